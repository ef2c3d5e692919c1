"""The signs of life that this node sends to the coordinator, and what they say."""

from __future__ import annotations

import asyncio
import itertools

from dtfm.node.host.work import WORK
from dtfm.node.parts import Parts
from dtfm.protos import control_pb2 as wire


async def beat(parts: Parts, every: float) -> None:
    """Sends a heartbeat ``every`` so many seconds, until it is cancelled. At each the device may be timed again."""
    for count in itertools.count(1):
        await asyncio.sleep(every)
        now = parts.vitals.now()
        said = parts.progress.heartbeat(count)
        said.MergeFrom(wire.Heartbeat(load=now.load, celsius=now.celsius))
        said.arriving.extend(parts.trainer.arriving())
        done, waits = WORK.so_far
        said.work.CopyFrom(wire.Heartbeat.Work(done=done, waits=waits))
        parts.send(wire.NodeMessage(heartbeat=said))
        parts.trainer.look_after_timing(max(parts.other_work.share(), now.load or 0.0))
