"""Checks of nodes' reports about the files of snapshots and checkpoints."""

from __future__ import annotations

import re

from dtfm.coordinator.core.refusal import check_number, require
from dtfm.coordinator.core.validation.votes import DIGEST_BYTES
from dtfm.protos import control_pb2 as wire

_NONCE = re.compile(r"[0-9a-f]{32}")


def check_parts(message: wire.Moved, buckets: int, digest_bytes: int = DIGEST_BYTES) -> None:
    """Raises Refused for files that do not exist, or come twice."""
    number = len(message.parts)
    require(len({part.bucket for part in message.parts}) == number, "parts", number, "of different buckets")
    for part in message.parts:
        require(part.bucket < buckets, "parts.bucket", part.bucket, f"below {buckets}")
        fits = len(part.digest) == digest_bytes
        require(fits, "parts.digest", part.digest.hex(), f"a digest of {digest_bytes} bytes")
        check_number("parts.size_bytes", part.size_bytes, 0, 1 << 50)


def check_uploaded(message: wire.Moved, buckets: int) -> None:
    """Raises Refused for files that no checkpoint can have."""
    check_parts(message, buckets)
    for part in message.parts:
        require(_NONCE.fullmatch(part.nonce) is not None, "parts.nonce", part.nonce, "32 hexadecimal digits")


def check_moments(message: wire.Moved, count: int) -> None:
    """Raises Refused unless each file comes with ``count`` digests, one for each tensor of the state that the file leaves out."""
    size = count * DIGEST_BYTES
    for part in message.parts:
        require(len(part.moments) == size, "parts.moments", part.moments.hex(), f"{size} bytes")


def check_own_layers(message: wire.Moved, own: tuple[int, int], layers: int) -> None:
    """Raises Refused for parts outside the node's ``own`` layers. Buckets from number ``layers`` on belong to several layers."""
    for part in message.parts:
        its_own = part.bucket >= layers or part.bucket in range(*own)
        require(its_own, "parts.bucket", part.bucket, f"of the node's layers, {own[0]} to {own[1] - 1}")
