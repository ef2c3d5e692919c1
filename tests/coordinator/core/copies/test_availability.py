"""Which nodes have which state, and the step where training can resume: `core/copies/availability.py`."""

from __future__ import annotations

from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.availability import Availability, Copy, Kind, ResumePoint as Point, availability
from tests.coordinator.script import BUCKETS, World, training
from tests.coordinator.snapshots import with_snapshot

NODES = "abc"
COPIES = st.builds(Copy, st.sampled_from(NODES), st.integers(0, 3), st.booleans())
BY_BUCKET = st.lists(st.lists(COPIES, max_size=4).map(tuple), max_size=3).map(tuple)
TABLES = st.builds(Availability, BY_BUCKET, BY_BUCKET, st.integers(0, 3))


def trained(**changes: dict[str, object]) -> World:
    """a trains the first half and b the second; both are at step 2."""
    world = training("a", "b", train={"steps": 50, "evaluate_every": 0}, **changes)
    world.automatic_standbys = False
    world.step()
    world.step()
    return world


def test_replicas_have_the_state_as_of_the_last_commit() -> None:
    world = trained()
    table = availability(world.state)
    assert table.memory == ((Copy("a", 2),), (Copy("a", 2),), (Copy("b", 2),), (Copy("b", 2),))
    assert table.resume_point() == Point(2, Kind.MEMORY)


def test_a_node_that_is_away_may_return_with_its_state() -> None:
    world = trained()
    world.lose("a")
    table = availability(world.state)
    assert table.in_memory(2) == (frozenset(), frozenset(), frozenset("b"), frozenset("b"))
    assert table.resume_point() == Point(0, None)
    with_a = table.resume_point({"a"})
    assert with_a == Point(2, Kind.MEMORY)
    assert table.needed(with_a, {"a", "b"}) == {"a"}


def test_a_new_process_of_the_same_node_has_nothing() -> None:
    world = trained()
    world.lose("a")
    world.greet("a", incarnation=2)
    assert availability(world.state).resume_point({"a"}) == Point(0, None)


def test_a_snapshot_on_disks_is_usable_while_every_bucket_is_with_a_member() -> None:
    world = with_snapshot()
    world.lose("a")
    assert availability(world.state).resume_point() == Point(3, Kind.DISK)
    world.lose("b")
    table = availability(world.state)
    assert table.resume_point() == Point(0, None)
    assert table.resume_point({"a"}) == Point(3, Kind.DISK)
    assert [len(bucket) for bucket in table.disks] == [2] * BUCKETS


@given(TABLES, st.frozensets(st.sampled_from(NODES)))
def test_returning_nodes_never_make_the_resume_point_older(table: Availability, returning: frozenset[str]) -> None:
    assert table.resume_point(returning).step >= table.resume_point().step


@given(TABLES, st.frozensets(st.sampled_from(NODES)))
def test_the_nodes_named_as_needed_are_enough(table: Availability, returning: frozenset[str]) -> None:
    point = table.resume_point(returning)
    assert table.resume_point(table.needed(point, returning)).step == point.step


@given(TABLES)
def test_a_resume_point_has_a_copy_of_every_bucket(table: Availability) -> None:
    point = table.resume_point()
    if point.kind in (None, Kind.CHECKPOINT):
        assert point.step == table.checkpoint
        return
    buckets = table.memory if point.kind is Kind.MEMORY else table.disks
    assert all(any(c.here and c.step == point.step for c in copies) for copies in buckets)
