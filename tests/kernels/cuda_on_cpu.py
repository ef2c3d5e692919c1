"""The part of CuPy that kernels/gpu.py uses, without a GPU: compiles the CUDA source with g++ and runs it lane by lane."""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

HEADER = Path(__file__).with_name("cuda_on_cpu.h")


class RawModule:
    """The compiled ``code``, built in ``folder``, which may hold others."""

    def __init__(self, folder: Path, code: str, options: tuple[str, ...]) -> None:
        built = len([*folder.glob("*.cpp")])
        source, library = folder / f"{built}.cpp", folder / f"{built}.so"
        source.write_text(code, encoding="utf-8")
        flags = [
            *options,
            "-O1",
            "-ffp-contract=off",
            "-fno-strict-aliasing",
            "-shared",
            "-fPIC",
            "-include",
            str(HEADER),
        ]
        subprocess.run(["g++", *flags, "-o", library, source], check=True, timeout=60)
        self._library = ctypes.CDLL(str(library))
        self._library.launch.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p]

    def get_function(self, name: str) -> Any:
        kernel = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)

        def run(grid: tuple[int], block: tuple[int], arguments: Sequence[np.uint64]) -> None:
            words = np.zeros(4, np.uint64)
            words[: len(arguments)] = arguments
            assert self._library.launch(kernel, grid[0], block[0], words.ctypes.data), f"{name}: its lanes diverged"

        return run


def cupy_without_gpu(folder: Path) -> Any:
    """A replacement for the module cupy."""

    @contextlib.contextmanager
    def nothing(*_: object) -> Iterator[None]:
        yield

    return SimpleNamespace(
        RawModule=lambda code, options: RawModule(folder, code, options),
        cuda=SimpleNamespace(Device=nothing, Stream=SimpleNamespace(from_external=nothing)),
    )
