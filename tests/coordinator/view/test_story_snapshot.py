"""Story snapshots make a restart quick, and nothing is lost without them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, strategies as st

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.coordinator.store import store as store_module
from dtfm.coordinator.store.record import Record
from dtfm.coordinator.store.store import Store, StoreError
from dtfm.coordinator.view.story import Story
from dtfm.coordinator.view.story_snapshot import read, story_format, story_in, story_of, take
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


def told(events: Iterable[ev.Event], story: Story | None = None) -> Story:
    story = story or Story()
    for event in events:
        story.add(Record(story.now.sequence + 1, float(story.now.sequence), event))
    return story


def whole(store: Store) -> Story:
    return story_of(store.snapshots(store.last), store.read)


@given(st.lists(MOVES, min_size=5, max_size=40), st.data())
def test_a_snapshot_and_the_rest_of_the_log_tell_the_same_story_as_the_whole_log(
    moves: list[tuple[Any, ...]], data: st.DataObject
) -> None:
    world = World(fresh_state(cluster={"nodes": 2}, train={"steps": 5}))
    world.join("a", "b")
    for move in moves:
        play(world, move)
    log = world.whole_log
    cut = data.draw(st.integers(0, len(log)))
    assert read(take(told(log[:cut]))) == told(log[:cut])
    assert told(log[cut:], read(take(told(log[:cut])))) == told(log)


def test_what_is_read_stays_bounded() -> None:
    story = read(take(told(LOG)))
    assert [part.maxlen for part in (story.now.steps, story.now.recent, story.history.plans)] == [20, 30, 1000]


def test_a_start_folds_only_what_came_after_the_newest_snapshot(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        for cut in (5, 10, 15):
            store.append(LOG[cut - 5 : cut])
            store.keep(take(story_in(store.url)))
        store.append(LOG[15:])
    with Store(store_url(tmp_path), write=True) as store:
        asked: list[int] = []
        story = story_of(store.snapshots(store.last), lambda after: asked.append(after) or store.read(after))  # type: ignore[func-returns-value]
        assert story.now.ledger == fold(LOG)
        assert asked == [15]
        assert story_in(store.url) == story


def test_older_snapshots_stay_while_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(take(told(LOG)).text)
    monkeypatch.setattr(store_module, "_MOST_CHARACTERS", 6 * size)
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        for sequence in range(1, 12):
            story = told(LOG)
            story.now.sequence = sequence
            store.keep(take(story))
        kept = [snapshot.sequence for snapshot in store.snapshots(11)]
        assert kept[:2] == [11, 10]
        assert 2 < len(kept) <= 6
        assert [snapshot.sequence for snapshot in store.snapshots(10)] == kept[1:]
        monkeypatch.setattr(store_module, "_MOST_CHARACTERS", 1)
        store.keep(take(told(LOG)))
        assert [snapshot.sequence for snapshot in store.snapshots(len(LOG))] == [len(LOG), 11]


def change_snapshot(store: Store, column: str, value: object) -> None:
    with store._engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE snapshots SET {column} = :value WHERE sequence = 10"), {"value": value})


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("text", "no JSON at all", "it is damaged"),
        ("text", "", "it is damaged"),
        ("digest", "00", "it is damaged"),
        ("format", story_format() ^ 1, f"it has format {story_format() ^ 1}, this dtfm writes {story_format()}"),
        ("sequence", 9, "it is damaged"),
        ("sequence", 10**6, ""),  # after the log's end
    ],
)
def test_an_unusable_snapshot_is_passed_over_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, column: str, value: object, words: str
) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        other = told(LOG[:10])
        other.now.ledger = replace(other.now.ledger, run_id="of another run")
        store.keep(take(other))
        change_snapshot(store, column, value)
        with caplog.at_level(logging.WARNING):
            assert whole(store).now.ledger == fold(LOG)
        assert [words in record.getMessage() for record in caplog.records] == [True] * bool(words), caplog.text
        store.keep(take(told(LOG)))
        assert whole(store).now.ledger == fold(LOG)


def test_an_older_snapshot_is_used_if_the_newest_is_damaged(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        marked = told(LOG[:5])
        marked.now.ledger = replace(marked.now.ledger, run_id="from the older snapshot")
        store.keep(take(marked))
        store.keep(take(told(LOG[:10])))
        change_snapshot(store, "text", "{}")
        assert whole(store).now.ledger.run_id == "from the older snapshot"


def test_a_snapshot_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    with Store(store_url(tmp_path), write=True) as store:
        store.append(LOG)
        store.keep(take(told(LOG[:10])))
        broken = replace(take(told(LOG)), digest=object())  # type: ignore[arg-type]
        with pytest.raises(StoreError):
            store.keep(broken)
        assert [snapshot.sequence for snapshot in store.snapshots(store.last)] == [10]
