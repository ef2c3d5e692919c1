"""``dtfm-coordinator demo``."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.demo_run import Demo, demo_run, new_folder, run_demo
from dtfm.coordinator.command.options import Json
from dtfm.coordinator.config.run_file import read_table


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="How many nodes, each a process on this machine.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: the run file's, or 100.")] = None,
    run: Annotated[
        Path | None, typer.Option(help="A run file (TOML); left out: a small Llama on Python's library.")
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Without a web page.")] = False,
    dir: Annotated[Path, typer.Option(help="Logs, store, checkpoints go into a new folder in this one.")] = Path(
        "dtfm-demo"
    ),
    threads: Annotated[int, typer.Option(min=0, help="CPU threads per node. 0: the cores, shared out.")] = 0,
    json_lines: Json = False,
) -> None:
    """Trains on this machine alone: a coordinator and some nodes, which talk as they would across the world."""
    table = read_table(run) if run is not None else {}
    demo_run(table, nodes, steps, dir)  # complains before a folder is made
    folder = new_folder(dir)
    share = threads or max(1, (os.cpu_count() or 1) // nodes)
    settings = Demo(demo_run(table, nodes, steps, folder), nodes, folder, share, json_lines)
    raise typer.Exit(asyncio.run(run_demo(settings)))
