"""Moves of buckets by nodes that come, go, fail and are late, in any order: `core/copies/moving.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.moving import arrived, begun, failed, followed
from dtfm.coordinator.core.state.copies import Moves
from dtfm.coordinator.core.state.session import Session

NODES, BUCKETS, PATIENCE = "abc", range(6), 10.0
SOME = st.frozensets(st.sampled_from(BUCKETS))


@dataclass
class Yard:
    """Moves, and beside them a plain account of the same. ``awaited``: by node and bucket, when the bucket is due."""

    moves: Moves = field(default_factory=Moves)
    sessions: dict[str, Session] = field(default_factory=dict)
    now: float = 0.0
    streams: int = 0
    awaited: dict[tuple[str, int], float] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def connect(self, node: str) -> None:
        """A node that is connected already comes on another stream, and its old stream ends."""
        self.streams += 1
        self.sessions[node] = Session(node, self.streams, self.now)
        self.forget(node)

    def lose(self, node: str) -> None:
        self.sessions.pop(node, None)
        self.forget(node)

    def forget(self, node: str) -> None:
        self.awaited = {key: due for key, due in self.awaited.items() if key[0] != node}

    def ask(self, node: str, buckets: frozenset[int]) -> None:
        if node in self.sessions and buckets:
            self.moves = begun(self.moves, self.sessions[node], buckets, self.now + PATIENCE)
            known = [bucket for at, bucket in self.awaited if at == node]
            self.awaited |= {(node, bucket): self.now + PATIENCE for bucket in (*known, *buckets)}

    def bring(self, node: str, buckets: frozenset[int]) -> None:
        if self.moves.of(node):
            self.moves = arrived(self.moves, node, buckets)
            for bucket in buckets:
                self.awaited.pop((node, bucket), None)

    def fail(self, node: str) -> None:
        self.moves = failed(self.moves, node, f"{node} has no room")
        self.failed.add(node)
        self.forget(node)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for node in {node for (node, _), due in self.awaited.items() if self.now > due}:
            self.failed.add(node)
            self.forget(node)

    def play(self, name: str, *arguments: Any) -> None:
        getattr(self, name)(*arguments)
        self.moves = followed(self.moves, self.sessions, self.now)


NODE = st.sampled_from(NODES)
EVENTS = st.one_of(
    st.tuples(st.just("connect"), NODE),
    st.tuples(st.just("lose"), NODE),
    *[st.tuples(st.just("ask"), NODE, SOME)] * 3,
    *[st.tuples(st.just("bring"), NODE, SOME)] * 2,
    st.tuples(st.just("fail"), NODE),
    st.tuples(st.just("wait"), st.sampled_from([1.0, PATIENCE, PATIENCE + 1])),
)


@given(st.lists(EVENTS, min_size=10, max_size=40))
def test_a_bucket_is_on_its_way_until_it_comes_or_its_node_fails_is_late_or_leaves(
    events: list[tuple[Any, ...]],
) -> None:
    yard = Yard()
    for event in events:
        yard.play(*event)
        assert {(node, bucket) for node in NODES for bucket in yard.moves.of(node)} == yard.awaited.keys()
        assert yard.moves.under_way == {bucket for _, bucket in yard.awaited}
        assert yard.moves.failed == yard.failed
        assert bool(yard.moves.problem) == bool(yard.failed)
        assert yard.moves.by_node.keys() <= yard.sessions.keys()


@given(st.lists(EVENTS, min_size=10, max_size=40))
def test_where_nothing_happens_the_moves_stay_the_same(events: list[tuple[Any, ...]]) -> None:
    yard = Yard()
    for event in events:
        yard.play(*event)
        assert followed(yard.moves, yard.sessions, yard.now) == yard.moves


@given(st.frozensets(st.sampled_from(BUCKETS), min_size=1), st.permutations(NODES), st.integers(0, len(NODES)))
def test_if_what_is_missing_is_asked_of_nodes_that_have_not_failed_it_comes_unless_all_fail(
    wanted: frozenset[int], order: list[str], failing: int
) -> None:
    yard = Yard()
    for node in NODES:
        yard.connect(node)
    broken, missing = set(order[:failing]), set(wanted)
    while missing and (able := [node for node in order if node not in yard.moves.failed]):
        yard.ask(able[0], frozenset(missing - yard.moves.under_way))
        if able[0] in broken:
            yard.play("wait", PATIENCE + 1)  # it says nothing
        else:
            yard.play("bring", able[0], frozenset(missing))
            missing.clear()
    assert bool(missing) == (failing == len(NODES))


def test_a_node_that_comes_back_is_not_awaited_even_if_nobody_saw_it_leave() -> None:
    yard = Yard()
    yard.connect("a")
    yard.play("ask", "a", frozenset({0}))
    yard.play("connect", "a")
    assert yard.moves == Moves()


def test_what_is_asked_later_gives_the_node_time_for_all_of_it() -> None:
    yard = Yard()
    yard.connect("a")
    yard.play("ask", "a", frozenset({0}))
    yard.play("wait", PATIENCE)
    yard.play("ask", "a", frozenset({1}))
    yard.play("wait", PATIENCE)
    assert yard.moves.of("a") == {0, 1}
    yard.play("wait", 1.0)
    assert not yard.moves.of("a")
    assert yard.moves.failed == {"a"}
    assert yard.moves.problem == "a: not in time"
