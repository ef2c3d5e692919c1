"""The shell around the core, with fake nodes over real gRPC streams: `service/server.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.service.checkpoint.manifest import read_manifest
from dtfm.coordinator.service.log_writer import LogWriter
from dtfm.coordinator.service.server import Server
from dtfm.coordinator.service.startup import open_run
from dtfm.coordinator.service.streams import Streams
from dtfm.coordinator.store.store import Record, Store, StoreError
from dtfm.protos import control_pb2 as wire
from dtfm.protos.identity.credentials import make_key
from tests.coordinator.fake_node import no_vote_for
from tests.coordinator.serving import Served, run_in, serving, train


async def test_a_commit_that_waits_for_a_standby_in_vain_comes_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node sends anything while it waits, not even a heartbeat."""

    def twist(message: wire.NodeMessage) -> wire.NodeMessage | None:
        for link in message.links.links:
            link.bandwidth = 1e12  # standbys could keep up
        return None if message.WhichOneof("message") == "heartbeat" else message

    monkeypatch.setattr("dtfm.coordinator.service.server.TOGETHER_LEASES", 1e6)
    run = run_in(tmp_path, cluster={"nodes": 3, "stages": [1, 1]}, train={"steps": 10_000_000})
    async with serving(tmp_path, run) as served:

        def committed_without_standby() -> bool:
            """A standby has caught up, and a commit came without its next report."""
            state = served.server.state
            standbys = [session.standby for session in state.members.sessions.values()]
            return any(
                s is not None and s.caught_up is not None and s.caught_up < state.ledger.training.step for s in standbys
            )

        nodes = [served.node(name, twist=twist) for name in "abc"]
        async with AsyncExitStack() as stack:
            for node in nodes:
                await stack.enter_async_context(node)
            await served.until(committed_without_standby)


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


async def test_a_node_that_vanishes_is_replaced_by_another(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        async with served.node("b", twist=no_vote_for(2)):
            await served.until(lambda: served.ledger.training.step == 1)
        await served.until(lambda: any(isinstance(event, ev.NodeLeft) for event in served.events))
        async with served.node("c"):
            assert await asyncio.wait_for(asyncio.shield(served.task), 30) == 0
        assert any(isinstance(event, ev.RolledBack) and event.step == 0 for event in served.events)


async def test_nodes_that_hang_when_the_run_ends_do_not_stay_members(tmp_path: Path) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.5})) as served, served.node("hung", deaf=True):
        await served.until(lambda: "hung" in served.ledger.members)
        assert await train(served, served.node("a"), served.node("b")) == 0
        assert not served.ledger.members


async def test_a_port_in_use_is_named_with_the_fix(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        with Store(f"sqlite:///{tmp_path / 'other.db'}", write=True) as store:
            state, story, _ = open_run(store, run_in(tmp_path / "other"))
            second = Server(state, store, story, make_key())
            with pytest.raises(ValueError, match=r"the port is in use.*--listen"):
                await second.bind("127.0.0.1", int(served.address.rpartition(":")[2]))
            assert store.last == 0


class Disk:
    """A store's disk. While it is ``full``, an append fails as one of SQLite does."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full, self.failures = False, asyncio.Queue[None]()
        append, loop = served.store.append, asyncio.get_running_loop()

        def appended(events: Sequence[ev.Event]) -> list[Record]:
            if self.full:
                loop.call_soon_threadsafe(self.failures.put_nowait, None)
                raise StoreError("the disk is full; make room")
            return append(events)

        monkeypatch.setattr(served.store, "append", appended)


async def test_the_run_stands_still_while_the_disk_is_full_and_nobody_hears_or_is_blamed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, run_in(tmp_path, cluster={"lease": 0.6})) as served:
        disk = Disk(served, monkeypatch)
        told: list[wire.CoordinatorMessage] = []
        put = Streams.put

        def counted(self: Streams, stream: int, message: wire.CoordinatorMessage | None) -> None:
            assert not disk.full
            put(self, stream, message)
            told.extend([message] if message is not None else [])

        monkeypatch.setattr(Streams, "put", counted)
        async with served.node("a") as node:
            await served.until(lambda: "a" in served.ledger.members)
            disk.full, before = True, len(told)
            async with served.node("b"):
                for _ in range(6):  # three leases
                    await asyncio.wait_for(disk.failures.get(), 10)
                assert len(told) == before
                disk.full = False
                assert await asyncio.wait_for(asyncio.shield(served.task), 30) == 0
            assert not node.error
        assert [record.levelname for record in caplog.records if "stands still until the log" in record.message] == [
            "ERROR"
        ]
        assert "the disk is full; make room" in caplog.text
        over = next(n for n, event in enumerate(served.events) if isinstance(event, ev.RunFinished))
        assert not [event for event in served.events[:over] if isinstance(event, ev.NodeLeft)]
        assert fold(served.events) == served.server.state.ledger


async def test_the_server_stops_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path) as served, served.node("a"):
        await served.until(lambda: "a" in served.ledger.members)
        disk = Disk(served, monkeypatch)
        disk.full = True
        async with served.node("b"):
            await asyncio.wait_for(disk.failures.get(), 10)
            served.server.ask_to_stop("SIGTERM")
            with pytest.raises(StoreError, match="the disk is full"):
                await asyncio.wait_for(asyncio.shield(served.task), 10)


async def test_a_database_that_is_full_can_be_written_again_once_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite reaches its own bound for its file, at the second and third of four attempts."""
    with Store(f"sqlite:///{tmp_path / 'dtfm.db'}", write=True) as store:
        bounds, append = iter([1 << 20, 1, 1, 1 << 20]), store.append

        def bounded(events: Sequence[ev.Event]) -> list[Record]:
            with store._engine.connect() as connection:  # the only one: the pool hands it out again
                connection.exec_driver_sql(f"PRAGMA max_page_count = {next(bounds)}")
            return append(events)

        monkeypatch.setattr(store, "append", bounded)
        writer, stopped = LogWriter(store), asyncio.Event()
        assert await writer.append_however_long([ev.Waiting("there is room")], 1.0, stopped) == 0
        assert await writer.append_however_long([ev.Waiting("x" * 100_000)], 1.0, stopped) > 0
        assert [record.sequence for record in store.read()] == [1, 2]
        await writer.close()


async def test_the_server_stops_when_it_is_asked_to(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, served.node("a") as node:
        await served.until(lambda: "a" in served.server.state.members.sessions)
        served.server.ask_to_stop("Ctrl-C")
        assert await asyncio.wait_for(asyncio.shield(served.task), 10) == 1
        await asyncio.wait_for(node.over.wait(), 10)
        assert node.finish is None, "it is to come back"
