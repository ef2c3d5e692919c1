"""A node's membership in a run: the control stream to the coordinator, and what its messages set in motion."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from typing import Any, TypeVar

import grpc
import grpc.aio
import torch

import dtfm
from dtfm.node.data.allowed import ALLOW, ALLOW_MODULE, EVERYTHING, Allowed
from dtfm.node.data.dataset import Agreed
from dtfm.node.data.problems import in_full, sentence_of
from dtfm.node.host.long_parts import long_part
from dtfm.node.host.other_work import OtherWork
from dtfm.node.host.vitals import vitals_of
from dtfm.node.network.addresses import candidates, host_of, reached_here
from dtfm.node.network.discovery import Search, follow
from dtfm.node.network.home_router import HomeRouter
from dtfm.node.network.links import measure_links, reach
from dtfm.node.settings import Settings
from dtfm.node.state.disk import Disk
from dtfm.node.state.images import Images
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.failure import exit_code
from dtfm.node.training.generation_setup import Equipment
from dtfm.node.training.status import Status
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport.lent_connections import Holder
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.send_priority import Rank
from dtfm.node.transport.sender import Sender
from dtfm.node.transport.ways import Ways
from dtfm.programs import START_AGAIN
from dtfm.protos import PROTOCOL_VERSION, control_pb2 as wire, coordinator_disk, services
from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.identity.access import Access, runs_it, with_permissions
from dtfm.protos.identity.credentials import Identity
from dtfm.protos.identity.enrolment import NotAdmitted, Opened, refusal_in
from dtfm.protos.identity.private_files import cache_folder
from dtfm.protos.identity.proof import is_let_in
from dtfm.scheduler.formats.plan import unpack_plan

log = logging.getLogger(__name__)
Argument = TypeVar("Argument")

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
"""Between attempts to connect. A pause is a tenth of the time since the coordinator was heard last: a reserve that takes over
after a lease does not wait long for its nodes."""
SAY_AGAIN_SECONDS = 60.0
"""After which it is said again that the coordinator does not answer."""
TEMPORARY = ("BUSY", "FULL")
"""Refusals that nobody has to do anything about: a node that is started again later may be let in."""


class Session:
    """From the first hello to the last goodbye, over any number of connections."""

    def __init__(self, settings: Settings, device: torch.device, hardware: wire.Device) -> None:
        """On a running event loop. ``hardware`` is what `measure_device` returns for the ``device``."""
        loop = asyncio.get_running_loop()
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
        self._vitals = vitals_of(device)
        self._other_work = OtherWork()
        self._patience = settings.give_up_after  # seconds without a coordinator
        self._search = Search(settings.coordinator)
        self._hang_up: Callable[[], object] = lambda: None
        self._sender = Sender(settings.node, self._sending_failed)
        report = _on_loop(loop, self._send)
        self._snapshots = Snapshots(Disk(settings.snapshots, settings.node), report)
        equipment = Equipment(
            node=settings.node,
            device=device,
            hardware=hardware,
            tokens=cache_folder() / "tokens",
            sender=self._sender,
            store=StateStore(Images(self._snapshots.disk.scratch)),
            snapshots=self._snapshots,
        )
        self._progress = equipment.progress
        self._trainer = Trainer(equipment, loop, report, _on_loop(loop, self._fail))
        give_way = partial(self._sender.priority.give_way, Rank.STATE)
        holder = Holder(relay=settings.relay != wire.Hello.NO)
        self._server = PeerServer(equipment.store, give_way, self._snapshots.disk, holder, equipment.kept)
        self._ways = Ways(settings.node, holder, loopback=ip_address(settings.facing).is_loopback)
        only_relays = settings.relay == wire.Hello.ONLY
        self._status = Status(
            settings.node, "relays for others" if only_relays else "no part in the plan, ready to step in"
        )

    async def run(self) -> int:
        """Takes part until the run is over. Returns the process's exit code. Raises ValueError for a user's mistake."""
        try:
            self._port = await self._server.start(self._settings.listen)
            self._candidates()  # an address that cannot be is to be known now
            if self._settings.open_port:  # while this node enrols
                self._opening = asyncio.create_task(self._router.open(self._port))
            self._ways.start(reached_here(self._settings.listen, self._port))
            await self._stay_connected()
            return self._exit if self._exit is not None else 1
        finally:
            await self._trainer.stand_by(wire.Standby())
            await asyncio.to_thread(self._trainer.stop)
            coordinator_disk.LINE.closing.set()
            await asyncio.to_thread(self._snapshots.close)
            for task in self._tasks:
                task.cancel()
            await self._search.end()
            if self._opening is not None:
                await asyncio.wait([self._opening])  # what it opens is closed below
            await self._sender.close()
            await self._ways.stop()
            await self._router.close()
            await self._server.stop()

    def _candidates(self) -> tuple[str, ...]:
        """As they are now: addresses change. Raises ValueError for an address in the settings that peers could not use."""
        mine = self._settings
        return tuple(candidates(host_of(mine.listen), self._port, mine.advertise, mine.facing, self._opened))

    def status_line(self) -> str:
        """How the run and this node's part in it fare, as one line; empty before anything is known."""
        return self._status.line(self._problem) if self._exit is None else self._status.last_line()

    @property
    def problem(self) -> str:
        """Why this node has no part in the run; empty: the coordinator hears it, or it goes home."""
        return "" if self._exit is not None else self._problem

    @property
    def _lease(self) -> float:
        return self._status.run.lease_seconds or DEFAULT_LEASE

    def places(self, record: logging.LogRecord) -> bool:
        """A filter that passes every record, and adds its run, node, generation and step."""
        record.place = self._status.place()
        return True

    def leave(self, reason: str) -> None:
        """Works on until this node's part is handed over, then makes ``run`` return 0."""
        self._leaving.set()
        self._leave_reason = reason
        self._send(wire.NodeMessage(leaving=wire.Leaving(reason=reason)))

    async def _stay_connected(self) -> None:
        """Connects whenever there is no connection, with growing pauses, until the node is to exit or gives up."""
        silent_since, said = time.monotonic(), -math.inf
        while self._exit is None:
            if self._leaving.is_set():
                self._exit = 0
                return
            began = time.monotonic()
            problem, answered = await self._connect_once()
            self._problem = self._lapsed or _silent(problem)
            if self._exit is not None or self._leaving.is_set():
                continue
            if answered:
                silent_since = time.monotonic()
            if silent_since - began > self._lease:
                said = -math.inf  # it was connected for a while
            silent = time.monotonic() - silent_since
            left = self._patience - silent
            if left <= 0:
                longer = (
                    "[cluster] wait_for_coordinator in the run file" if self._identity else "--give-up-after SECONDS"
                )
                log.error(
                    "Gave up after %.0f s without the coordinator at %s: %s. Is it running there, and is that port open? (%s "
                    "waits longer)",
                    *(self._patience, self._settings.coordinator, problem, longer),
                )
                self._exit = 1
                return
            pause = min(max(silent / 10, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
            wait = min(pause * random.uniform(0.8, 1.2), max(left, 0.05))
            if self._lapsed:
                log.warning("%s. It connects again and keeps its state.", self._lapsed)
            elif time.monotonic() - said >= SAY_AGAIN_SECONDS:
                said = time.monotonic()
                log.warning(
                    "The coordinator at %s does not answer (%s); trying again at least each %.0f s, giving up in %.0f s",
                    *(self._settings.coordinator, problem, LONGEST_PAUSE_SECONDS, left),
                )
            log.debug("trying again in %.1f s", wait)
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
                opened = await self._open()
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
        self._allowed = await asyncio.to_thread(self._remember_allowed, opened.access)
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
                    device=self._trainer.hardware,
                )
            )
        )
        heartbeat: asyncio.Task[None] | None = None
        every = 0.0
        async with opened.channel(self._lease) as channel:
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
                    if self._identity is not None and self._status.run.heartbeat_seconds != every:
                        every = self._status.run.heartbeat_seconds
                        self._become(self._identity)
                        if heartbeat is not None:
                            heartbeat.cancel()
                        heartbeat = asyncio.create_task(self._beat(every))
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
                self._trainer.interrupt("the connection to the coordinator broke")
                stream.cancel()
                while not outgoing.empty():
                    outgoing.get_nowait()
                # Else gRPC's task would still wait for a message when it is collected, and complain on the terminal.
                outgoing.put_nowait(None)
                let_in.set()

    def _remember_allowed(self, access: Access) -> Allowed:
        """Keeps with the membership what this machine's operator allows now. What the operator has not said is as before."""
        data, modules = self._settings.allowed_data, self._settings.allowed_modules
        before = with_permissions(access)
        now = replace(
            before,
            allowed_data=before.allowed_data if data is None else data,
            allowed_modules=before.allowed_modules if modules is None else modules,
        )
        if now != access:
            self._settings.coordinator.remember(now)
        for option, said, kept in ((ALLOW, data, now.allowed_data), (ALLOW_MODULE, modules, now.allowed_modules)):
            if self._allowed is None and said is None and kept:
                log.info("As before, the run may use %s (%s changes that)", ", ".join(kept), option)
        # Who runs the coordinator has named the paths, and may use them anyway.
        places = EVERYTHING if runs_it(access.pin) else now.allowed_data
        return Allowed(places, now.allowed_modules)

    async def _open(self) -> Opened:
        """Raises ConnectionError and NotAdmitted. Before it refuses another authority, it looks for the coordinator elsewhere."""
        coordinator = self._settings.coordinator
        try:
            return await coordinator.open(self._lease)
        except NotAdmitted as refused:
            is_other = refused.reason == "WRONG_AUTHORITY" and self._identity is None
            if not is_other or not await follow(coordinator):
                raise
        return await coordinator.open(self._lease)

    async def _handle(self, message: wire.CoordinatorMessage) -> None:
        kind = message.WhichOneof("message")
        log.debug("from the coordinator: %s", kind)
        match kind:
            case "welcome":
                welcome = message.welcome
                self._progress.does(wire.NOTHING_TO_SAY)  # what it did before is over
                self._patience = welcome.wait_for_coordinator_seconds or self._patience
                self._problem = ""
                self._status.welcomed(welcome)
                self._become(Identity(welcome.authority, welcome.certificate, self._key))
                self._server.callers.revoke(welcome.revoked)
                self._server.callers.quarantine(welcome.quarantined)
                if self._settings.relay != wire.Hello.ONLY:
                    known = welcome.data_fingerprint
                    agreed = Agreed(known, welcome.unigram_entropy) if known else None
                    assert self._allowed is not None
                    trained = welcome.status.step * welcome.run.train.global_batch
                    self._trainer.prepare(welcome.run, self._ways.dialler, self._allowed, agreed, trained)
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
            case "revoked":
                self._server.callers.revoke(message.revoked.names)
            case "quarantined":
                self._server.callers.quarantine(message.quarantined.names)
            case "test":
                self._trainer.test()
            case "probe":
                self._start(self._probe(message.probe))
            case "reach":
                self._start(self._reach(message.reach))
            case "ways":
                self._ways.follow(message.ways)
            case "status":
                self._status.told(message.status)
            case "assignment":
                with contextlib.suppress(ValueError, IndexError):  # otherwise the trainer reports the problem
                    self._status.assigned(unpack_plan(message.assignment.plan))
                self._trainer.adopt(message.assignment, self._server.deliver_to)
            case "standby":
                self._status.stands_by(message.standby)
                self._start(self._trainer.stand_by(message.standby))
            case "keep":
                self._start(self._snapshots.keep(message.keep))
            case "move" if message.move.folder:
                self._snapshots.upload(message.move)
            case "move":
                self._start(self._snapshots.fetch(message.move))
            case "begin":
                self._trainer.begin(message.begin)
            case "commit":
                self._status.committed(message.commit)
                self._trainer.conclude(message.commit)
            case "audit":
                self._trainer.audit(message.audit)
            case "write_texts":
                self._trainer.write_texts(message.write_texts)
            case "links_changed":
                self._trainer.links_changed(message.links_changed)
            case "abort":
                log.info("step %d is aborted: %s", message.abort.step, message.abort.reason)
                self._trainer.call_off(message.abort.reason)
            case "finish":
                finish = message.finish
                good = finish.completed or finish.stopped
                log.log(logging.INFO if good else logging.ERROR, "%s", finish.reason or "The run is complete.")
                self._exit = 0 if good or self._leaving.is_set() else 1
                if finish.completed:
                    self._snapshots.run_is_over()
            case _:
                log.warning("ignored a message from the coordinator that this version does not know")

    def _sending_failed(self, generation: int, error: Exception) -> None:
        if self._exit is None:  # else the run is over for this node, and its peers leave as well
            self._trainer.failed(error, generation)

    def _become(self, identity: Identity) -> None:
        """Shows this identity to peers from now on."""
        self._identity = identity
        self._server.become(identity, self._lease)
        self._ways.become(identity, self._lease)

    def _refused(self, reason: str, sentence: str) -> None:
        if self._identity is not None and reason in ("WRONG_AUTHORITY", "WRONG_CLOCK"):
            return  # it was let in before: this passes, once another coordinator is gone, or a clock is set
        log.error("This node was not let in: %s: %s", reason, sentence)
        self._exit = 1 if reason in TEMPORARY else 2

    async def _probe(self, probe: wire.Probe) -> None:
        with long_part(f"measuring links to {len(probe.peers)} nodes"):
            does, peers = self._progress.does, list(probe.peers)
            does(wire.MEASURING_LINKS, 0, len(peers))
            measured = partial(does, wire.MEASURING_LINKS)
            report = await measure_links(self._settings.node, peers, self._ways.dialler, self._lease, measured)
        self._send(wire.NodeMessage(links=report))

    async def _reach(self, wanted: wire.Reach) -> None:
        self._send(wire.NodeMessage(reached=await reach(wanted.peers, self._ways.dialler, self._lease)))

    async def _beat(self, every: float) -> None:
        for count in itertools.count(1):
            await asyncio.sleep(every)
            now = self._vitals.now()
            beat = self._progress.heartbeat(count)
            beat.MergeFrom(wire.Heartbeat(load=now.load, celsius=now.celsius))
            beat.arriving.extend(self._trainer.arriving())
            beat.work.CopyFrom(self._trainer.work())
            self._send(wire.NodeMessage(heartbeat=beat))
            self._trainer.look_after_timing(max(self._other_work.share(), now.load or 0.0))

    async def _messages(
        self, outgoing: asyncio.Queue[wire.NodeMessage | None], let_in: asyncio.Event
    ) -> AsyncIterator[wire.NodeMessage]:
        await let_in.wait()  # a write that meets a refusal would turn its status into grpc's INTERNAL
        while (message := await outgoing.get()) is not None:
            yield message
            if message.WhichOneof("message") == "goodbye":
                # The coordinator ends the stream. If it has vanished, this does.
                asyncio.get_running_loop().call_later(self._lease, self._hang_up)
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


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Argument], None]) -> Callable[[Argument], None]:
    """``function``, callable from any thread, run on ``loop``."""

    def call(argument: Argument) -> None:
        # The loop is closed if a checkpoint is finished after the session has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function, argument)

    return call
