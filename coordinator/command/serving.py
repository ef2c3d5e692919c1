"""Serves one run: the work of ``dtfm-coordinator serve`` after its options are read."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from dtfm.coordinator.command.options import print_record
from dtfm.coordinator.log.events import Listens, Revoked, RunFinished, RunResumed, RunStarted, RunStopped
from dtfm.coordinator.service.addresses import EVERYWHERE, public_addresses
from dtfm.coordinator.service.authority_key import authority_file, authority_key
from dtfm.coordinator.service.checkpoint.checkpoint_place import mark
from dtfm.coordinator.service.checkpoint.manifest import CheckpointError
from dtfm.coordinator.service.first_access import FIRST_SECONDS, FIRST_USES, first_invitation, local_operator
from dtfm.coordinator.service.local_network import announcing
from dtfm.coordinator.service.notifying import notifying
from dtfm.coordinator.service.pasted_line import pasted_line, where_it_leads
from dtfm.coordinator.service.room import open_store, wait_for_room
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run, serve_until_over, start_over
from dtfm.coordinator.store.database import sqlite_file
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.track.tracker import check_tracker, tracked
from dtfm.coordinator.track.tracking import tracking
from dtfm.coordinator.web.app import make_app, make_metrics_app
from dtfm.coordinator.web.serving import bind, bind_page, link_to, page_served, url_elsewhere
from dtfm.protos import DEFAULT_ADDRESS
from dtfm.protos.connection import address_of, read_address
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.invitation import MOST_ADDRESSES, MOST_CHARACTERS, PREFIX, Invitation, read_invitation
from dtfm.protos.identity.private_files import read_private, state_folder, write_private
from dtfm.protos.run_file.run_file import RunFile, read_run_file

log = logging.getLogger(__name__)

MOST_AFTER = 100
"""The number of events that may follow a run's stop."""


@dataclass(frozen=True, slots=True)
class Serving:
    """How the operator wants a run to be served."""

    listen: str
    """Where to listen. Empty: as the store remembers."""
    web: str | None
    """Where the page is: see bind_page. None: there is no page."""
    page_url: str
    """See url_elsewhere."""
    metrics: str
    """Where metrics are served beside the page. Empty: nowhere else."""
    advertised: list[str]
    """The addresses for invitations. Empty: as the store remembers."""
    authority: Path | None
    """The file with the authority's key. None: the usual one."""
    invitation: Path | None
    """A file for the first invitation. None: it is printed."""
    announce: bool | None
    """See announcing."""
    json_lines: bool
    verbose: bool
    stays: bool
    """See serve_until_over."""


def serve_run(store_url: str, run_file: Path | None, new: bool, reserve: bool, options: Serving) -> int:
    """Serves the run, and returns the exit code. ``new``: see start_over. ``reserve``: waits until no other coordinator serves
    the run. Raises ValueError."""
    state_folder()  # raises where this user has none
    if options.listen:
        read_address(options.listen)
    run = read_run_file(run_file) if run_file is not None or new else None
    page = bind_page(options.web) if options.web is not None else None
    metrics = bind(options.metrics, "--metrics") if options.metrics else None
    if reserve:
        _check_reserve(store_url, new, options.authority)
        from dtfm.coordinator.service.planning.planner import compile_scheduler

        asyncio.run(compile_scheduler())
        print(
            "This is a reserve: it takes over once no other coordinator renews the lease.", file=sys.stderr, flush=True
        )
    for aside in start_over(store_url, run) if new and run is not None else ():
        print(f"What was there is {aside} now.", file=sys.stderr)
    own = Path(sqlite_file(store_url))
    if own.is_file() and own.stat().st_size:  # a run that goes on
        wait_for_room([own.absolute().parent, state_folder()])
    with open_store(store_url, waits=reserve) as store:
        if store.was_reserve and was_stopped(store):
            print("The run was stopped, so no reserve is needed.", file=sys.stderr, flush=True)
            return 0
        return asyncio.run(_serve(store, run, page, metrics, options))


def was_stopped(store: Store) -> bool:
    """Whether an operator has ended the last coordinator."""
    newest = [record.event for record in store.page(max(store.last - MOST_AFTER, 0))]
    told = [event for event in newest if isinstance(event, RunStarted | RunResumed | RunStopped)]
    return isinstance(told[-1] if told else None, RunStopped)


def _check_reserve(store_url: str, new: bool, authority: Path | None) -> None:
    """Raises ValueError for mistakes that would show only when the reserve is needed."""
    if new:
        raise ValueError(
            "--new starts over, and --reserve goes on with the log of another coordinator; leave one of them out"
        )
    if store_url.startswith("sqlite:"):
        raise ValueError("--reserve needs a store that other machines reach too: --store postgresql+psycopg://...")
    if authority is None or not authority.exists():
        raise ValueError(
            "--reserve needs the key that shows nodes the run's coordinators: copy the file of `serve --authority FILE`, and "
            "name the copy with --authority"
        )
    authority_key(authority)


async def _serve(
    store: Store,
    run: RunFile | None,
    page: socket.socket | None,
    metrics: socket.socket | None,
    options: Serving,
) -> int:
    old = None if options.invitation is None else _written_before(options.invitation)
    state, story, events = open_run(store, run)
    try:
        mark(state.run.checkpoints, state.ledger.run_id)
    except CheckpointError as problem:
        if isinstance(events[0], RunStarted):
            raise
        print(f"{problem} The run goes on, and tries again when a checkpoint is due.", file=sys.stderr)
    trackers = run.track.destinations if run is not None else []
    for destination in trackers:
        try:
            check_tracker(destination)
        except ValueError as problem:
            if isinstance(events[0], RunStarted):
                raise ValueError(f"track.to: {problem}") from None
    known = state.ledger.listens
    host, port = read_address(options.listen or (known.address if known else DEFAULT_ADDRESS))
    advertised = options.advertised or list(known.advertised if known else ())
    begun = len(events)
    key = authority_key(options.authority or authority_file(store.url, state.ledger.run_id))
    server = Server(state, store, story, key)
    server.log.on_event(lambda record: print_record(record, json_lines=options.json_lines, all_events=options.verbose))
    if options.stays and not options.json_lines:
        server.log.on_event(_tell_end)
    port = await server.bind(host, port)
    server.addresses = public_addresses(host, port, advertised)
    elsewhere = ""
    if page is not None:
        hosts = [read_address(each)[0] for each in server.addresses] if advertised else []
        elsewhere = url_elsewhere(page, options.page_url, hosts)
        server.page = elsewhere or link_to(page)
    listens = Listens(address_of(host, port), tuple(advertised))
    events += [listens] if listens != known else []
    # Before the first call can come, so that a node on this machine finds the key that it looks for.
    events += local_operator(state.ledger, (_here(host, port), *server.addresses)[:MOST_ADDRESSES], server.pin)
    text = ""
    stale = options.invitation is not None and not (old is not None and _leads_here(options.invitation, old, server))
    over = state.ledger.outcome.reason if state.ledger.outcome is not None else ""
    uses = 1 if state.ledger.is_open and options.invitation is None else FIRST_USES  # several nodes read the file
    if not over and (first := first_invitation(state.ledger, time.time(), uses, another=stale)) is not None:
        events.append(first[0])
        text = server.invitation(first[0].invitation, first[1])
        if options.invitation is not None:
            write_private(options.invitation, f"{text}\n".encode())
            if old is not None and old.id in state.ledger.access.invitations:
                events.append(Revoked("", (old.id,), time.time(), "the coordinator"))
    server.begin_with(events[begun:])
    await server.start()
    shown = "" if options.invitation is not None else text
    if options.json_lines:
        line, leads_to = pasted_line(shown, Role.NODE, state.run), where_it_leads(server.addresses)
        told = {"event": "listening", "address": _here(host, port), "invitation": shown}
        told |= {"line": line, "leads_to": leads_to, "page": server.page}
        print(json.dumps(told), flush=True)
    else:
        _tell(server, host, port, shown, options.invitation, over)
        if elsewhere:
            print(f"To see it, with a link: {elsewhere} (dtfm-coordinator invite --role viewer)", flush=True)
        elif page is not None:
            print(f"To see it: {server.page} (to direct it there: dtfm-coordinator invite --role operator)", flush=True)
    telling = notifying(run.notify.url if run is not None else "", lambda: server.ledger, server.log.on_event)
    keeping = tracking(trackers, tracked(server.ledger), store, server.log.on_event)
    by_link, secure = bool(elsewhere), elsewhere.startswith("https:")

    def why_not_well() -> str:
        return "the log cannot be written" if server.log.is_failing else ""

    look = {"by_link": by_link, "secure": secure}
    app = make_app(
        server.follower, lambda: server.ledger, server.ask, **look, shown_at=options.page_url, problem=why_not_well
    )
    page_up = page_served(page, app, from_anywhere=by_link and not options.page_url)
    metrics_up = page_served(metrics, make_metrics_app(server.follower, why_not_well), from_anywhere=True)
    say = log.log if options.json_lines else _tell_plainly  # JSON lines on standard output are the run's events alone
    announced = announcing(lambda: server.ledger, server.pin, (host, port), options.announce, say)
    async with telling, keeping, announced, page_up, metrics_up:
        code = await serve_until_over(server, events, stays=options.stays)
    if code and server.ledger.outcome is None:
        minutes, step = state.run.cluster.wait_for_coordinator / 60, server.ledger.training.step
        print(
            f"The coordinator has stopped after step {step}. Nodes keep what they have, and wait {minutes:g} minutes for it "
            "to come back: the same command goes on with the run. To send them home, start it again, and: "
            "dtfm-coordinator stop",
            file=sys.stderr,
        )
    return code


def _written_before(file: Path) -> Invitation | None:
    """The invitation that an earlier start wrote to the file, if it can be read. Raises ValueError if something else is there."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MOST_CHARACTERS + 1).decode(errors="replace").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"--invitation-file {file} cannot be read ({error.strerror}); name another file") from None
    if text and not text.startswith(PREFIX):
        raise ValueError(f"--invitation-file {file} holds something else, which would be lost; name another file")
    try:
        return read_invitation(text)
    except ValueError:
        return None


def _leads_here(file: Path, shown: Invitation, server: Server) -> bool:
    """Whether the invitation still lets somebody in, and nobody but its owner may read the file."""
    try:
        read_private(file)
    except (FileNotFoundError, ValueError):
        return False
    made = server.ledger.access.invitations.get(shown.id)
    leads_here = (shown.pin, shown.addresses) == (server.pin, server.addresses)
    return leads_here and made is not None and made.is_usable(time.time())


def _tell_end(record: Record) -> None:
    if isinstance(record.event, RunFinished):
        print("The coordinator stays, and tells nodes that come back; Ctrl-C ends it.")
        print("To go on with more steps: dtfm-coordinator set train.steps=N", flush=True)


def _tell(server: Server, host: str, port: int, invitation: str, file: Path | None, over: str) -> None:
    run, leads_to = server.state.run, where_it_leads(server.addresses)
    line = pasted_line(invitation, Role.NODE, run)
    print(f"Run {run.name!r}, listening on {address_of(host, port)}.")
    if file is not None and not over:
        print(f"To take part, on each machine: {line}, with the invitation in {file}.")
    elif invitation:
        days = f"within {FIRST_SECONDS / 86400:.0f} days"
        if server.ledger.is_open:
            print(f"To take part, on one machine, {days} (lines for eight more: dtfm-coordinator invite --count 8):")
        else:
            print(f"To take part, on each machine (up to {FIRST_USES}, {days}):")
        print(f"    {line}")
        print(f"  (leads to {leads_to})")
        if "--allow-data" in line:
            print(
                "  (the run names these files of each machine, or its keys' places, and only its operator can allow that)"
            )
    elif over:
        print(f"The run is over: {over}. Nodes that come back are told. --new starts another run.")
    else:
        print("Nodes that were here come back by themselves. To let others in: dtfm-coordinator invite")
    sys.stdout.flush()


def _tell_plainly(level: int, sentence: str) -> None:
    print(sentence, file=sys.stderr if level > logging.INFO else sys.stdout, flush=True)


def _here(host: str, port: int) -> str:
    """How this machine itself reaches a server that listens on ``host``."""
    return address_of("127.0.0.1" if host in EVERYWHERE else host, port)
