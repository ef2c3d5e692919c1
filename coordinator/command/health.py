"""``dtfm-coordinator health``: for supervisors, and Docker's HEALTHCHECK."""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from typing import Annotated, Any

import typer

from dtfm.coordinator.command.options import Json

PATIENCE_SECONDS = 10.0
"""A coordinator that takes longer to answer is not healthy."""
MOST_BYTES = 1 << 16


def health(
    where: Annotated[
        str,
        typer.Argument(
            metavar="INVITATION|ADDRESS|URL",
            help="As for the other commands; or the http:// address of the page, or of --metrics, which is quicker. Default: "
            "the coordinator that was used or started last on this machine.",
        ),
    ] = "",
    json_lines: Json = False,
) -> None:
    """Says whether the run makes progress.

    Exit codes: 0 it trains, waits for nodes or people, or is complete; 1 it has failed, its next step is long overdue, the log
    cannot be written, or no coordinator answers.
    """
    is_url = where.startswith(("http://", "https://"))
    try:
        found = _by_page(where) if is_url else asyncio.run(_by_log(where))
    except (ValueError, OSError) as problem:
        found = {"healthy": False, "reason": str(problem)}
    if json_lines:
        print(json.dumps(found))
    else:
        told = f"{'healthy' if found['healthy'] else 'not healthy'}: {found.get('reason') or found.get('state')}"
        print(told, file=sys.stdout if found["healthy"] else sys.stderr)
    raise typer.Exit(0 if found["healthy"] else 1)


def _by_page(url: str) -> dict[str, Any]:
    """The answer of /healthz there. Raises OSError, and ValueError if the answer is something else."""
    address = f"{url.rstrip('/').removesuffix('/healthz')}/healthz"
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE_SECONDS) as answer:
            content = answer.read(MOST_BYTES)
    except urllib.error.HTTPError as refusal:
        if refusal.code != 503:
            raise ValueError(f"{address} answers {refusal.code}; name the page of a coordinator") from None
        content = refusal.read(MOST_BYTES)
    except urllib.error.URLError as problem:
        raise ValueError(f"no coordinator answers at {address} ({problem.reason})") from None
    found = json.loads(content)
    if not isinstance(found, dict) or not isinstance(found.get("healthy"), bool):
        raise ValueError(f"{address} is not the page of a coordinator")
    return found


async def _by_log(where: str) -> dict[str, Any]:
    """The same answer from the run so far, as the coordinator has it. Raises ValueError."""
    from dtfm.coordinator.command.client import told
    from dtfm.coordinator.view.condition.condition import fitness

    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            *_, so_far = [each async for each in told(where, follow=False)]
    except TimeoutError:
        raise ValueError(f"the coordinator does not answer within {PATIENCE_SECONDS:.0f} seconds") from None
    return asdict(fitness(so_far, time.time()))
