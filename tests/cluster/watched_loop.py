"""The node's command, which reports every operation on tensors that runs on its event loop: ``python -m
tests.cluster.watched_loop join ...``."""

from __future__ import annotations

import asyncio
import sys
import traceback
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dtfm.node import cli

SMALL = 4 << 10
"""Bytes that a device handles in less time than a call of it takes."""

REPORT = "on the event loop:"


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what the thread that enters it does. A view of a tensor is no work."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        largest = max((tensor.nbytes for tensor in tensors), default=0)
        if largest > SMALL and not func.is_view and asyncio._get_running_loop() is not None:
            print(f"{REPORT} {func} of {largest} bytes", file=sys.stderr)
            traceback.print_stack(limit=6)
        return result


def main() -> None:
    with Watch():  # type: ignore[no-untyped-call]
        cli.main()


if __name__ == "__main__":
    main()
