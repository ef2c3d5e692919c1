"""``dtfm-coordinator check``."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from dtfm.coordinator.command.options import Json, StoreUrl, Where, log_of

if TYPE_CHECKING:
    from dtfm.coordinator.store.check import Checked


def check(where: Where = "", store: StoreUrl = "", json_lines: Json = False) -> None:
    """Checks the event log.

    Every step must be committed once and in order, and every sample counted once. Samples that were lost with an island must be
    trained again.

    Exit codes: 0 the log is in order, 1 it is not, 2 bad input.
    """
    from dtfm.protos.printable import counted

    result = asyncio.run(_checked(where, store))
    if json_lines:
        print(json.dumps(asdict(result)))
    else:
        print(
            f"{counted(result.steps, 'step')} committed ({result.samples:,} samples, {result.tokens:,} tokens), "
            f"{result.redone:,} trained again, {counted(result.aborted, 'attempt')} aborted, "
            f"{counted(result.generations, 'plan')}"
        )
        if result.owed:
            print(f"{result.owed:,} samples were lost with an island and have not come again yet")
        for finding in result.findings:
            print(f"event {finding.sequence}: {finding.sentence}")
        print("The log is in order." if not result.findings else f"{counted(len(result.findings), 'finding')}.")
    raise typer.Exit(1 if result.findings else 0)


async def _checked(where: str, store: str) -> Checked:
    from dtfm.coordinator.store.check import Checking

    checking = Checking()
    async for record in log_of(where, store):
        checking.add(record)
    return checking.result
