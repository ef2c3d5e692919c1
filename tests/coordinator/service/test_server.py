"""The coordinator over real gRPC streams on the loopback interface, with nodes that have no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from dtfm.coordinator.command.client import ask, records
from dtfm.coordinator.config.run_file import RunFile, parse_run
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log import ledger_snapshot
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.manifest import read_manifest
from dtfm.coordinator.log.store import LedgerSnapshot, Store, StoreError
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run
from dtfm.protos import control_pb2 as wire
from dtfm.protos import control_pb2_grpc
from dtfm.protos.connection import MAX_MESSAGE_BYTES, open_channel
from dtfm.protos.credentials import to_coordinator
from tests.coordinator.fake_node import FakeNode, nan_at
from tests.coordinator.script import hello, run_table


def run_in(folder: Path, **changes: dict[str, Any]) -> RunFile:
    checkpoint = {"uri": (folder / "checkpoints").as_uri(), **changes.pop("checkpoint", {})}
    cluster = {"lease": 2.0, **changes.pop("cluster", {})}
    return parse_run(run_table(checkpoint=checkpoint, cluster=cluster, **changes), "the test")


class Served:
    """A server that runs as long as the test's ``async with``."""

    def __init__(self, server: Server, store: Store, port: int, task: asyncio.Task[int]) -> None:
        self.server = server
        self.store = store
        self.address = f"127.0.0.1:{port}"
        self.task = task

    def node(self, name: str, **changes: Any) -> FakeNode:
        return FakeNode(self.address, self.server.authority, name, **changes)

    def channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, to_coordinator(self.server.authority))

    @property
    def events(self) -> list[ev.Event]:
        return [record.event for record in self.store.read()]

    @property
    def ledger(self) -> Ledger:
        """What the log adds up to; the server's own may be ahead of it by what is being written."""
        return fold(self.events)

    async def until(self, happened: Callable[[], bool]) -> None:
        """Waits for an event after which ``happened``."""
        async with asyncio.timeout(20):
            while not happened():
                news = asyncio.Event()
                self.server.on_event(lambda _, news=news: news.set())  # type: ignore[misc]
                if not happened():
                    await news.wait()


@asynccontextmanager
async def serving(
    folder: Path, run: RunFile | None = None, *, token: str = "", resume: bool = False
) -> AsyncIterator[Served]:
    with Store(f"sqlite:///{folder / 'dtfm.db'}", write=True) as store:
        state, events = open_run(store, run or run_in(folder), resume=resume)
        server = Server(state, store, token)
        port = await server.listen("127.0.0.1", 0)
        task = asyncio.create_task(server.run(events))
        try:
            yield Served(server, store, port, task)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await server.close()  # a task that never began has not


async def train(served: Served, *nodes: FakeNode) -> int:
    async with AsyncExitStack() as stack:
        for node in nodes:
            await stack.enter_async_context(node)
        return await asyncio.wait_for(asyncio.shield(served.task), 30)


def forget_log(folder: Path) -> None:
    for file in folder.glob("dtfm.db*"):
        file.unlink()


async def test_a_commit_that_waits_for_a_standby_in_vain_comes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody says a word meanwhile, and the next beat is far away."""

    def twist(message: wire.NodeMessage) -> wire.NodeMessage | None:
        for link in message.links.links:
            link.bandwidth = 1e12  # copies could keep up
        return None if message.WhichOneof("message") == "heartbeat" else message

    monkeypatch.setattr("dtfm.coordinator.service.server.TOGETHER_LEASES", 1e6)
    run = run_in(tmp_path, cluster={"nodes": 3, "stages": [1, 1]}, train={"steps": 10_000_000})
    async with serving(tmp_path, run) as served:

        def passed_over() -> bool:
            """A standby has caught up, and a commit came without its next report."""
            state = served.server.state
            standbys = [session.standby for session in state.members.sessions.values()]
            return any(s is not None and s.caught_up is not None and s.caught_up < state.ledger.step for s in standbys)

        nodes = [served.node(name, twist=twist) for name in "abc"]
        async with AsyncExitStack() as stack:
            for node in nodes:
                await stack.enter_async_context(node)
            await served.until(passed_over)


async def test_a_run_trains_and_finishes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        nodes = served.node("a"), served.node("b")
        assert await train(served, *nodes) == 0
        losses = [event.loss for event in served.events if isinstance(event, ev.StepCommitted)]
        assert losses == [1.0, 0.5, pytest.approx(1 / 3)]
        for node in nodes:
            assert node.finish is not None
            assert node.finish.completed
        manifest = read_manifest((tmp_path / "checkpoints" / "step-00000003").as_uri())
        assert (manifest.step, manifest.run_id, len(manifest.buckets)) == (3, served.server.state.ledger.run_id, 4)
        assert served.events[0].event == "run_started"
        assert "run_finished" in [event.event for event in served.events]


async def test_three_nan_losses_in_a_row_end_the_run_and_say_why(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        nodes = served.node("a", twist=nan_at(2)), served.node("b", twist=nan_at(2))
        assert await train(served, *nodes) == 1
        aborted = [event for event in served.events if isinstance(event, ev.StepAborted)]
        assert [(event.step, event.problem) for event in aborted] == [(2, "NON_FINITE")] * 3
        assert nodes[0].finish is not None
        assert "3 attempts in a row failed at step 2: NON_FINITE" in nodes[0].finish.reason
        assert served.server.state.ledger.step == 1


async def test_a_node_that_vanishes_is_replaced_by_another(tmp_path: Path) -> None:
    hold: Callable[[wire.NodeMessage], wire.NodeMessage | None] = lambda m: None if m.step_ready.step == 2 else m  # noqa: E731
    async with serving(tmp_path) as served, served.node("a"):
        async with served.node("b", twist=hold):
            await served.until(lambda: served.ledger.step == 1)
        await served.until(lambda: any(isinstance(event, ev.NodeLeft) for event in served.events))
        async with served.node("c"):
            assert await asyncio.wait_for(asyncio.shield(served.task), 30) == 0
        assert any(isinstance(event, ev.RolledBack) and event.step == 0 for event in served.events)


async def test_a_run_resumed_from_its_log_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    hold: Callable[[wire.NodeMessage], wire.NodeMessage | None] = lambda m: None if m.step_ready.step == 3 else m  # noqa: E731
    async with serving(tmp_path) as served, served.node("a", twist=hold), served.node("b", twist=hold):
        await served.until(lambda: bool(served.ledger.checkpoints))
    with pytest.raises(ValueError, match="holds run 'demo' already"):
        async with serving(tmp_path):
            pass
    async with serving(tmp_path, resume=True) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        committed = [event for event in served.events if isinstance(event, ev.StepCommitted)]
        assert [(event.step, event.loss) for event in committed] == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3))]
    with pytest.raises(ValueError, match="is over"):
        async with serving(tmp_path, resume=True):
            pass


async def test_a_ledger_snapshot_is_stored_at_intervals_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_snapshot, "EVERY", 5)
    async with serving(tmp_path) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        last, before = served.store.snapshots()
        assert last.sequence == served.store.last
        assert 5 <= before.sequence < last.sequence
        for kept in (last, before):
            assert ledger_snapshot.read(kept) == fold(served.events[: kept.sequence])


async def test_a_full_disk_costs_only_the_ledger_snapshot_and_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: LedgerSnapshot) -> None:
        raise StoreError("the disk is full")

    async with serving(tmp_path) as served:
        monkeypatch.setattr(served.store, "keep", full)
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert f"no ledger snapshot of event {served.store.last}: the disk is full" in caplog.text


async def test_nodes_that_hang_when_the_run_ends_do_not_stay_members(tmp_path: Path) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.5})) as served, served.node("hung", deaf=True):
        await served.until(lambda: "hung" in served.ledger.members)
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert not served.ledger.members


async def test_a_run_without_its_log_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    hold: Callable[[wire.NodeMessage], wire.NodeMessage | None] = lambda m: None if m.step_ready.step == 3 else m  # noqa: E731
    async with serving(tmp_path) as served, served.node("a", twist=hold), served.node("b", twist=hold):
        await served.until(lambda: bool(served.ledger.checkpoints))
        run_id = served.server.state.ledger.run_id
    forget_log(tmp_path)
    with pytest.raises(ValueError, match="holds another run's checkpoints"):
        async with serving(tmp_path):
            pass
    async with serving(tmp_path, resume=True) as served:
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert served.server.state.ledger.run_id == run_id
        assert [event.step for event in served.events if isinstance(event, ev.StepCommitted)] == [3]


async def test_a_run_cannot_be_resumed_with_another_training_setup(tmp_path: Path) -> None:
    async with serving(tmp_path):
        pass
    with pytest.raises(ValueError, match="there is nothing to resume"):
        async with serving(tmp_path / "..", run_in(tmp_path / "none"), resume=True):
            pass
    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        store.append([ev.RunStarted("id", run_in(tmp_path).model_dump(mode="json"))])
    with pytest.raises(ValueError, match=r"train.learning_rate is 0.5 in the run file, and was 0.003"):
        async with serving(tmp_path, run_in(tmp_path, train={"learning_rate": 0.5}), resume=True):
            pass
    async with serving(tmp_path, run_in(tmp_path, cluster={"nodes": 3}), resume=True) as served:
        assert served.server.state.run.cluster.nodes == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol_version": 99}, wire.PROTOCOL_VERSION),
        ({"run": "other"}, wire.WRONG_RUN),
        ({"address": "nowhere"}, wire.MALFORMED),
        ({"token": "wrong"}, wire.TOKEN),
    ],
)
async def test_refusals_name_their_reason_and_end_the_stream(
    tmp_path: Path, changes: dict[str, Any], reason: wire.RefusalReason
) -> None:
    async with serving(tmp_path, token="secret") as served, served.node("a", **{"token": "secret", **changes}) as node:
        await asyncio.wait_for(node.over.wait(), 10)
        assert node.refusal is not None
        assert node.refusal.reason == reason
        assert "secret" not in node.refusal.sentence


async def test_two_nodes_cannot_share_an_identity(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a", incarnation=1):
        await served.until(lambda: "a" in served.server.state.members.sessions)
        async with served.node("a", incarnation=2) as second:
            await asyncio.wait_for(second.over.wait(), 10)
            assert second.refusal is not None
            assert second.refusal.reason == wire.IDENTITY_IN_USE
        assert "a" in served.server.state.members.sessions


async def test_a_node_started_again_takes_the_place_of_its_process_that_fell_silent(tmp_path: Path) -> None:
    silent: Callable[[wire.NodeMessage], wire.NodeMessage | None] = lambda _: None  # noqa: E731
    run = run_in(tmp_path, cluster={"lease": 1.0})
    async with serving(tmp_path, run) as served, served.node("a", incarnation=1, twist=silent) as first:
        await served.until(lambda: "a" in served.ledger.members)
        async with served.node("a", incarnation=2) as second:
            await served.until(lambda: served.ledger.members["a"].incarnation.endswith("2"))
            await asyncio.wait_for(first.over.wait(), 10)
            assert second.refusal is None
        reasons = [event.reason for event in served.events if isinstance(event, ev.NodeLeft)]
        assert reasons[0] == "a new process has its identity, and this one gave no sign of life since"


async def test_a_silent_stream_is_closed(tmp_path: Path) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.5})) as served, served.channel() as channel:
        stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Join()
        reply = await asyncio.wait_for(call.read(), 10)
        assert reply.refusal.reason == wire.MALFORMED
        assert await asyncio.wait_for(call.read(), 10) is grpc.aio.EOF


async def test_a_message_larger_than_allowed_ends_only_its_stream(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.server.state.members.sessions)
        credentials, named = to_coordinator(served.server.authority)
        options = (*named, ("grpc.max_send_message_length", -1))
        async with grpc.aio.secure_channel(served.address, credentials, options=options) as channel:
            stub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
            call = stub.Join()
            await call.write(hello("b"))
            assert (await call.read()).WhichOneof("message") == "welcome"
            await call.write(wire.NodeMessage(goodbye=wire.Goodbye(reason="x" * MAX_MESSAGE_BYTES)))
            assert await asyncio.wait_for(call.code(), 10) == grpc.StatusCode.RESOURCE_EXHAUSTED
        await served.until(lambda: "b" not in served.server.state.members.sessions)
        assert "a" in served.server.state.members.sessions


async def test_a_port_in_use_is_named_with_the_fix(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        with Store(f"sqlite:///{tmp_path / 'other.db'}", write=True) as store:
            state, _ = open_run(store, run_in(tmp_path / "other"), resume=False)
            second = Server(state, store)
            with pytest.raises(ValueError, match=r"the port is in use.*--listen"):
                await second.listen("127.0.0.1", int(served.address.rpartition(":")[2]))
            assert store.last == 0


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


async def test_the_server_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a") as node:
        await served.until(lambda: "a" in served.server.state.members.sessions)
        served.server.ask_to_stop("Ctrl-C", dismiss=True)
        assert await asyncio.wait_for(asyncio.shield(served.task), 10) == 1
        await asyncio.wait_for(node.over.wait(), 10)
        assert node.finish is not None
        assert not node.finish.completed
