"""If CuPy cannot be used for any reason, a node starts: it does the work on the CPU, and says why."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dtfm import compiled_code
from dtfm.kernels.with_cupy import gpu_kernels, prepare

GPU = torch.device("cuda:0")


class CompileException(Exception):
    """Like CuPy's own: no RuntimeError."""


class Device:
    def __init__(self, _: int) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def cupy_that_raises(error: Exception) -> ModuleType:
    """A CuPy whose compiler raises ``error``."""

    class Kernels:
        def __init__(self, **_: object) -> None: ...

        def get_function(self, _: str) -> None:
            raise error

    cupy = ModuleType("cupy")
    cupy.cuda = ModuleType("cupy.cuda")  # type: ignore[attr-defined]
    cupy.cuda.Device = Device
    cupy.RawModule = Kernels  # type: ignore[attr-defined]
    return cupy


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dtfm.kernels.gpu", raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", "")  # so that it is restored
    monkeypatch.delenv("CUPY_CACHE_DIR")
    gpu_kernels.cache_clear()


@pytest.mark.parametrize(
    ("cupy", "why"),
    [
        (None, "import of cupy halted"),
        (cupy_that_raises(CompileException("error: invalid value for --gpu-architecture")), "--gpu-architecture"),
        (cupy_that_raises(RuntimeError("CuPy failed to load libnvrtc.so.13")), "libnvrtc.so.13"),
        (cupy_that_raises(PermissionError(13, "Permission denied", "/home/me/.cupy")), "Permission denied"),
    ],
    ids=["not installed", "a GPU that the compiler does not know", "no compiler", "no room"],
)
def test_without_cupy_the_work_is_done_on_the_cpu_and_the_log_says_why_and_what_to_do(
    cupy: ModuleType | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    prepare(GPU)
    costs = ("encoded and decoded on the CPU, which is slower", "copied to the host for its digest")
    (told,) = caplog.messages
    for part in (*costs, why, "dtfm-node install-line"):
        assert part in told
    prepare(GPU)
    assert len(caplog.messages) == 1  # once


def test_cupy_keeps_what_it_compiles_where_the_home_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert compiled_code.find_room() == tmp_path
    prepare(GPU)
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "cupy")
    gpu_kernels.cache_clear()
    monkeypatch.setenv("CUPY_CACHE_DIR", "/named/by/the/operator")
    prepare(GPU)
    assert os.environ["CUPY_CACHE_DIR"] == "/named/by/the/operator"
