"""`dtfm-node install-line`: the line that installs what a node needs on this machine."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dtfm.installed import torch_line
from dtfm.node.command.options import mistakes
from dtfm.node.host.driver import has_nvidia_gpu, line_for, nvidia_driver


def install_line(
    device: Annotated[str, typer.Option(help="auto, for this machine's GPU if there is one; or cpu.")] = "auto",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object, for scripts.")] = False,
) -> None:
    """Prints the line that installs PyTorch, and CuPy for a GPU, as this machine's driver needs them, in tested versions.

    `dtfm-node install-line | sh` does it. Exit code 2: the driver is too old for any build of PyTorch.
    """
    with mistakes():
        if device not in ("auto", "cpu"):
            raise ValueError(f"--device {device!r}: give auto or cpu")
        line, why = (torch_line("node"), "--device cpu")
        if device == "auto":
            line, why = line_for(nvidia_driver(), has_nvidia_gpu(), *installed_torch())
    if json_lines:
        print(json.dumps({"line": line, "why": why}))
        return
    print(f"# {why}", file=sys.stderr)
    print(line)


def installed_torch() -> tuple[bool, str | None]:
    """Whether PyTorch is installed, and the CUDA that it is built for, like "12.9". It is not imported: that takes seconds."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False, None
    try:
        text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return True, None
    said = re.search(r"^cuda\b.*= *['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return True, said.group(1) if said else None
