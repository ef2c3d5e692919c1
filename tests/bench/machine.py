"""What this machine can do for a run: ``python -m tests.bench.machine [--device auto] [--snapshots DIR] [--json]``.

Its device, the codecs, the optimizer and its disk, in ten seconds.
"""

from __future__ import annotations

import argparse
import functools
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from dtfm.kernels import codec
from dtfm.kernels.layout import Codec
from dtfm.node.host.cuda_streams import wait_until_computed
from dtfm.node.host.device import measure_flops, open_device
from dtfm.node.host.disk_speed import measure_disk
from dtfm.node.model.bucket import HOST, Bucket, BucketSpec
from dtfm.node.model.optimizer.optimizer import Terms, adamw
from dtfm.protos.identity.private_files import cache_folder
from dtfm.protos.plan_pb2 import Run
from tests.bench.rows import Row, show

DEVICE_SECONDS = 1.0
"""Seconds of timed products, for each precision."""
CODEC_ELEMENTS = 4 << 20
CODEC_ROUNDS = 5
UPDATED, UPDATES = 16 << 20, 3
DISK_BYTES = 256 << 20


def bench_device(device: torch.device) -> list[Row]:
    """Times products of square matrices."""
    full, half = (measure_flops(device, dtype, DEVICE_SECONDS) / 1e12 for dtype in (torch.float32, torch.bfloat16))
    return [
        Row("matrix product, fp32", full, "TFLOP/s"),
        Row("matrix product, bf16", half, "TFLOP/s", "matrix product, fp32", half / full),
    ]


def codec_calls(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The calls of nodes for encoding and decoding ``x`` (1-D float32) with each codec, by name. Each encoding goes before its
    decoding, which reads the encoded bytes."""
    calls: dict[str, Callable[[], object]] = {}
    for each in Codec:
        if each is Codec.OFF:
            continue
        encoded = np.empty(codec.encoded_bytes(each, x.numel(), x.dtype), np.uint8)
        encoded[:] = np.frombuffer(codec.encode(each, x).data, np.uint8)
        name = each.name.lower()
        calls[f"{name} encode"] = functools.partial(codec.encode, each, x)
        calls[f"{name} decode"] = functools.partial(codec.decode, each, encoded.data, x.numel(), x.dtype, x.device)
    return calls


def bench_codecs(device: torch.device) -> list[Row]:
    """Times the codecs. Speeds count the bytes of the float32 tensor, and are compared with a copy of it in the device's
    memory."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(CODEC_ELEMENTS, np.float32)).to(device)
    copy = torch.empty_like(x)
    calls: dict[str, Callable[[], object]] = {"copy": functools.partial(copy.copy_, x), **codec_calls(x)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(CODEC_ROUNDS + 1):
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            wait_until_computed(device)
            if turn:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
    speeds = {name: x.nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()}
    rows = [Row("copy in memory", speeds["copy"], "GB/s")]
    return rows + [
        Row(f"codec {name}", speed, "GB/s", "copy in memory", speed / speeds["copy"])
        for name, speed in speeds.items()
        if name != "copy"
    ]


def bench_update(device: torch.device) -> list[Row]:
    """Times AdamW, with the state on the device, and in the host's memory."""
    speeds, terms = {}, Terms(1.0, 1e-3, 0.0)
    for home in dict.fromkeys((device, HOST)):
        bucket = Bucket(BucketSpec(0, (0,), (("matrix", (1, UPDATED)),)), device, torch.float32, home)
        seconds = []
        for step in range(1, UPDATES + 2):
            bucket.gradients.fill_(1)
            wait_until_computed(device)
            began = time.perf_counter()
            adamw(Run.Train(beta1=0.9, beta2=0.95, epsilon=1e-8), step, terms, bucket, bucket.gradients)
            wait_until_computed(device)
            seconds.append(time.perf_counter() - began)
        speeds[home] = UPDATED / statistics.median(seconds[1:]) / 1e9  # the first warms up
    rows = [Row("AdamW", speeds.pop(device), "G parameters/s")]
    for speed in speeds.values():
        rows.append(Row("AdamW, state on the host", speed, "G parameters/s", "AdamW", speed / rows[0].value))
    return rows


def bench_disk(folder: Path) -> list[Row]:
    folder.mkdir(parents=True, exist_ok=True)
    written, read = measure_disk(folder, DISK_BYTES)
    return [
        Row("disk, write and fsync", written / 1e6, "MB/s"),
        Row("disk, read", read / 1e6, "MB/s", "disk, write and fsync", read / written),
    ]


def measures(device: torch.device, folder: Path) -> Iterator[tuple[str, Callable[[], Sequence[Row]]]]:
    """The measurements, in order, by name."""
    yield f"matrix products on {device}", lambda: bench_device(device)
    yield "codecs, compiled first where that was not done before", lambda: bench_codecs(device)
    yield "the optimizer", lambda: bench_update(device)
    yield f"the disk in {folder}", lambda: bench_disk(folder)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--snapshots", type=Path, default=cache_folder() / "snapshots", help="the folder whose disk is measured"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    for what, measure in measures(open_device(options.device), options.snapshots.absolute()):
        print(f"measuring {what} ...", file=sys.stderr, flush=True)
        rows += measure()
    show(f"This machine, {socket.gethostname()}", rows, options.json)


if __name__ == "__main__":
    main()
