"""Commands that need no running coordinator: ``plan``, ``export``, ``audit``."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from dtfm.coordinator.command.export import export as export_checkpoint
from dtfm.coordinator.command.options import (
    DEFAULT_ADDRESS,
    DEFAULT_STORE,
    Address,
    Json,
    StoreUrl,
    TokenFile,
    read_token,
)
from dtfm.coordinator.log.audit import audit as audit_records
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.manifest import CheckpointError, newest
from dtfm.coordinator.log.store import Record, Store
from dtfm.coordinator.view.client import records
from dtfm.coordinator.view.narration import shape
from dtfm.scheduler.formats import decision_document, parse_any_network, parse_plan, parse_workload
from dtfm.scheduler.model.decision import Infeasible, Objective
from dtfm.scheduler.schedule import schedule

Parsed = TypeVar("Parsed")


def plan(
    network: Annotated[
        Path, typer.Option(help="NETWORK.json: nodes, latency_ms, bandwidth_gbps, classes for thousands.")
    ],
    workload: Annotated[Path, typer.Option(help="WORKLOAD.json: layers, micro_batches.")],
    objective: Annotated[
        Objective, typer.Option(help="Seconds per step, or the paper's cost model.")
    ] = Objective.ITERATION,
    incumbent: Annotated[Path | None, typer.Option(help="PLAN.json that is in force.")] = None,
    stages: Annotated[int | None, typer.Option(min=1, help="So many stages; left out: the scheduler chooses.")] = None,
    deadline: Annotated[float | None, typer.Option(min=0, help="Stop searching after so many seconds.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    json_lines: Json = False,
) -> None:
    """Runs the scheduler alone, on files. Exit codes: 0 a plan, 1 none is possible, 2 bad input."""
    cluster, work = _parsed(network, parse_any_network), _parsed(workload, parse_workload)
    current = _parsed(incumbent, parse_plan) if incumbent is not None else None
    began = time.monotonic()
    try:
        decision = schedule(
            cluster,
            work,
            current,
            stages=stages,
            objective=objective,
            seed=seed,
            deadline=None if deadline is None else lambda: time.monotonic() - began > deadline,
            generation=current.generation + 1 if current is not None else 0,
        )
    except Infeasible as error:
        print(json.dumps({"plan": None, "reason": str(error)}) if json_lines else f"No plan: {error}")
        raise typer.Exit(1) from None
    if json_lines:
        print(json.dumps(decision_document(decision, time.monotonic() - began)))
    else:
        print(f"{decision.sentence}\n{shape(decision.plan)}")


def export(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The new folder.")],
    checkpoint: Annotated[
        str, typer.Option(help="Folder of a checkpoint, or of several, of which the newest counts. Any fsspec URL.")
    ] = "",
    store: Annotated[str, typer.Option(help="Without --checkpoint: the event log that names it.")] = DEFAULT_STORE,
    json_lines: Json = False,
) -> None:
    """Writes a checkpoint as a folder that transformers' from_pretrained loads."""
    folder = (newest(checkpoint) or checkpoint) if checkpoint else _logged_checkpoint(store)
    step = export_checkpoint(folder, target)
    if json_lines:
        print(json.dumps({"checkpoint": folder, "step": step, "folder": str(target)}))
    else:
        print(f"Step {step} of {folder} is in {target}.")


def audit(
    address: Address = DEFAULT_ADDRESS, store: StoreUrl = "", token_file: TokenFile = None, json_lines: Json = False
) -> None:
    """Checks the log: every step committed once and in order, every sample counted once. Exit code 1: it is not so."""
    result = audit_records(asyncio.run(_all(address, store, read_token(token_file))))
    if json_lines:
        print(json.dumps(asdict(result)))
    else:
        print(
            f"{result.steps} steps stand ({result.samples} samples, {result.tokens} tokens), {result.redone} were trained "
            f"again, {result.aborted} attempts aborted, {result.generations} plans"
        )
        for finding in result.findings:
            print(f"event {finding.sequence}: {finding.sentence}")
        print("The log is in order." if not result.findings else f"{len(result.findings)} findings.")
    raise typer.Exit(1 if result.findings else 0)


async def _all(address: str, store: str, token: str) -> list[Record]:
    return [record async for record in records(address, store, token, follow=False)]


def _parsed(path: Path, parse: Callable[[str], Parsed]) -> Parsed:
    try:
        return parse(path.read_text())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _logged_checkpoint(store: str) -> str:
    with Store(store, write=False) as opened:
        ledger = fold(record.event for record in opened.read())
    if not ledger.checkpoints:
        raise CheckpointError(f"{store} names no checkpoint; give one with --checkpoint")
    return ledger.checkpoints[ledger.checkpoint_step]
