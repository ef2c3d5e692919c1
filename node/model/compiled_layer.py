"""Compiles a model's layers with torch.compile: [train] compile."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from dtfm.compiled_code import find_room

log = logging.getLogger(__name__)


def can_compile(device: torch.device) -> bool:
    """Whether PyTorch finds what it needs to compile for ``device``. If not, the log says why."""
    from torch import _dynamo, _inductor  # here, as they take a second to import

    # By itself PyTorch keeps what it compiles in /tmp. What it finds there it runs.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(find_room() / "torch"))
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as problem:  # whatever compilers raise
        log.warning(
            "train.compile: the layers are not compiled here, which is slower: PyTorch cannot compile for %s (%s). It needs a "
            "C++ compiler for a CPU (apt-get install g++), Triton and a C compiler for a GPU, and in TORCHINDUCTOR_CACHE_DIR a "
            "folder that it may write to",
            device,
            (str(problem).splitlines() or [type(problem).__name__])[0][:300],
        )
        return False
    # Parts of a layer that it cannot compile are computed without. Compiled parts round the same: audits compare both.
    _dynamo.config.suppress_errors = True
    _inductor.config.emulate_precision_casts = True
    return True


def compiled(method: Callable[..., Any]) -> Callable[..., Any]:
    """``method`` of a module. Its first call with inputs of some shapes compiles it for all modules of its class."""
    assert isinstance(method, MethodType)
    return MethodType(_compiled(method.__func__), method.__self__)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
