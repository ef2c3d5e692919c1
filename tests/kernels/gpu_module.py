"""The parts of kernels/ that need CuPy, on something else."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


@contextmanager
def gpu_with(cupy: Any) -> Iterator[ModuleType]:
    """A fresh module kernels/gpu.py that takes ``cupy`` for the module CuPy."""
    spec = importlib.util.find_spec("dtfm.kernels.gpu")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", cupy)
        spec.loader.exec_module(module)
        yield module
