"""The speed of the codecs on a GPU compared with its memory: ``python -m tests.bench.kernels --device cuda [--json]``.

128 and 512 MiB of normally distributed elements. Speeds count bytes read and written, and are compared with a copy of the same
tensor within the GPU's memory. "to the host" and "from the host" rows measure the functions that nodes call, including pinned
memory and the bus; they count the tensor's bytes, and are compared with an uncompressed copy. If bitsandbytes and torchao are
installed, their nearest equivalents are measured, too: 8 bits in blocks of 256, 4 bits in blocks of 64.

A measurement covers several runs in a row. Each uses the next of several sets of buffers, which together fit in no cache. They
are queued behind other work, so that all are queued before the first begins. Values are medians of rounds; in each round every
measurement takes its turn.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dtfm.kernels import codec, gpu
from dtfm.kernels.layout import Codec
from tests.bench import kernels
from tests.bench.rows import Row

SIZES_MIB = (128, 512)
ROUNDS, RUNS, BUFFERS = 9, 8, 4
CODECS = [c for c in Codec if c is not Codec.OFF]


@dataclass(frozen=True, slots=True)
class Subject:
    """``run(n)`` works on the ``n``-th set of buffers; it reads and writes ``moved`` bytes in all."""

    run: Callable[[int], object]
    moved: int


def measure(device: torch.device) -> Iterator[tuple[str, list[Row]]]:
    """The tables, each with its title."""
    torch.cuda.set_device(device)
    name = torch.cuda.get_device_name(device)
    for mib in SIZES_MIB:
        for dtype in (torch.float32, torch.bfloat16):
            elements = (mib << 20) // dtype.itemsize
            xs = [torch.randn(elements, device=device).to(dtype) for _ in range(BUFFERS)]
            title = f"Codecs on {name}: {mib} MiB of {str(dtype).removeprefix('torch.')}"
            yield title, rows(on_device(xs), seconds_on_device)
            if dtype is torch.float32:
                yield f"{title}, by way of the host", rows(by_way_of_the_host(xs), seconds_on_the_clock)


def rows(subjects: dict[str, Subject], clock: Callable[[Callable[[int], object]], float]) -> list[Row]:
    """The speeds, compared with the first one."""
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in range(ROUNDS + 1):
        for name, subject in subjects.items():
            taken = clock(subject.run)
            if turn:  # the first warms up
                seconds[name].append(taken)
    return kernels.rows(
        {name: subject.moved / statistics.median(seconds[name]) / 1e9 for name, subject in subjects.items()}
    )


def seconds_on_device(run: Callable[[int], object]) -> float:
    """The time of one run by the GPU's clock."""
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for n in range(100):  # several milliseconds of work, so that launching is not measured
        busy.fill_(n)
    begin.record()
    for n in range(RUNS):
        run(n % BUFFERS)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / RUNS


def seconds_on_the_clock(run: Callable[[int], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run(0)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def on_device(xs: list[torch.Tensor]) -> dict[str, Subject]:
    x = xs[0]
    restored = [torch.empty_like(x) for x in xs]
    subjects = {"copy": Subject(lambda n: restored[n].copy_(xs[n]), 2 * x.nbytes)}
    refused = torch.zeros(1, dtype=torch.int32, device=x.device)
    for c in CODECS:
        encoded = [
            torch.empty(codec.encoded_bytes(c, x.numel(), x.dtype), dtype=torch.uint8, device=x.device) for _ in xs
        ]
        moved = x.nbytes + encoded[0].nbytes

        def encode(n: int, c: Codec = c, encoded: list[torch.Tensor] = encoded) -> None:
            gpu.encode_into(c, xs[n], encoded[n], refused)

        def decode(n: int, c: Codec = c, encoded: list[torch.Tensor] = encoded) -> None:
            gpu.decode_into(c, encoded[n], restored[n])

        for n in range(len(xs)):
            encode(n)
        subjects[f"{c.name.lower()} encode"] = Subject(encode, moved)
        subjects[f"{c.name.lower()} decode"] = Subject(decode, moved)
    return subjects | of_bitsandbytes(xs) | of_torchao(xs)


def by_way_of_the_host(xs: list[torch.Tensor]) -> dict[str, Subject]:
    x = xs[0]
    subjects = {}
    for c, direction in itertools.product((Codec.OFF, *CODECS), ("to", "from")):
        if direction == "to":
            run: Callable[[int], object] = functools.partial(lambda c, _: codec.encode(c, x), c)
        else:
            data = bytearray(codec.encode(c, x).data)  # like data from the network, in memory that is not pinned
            run = functools.partial(
                lambda c, data, _: codec.decode(c, memoryview(data), x.numel(), x.dtype, x.device), c, data
            )
        subjects[f"{c.name.lower()} {direction} the host"] = Subject(run, x.nbytes)
    return subjects


def of_bitsandbytes(xs: list[torch.Tensor]) -> dict[str, Subject]:
    try:
        from bitsandbytes import functional
    except ImportError:
        return {}
    x = xs[0]
    eights = [functional.quantize_blockwise(x, blocksize=256) for x in xs]
    fours = [functional.quantize_4bit(x, blocksize=64, quant_type="fp4") for x in xs]
    moved8 = x.nbytes + eights[0][0].nbytes + eights[0][1].absmax.nbytes
    moved4 = x.nbytes + fours[0][0].nbytes + fours[0][1].absmax.nbytes
    return {
        "bitsandbytes 8 bits encode": Subject(lambda n: functional.quantize_blockwise(xs[n], blocksize=256), moved8),
        "bitsandbytes 8 bits decode": Subject(lambda n: functional.dequantize_blockwise(*eights[n]), moved8),
        "bitsandbytes 4 bits encode": Subject(
            lambda n: functional.quantize_4bit(xs[n], blocksize=64, quant_type="fp4"), moved4
        ),
        "bitsandbytes 4 bits decode": Subject(lambda n: functional.dequantize_4bit(*fours[n]), moved4),
    }


def of_torchao(xs: list[torch.Tensor]) -> dict[str, Subject]:
    """torchao's functions, compiled, as its documentation says. It packs 4 bits only for weights."""
    try:
        from torchao.quantization import quant_primitives as torchao
    except ImportError:
        return {}
    block = (1, 256)

    @torch.compile
    def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        scale, zero = torchao.choose_qparams_affine(x, torchao.MappingType.SYMMETRIC, block, torch.int8)
        return torchao.quantize_affine(x, block, scale, zero, torch.int8), scale, zero

    @torch.compile
    def decode(values: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        restored: torch.Tensor = torchao.dequantize_affine(
            values, block, scale, zero, torch.int8, output_dtype=xs[0].dtype
        )
        return restored

    rows_of = [x.view(-1, 256) for x in xs]
    encoded = [encode(x) for x in rows_of]
    moved = xs[0].nbytes + encoded[0][0].nbytes + encoded[0][1].nbytes
    return {
        "torchao 8 bits encode": Subject(lambda n: encode(rows_of[n]), moved),
        "torchao 8 bits decode": Subject(lambda n: decode(*encoded[n]), moved),
    }
