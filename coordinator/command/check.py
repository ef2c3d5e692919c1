"""``dtfm-coordinator check``."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from dtfm.coordinator.command.options import Json, StoreUrl, Where

if TYPE_CHECKING:
    from dtfm.coordinator.log.check import Checked


def check(where: Where = "", store: StoreUrl = "", json_lines: Json = False) -> None:
    """Checks the event log.

    Every step must be committed once and in order, and every sample counted once. Exit codes: 0 the log is in order, 1 it is
    not, 2 bad input.
    """
    result = asyncio.run(_checked(where, store))
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


async def _checked(where: str, store: str) -> Checked:
    from dtfm.coordinator.command.client import records
    from dtfm.coordinator.log.check import Checking

    checking = Checking()
    async for record in records(where, store, follow=False):
        checking.add(record)
    return checking.result
