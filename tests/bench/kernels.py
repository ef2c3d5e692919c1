"""The speed of the codecs compared with memory: ``python -m tests.bench.kernels [--json] [--device cuda]``.

On a CPU: 64 MiB of normally distributed float32, one thread. Speeds count the bytes of the float32 tensor, and are compared
with a memcpy of it into memory that was written before. "into" rows write into such memory, too, and measure the codecs alone.
"fresh" rows measure the functions that nodes call, which return memory from the pool of kernels/memory.py. Times are CPU times
of this thread, medians of rounds. In each round every measurement takes its turn, so that a busy machine disturbs all equally.
On a GPU: kernels_gpu.py.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from dtfm.kernels import codec, cpu
from dtfm.kernels.layout import Codec
from tests.bench.machine import codec_calls
from tests.bench.rows import Row, show

ELEMENTS = 16 << 20
ROUNDS = 9


def subjects(x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """The functions to measure, by name. The others are compared with the first."""
    restored = torch.empty_like(x)
    found: dict[str, Callable[[], object]] = {"memcpy": functools.partial(np.copyto, restored.numpy(), x.numpy())}
    for c in Codec:
        if c is Codec.OFF:
            continue
        encoded = np.empty(codec.encoded_bytes(c, x.numel(), x.dtype), np.uint8)
        name = c.name.lower()
        found[f"{name} encode into"] = functools.partial(cpu.encode, c, x.numpy(), encoded)
        found[f"{name} decode into"] = functools.partial(cpu.decode, c, encoded, restored.numpy())
    return found | {f"{name} fresh": call for name, call in codec_calls(x).items()}


def measure() -> list[Row]:
    torch.set_num_threads(1)
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(ELEMENTS, np.float32))
    measured = subjects(x)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for turn in range(ROUNDS + 1):
        for name, run in measured.items():
            began = time.thread_time()
            run()
            if turn:  # the first warms up, and leaves in `encoded` what decoding reads
                seconds[name].append(time.thread_time() - began)
    return rows({name: x.nbytes / statistics.median(taken) / 1e9 for name, taken in seconds.items()})


def rows(speeds: Mapping[str, float]) -> list[Row]:
    """Speeds in GB/s, compared with the first one."""
    first = next(iter(speeds))
    return [
        Row(name, speed, "GB/s", *(() if name == first else (first, speed / speeds[first])))
        for name, speed in speeds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object per row")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"), help="cpu, cuda or cuda:N")
    arguments = parser.parse_args()
    device: torch.device = arguments.device
    if device.type != "cuda":
        show("Codecs: 64 MiB of float32, one CPU thread", measure(), arguments.json)
    elif not torch.cuda.is_available():
        parser.error(f"{device} is not there: torch {torch.__version__} finds no GPU")
    else:
        from tests.bench import kernels_gpu  # needs CuPy

        for title, measured in kernels_gpu.measure(torch.device("cuda", device.index or 0)):
            show(title, measured, arguments.json)


if __name__ == "__main__":
    main()
