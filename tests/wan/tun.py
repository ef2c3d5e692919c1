"""A network namespace with one TUN device in it, and the packets that pass through that device.

Packets have a virtio_net header (Linux, include/uapi/linux/virtio_net.h): TCP hands over up to 64 KiB at once and leaves
segmentation and checksums to the device. The device gives the same packet, with the same header, to TCP at the other end.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

DEVICE = "wan0"
MTU = 1500
HEADER_BYTES = 10
LARGEST_PACKET = HEADER_BYTES + 65535
"""The most bytes that one read of a TUN device returns."""

_CLONE_NEWNET = 0x40000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_TUN_F_USO = 0x60  # the same for UDP; Linux 6.2 and later
_UDP_SEGMENTS = 5
_HEADER = struct.Struct(
    "<BBHHHH"
)  # flags, kind of segmenting, header bytes, bytes per segment, checksum's start and offset

_SETTINGS = {
    "ipv6/conf/all/disable_ipv6": "1",
    "ipv4/tcp_no_metrics_save": "1",  # a connection learns nothing from earlier ones
    # Larger buffers than the machine's own, so that the link is the limit.
    "ipv4/tcp_wmem": "4096 16384 33554432",
    "ipv4/tcp_rmem": "4096 131072 33554432",
    "ipv4/tcp_slow_start_after_idle": "0",  # as dtfm-node doctor advises
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Descriptors of a namespace and of the TUN device in it. The namespace exists while any process is in it."""

    namespace: int
    tun: int


def open_endpoint(address: str) -> Endpoint:
    """Creates a namespace whose only way out is a TUN device with ``address`` (in a /24), and moves this process into it.

    Raises OSError where the machine does not allow that.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"no new network namespace: {os.strerror(number)}")
    namespace = os.open("/proc/self/ns/net", os.O_RDONLY)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    try:
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_USO)
    except OSError:
        fcntl.ioctl(tun, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    for name, value in _SETTINGS.items():
        Path("/proc/sys/net", name).write_text(value)
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{address}/24", "dev", DEVICE)
    _ip("link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "2000", "up")
    return Endpoint(namespace, tun)


@dataclass(frozen=True, slots=True)
class Envelope:
    """What the emulator needs to know of a packet: the last byte of its IPv4 destination, the number of segments that it stands
    for, and the number of bytes that these have as separate packets."""

    destination: int
    segments: int
    size: int


def envelope(packet: bytes) -> Envelope | None:
    """The envelope of a packet as read from the device; None if it is not IPv4."""
    if len(packet) < HEADER_BYTES + 20 or packet[HEADER_BYTES] >> 4 != 4:
        return None
    _, kind, _, segment_bytes, start, _ = _HEADER.unpack_from(packet)
    size = len(packet) - HEADER_BYTES
    segments = 1
    if kind and segment_bytes:
        # Each segment has the IP header and that of UDP or of TCP. The 13th byte of a TCP header holds its length.
        headers = start + (8 if kind == _UDP_SEGMENTS else (packet[HEADER_BYTES + start + 12] >> 4) * 4)
        segments = max(1, -(-(size - headers) // segment_bytes))
        size += (segments - 1) * headers
    return Envelope(packet[HEADER_BYTES + 19], segments, size)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise OSError(done.returncode, f"ip {' '.join(arguments)}: {done.stderr.strip()}")
