"""What each message of the coordinator sets in motion on a node that is let in."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from dtfm.node.host.long_parts import long_part
from dtfm.node.network.links import measure_links, reach
from dtfm.node.parts import Parts
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.formats.plan import unpack_plan

log = logging.getLogger(__name__)

#: Starts a task, which ends with the session at the latest.
Start = Callable[[Coroutine[Any, Any, None]], None]


def carry_out(message: wire.CoordinatorMessage, parts: Parts, start: Start) -> bool:
    """Sets in motion what ``message`` asks for. False: it is about the membership itself, or unknown."""
    trainer, server, snapshots, status = parts.trainer, parts.server, parts.snapshots, parts.status
    match message.WhichOneof("message"):
        case "revoked":
            server.callers.revoke(message.revoked.names)
        case "quarantined":
            server.callers.quarantine(message.quarantined.names)
        case "test":
            trainer.test()
        case "probe":
            start(_probe(message.probe, parts))
        case "reach":
            start(_reach(message.reach, parts))
        case "ways":
            parts.ways.follow(message.ways)
        case "status":
            status.told(message.status)
        case "assignment":
            with contextlib.suppress(ValueError, IndexError):  # otherwise the trainer reports the problem
                status.assigned(unpack_plan(message.assignment.plan))
            trainer.adopt(message.assignment, server.deliver_to)
        case "standby":
            status.stands_by(message.standby)
            start(trainer.stand_by(message.standby))
        case "keep":
            start(snapshots.keep(message.keep))
        case "move" if message.move.folder:
            snapshots.upload(message.move)
        case "move":
            start(snapshots.fetch(message.move))
        case "begin":
            trainer.begin(message.begin)
        case "commit":
            status.committed(message.commit)
            trainer.conclude(message.commit)
        case "audit":
            trainer.audit(message.audit)
        case "write_texts":
            trainer.write_texts(message.write_texts)
        case "links_changed":
            trainer.links_changed(message.links_changed)
        case "abort":
            log.info("step %d is aborted: %s", message.abort.step, message.abort.reason)
            trainer.call_off(message.abort.reason)
        case _:
            return False
    return True


async def _probe(probe: wire.Probe, parts: Parts) -> None:
    with long_part(f"measuring links to {len(probe.peers)} nodes"):
        does, peers = parts.progress.does, list(probe.peers)
        does(wire.MEASURING_LINKS, 0, len(peers))
        measured = partial(does, wire.MEASURING_LINKS)
        report = await measure_links(parts.node, peers, parts.ways.dialler, parts.lease, measured)
    parts.send(wire.NodeMessage(links=report))


async def _reach(wanted: wire.Reach, parts: Parts) -> None:
    parts.send(wire.NodeMessage(reached=await reach(wanted.peers, parts.ways.dialler, parts.lease)))
