"""Commands that show a run: ``members``, ``events``, ``watch``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtfm.coordinator.command.options import Json, StoreUrl, Where, log_of, print_record

if TYPE_CHECKING:
    from dtfm.coordinator.view.so_far import SoFar


def members(where: Where = "", store: StoreUrl = "", json_lines: Json = False) -> None:
    """Shows the nodes: address, device, what each computes, and what does not work."""
    from dtfm.coordinator.view.members import member_documents

    so_far = asyncio.run(_run(where, store))
    ledger, documents = so_far.ledger, member_documents(so_far)
    if not documents and not json_lines:
        print(
            f"No node takes part{f': the run is over, {ledger.outcome.reason}' if ledger.outcome is not None else ''}."
        )
    for document in documents:
        print(json.dumps(document) if json_lines else _member_line(document), flush=True)
    if so_far.asks and not json_lines:
        print(f"The run needs an operator: {so_far.said}.")


def events(
    where: Where = "",
    store: StoreUrl = "",
    json_lines: Json = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events too, until the run is over.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="Print only events after this sequence number.")] = 0,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Print nothing, and write the curves to tensorboard:DIR, wandb:PROJECT or trackio:PROJECT (may be given several "
            "times). What is there already is not written again.",
        ),
    ] = None,
) -> None:
    """Prints the event log: all events of the run, in order.

    With --follow, it goes on as things happen.
    """
    if to and after:
        raise ValueError("--after says which events are printed, and --to prints none; leave one of them out")
    asyncio.run(
        _track(where, store, to, follow, json_lines) if to else _events(where, store, after, follow, json_lines)
    )


def watch(where: Where = "", store: StoreUrl = "", json_lines: Json = False) -> None:
    """Shows a live view of the run until it is over. Ctrl-C ends the view, not the run.

    Into a pipe or a file it prints a line for each tenth step, and for other events that a person must know.
    """
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(where, store, json_lines))


async def _watch(where: str, store: str, json_lines: bool) -> None:
    if json_lines or not sys.stdout.isatty():
        async for record in log_of(where, store, follow=not store):
            print_record(record, json_lines=json_lines, all_events=False)
        return
    from rich.console import Console

    from dtfm.coordinator.view.watch import live_view, render

    console = Console()
    if store:  # the final state alone
        console.print(render(await _run(where, store), console))
        return
    from dtfm.coordinator.command.client import told

    with contextlib.ExitStack() as stack:
        shown = None
        async for so_far in told(where):
            shown = shown or stack.enter_context(live_view(so_far, console))


async def _run(where: str, store: str) -> SoFar:
    """The run so far, as the store or the coordinator has it."""
    if store:
        from dtfm.coordinator.view.story_snapshot import story_in

        return story_in(store).now
    from dtfm.coordinator.command.client import told

    return [so_far async for so_far in told(where, follow=False)][-1]


async def _events(where: str, store: str, after: int, follow: bool, json_lines: bool) -> None:
    async for record in log_of(where, store, after=after, follow=follow):
        print_record(record, json_lines=json_lines)


async def _track(where: str, store: str, to: list[str], follow: bool, json_lines: bool) -> None:
    from dtfm.coordinator.track.writing import write_curves
    from dtfm.protos.run_file.trackers import read_destination

    try:
        destinations = list(dict.fromkeys(map(read_destination, to)))
    except ValueError as problem:
        raise ValueError(f"--to {problem}") from None
    for written in await write_curves(
        destinations, log_of(where, store, follow=follow), as_they_come=follow and not store
    ):
        told = {"tracker": str(written.destination), "steps": written.steps, "evaluations": written.evaluations}
        line = f"{written.destination}: {written.steps:,} more steps and {written.evaluations:,} more evaluations"
        print(json.dumps(told) if json_lines else line, flush=True)


def _member_line(document: dict[str, Any]) -> str:
    if (why := document["quarantine"]) is not None:
        return f"{document['node']:<20} quarantined since step {why['step']}: {why['charge']}: {why['reason']}"
    stage, device = document["stage"], document["device"]
    work = f"stage {stage}, layers {document['layers'][0]}-{document['layers'][1] - 1}" if stage is not None else ""
    from dtfm.coordinator.log.wording import describe_codecs

    sent = [
        f"to {destination} {describe_codecs(link['codecs'])}"
        for destination, link in document["links"].items()
        if link["codecs"]
    ]
    its = document["standing"]
    standing = f"; {its['word']}: {its['reason']}" if its["word"] != "proven" or its["audits"] else ""
    return (
        f"{document['node']:<20} {document['status']:<10} {work:<24} {document['address']:<22} "
        f"{device['name']} ({device['memory_bytes'] / 2**30:.1f} GiB, {device['flops'] / 1e9:.0f} GFLOP/s)"
        f"{'; sends ' if sent else ''}{', '.join(sent)}{''.join(_ailments(document))}{standing}"
    )


def _ailments(document: dict[str, Any]) -> Iterator[str]:
    """What does not work for now: the node, and its links to others."""
    if not (health := document["health"])["works"]:
        since, again = _clock(health["since"]), _clock(health["tried_again"])
        yield f"; out of use since {since}, tested again by {again}: {health['reason']}"
    for each in document["apart"]:
        since, again = _clock(each["since"]), _clock(each["tried_again"])
        yield f"; no link with {each['node']} since {since}, tried again about {again}: {each['reason']}"


def _clock(at: float) -> str:
    """The local time at ``at``, in seconds since 1970."""
    return time.strftime("%a %d %b, %H:%M:%S", time.localtime(at))
