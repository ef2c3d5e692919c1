"""The store: the log on disk, and events as JSON."""

from __future__ import annotations

import json
import multiprocessing
import os
from pathlib import Path
from typing import Any, get_args

import pytest
import sqlalchemy as sa

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import Event, PlanFailed, SnapshotWritten, StandbyPromoted, from_json, from_text
from dtfm.coordinator.log.store import Record, Store, StoreError
from dtfm.scheduler.model.plan import Plan, Route, Stage
from dtfm.scheduler.model.workload import Layer, Workload

DEVICE = ev.DeviceSeen("cpu", "a cpu", 1 << 33, 1e11)
PLAN = Plan(1, (Stage((0, 2), ("a", "b")), Stage((2, 3), ("c",))), (Route(("a", "c"), 3), Route(("b", "c"), 5)), ("d",))
DESCRIBED = ev.Described(Workload((Layer("x", 1e9, 4e6, 1e5),), 8), "ab12", 100, 10, 3.2, 256, 1)

EVERY_EVENT: list[ev.Event] = [
    ev.RunStarted("id", {"name": "demo", "train": {"steps": 3}}),
    ev.RunResumed("why", {"name": "demo"}),
    ev.NodeJoined("a", "first contact", "10.0.0.1:7000", DEVICE, "0.1"),
    ev.NodeRefused("a", "TOKEN", "why"),
    ev.NodeReady("a"),
    ev.NodeLeaving("a", "why"),
    ev.StandbyPromoted("a", "1f", (0, 2), 1),
    ev.DeviceTimed("a", 1e9),
    ev.DeviceDrifted("a", 1e9, "why"),
    ev.NodeLeft("a", "why"),
    ev.LinksMeasured("a", (ev.Link("a", "b", 0.001, 1e9), ev.Link("b", "a", 0.0, 0.0, "no route")), up=2e9),
    ev.RunDescribed(DESCRIBED),
    ev.Waiting("why"),
    ev.PlanAdopted(1, PLAN, "why", 0, 1.5, None),
    ev.PlanStarted(1, 1, 0, {"a": {"b": {"activations": "raw16"}}}),
    ev.CodecsChosen("a", {"b": {"activations": "i8b256"}}),
    ev.PlanFailed(1, "a", "why"),
    ev.StepCommitted(1, 1, 2.5, 8192, 0.5, 1.25, 32, {"a": 1.0}, {"a": 0.25}),
    ev.StepAborted(2, 1, "NON_FINITE", "a", "why"),
    ev.DigestMismatch(2, 1, 0, {"a": "00", "b": "01"}),
    ev.Evaluated(1, 2.5, 64, 3.2),
    ev.CheckpointWritten(1, "file:///x/step-00000001"),
    ev.CheckpointFailed(1, "why"),
    ev.SnapshotWritten(
        1, (ev.SnapshotPart(10, "ab"), ev.SnapshotPart(20, "cd")), {"a": ((0, 2),), "b": ((1, 2),)}, 0.5
    ),
    ev.RolledBack(0, 1, "", "why"),
    ev.RunFinished(3, "why"),
    ev.RunFailed(3, "why"),
    ev.CoordinatorStopped("why"),
]


def url(path: Path) -> str:
    return f"sqlite:///{path / 'dtfm.db'}"


def test_every_event_is_read_back_from_the_store_unchanged(tmp_path: Path) -> None:
    assert {type(event) for event in EVERY_EVENT} == set(get_args(ev.Event))
    with Store(url(tmp_path), write=True) as store:
        written = store.append(EVERY_EVENT)
    with Store(url(tmp_path), write=False) as store:
        read = list(store.read())
        assert [record.event for record in read] == EVERY_EVENT
        assert read == written
        assert list(store.read(after=20)) == written[20:]


@pytest.mark.parametrize("event", EVERY_EVENT, ids=lambda event: event.event)
def test_every_event_is_read_back_from_its_json_unchanged(event: ev.Event) -> None:
    record = Record(7, 12.5, event)
    fields = record.to_json()
    assert list(fields)[:3] == ["event", "sequence", "time"]
    assert Record.from_json(fields) == record


def test_a_plan_in_the_log_is_a_plan_file() -> None:
    fields = ev.to_json(ev.PlanAdopted(1, PLAN, "why", 0))
    assert fields["plan"] == {
        "generation": 1,
        "stages": [
            {"layers": [0, 2], "replicas": ["a", "b"], "in_flight": 0},
            {"layers": [2, 3], "replicas": ["c"], "in_flight": 0},
        ],
        "routes": [{"nodes": ["a", "c"], "micro_batches": 3}, {"nodes": ["b", "c"], "micro_batches": 5}],
        "idle": ["d"],
    }


@pytest.mark.parametrize("fields", [{"event": "from_the_future"}, {"event": "node_left"}, {}, {"event": 3}])
def test_json_that_is_no_event_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not an event of this version"):
        ev.from_json(fields)


def test_sequence_numbers_continue_after_a_restart(tmp_path: Path) -> None:
    with Store(url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a"), ev.NodeReady("b")])
    with Store(url(tmp_path), write=True) as store:
        assert store.last == 2
        assert store.append([ev.NodeReady("c")])[0].sequence == 3


def test_an_append_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        store._last = 0  # as if another process had written in between
        with pytest.raises(StoreError, match="another coordinator writes to it"):
            store.append([ev.NodeReady("b"), ev.NodeReady("c")])
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def test_a_second_coordinator_cannot_open_the_store(tmp_path: Path) -> None:
    with Store(url(tmp_path), write=True):
        with pytest.raises(StoreError, match=r"another coordinator uses this store .*--store"):
            Store(url(tmp_path), write=True)
        with Store(url(tmp_path), write=False) as reader:
            assert list(reader.read()) == []
    Store(url(tmp_path), write=True).close()


def _write_and_die(store_url: str) -> None:
    store = Store(store_url, write=True)
    store.append([ev.NodeReady("a")])
    os._exit(9)


def test_a_coordinator_that_was_killed_leaves_its_log_and_no_lock(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(url(tmp_path),))
    process.start()
    process.join(30)
    assert process.exitcode == 9
    with Store(url(tmp_path), write=True) as store:
        assert [record.event for record in store.read()] == [ev.NodeReady("a")]


def test_an_error_says_that_the_database_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store(url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        monkeypatch.setattr(store, "_engine", sa.create_engine(url(tmp_path), connect_args={"timeout": 0}))
        other = sa.create_engine(url(tmp_path)).connect()
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another process has locked it"):
            store.append([ev.NodeReady("b")])
        other.close()


def test_an_error_says_that_the_disk_is_full(tmp_path: Path) -> None:
    with Store(url(tmp_path), write=True) as store:
        store.append([ev.NodeReady("a")])
        with store._engine.connect() as connection:
            connection.exec_driver_sql(
                "PRAGMA max_page_count = 1"
            )  # of this connection, which the pool hands out again
        with pytest.raises(StoreError, match="the disk is full; make room"):
            store.append([ev.NodeLeft("a", "x" * 100_000)])


@pytest.mark.parametrize(
    ("store_url", "words"),
    [
        ("nonsense", "give a SQLAlchemy URL like sqlite:///dtfm.db"),
        ("nosuchdatabase://x", "give a SQLAlchemy URL"),
        ("sqlite:////nowhere/at/all/dtfm.db", "No such file or directory"),
    ],
)
def test_an_impossible_store_address_is_refused_with_its_reason(store_url: str, words: str) -> None:
    with pytest.raises(StoreError, match=words):
        Store(store_url, write=True)


def test_opening_a_store_to_read_creates_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is no store at"):
        Store(url(tmp_path), write=False)
    (tmp_path / "dtfm.db").write_bytes(b"no database at all, but long enough to be looked at" * 50)
    with pytest.raises(StoreError, match="is not a database"):
        Store(url(tmp_path), write=False)


def test_secrets_stay_the_same_and_are_not_in_the_log(tmp_path: Path) -> None:
    with Store(url(tmp_path), write=True) as store:
        assert store.secret("peer_token", "first") == "first"
        assert store.secret("peer_token", "second") == "first"
        assert list(store.read()) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (
            {"event": "plan_failed", "generation": 1, "node": "a", "reason": "why", "backup": True},
            PlanFailed(1, "a", "why", snapshot_damaged=True),
        ),
        (
            {"event": "state_copied", "node": "a", "incarnation": "1", "layers": [0, 2], "step": 3},
            StandbyPromoted("a", "1", (0, 2), 3, "state_copied"),
        ),
        (
            {"event": "backup_kept", "step": 3, "parts": [], "holders": {"a": [[0, 2]]}, "seconds": 1.0},
            SnapshotWritten(3, (), {"a": ((0, 2),)}, 1.0, "backup_kept"),
        ),
    ],
)
def test_events_are_read_under_their_old_names(old: dict[str, Any], new: Event) -> None:
    assert from_json(old) == new
    assert from_text(json.dumps(old)) == new
