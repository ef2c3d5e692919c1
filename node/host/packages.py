"""The packages that a node needs in addition to a coordinator's."""

from __future__ import annotations

from importlib.util import find_spec

from dtfm.installed import torch_line

EXTRA = ("torch", "transformers", "safetensors")
"""The packages of the extra "node" that no node can do without."""


def missing_packages() -> list[str]:
    return [package for package in EXTRA if find_spec(package) is None]


def require_extra() -> None:
    """Raises ValueError, with the fix, if the extra is not installed."""
    if missing := missing_packages():
        raise ValueError(
            f"dtfm-node: {missing[0]} is not installed; a node needs more than the coordinator: {torch_line('node')} (with a GPU "
            "[gpu] in place of [node]; `dtfm-node install-line` prints the line for this machine)"
        )
