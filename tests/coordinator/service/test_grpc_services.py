"""What operators see and ask for over gRPC: `service/grpc_services.py`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from dtfm.coordinator.command import health
from dtfm.coordinator.command.client import ask, records, told
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.service import grpc_services
from dtfm.coordinator.view.members import member_documents
from dtfm.coordinator.view.published import for_members
from dtfm.coordinator.view.so_far import SoFar
from dtfm.coordinator.view.story_snapshot import story_format, story_in
from dtfm.protos import control_pb2 as wire, services
from dtfm.protos.identity.access import Role
from tests.coordinator.every_event import EVERY_EVENT
from tests.coordinator.serving import Served, serving, train


async def members(address: str) -> list[dict[str, Any]]:
    return member_documents([each async for each in told(address, follow=False)][-1])


async def read_all(served: Served) -> None:
    """Waits until the log's follower has read it."""
    while served.server.follower.last < served.store.last:
        await served.server.follower.news(1)


async def test_observers_see_members_and_events(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: any(isinstance(event, ev.NodeReady) for event in served.events))
        (member,) = await members(served.address)
        assert (member["node"], member["status"], member["stage"]) == ("a", "idle", None)
        seen = [record async for record in records(served.address, follow=False)]
        assert [record.sequence for record in seen] == list(range(1, len(seen) + 1))
        assert [record.event.event for record in seen] == [event.event for event in served.events]
    with pytest.raises(ValueError, match="no coordinator answers at"):
        await members(served.address)


async def test_who_looks_on_is_told_the_story_so_far_and_then_each_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_services, "STORY_PIECE", 100)
    async with serving(tmp_path) as served, asyncio.timeout(30):
        numbers, begun = list[int](), asyncio.Event()

        async def follow() -> SoFar:
            async for so_far in told(served.address):
                numbers.append(so_far.sequence)
                begun.set()
            return so_far

        async with served.node("a"):
            await served.until(lambda: any(isinstance(event, ev.NodeReady) for event in served.events))
            await read_all(served)
            follower = asyncio.create_task(follow())
            await begun.wait()
            assert await train(served, served.node("b")) == 0
        so_far = await follower
        assert numbers == list(range(numbers[0], served.store.last + 1))
        assert numbers[0] > 5
        whole = story_in(served.store.url).now
        assert (so_far.sequence, so_far.losses, so_far.given) == (whole.sequence, whole.losses, whole.given)
        assert so_far.ledger.training.plan == whole.ledger.training.plan


async def test_who_reads_other_stories_is_told_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.ledger.members)
        monkeypatch.setattr(grpc_services, "story_format", lambda: 1)
        assert (await anext(told(served.address))).sequence == 1


@pytest.mark.parametrize("role", [Role.NODE, Role.VIEWER])
async def test_a_nodes_or_a_viewers_key_shows_how_the_run_fares_and_nobodys_address(tmp_path: Path, role: Role) -> None:
    async with serving(tmp_path) as served, served.node("a"), served.channel() as channel:
        await served.until(lambda: any(isinstance(event, ev.NodeReady) for event in served.events))
        stub = services.stub("Observer", channel)
        metadata = await served.enrolled("lender", await served.invite(role), role)
        heard = [json.loads(each.event_json) async for each in stub.Events(wire.EventsRequest(), metadata=metadata)]
        assert [event["event"] for event in heard] == [event.event for event in served.events]
        assert "10.0.0.1" in str(served.events)
        assert "10.0.0.1" not in str(heard)
        await read_all(served)
        request = wire.EventsRequest(story_format=story_format())
        story = "".join([each.story async for each in stub.Events(request, metadata=metadata)])
        assert '"a"' in story
        assert "10.0.0.1" not in story


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_an_event_without_addresses_is_an_event_still(event: ev.Event) -> None:
    assert ev.from_json(for_members(ev.to_json(event))).narrate()


async def test_following_shows_new_events_and_ends_with_the_run(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        seen: list[ev.Event] = []

        async def follow() -> None:
            async for record in records(served.address, follow=True):
                seen.append(record.event)  # noqa: PERF401 (seen as they come)

        follower = asyncio.create_task(follow())
        assert await train(served, served.node("a"), served.node("b")) == 0
        await asyncio.wait_for(follower, 10)
        assert "run_finished" in [event.event for event in seen]


async def test_plan_now_is_answered_over_the_wire(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        reply: wire.PlanNowReply = await ask(served.address, "PlanNow")
        assert (reply.changed, reply.reason) == (False, "0 of 2 nodes are ready")


async def test_a_supervisor_is_told_whether_the_run_gets_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, asyncio.timeout(30):
        await read_all(served)
        found = await health._by_log(served.address)
        assert (found["healthy"], found["state"], found["step"]) == (True, "waiting", 0)
    with pytest.raises(ValueError, match="no coordinator answers at"):
        await health._by_log(served.address)
