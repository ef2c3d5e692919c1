"""The shell around ``tick``: gRPC streams in, the log and gRPC streams out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, ParamSpec, TypeVar

import grpc
import grpc.aio

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import PlanChosen, State
from dtfm.coordinator.core.tick import tick
from dtfm.coordinator.core.timeouts import TOGETHER_LEASES
from dtfm.coordinator.log import ledger_snapshot
from dtfm.coordinator.log.events import Event
from dtfm.coordinator.log.ledger import Ledger
from dtfm.coordinator.log.manifest import CheckpointError, write_manifest
from dtfm.coordinator.log.store import Record, Store, StoreError
from dtfm.coordinator.service.grpc_services import Context, Joins, Observers
from dtfm.coordinator.service.planner import choose
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.connection import server_options, shows_token
from dtfm.protos.credentials import coordinator_credentials, issue, make_authority, make_key

log = logging.getLogger(__name__)
P = ParamSpec("P")
Result = TypeVar("Result")

MAX_WAITING = 10_000
"""Messages that may wait for a slow reader, in either direction."""


class Server:
    """One run's coordinator: everything that happens is put into a queue, and one task ticks through it."""

    def __init__(
        self, state: State, store: Store, token: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = state
        self.exit_code: int | None = None
        self._store = store
        self._token = token
        key = store.secret("authority_key", make_key().decode()).encode()
        self._authority = make_authority(key, token, datetime.now(UTC))
        self._clock = clock
        self._inputs: asyncio.Queue[t.Input] = asyncio.Queue(MAX_WAITING)
        self._streams: dict[int, asyncio.Queue[wire.CoordinatorMessage | None]] = {}
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[t.AnswerPlanNow]] = {}
        self._listeners: set[Callable[[Record], None]] = set()
        self._appended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing: set[asyncio.Future[Any]] = set()
        self._snapshot_due = store.last_snapshot + ledger_snapshot.EVERY
        self._snapshots = asyncio.Lock()
        self._stopping = False

    @property
    def authority(self) -> bytes:
        """The certificate by which this coordinator is known."""
        return self._authority.certificate

    async def listen(self, host: str, port: int) -> int:
        """Starts serving; returns the port, which is drawn where 0 is asked for. Raises ValueError."""
        self._grpc = grpc.aio.server(options=server_options())
        control_pb2_grpc.add_CoordinatorServicer_to_server(Joins(self), self._grpc)  # type: ignore[no-untyped-call]
        control_pb2_grpc.add_ObserverServicer_to_server(Observers(self), self._grpc)  # type: ignore[no-untyped-call]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound = self._grpc.add_secure_port(address, coordinator_credentials(self._authority))
        except RuntimeError:
            await self._grpc.stop(None)
            raise ValueError(
                f"cannot listen on {address}: the port is in use, or the address is not this machine's; choose another with "
                f"--listen HOST:PORT (port 0: any free one)"
            ) from None
        await self._grpc.start()
        return bound

    async def run(self, events: Sequence[Event] = ()) -> int:
        """Until the run is over or ``ask_to_stop`` is called; returns the exit code. ``events``, which the state already
        contains, go into the log first. Raises StoreError."""
        timer = asyncio.create_task(self._beat())
        try:
            if events:
                await self._append(events)
            while self.exit_code is None:
                await self._handle(await self._next())
            await self._let_nodes_go()
            await self._take_snapshot(self.state.ledger, self._store.last)
            return self.exit_code
        finally:
            timer.cancel()
            await self.close()

    async def close(self) -> None:
        """Ends all streams and frees the port; ``run`` does so by itself."""
        self._stopping = True
        self._appended.set()
        for answer in self._answers.values():
            answer.cancel()
        if self._writing:
            await asyncio.wait(self._writing)  # the store is not to be closed under it
        await self._grpc.stop(grace=0.5)

    def ask_to_stop(self, reason: str, *, dismiss: bool) -> None:
        """``dismiss``: the nodes are told to stop as well; else they come back once a coordinator answers again."""
        self._inputs.put_nowait(t.StopAsked(reason, dismiss))

    def on_event(self, listener: Callable[[Record], None]) -> None:
        """``listener`` is called with every event from now on, once it is in the log."""
        self._listeners.add(listener)

    async def _next(self) -> t.Input:
        """The next input; when the state wants to wake before one comes, that time has passed."""
        wakes_at = self.state.wakes_at
        if wakes_at is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, wakes_at - self._clock())):
                    return await self._inputs.get()
            return t.TimePassed()
        return await self._inputs.get()

    async def _handle(self, event: t.Input) -> None:
        self.state, ready = tick(self.state, event, self._clock())
        if ready.entries:
            await self._append(ready.entries)
        for command in ready.commands:
            self._carry_out(command)
        if self._store.last >= self._snapshot_due:
            self._start(self._take_snapshot(self.state.ledger, self._store.last))

    async def _append(self, events: Sequence[Event]) -> None:
        for record in await self._write(self._store.append, events):
            for listener in self._listeners:
                listener(record)
        self._appended.set()
        self._appended = asyncio.Event()

    async def _take_snapshot(self, ledger: Ledger, last: int) -> None:
        """``ledger`` is what the log up to the event ``last`` adds up to. One after the other, as the last one counts."""
        self._snapshot_due = last + ledger_snapshot.EVERY
        async with self._snapshots:
            if last <= self._store.last_snapshot:
                return
            try:
                await self._write(lambda: self._store.keep(ledger_snapshot.take(ledger, last)))
            except StoreError as error:
                log.warning("no snapshot of event %d: %s", last, error)

    async def _write(self, write: Callable[P, Result], *arguments: P.args, **options: P.kwargs) -> Result:
        """What ``write`` does in a thread; ``close`` waits for it, whoever else gave up."""
        writing = asyncio.ensure_future(asyncio.to_thread(write, *arguments, **options))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return await asyncio.shield(writing)

    def _carry_out(self, command: t.Command) -> None:
        match command:
            case t.Send():
                self._put(command.stream, command.message)
            case t.Admit():
                self._put(command.stream, self._welcome(command))
            case t.HangUp():
                self._put(command.stream, None)
            case t.PlanWanted():
                self._start(self._plan(command))
            case t.WriteManifest():
                self._start(self._write_manifest(command))
            case t.AnswerPlanNow():
                if (answer := self._answers.pop(command.ticket, None)) and not answer.done():
                    answer.set_result(command)
            case t.Log():
                log.info(command.sentence)
            case t.Stop():
                self.exit_code = command.exit_code

    def _welcome(self, admit: t.Admit) -> wire.CoordinatorMessage:
        message = wire.CoordinatorMessage(welcome=admit.welcome)
        message.welcome.authority = self._authority.certificate
        message.welcome.certificate = issue(self._authority, admit.request, admit.node, datetime.now(UTC))
        return message

    def _put(self, stream: int, message: wire.CoordinatorMessage | None) -> None:
        if (out := self._streams.get(stream)) is None:
            return
        try:
            out.put_nowait(message)
        except asyncio.QueueFull:  # it does not read: the stream ends, and its node with it
            while not out.empty():
                out.get_nowait()
            out.put_nowait(None)

    async def _plan(self, wanted: t.PlanWanted) -> None:
        outcome: PlanChosen | str
        hopeless = False
        try:
            outcome = await asyncio.to_thread(
                choose,
                wanted.cluster,
                wanted.workload,
                wanted.incumbent,
                stages=wanted.stages,
                seed=wanted.seed,
                generation=wanted.generation,
                seconds=wanted.seconds,
            )
        except ValueError as error:
            outcome, hopeless = str(error), True
        except Exception as error:
            log.exception("the planner failed")
            outcome, hopeless = f"the planner failed ({type(error).__name__}: {error}); this is a bug in dtfm", True
        await self._inputs.put(t.Planned(wanted.number, outcome, hopeless))

    async def _write_manifest(self, command: t.WriteManifest) -> None:
        ledger, problem = self.state.ledger, ""
        try:
            await asyncio.to_thread(
                write_manifest, command.folder, ledger.run, ledger.run_id, command.step, command.parts
            )
        except CheckpointError as error:
            problem = str(error)
        except Exception as error:
            log.exception("the manifest of step %d could not be written", command.step)
            problem = f"{type(error).__name__}: {error}"
        await self._inputs.put(t.ManifestDone(command.step, problem))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.state.lease * TOGETHER_LEASES / 2)
            await self._inputs.put(t.TimePassed())

    async def _let_nodes_go(self) -> None:
        """The nodes hear why, and hang up; those that do not within a lease are hung up on."""
        until = self._clock() + self.state.lease
        while self._streams and self._clock() < until:
            with contextlib.suppress(TimeoutError):
                event = await asyncio.wait_for(self._inputs.get(), max(0.0, until - self._clock()))
                if isinstance(event, t.StopAsked):
                    return  # asked twice: at once
                await self._handle(event)
        for session in list(self.state.members.sessions.values()):
            await self._handle(t.StreamClosed(session.stream, "the run is over"))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What the gRPC services call.

    async def join(self, requests: AsyncIterator[wire.NodeMessage], shown: bool, context: Context) -> None:
        """Serves one node's stream from its first message to its end."""
        stream = next(self._numbers)
        out = self._streams[stream] = asyncio.Queue(MAX_WAITING)
        reader = asyncio.create_task(self._read(stream, requests, shown))
        try:
            while (message := await out.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            del self._streams[stream]
            await self._inputs.put(t.StreamClosed(stream, "its connection broke"))

    async def _read(self, stream: int, requests: AsyncIterator[wire.NodeMessage], shown: bool) -> None:
        reason = "it closed its stream"
        try:
            first = await asyncio.wait_for(anext(requests, None), self.state.lease)
            await self._inputs.put(t.Greeted(stream, first or wire.NodeMessage(), shown))
            async for message in requests:
                await self._inputs.put(t.Heard(stream, message))
        except TimeoutError:
            await self._inputs.put(t.Greeted(stream, wire.NodeMessage(), shown))
            return  # refused, and hung up on
        except grpc.aio.AioRpcError as error:
            reason = f"its connection broke ({error.code().name})"
        except Exception as error:
            reason = f"its connection broke ({type(error).__name__})"
        await self._inputs.put(t.StreamClosed(stream, reason))
        self._put(stream, None)

    def allows(self, context: Context) -> bool:
        return shows_token(context.invocation_metadata(), self._token)

    async def plan_now(self) -> t.AnswerPlanNow:
        ticket = next(self._numbers)
        answer: asyncio.Future[t.AnswerPlanNow] = asyncio.get_running_loop().create_future()
        self._answers[ticket] = answer
        await self._inputs.put(t.PlanNow(ticket))
        return await answer

    async def records(self, after: int, follow: bool) -> AsyncIterator[Record]:
        while True:
            appended = self._appended
            page = await asyncio.to_thread(self._store.page, after)
            for record in page:
                yield record
                after = record.sequence
            if page:
                continue
            if not follow or self._stopping:
                return
            await appended.wait()
