"""The parts of a node, put together for a session."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TypeVar

import torch

from dtfm.node.host.other_work import OtherWork
from dtfm.node.host.vitals import Watched, vitals_of
from dtfm.node.settings import Settings
from dtfm.node.state.disk import Disk
from dtfm.node.state.images import Images
from dtfm.node.state.snapshots import Snapshots
from dtfm.node.state.state_store import StateStore
from dtfm.node.training.equipment import Equipment
from dtfm.node.training.preparing.preparation_progress import PreparationProgress
from dtfm.node.training.status import Status
from dtfm.node.training.trainer import Trainer
from dtfm.node.transport.lent_connections import Holder
from dtfm.node.transport.peer_server import PeerServer
from dtfm.node.transport.send_priority import Rank
from dtfm.node.transport.sender import Sender
from dtfm.node.transport.ways import Ways
from dtfm.protos import control_pb2 as wire
from dtfm.protos.connection import DEFAULT_LEASE
from dtfm.protos.identity.private_files import cache_folder

Argument = TypeVar("Argument")


@dataclass(frozen=True, slots=True)
class Parts:
    """What messages of the coordinator reach, and what heartbeats tell of."""

    node: str
    send: Callable[[wire.NodeMessage], None]
    """To the coordinator, on the event loop."""
    trainer: Trainer
    snapshots: Snapshots
    sender: Sender
    server: PeerServer
    ways: Ways
    status: Status
    progress: PreparationProgress
    vitals: Watched
    other_work: OtherWork

    @property
    def lease(self) -> float:
        """In seconds, as the run has it now."""
        return self.status.run.lease_seconds or DEFAULT_LEASE


def put_together(
    settings: Settings,
    device: torch.device,
    hardware: wire.Device,
    *,
    send: Callable[[wire.NodeMessage], None],
    fail: Callable[[Exception], None],
    sending_failed: Callable[[int, Exception], None],
) -> Parts:
    """A node that nobody has heard of yet. On a running event loop, on which the functions are called. ``hardware`` is what
    `measure_device` returns for the ``device``."""
    loop = asyncio.get_running_loop()
    sender, report = Sender(settings.node, sending_failed), _on_loop(loop, send)
    snapshots = Snapshots(Disk(settings.snapshots, settings.node), report)
    equipment = Equipment(
        node=settings.node,
        device=device,
        hardware=hardware,
        tokens=cache_folder() / "tokens",
        frozen=cache_folder() / "frozen",
        sender=sender,
        store=StateStore(Images(snapshots.disk.scratch)),
        snapshots=snapshots,
    )
    holder = Holder(relay=settings.relay != wire.Hello.NO)
    give_way = partial(sender.priority.give_way, Rank.STATE)
    only_relays = settings.relay == wire.Hello.ONLY
    return Parts(
        node=settings.node,
        send=send,
        trainer=Trainer(equipment, loop, report, _on_loop(loop, fail)),
        snapshots=snapshots,
        sender=sender,
        server=PeerServer(equipment.store, give_way, snapshots.disk, holder, equipment.kept),
        ways=Ways(settings.node, holder, loopback=ip_address(settings.facing).is_loopback),
        status=Status(settings.node, "relays for others" if only_relays else "no part in the plan, ready to step in"),
        progress=equipment.progress,
        vitals=vitals_of(device),
        other_work=OtherWork(),
    )


def _on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[Argument], None]) -> Callable[[Argument], None]:
    """``function``, callable from any thread, run on ``loop``."""

    def call(argument: Argument) -> None:
        # The loop is closed if a checkpoint is finished after the session has ended.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(function, argument)

    return call
