"""A node's membership in a run: the control stream to the coordinator, opened again whenever it breaks, and the goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import torch

import dtfm
from dtfm.node.data.allowed import Allowed
from dtfm.node.data.dataset import Agreed
from dtfm.node.data.problems import in_full, sentence_of
from dtfm.node.heartbeat import beat
from dtfm.node.host.long_parts import long_part
from dtfm.node.messages import carry_out
from dtfm.node.network.addresses import candidates, host_of, reached_here
from dtfm.node.network.discovery import Search, open_there
from dtfm.node.network.home_router import HomeRouter
from dtfm.node.network.patience import Patience
from dtfm.node.parts import put_together
from dtfm.node.settings import Settings
from dtfm.node.training.failure import exit_code
from dtfm.programs import START_AGAIN
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire, coordinator_disk, services
from dtfm.protos.identity.credentials import Identity
from dtfm.protos.identity.enrolment import NotAdmitted, refusal_in
from dtfm.protos.identity.proof import is_let_in

log = logging.getLogger(__name__)

TEMPORARY = ("BUSY", "FULL")
"""Refusals that nobody has to do anything about: a node that is started again later may be let in."""


class Session:
    """From the first hello to the last goodbye, over any number of connections."""

    def __init__(self, settings: Settings, device: torch.device, hardware: wire.Device) -> None:
        """On a running event loop. ``hardware`` is what `measure_device` returns for the ``device``."""
        self._settings = settings
        self._incarnation = secrets.randbits(64)
        self._outgoing: asyncio.Queue[wire.NodeMessage | None] = asyncio.Queue()  # None: nothing follows
        self._tasks: set[asyncio.Task[None]] = set()
        self._exit: int | None = None
        self._problem = _silent("it was not let in yet")  # empty while the coordinator hears it
        self._has_tried = False  # to connect
        self._lapsed = ""  # that the coordinator has ended this node's membership, on the connection that is open
        self._leaving = asyncio.Event()
        self._leave_reason = ""
        self._port = 0
        self._router = HomeRouter()
        self._opening: asyncio.Task[str] | None = None
        self._opened = ""
        self._identity: Identity | None = None  # None until the first welcome
        self._key = b""  # of the name, from the first connection on
        self._allowed: Allowed | None = None  # what the run may name here; None until the first connection
        self._patience = settings.give_up_after  # seconds without a coordinator
        self._search = Search(settings.coordinator)
        self._hang_up: Callable[[], object] = lambda: None
        self._parts = put_together(
            settings, device, hardware, send=self._send, fail=self._fail, sending_failed=self._sending_failed
        )

    async def run(self) -> int:
        """Takes part until the run is over. Returns the process's exit code. Raises ValueError for a user's mistake."""
        try:
            self._port = await self._parts.server.start(self._settings.listen)
            self._candidates()  # an address that cannot be is to be known now
            if self._settings.open_port:  # while this node enrols
                self._opening = asyncio.create_task(self._router.open(self._port))
            self._parts.ways.start(reached_here(self._settings.listen, self._port))
            await self._stay_connected()
            return self._exit if self._exit is not None else 1
        finally:
            await self._parts.trainer.stand_by(wire.Standby())
            await asyncio.to_thread(self._parts.trainer.stop)
            coordinator_disk.LINE.closing.set()
            await asyncio.to_thread(self._parts.snapshots.close)
            for task in self._tasks:
                task.cancel()
            await self._search.end()
            if self._opening is not None:
                await asyncio.wait([self._opening])  # what it opens is closed below
            await self._parts.sender.close()
            await self._parts.ways.stop()
            await self._router.close()
            await self._parts.server.stop()

    def _candidates(self) -> tuple[str, ...]:
        """As they are now: addresses change. Raises ValueError for an address in the settings that peers could not use."""
        mine = self._settings
        return tuple(candidates(host_of(mine.listen), self._port, mine.advertise, mine.facing, self._opened))

    def status_line(self) -> str:
        """How the run and this node's part in it fare, as one line; empty before anything is known."""
        return self._parts.status.line(self._problem) if self._exit is None else self._parts.status.last_line()

    @property
    def problem(self) -> str:
        """Why this node has no part in the run; empty: the coordinator hears it, or it goes home."""
        return "" if self._exit is not None else self._problem

    def places(self, record: logging.LogRecord) -> bool:
        """A filter that passes every record, and adds its run, node, generation and step."""
        record.place = self._parts.status.place()
        return True

    def leave(self, reason: str) -> None:
        """Works on until this node's part is handed over, then makes ``run`` return 0."""
        self._leaving.set()
        self._leave_reason = reason
        self._send(wire.NodeMessage(leaving=wire.Leaving(reason=reason)))

    async def _stay_connected(self) -> None:
        """Connects whenever there is no connection, with growing pauses, until the node is to exit or gives up."""
        patience = Patience(self._settings.coordinator)
        while self._exit is None:
            if self._leaving.is_set():
                self._exit = 0
                return
            began = time.monotonic()
            problem, answered = await self._connect_once()
            self._problem = self._lapsed or _silent(problem)
            if self._exit is not None or self._leaving.is_set():
                continue
            longer = "[cluster] wait_for_coordinator in the run file" if self._identity else "--give-up-after SECONDS"
            wait = patience.pause(
                *(began, problem, answered, self._lapsed),
                lease=self._parts.lease,
                patience=self._patience,
                longer=longer,
            )
            if wait is None:
                self._exit = 1
                return
            self._search.begin()
            await self._pause(wait)

    async def _pause(self, seconds: float) -> None:
        """Waits, unless this node is to leave or the coordinator is found elsewhere."""
        waits = [asyncio.create_task(event.wait()) for event in (self._leaving, self._search.found)]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()

    async def _connect_once(self) -> tuple[str, bool]:
        """One control stream. Returns (what ended it, whether the coordinator sent anything)."""
        answered, self._lapsed = False, ""
        try:
            # Later attempts are not told one by one.
            with long_part("connecting to the coordinator") if not self._has_tried else contextlib.nullcontext():
                self._has_tried = True
                opened = await open_there(self._settings.coordinator, self._parts.lease, self._identity is None)
        except ConnectionError as error:
            return str(error), answered
        except NotAdmitted as refused:
            self._refused(refused.reason, refused.sentence)
            return str(refused), answered
        await self._search.end()
        if self._opening is not None:
            with long_part("asking the home router for a port"):
                self._opened = await self._opening
        coordinator_disk.LINE.lead_to(opened)
        self._key = opened.access.key
        self._allowed = await asyncio.to_thread(self._settings.remember_allowed, opened.access, self._allowed is None)
        self._outgoing = asyncio.Queue()
        self._send(
            wire.NodeMessage(
                hello=wire.Hello(
                    protocol_version=PROTOCOL_VERSION,
                    package_version=dtfm.__version__,
                    node=self._settings.node,
                    incarnation=self._incarnation,
                    candidates=self._candidates(),
                    port=self._port,
                    relay=self._settings.relay,
                    device=self._parts.trainer.hardware,
                )
            )
        )
        heartbeat: asyncio.Task[None] | None = None
        every = 0.0
        async with opened.channel(self._parts.lease) as channel:
            stub = services.stub("Coordinator", channel)
            let_in = asyncio.Event()
            outgoing = self._outgoing
            stream = stub.Join(self._messages(outgoing, let_in), metadata=opened.metadata)
            self._hang_up = stream.cancel
            try:
                if is_let_in(await stream.initial_metadata()):
                    let_in.set()
                async for message in stream:
                    answered = True
                    await self._handle(message)
                    if self._exit is not None:
                        break
                    if self._identity is not None and self._parts.status.run.heartbeat_seconds != every:
                        every = self._parts.status.run.heartbeat_seconds
                        self._become(self._identity)
                        if heartbeat is not None:
                            heartbeat.cancel()
                        heartbeat = asyncio.create_task(beat(self._parts, every))
                return "it closed the connection", answered
            except grpc.aio.AioRpcError as error:
                if (refusal := refusal_in(error)) is not None:
                    self._refused(refusal.reason, refusal.sentence)
                return f"{error.code().name}: {error.details()}", answered
            except asyncio.CancelledError:
                if self._exit is None:
                    raise
                return "it did not answer the goodbye", answered
            finally:
                if heartbeat is not None:
                    heartbeat.cancel()
                self._parts.trainer.interrupt("the connection to the coordinator broke")
                stream.cancel()
                while not outgoing.empty():
                    outgoing.get_nowait()
                # Else gRPC's task would still wait for a message when it is collected, and complain on the terminal.
                outgoing.put_nowait(None)
                let_in.set()

    async def _handle(self, message: wire.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        log.debug("from the coordinator: %s", kind)
        match kind:
            case "welcome":
                welcome = message.welcome
                self._parts.progress.does(wire.NOTHING_TO_SAY)  # what it did before is over
                self._patience = welcome.wait_for_coordinator_seconds or self._patience
                self._problem = ""
                self._parts.status.welcomed(welcome)
                self._become(Identity(welcome.authority, welcome.certificate, self._key))
                self._parts.server.callers.revoke(welcome.revoked)
                self._parts.server.callers.quarantine(welcome.quarantined)
                if self._settings.relay != wire.Hello.ONLY:
                    known = welcome.data_fingerprint
                    agreed = Agreed(known, welcome.unigram_entropy) if known else None
                    assert self._allowed is not None
                    self._parts.trainer.prepare(
                        welcome.run, self._parts.ways.dialler, self._allowed, agreed, welcome.trained_samples
                    )
                if self._leaving.is_set():  # this may not have been sent before
                    self._send(wire.NodeMessage(leaving=wire.Leaving(reason=self._leave_reason)))
            case "refusal":
                self._refused(wire.RefusalReason.Name(message.refusal.reason), message.refusal.sentence)
            case "lapsed":
                heard = message.lapsed.lease_seconds
                self._lapsed = (
                    f"The coordinator has heard nothing from this node for {heard:g} s, so its lease has ended"
                )
            case "certificate":
                if self._identity is not None:
                    self._become(replace(self._identity, certificate=message.certificate.certificate))
            case "finish":
                finish = message.finish
                good = finish.completed or finish.stopped
                log.log(logging.INFO if good else logging.ERROR, "%s", finish.reason or "The run is complete.")
                self._exit = 0 if good or self._leaving.is_set() else 1
                if finish.completed:
                    self._parts.snapshots.run_is_over()
            case _:
                if not carry_out(message, self._parts, self._start):
                    log.warning("ignored a message from the coordinator that this version does not know")

    def _sending_failed(self, generation: int, error: Exception) -> None:
        if self._exit is None:  # else the run is over for this node, and its peers leave as well
            self._parts.trainer.failed(error, generation)

    def _become(self, identity: Identity) -> None:
        """Shows this identity to peers from now on."""
        self._identity = identity
        self._parts.server.become(identity, self._parts.lease)
        self._parts.ways.become(identity, self._parts.lease)

    def _refused(self, reason: str, sentence: str) -> None:
        if self._identity is not None and reason in ("WRONG_AUTHORITY", "WRONG_CLOCK"):
            return  # it was let in before: this passes, once another coordinator is gone, or a clock is set
        log.error("This node was not let in: %s: %s", reason, sentence)
        self._exit = 1 if reason in TEMPORARY else 2

    async def _messages(
        self, outgoing: asyncio.Queue[wire.NodeMessage | None], let_in: asyncio.Event
    ) -> AsyncIterator[wire.NodeMessage]:
        await let_in.wait()  # a write that meets a refusal would turn its status into grpc's INTERNAL
        while (message := await outgoing.get()) is not None:
            yield message
            if message.WhichOneof("message") == "goodbye":
                # The coordinator ends the stream. If it has vanished, this does.
                asyncio.get_running_loop().call_later(self._parts.lease, self._hang_up)
                return

    def _send(self, message: wire.NodeMessage) -> None:
        self._outgoing.put_nowait(message)

    def _fail(self, error: Exception) -> None:
        log.error("%s", in_full(error))
        self._exit = exit_code(error)
        if self._exit == START_AGAIN:  # it comes back under its name, with its disk
            self._hang_up()
        else:
            self._send(wire.NodeMessage(goodbye=wire.Goodbye(reason=sentence_of(error))))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _silent(problem: str) -> str:
    return f"the coordinator does not answer: {problem}"
