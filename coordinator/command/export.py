"""``dtfm-coordinator export``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dtfm.coordinator.command.options import DEFAULT_STORE, Json, store_option, store_url


def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write: a new or empty one.")],
    checkpoint: Annotated[
        str, typer.Option(help="URL (fsspec) of a checkpoint, or of a folder of checkpoints: the newest is exported.")
    ] = "",
    store: Annotated[
        str,
        store_option(
            "The event log (an SQLite file, or a SQLAlchemy URL) by which the checkpoint is checked, and which names the newest "
            f"one; without --checkpoint {DEFAULT_STORE}."
        ),
    ] = "",
    json_lines: Json = False,
) -> None:
    """Writes a checkpoint as a folder that transformers' from_pretrained loads."""
    from dtfm.coordinator.command.exporting import export_checkpoint, ledger_of, logged_checkpoint, newest

    log = store or ("" if checkpoint else store_url(DEFAULT_STORE))
    ledger = ledger_of(log) if log else None
    folder = (newest(checkpoint) or checkpoint) if checkpoint or ledger is None else logged_checkpoint(ledger, log)
    step = export_checkpoint(folder, target, ledger)
    if ledger is None:
        typer.echo(f"{folder} was not checked against a log: who wrote it is believed; give --store", err=True)
    elif not all(ledger.copies.agreed.get(step, ("",))):
        typer.echo(f"The log does not have the digests of all state in {folder}: who wrote it is believed", err=True)
    if json_lines:
        print(json.dumps({"checkpoint": folder, "step": step, "folder": str(target)}))
    else:
        print(f"Step {step} of {folder} is in {target}.")
