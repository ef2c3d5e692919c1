"""`dtfm-node bench`: what this machine can do for a run."""

from __future__ import annotations

import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from dtfm.node.command.options import mistakes
from dtfm.node.host.packages import require_extra
from dtfm.programs import ended_by_ctrl_c
from dtfm.protos.identity.private_files import cache_folder


def bench(
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    snapshots: Annotated[Path | None, typer.Option(help="The folder whose disk is measured.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object per line, for scripts.")] = False,
) -> None:
    """Measures what this machine can do for a run: the device, the codecs, the optimizer, the disk."""
    with mistakes():
        require_extra()
        with ended_by_ctrl_c():
            from dtfm.node.command.measuring import measures
            from dtfm.node.host.device import open_device
            from dtfm.node.host.rows import Row, show

        rows: list[Row] = []
        for what, measure in measures(open_device(device), (snapshots or cache_folder() / "snapshots").absolute()):
            print(f"measuring {what} ...", file=sys.stderr, flush=True)
            rows += measure()
    show(f"This machine, {socket.gethostname()}", rows, json_lines)
