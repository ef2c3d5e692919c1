"""``dtfm-coordinator export``."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.options import DEFAULT_STORE, Json, Where, store_option, store_url
from dtfm.coordinator.command.weights.formats import Format


def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write: a new or empty one.")],
    where: Where = "",
    checkpoint: Annotated[
        str,
        typer.Option(help="Export this checkpoint (a URL of fsspec), or the newest of a folder of checkpoints."),
    ] = "",
    store: Annotated[
        str, store_option("Export the newest checkpoint that this event log names, or check the --checkpoint by it.")
    ] = "",
    dtype: Annotated[
        Format | None,
        typer.Option(
            help="The numbers' format in the export. Default: the run's own, mostly fp32; with --merged the model's own."
        ),
    ] = None,
    merged: Annotated[
        bool,
        typer.Option(
            "--merged",
            help="Of a run with an adapter, write the whole model, merged with the adapter. Reads the model from where the run "
            "file names it.",
        ),
    ] = False,
    json_lines: Json = False,
) -> None:
    """Writes the model as a folder that transformers' from_pretrained loads.

    Of a run with [adapter] it writes the adapter, as a folder that peft's PeftModel.from_pretrained loads. With --merged it
    writes the whole model instead.

    If the run goes on, the weights are from the end of the current step, or with rounds from the next exchange: the coordinator
    fetches them from the nodes. If no coordinator answers, the command exports the newest checkpoint that the log in this
    folder (dtfm.db) names.
    """
    from dtfm.coordinator.command.client import NobodyAnswers
    from dtfm.coordinator.command.weights.exporting import (
        check_target,
        export_checkpoint,
        export_merged,
        logged_checkpoint,
        newest,
        newest_of,
    )
    from dtfm.coordinator.view.story_snapshot import story_in
    from dtfm.protos.identity.enrolment import NotAdmitted

    check_target(target)
    ledger, folder = None, newest(checkpoint) or checkpoint if checkpoint else ""
    if not (store or checkpoint):
        try:
            ledger, folder = asyncio.run(newest_of(where))
        except (NobodyAnswers, NotAdmitted):
            if where or not Path(DEFAULT_STORE).exists():
                raise
            store = store_url(DEFAULT_STORE)
    if store:
        ledger = story_in(store).now.ledger
        folder = folder or logged_checkpoint(ledger, store)
    infinite: dict[str, int] = {}
    step = (export_merged if merged else export_checkpoint)(folder, target, ledger, dtype, infinite.update)
    if infinite:
        typer.echo(
            f"{sum(infinite.values()):,} numbers in {len(infinite)} tensors ({next(iter(infinite))} is the first) are too large "
            f"for {dtype} and became infinite; use --dtype bf16 or fp32",
            err=True,
        )
    if ledger is None:
        typer.echo(f"{folder} was not checked against a log: who wrote it is believed; give --store", err=True)
    elif not all(ledger.copies.digests(step) or ("",)):
        typer.echo(f"The log does not have the digests of all state in {folder}: who wrote it is believed", err=True)
    if json_lines:
        print(
            json.dumps({"checkpoint": folder, "step": step, "folder": str(target), "infinite": sum(infinite.values())})
        )
    else:
        print(f"Step {step} of {folder} is in {target}.")
