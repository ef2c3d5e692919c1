"""The shell around ``tick``: one queue of inputs, one task that ticks through it, and the commands that ticks return."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import grpc.aio

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.members.invitations import check_enrolment
from dtfm.coordinator.core.refusal import Refused
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.core.steering import changed_run
from dtfm.coordinator.core.stumbling import after_an_error, kind_of
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.timeouts import HEARTBEAT_LEASES, TOGETHER_LEASES
from dtfm.coordinator.log.events import Event, RunStarted, StepCommitted, WorkAudited
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.service.checkpoint.checkpoint_commands import CheckpointCommands
from dtfm.coordinator.service.checkpoint.checkpoint_place import claim
from dtfm.coordinator.service.grpc_services import Files, Joins, Observers, OtherMethods
from dtfm.coordinator.service.log_writer import LogWriter
from dtfm.coordinator.service.own_files import describe_own_files
from dtfm.coordinator.service.pasted_line import page_link, pasted_line, where_it_leads
from dtfm.coordinator.service.planning.planner_thread import PlannerThread
from dtfm.coordinator.service.port.front import Front
from dtfm.coordinator.service.port.gate import Gate
from dtfm.coordinator.service.port.strangers import Limits
from dtfm.coordinator.service.streams import Inputs, Streams
from dtfm.coordinator.store.record import AnotherWriter, StoreError
from dtfm.coordinator.store.store import Store
from dtfm.coordinator.view.follower import Follower
from dtfm.coordinator.view.story import Story
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.candidates import origin_of, read_candidate
from dtfm.protos.connection import address_of, coordinator_options
from dtfm.protos.identity.access import Role
from dtfm.protos.identity.credentials import coordinator_credentials, issue, make_authority, pin_of, read_public_key
from dtfm.protos.identity.invitation import Invitation, new_secret, secret_digest
from dtfm.protos.open_files import raise_limit

log = logging.getLogger(__name__)


class Deaf(RuntimeError):
    """Nobody can connect, from now on."""


class Server:
    """The coordinator of one run. ``story`` is the store's story so far. ``authority_key`` is the authority's key (PEM).

    ``pin`` is the authority's pin. Invitations name the pin and the ``addresses``, which are known after it listens. ``page``:
    the page's URL; empty: there is no page.
    """

    def __init__(self, state: State, store: Store, story: Story, authority_key: bytes) -> None:
        self.state = state
        self.authority = make_authority(authority_key, datetime.now(UTC))
        self.pin = pin_of(self.authority.certificate)
        self.addresses: tuple[str, ...] = ()
        self.page = ""
        self._lost = 0.0  # seconds during which the log could not be written
        self._told_to_stop = asyncio.Event()
        self._inputs = Inputs()
        self._streams = Streams(self._inputs, state.lease, lambda name: self.ledger.party(name))
        self.log = LogWriter(store)
        self.follower = Follower(store, story, self._beats)
        self.log.on_event(self.follower.wake)
        self._planner = PlannerThread()
        self._tickets = itertools.count(1)
        self._answers: dict[int, asyncio.Future[t.Granted | Refused]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stumbled = set[tuple[str, type[Exception]]]()
        self._replaced: AnotherWriter | None = None  # the log is another coordinator's now

    def _clock(self) -> float:
        """Seconds that never go back. The clock stands still while the log cannot be written: nobody is late because of that."""
        return time.monotonic() - self._lost

    @property
    def ledger(self) -> Ledger:
        return self.state.ledger

    def _beats(self) -> Mapping[str, wire.Heartbeat]:
        """By member, its last heartbeat; for any thread."""
        return {node: each.beat for node, each in self.state.members.sessions.items() if each.beat is not None}

    async def bind(self, host: str, port: int) -> int:
        """Takes the port (0: one that the system chooses), and returns it. Nobody is answered before ``start``. Raises
        ValueError."""
        members = {origin_of(read_candidate(text)[0]) for text in self.ledger.former}
        self._front = front = Front(Limits.within(raise_limit()), members)
        self._grpc = grpc.aio.server(options=coordinator_options())
        gate = Gate(self.pin, lambda: self.state.ledger, front)
        joins, observers = Joins(self._streams, self, gate, front.seen), Observers(self, gate)
        self._files = Files(lambda: self.state, gate)
        self._checkpoints = CheckpointCommands(lambda: self.state, self._files.thread)
        # The last one refuses what the others do not answer.
        self._grpc.add_generic_rpc_handlers(
            (
                services.handlers("Disk", self._files),
                services.handlers("Coordinator", joins),
                services.handlers("Observer", observers),
                OtherMethods(front.called),
            )
        )
        try:
            self._grpc.add_secure_port(front.inner, coordinator_credentials(self.authority))
            return front.bind(host, port)
        except BaseException as error:
            await self._grpc.stop(None)
            await front.close()
            if not isinstance(error, OSError):
                raise
            raise ValueError(
                f"cannot listen on {address_of(host, port)} ({error.strerror}): the port is in use, or the address is not this "
                f"machine's; choose another with --listen HOST:PORT (port 0: any free one)"
            ) from None

    async def start(self) -> None:
        """Begins to answer."""
        await self._grpc.start()
        self._front.start()

    async def run(self, events: Sequence[Event] = (), *, stays: bool = False) -> int:
        """Runs until the run is over or `ask_to_stop` is called; returns the exit code. ``events``, which the state already
        contains, go into the log first. ``stays``: a complete run goes on being served, until `ask_to_stop` is called.

        Raises Deaf. Raises StoreError if a new run's events cannot be written, if another coordinator writes to the log, or if
        it is to stop while the log cannot be written.
        """
        work = (self._beat(), self._keep_the_lease(), self.follower.follow())
        working = {asyncio.create_task(each) for each in work}
        compiling = self._planner.compile()
        try:
            if events and isinstance(events[0], RunStarted):
                await self.log.append(events)
            elif events:
                self._lost += await self.log.append_however_long(events, self.state.lease, self._told_to_stop)
            await self._checkpoints.clear_unfinished()  # of the process before: nothing is under way yet
            self._look_at_own_files()
            while True:
                while not self.state.stopped:
                    await self._go_on()
                await self._let_nodes_go()
                if self.ledger.outcome is not None:
                    self.log.let_follow(False)
                    while stays and self.state.is_complete and not self._told_to_stop.is_set():
                        await self._go_on()
                if (code := self.state.exit_code) is not None:
                    await self._checkpoints.clear_unfinished()
                    return code
                self.log.let_follow(True)  # an operator has given the run more steps
        finally:
            working.add(compiling)
            for task in working:
                task.cancel()
            await asyncio.wait(working)
            await self.close()

    def _look_at_own_files(self) -> None:
        """Before the first plan they decide which members have read the right ones."""
        if self.ledger.training.generation or self.ledger.outcome is not None:
            return
        call, put = asyncio.get_running_loop().call_soon_threadsafe, self._inputs.put_nowait
        describe_own_files(self.state.run.data, lambda files: call(put, t.OwnFilesRead(files)))

    async def _go_on(self) -> None:
        await self._handle(await self._next())
        if self._replaced is not None:
            raise self._replaced
        if self._front.has_died:  # seen at the next beat at the latest
            raise Deaf("the thread that takes connections has ended, so that nobody can connect any more")

    async def close(self) -> None:
        """Ends all streams and frees the port. `run` calls it by itself."""
        for answer in self._answers.values():
            answer.cancel()
        await self.log.close()
        await self.follower.close()
        self._planner.close()
        self._files.thread.shutdown(wait=False, cancel_futures=True)
        self._checkpoints.close()
        await self._grpc.stop(grace=0.5)
        await self._front.close()

    def ask_to_stop(self, reason: str) -> None:
        """Makes ``run`` return. The nodes return when a coordinator answers again."""
        self._told_to_stop.set()
        self._inputs.put_nowait(t.StopAsked(reason))

    def begin_with(self, events: Sequence[Event]) -> None:
        """Adds the events to the state before the server starts. ``run`` gets the same events."""
        self.state = replace(self.state, ledger=fold(events, self.state.ledger))

    async def ask(self, request: t.Request, by: str = "") -> t.Granted:
        """The core's answer to ``by``. For a plan, waits until the planner has looked for a better one. Raises Refused."""
        made, secret = ("", ""), b""
        if isinstance(request, wire.EnrolRequest):
            check_enrolment(self.ledger, request, time.time())  # refusals here do not keep the core busy
        elif isinstance(request, wire.InviteRequest):
            id, secret = new_secret()
            made = id, secret_digest(secret)
        elif isinstance(request, wire.SteerRequest) and request.wish == wire.SteerRequest.SET:
            place = changed_run(self.state, request).checkpoints
            if place != self.state.run.checkpoints:
                await claim(place, self.ledger.run_id, self.state.patience)
        ticket = next(self._tickets)
        future: asyncio.Future[t.Granted | Refused] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = future
        self._inputs.put_nowait(t.Asked(ticket, request, by, time.time(), made))
        reply = await future
        if isinstance(reply, Refused):
            raise reply
        if isinstance(reply, wire.InviteReply) and isinstance(request, wire.InviteRequest):
            reply.invitation = self.invitation(reply.id, secret)
            reply.line = pasted_line(reply.invitation, Role(request.role), self.state.run)
            reply.leads_to = where_it_leads(self.addresses)
            if self.page and request.role != Role.NODE:
                reply.page = page_link(self.page, reply.id, secret)
        return reply

    def invitation(self, id: str, secret: bytes) -> str:
        """The text to hand out."""
        return str(Invitation(self.addresses, self.pin, id, secret))

    async def _next(self) -> t.Input:
        """The next input, or TimePassed when the state wants to wake before one comes."""
        wakes_at = self.state.wakes_at
        if wakes_at is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wakes_at - self._clock())):
                    return await self._inputs.get()
            return t.TimePassed()
        return await self._inputs.get()

    async def _handle(self, event: t.Input) -> None:
        now = self._clock()
        try:
            self.state, ready = tick(self.state, event, now)
        except Exception as error:
            what = kind_of(event)
            if (what, type(error)) not in self._stumbled:  # anybody may repeat the same message
                self._stumbled.add((what, type(error)))
                log.exception("a bug in dtfm: the coordinator stumbled over %s, and goes on without it", what)
            self.state, ready = after_an_error(self.state, event, now)
        if ready.entries:
            self._lost += await self.log.append_however_long(ready.entries, self.state.lease, self._told_to_stop)
        if isinstance(event, t.Greeted | t.Heard | t.StreamClosed):
            # Everybody's votes cause a commit, and audits are asked for: nobody pays for these.
            free = any(isinstance(entry, StepCommitted | WorkAudited) for entry in ready.entries)
            self._streams.logged(event, 0 if free else len(ready.entries))
        for command in ready.commands:
            self._carry_out(command)

    def _carry_out(self, command: t.Command) -> None:
        match command:
            case t.Send():
                self._streams.put(command.stream, command.message)
            case t.HangUp():
                self._streams.put(command.stream, None)
            case t.PlanWanted():
                self._start(self._plan(command))
            case t.WriteManifest():
                self._start(self._write_manifest(command))
            case t.TidyCheckpoints():
                self._start(self._checkpoints.tidy(command))
            case t.Certify():
                self._streams.put(command.stream, self._certified(command))
            case t.Answer():
                self._answer(command.ticket, command.reply)
            case t.Log():
                log.info(command.sentence)

    def _certified(self, command: t.Certify) -> wire.CoordinatorMessage:
        certificate, holder = b"", self.ledger.access.names.get(command.node)
        if holder is not None:  # otherwise it has just been revoked, and is being hung up on
            key = read_public_key(base64.b64decode(holder.key))
            certificate = issue(self.authority, key, command.node, datetime.now(UTC))
        if command.welcome is None:
            return wire.CoordinatorMessage(certificate=wire.Certificate(certificate=certificate))
        message = wire.CoordinatorMessage(welcome=command.welcome)
        message.welcome.authority, message.welcome.certificate = self.authority.certificate, certificate
        return message

    def _answer(self, ticket: int, answer: t.Granted | Refused) -> None:
        if (future := self._answers.pop(ticket, None)) is not None and not future.done():
            future.set_result(answer)

    async def _plan(self, wanted: t.PlanWanted) -> None:
        def dropped() -> bool:
            asked = self.state.planner.asked
            return asked is None or asked.number != wanted.number

        self._inputs.put_nowait(await self._planner.plan(wanted, dropped))

    async def _write_manifest(self, command: t.WriteManifest) -> None:
        self._inputs.put_nowait(await self._checkpoints.write_manifest(command))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.state.lease * TOGETHER_LEASES / 2)
            if not self.log.is_failing:
                self._inputs.put_nowait(t.TimePassed())

    async def _keep_the_lease(self) -> None:
        while self._replaced is None:
            try:
                await self.log.renew(self.state.lease)
            except AnotherWriter as error:
                self._replaced = error
                self._inputs.put_nowait(t.TimePassed())  # so that `_go_on` sees it
            except StoreError:
                pass  # an append will say so, and go on trying
            await asyncio.sleep(self.state.lease * HEARTBEAT_LEASES)

    async def _let_nodes_go(self) -> None:
        """Tells the nodes why the run ends, and lets them hang up. After a lease, the server hangs up on the rest."""
        until = self._clock() + self.state.lease
        while self.state.stopped and self._streams.any_open and self._clock() < until:
            with contextlib.suppress(TimeoutError):
                await self._handle(await asyncio.wait_for(self._inputs.get(), max(0.0, until - self._clock())))
        for session in list(self.state.members.sessions.values()) if self.state.stopped else ():
            await self._handle(t.StreamClosed(session.stream, "the run is over"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
