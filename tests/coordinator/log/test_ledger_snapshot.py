"""Ledger snapshots make a restart quick, and nothing is lost without them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings, strategies as st

from dtfm.coordinator.log import events as ev, ledger_snapshot
from dtfm.coordinator.log.ledger import Ledger, fold
from dtfm.coordinator.log.store import Store, StoreError
from tests.coordinator.moves import MOVES, play
from tests.coordinator.script import World, fresh_state, training
from tests.coordinator.stores import store_url


def log_of_a_run() -> list[ev.Event]:
    """The log of a run of four nodes with a checkpoint, which one of them left."""
    world = training("a", "b", "c", "d", train={"steps": 10})
    world.step()
    world.step()
    world.evaluate()
    world.save()
    world.lose("d")
    return world.whole_log


LOG = log_of_a_run()


@settings(max_examples=60)
@given(st.lists(MOVES, min_size=5, max_size=40), st.data())
def test_a_snapshot_and_the_rest_of_the_log_fold_to_the_same_ledger_as_the_whole_log(
    moves: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    world = World(fresh_state(cluster={"nodes": 2}, train={"steps": 5}))
    world.join("a", "b")
    for move in moves:
        play(world, move)
    cut = data.draw(st.integers(0, len(world.log)))
    prefix = fold(world.log[:cut], world.start)
    assert ledger_snapshot.read(ledger_snapshot.take(prefix, cut)) == prefix
    assert fold(world.log[cut:], ledger_snapshot.read(ledger_snapshot.take(prefix, cut))) == world.refolded()


def test_a_start_folds_only_what_came_after_the_newest_snapshot(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        for cut in (5, 10, 15):
            store.append(LOG[cut - 5 : cut])
            store.keep(ledger_snapshot.take(fold(LOG[:cut]), cut))
        store.append(LOG[15:])
        assert [snapshot.sequence for snapshot in store.snapshots()] == [15, 10]
    with Store(store_url(tmp_path), write=True) as store:
        assert store.last_snapshot == 15
        read: list[int] = []
        page = store.page
        store.page = lambda after: read.append(after) or page(after)  # type: ignore[method-assign, func-returns-value]
        assert ledger_snapshot.restore(store) == fold(LOG)
        assert min(read) == 15


def change_snapshot(store: Store, column: str, value: object) -> None:
    with store._engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE snapshots SET {column} = :value WHERE sequence = 10"), {"value": value})


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("text", "no JSON at all", "it is damaged"),
        ("text", "", "it is damaged"),
        ("digest", "00", "it is damaged"),
        (
            "format",
            ledger_snapshot.FORMAT ^ 1,
            f"it has format {ledger_snapshot.FORMAT ^ 1}, this dtfm writes {ledger_snapshot.FORMAT}",
        ),
        ("sequence", 9, "it is damaged"),
        ("sequence", 10**6, f"the log ends with event {len(LOG)}"),
    ],
)
def test_an_unusable_snapshot_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: object, words: str
) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        store.keep(ledger_snapshot.take(Ledger(run_id="of another run"), 10))
        change_snapshot(store, column, value)
        with caplog.at_level(logging.WARNING):
            assert ledger_snapshot.restore(store) == fold(LOG)
        assert [words in record.getMessage() for record in caplog.records] == [True], caplog.text
        store.keep(ledger_snapshot.take(fold(LOG), len(LOG)))
        assert ledger_snapshot.restore(store) == fold(LOG)


def test_an_older_snapshot_is_used_if_the_newest_is_damaged(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        marked = replace(fold(LOG[:5]), run_id="from the older snapshot")
        store.keep(ledger_snapshot.take(marked, 5))
        store.keep(ledger_snapshot.take(fold(LOG[:10]), 10))
        change_snapshot(store, "text", "{}")
        assert ledger_snapshot.restore(store).run_id == "from the older snapshot"


def test_a_snapshot_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        store.keep(ledger_snapshot.take(fold(LOG[:10]), 10))
        broken = replace(ledger_snapshot.take(fold(LOG), len(LOG)), text=object())  # type: ignore[arg-type]
        with pytest.raises(StoreError):
            store.keep(broken)
        assert [snapshot.sequence for snapshot in store.snapshots()] == [10]
