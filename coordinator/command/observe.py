"""Commands that show a run: ``members``, ``events``, ``watch``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from dtfm.coordinator.command.client import ask, records
from dtfm.coordinator.command.options import (
    DEFAULT_ADDRESS,
    Address,
    Json,
    StoreUrl,
    TokenFile,
    print_record,
    read_token,
)
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.log.store import Store
from dtfm.coordinator.view.members import member_documents
from dtfm.coordinator.view.narration import describe_codecs
from dtfm.coordinator.view.watch import View, render
from dtfm.protos import control_pb2 as wire


def members(
    address: Address = DEFAULT_ADDRESS, store: StoreUrl = "", token_file: TokenFile = None, json_lines: Json = False
) -> None:
    """Shows the nodes: address, device, and what each computes."""
    for document in asyncio.run(_members(address, store, read_token(token_file))):
        print(json.dumps(document) if json_lines else _member_line(document), flush=True)


def events(
    address: Address = DEFAULT_ADDRESS,
    store: StoreUrl = "",
    token_file: TokenFile = None,
    json_lines: Json = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Print new events too, until the run is over.")
    ] = False,
    after: Annotated[int, typer.Option(min=0, help="Print only events after this sequence number.")] = 0,
) -> None:
    """Prints the event log: everything that happened in the run, in order."""
    asyncio.run(_events(address, store, read_token(token_file), after, follow, json_lines))


def watch(
    address: Address = DEFAULT_ADDRESS, store: StoreUrl = "", token_file: TokenFile = None, json_lines: Json = False
) -> None:
    """Shows a live view of the run until it is over. Ctrl-C ends the view, not the run."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_watch(address, store, read_token(token_file), json_lines))


async def _watch(address: str, store: str, token: str, json_lines: bool) -> None:
    if json_lines:
        await _events(address, store, token, 0, True, json_lines)
        return
    view = View()
    console = Console()
    live = Live(console=console, refresh_per_second=4, get_renderable=lambda: render(view))
    # A terminal shows the log so far at once and then follows it; anything else gets the final state alone.
    with live if console.is_terminal and not store else contextlib.nullcontext():
        async for record in records(address, store, token, follow=not store):
            view.add(record)
    if not console.is_terminal or store:
        console.print(render(view))


async def _members(address: str, store: str, token: str) -> list[dict[str, Any]]:
    if store:
        with Store(store, write=False) as opened:
            return member_documents(fold(record.event for record in opened.read()))
    reply: wire.MembersReply = await ask(address, token, lambda stub: stub.Members, wire.MembersRequest())
    return [json.loads(text) for text in reply.members_json]


async def _events(address: str, store: str, token: str, after: int, follow: bool, json_lines: bool) -> None:
    async for record in records(address, store, token, after=after, follow=follow):
        print_record(record, json_lines=json_lines)


def _member_line(document: dict[str, Any]) -> str:
    stage, device = document["stage"], document["device"]
    work = f"stage {stage}, layers {document['layers'][0]}-{document['layers'][1] - 1}" if stage is not None else ""
    sent = [
        f"to {destination} {describe_codecs(link['codecs'])}"
        for destination, link in document["links"].items()
        if link["codecs"]
    ]
    return (
        f"{document['node']:<20} {document['status']:<10} {work:<24} {document['address']:<22} "
        f"{device['name']} ({device['memory_bytes'] / 2**30:.1f} GiB, {device['flops'] / 1e9:.0f} GFLOP/s)"
        f"{'; sends ' if sent else ''}{', '.join(sent)}"
    )
