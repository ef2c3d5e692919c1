"""What operators see and ask for over gRPC: `service/grpc_services.py`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from pathlib import Path

import pytest

from dtfm.coordinator.command.client import ask, records
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.serving import serving, train


async def observe(address: str, token: str) -> Sequence[Awaitable[object]]:
    async def all_records() -> list[object]:
        return [record async for record in records(address, "", token, follow=False)]

    return [ask(address, token, lambda stub: stub.Members, wire.MembersRequest()), all_records()]


async def test_observers_see_members_and_events(tmp_path: Path) -> None:
    async with serving(tmp_path, token="secret") as served, served.node("a", token="secret"):
        await served.until(lambda: any(isinstance(event, ev.NodeReady) for event in served.events))
        reply: wire.MembersReply = await ask(served.address, "secret", lambda stub: stub.Members, wire.MembersRequest())
        member = json.loads(reply.members_json[0])
        assert (member["node"], member["status"], member["stage"]) == ("a", "idle", None)
        seen = [record async for record in records(served.address, "", "secret", follow=False)]
        assert [record.sequence for record in seen] == list(range(1, len(seen) + 1))
        assert [record.event for record in seen] == served.events
        for call in await observe(served.address, "wrong"):
            with pytest.raises(ValueError, match="does not know this run's token"):
                await call
    for call in await observe(served.address, "secret"):
        with pytest.raises(ValueError, match="no coordinator answers at"):
            await call


async def test_following_shows_new_events_and_ends_with_the_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        seen: list[ev.Event] = []

        async def follow() -> None:
            async for record in records(served.address, "", "", follow=True):
                seen.append(record.event)  # noqa: PERF401 (seen as they come)

        follower = asyncio.create_task(follow())
        assert await train(served, served.node("a"), served.node("b")) == 0
        await asyncio.wait_for(follower, 10)
        assert "run_finished" in [event.event for event in seen]


async def test_plan_now_is_answered_over_the_wire(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reply: wire.PlanNowReply = await ask(served.address, "", lambda stub: stub.PlanNow, wire.PlanNowRequest())
        assert (reply.changed, reply.reason) == (False, "0 of 2 nodes are ready")
