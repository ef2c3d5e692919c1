"""``dtfm-coordinator demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.background import announced
from dtfm.coordinator.command.options import Json


def demo(
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of nodes, each a process on this machine.")] = 4,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Number of steps. Default: the run file's, or 100; 400 without a run file."),
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN.toml",
            help="The run file. Default: a small Llama, trained on the source of Python's library.",
        ),
    ] = None,
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no web page.")] = False,
    dir: Annotated[
        Path, typer.Option(help="Folder for logs, store and checkpoints; each demo makes a new folder in it.")
    ] = Path("dtfm-demo"),
    threads: Annotated[int, typer.Option(min=0, help="CPU threads per node. 0 divides the cores among the nodes.")] = 0,
    device: Annotated[str, typer.Option(help="What each node computes on: auto, cpu, cuda or cuda:N.")] = "auto",
    json_lines: Json = False,
) -> None:
    """Trains a model on this machine alone.

    Starts a coordinator and several nodes, which talk to each other as they would across the world, and shows progress until
    the run is over. Then exports the model and prints a sample of the text it writes.
    """
    with announced("Loading the coordinator"):
        from dtfm.coordinator.command.demonstration.demonstration import demonstrate

    raise typer.Exit(demonstrate(run, nodes, steps, dir, threads, device, json_lines, page=not no_page))
