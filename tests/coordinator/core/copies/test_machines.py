"""Copies on one machine count as one, because they are lost together: `core/copies/availability.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import pytest

from dtfm.coordinator.core.copies.keeping_up import commit_waits_for, rests_on_one_machine
from dtfm.coordinator.core.copies.wanted_standbys import wanted_standbys
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log.members import Member
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.coordinator.ledgers import altered
from tests.coordinator.script import LONG, World, training
from tests.coordinator.snapshots import all_to_fetch, report_written, snapshot_due
from tests.coordinator.standbys import caught_up, layers_of, report, share_a_machine


def two_boxes() -> World:
    """a and b train the first stage on one machine, c and d the second on another. A step took a second."""
    world = training("a", "b", "c", "d", **LONG)
    share_a_machine(world, "a", "b")
    share_a_machine(world, "c", "d")
    world.automatic_standbys = False
    world.now += 1
    world.step()
    return world


def test_a_stage_whose_replicas_share_a_machine_gets_a_standby_on_another() -> None:
    world = two_boxes()
    asked = {node: layers_of(world, node) for node in "abcd" if "standby" in world.kinds_to(node)}
    assert asked == {"a": (2, 4), "c": (0, 2)}


def test_such_a_stage_rests_on_one_machine_until_the_standby_keeps_up() -> None:
    world = two_boxes()
    assert rests_on_one_machine(world.state)
    caught_up(world, "a")
    assert rests_on_one_machine(world.state)
    caught_up(world, "c")
    assert not rests_on_one_machine(world.state)


def test_a_commit_waits_for_the_standby_on_the_other_machine() -> None:
    world = two_boxes()
    caught_up(world, "a")
    caught_up(world, "c")
    assert commit_waits_for(world.state) == {"a", "c"}
    report(world, "c")
    assert commit_waits_for(world.state) == {"a"}


def test_an_idle_node_becomes_the_standby_of_a_stage_that_its_own_machine_does_not_hold() -> None:
    world = training("a", "b", **LONG)
    world.stick_to_plan()
    share_a_machine(world, "a", "c")
    share_a_machine(world, "b", "d")
    world.join("c", "d")
    assert (layers_of(world, "c"), layers_of(world, "d")) == ((2, 4), (0, 2))


def test_where_all_are_on_one_machine_each_node_counts() -> None:
    world = training("a", "b", **LONG)
    share_a_machine(world, "a", "b")
    assert world.state.ledger.party("a") != world.state.ledger.party("b")
    world.now += 1
    world.step()
    assert (layers_of(world, "a"), layers_of(world, "b")) == ((2, 4), (0, 2))


def test_what_is_on_the_disks_of_one_machine_alone_is_fetched_by_another() -> None:
    world = snapshot_due("a", "b", "c", "d")
    share_a_machine(world, "a", "b")
    share_a_machine(world, "c", "d")
    world.step()
    report_written(world)
    fetched = {node: sorted(buckets) for node, buckets in all_to_fetch(world).items() if buckets}
    assert fetched == {"a": [2, 3], "c": [0, 1]}  # the tied bucket is everywhere


class Counted(Mapping[str, Member]):
    """Members, and how often somebody looked at all of them."""

    def __init__(self, members: Mapping[str, Member]) -> None:
        self.members, self.passes = members, 0

    def __getitem__(self, node: str) -> Member:
        return self.members[node]

    def __iter__(self) -> Iterator[str]:
        self.passes += 1
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


def large_run(stages: int) -> tuple[State, Counted]:
    """A stage for each of as many nodes, and as many idle nodes. Links allow everything."""
    world = training("a", "b", **LONG)
    state, names = world.state, [f"n{number:03d}" for number in range(2 * stages)]
    ledger, trainers = state.ledger, names[:stages]
    assert ledger.described is not None
    workload = ledger.described.workload
    plan = from_routes(1, [Stage((at, at + 1), (name,), ()) for at, name in enumerate(trainers)], [(trainers, 4)])
    members = Counted(dict.fromkeys(names, ledger.members["a"]))
    link = ledger.reach.links["a"]["b"]
    ledger = altered(
        ledger,
        members=members,
        plan=plan,
        links={name: {other: link for other in names if other != name} for name in names},
        described=replace(ledger.described, workload=replace(workload, layers=workload.layers[:1] * stages)),
        held=tuple(((name, ledger.members["a"].incarnation),) for name in trainers),
        step_seconds=1000.0,
    )
    sessions = {name: replace(state.members.sessions["a"], node=name) for name in names}
    return replace(state, ledger=ledger, members=replace(state.members, sessions=sessions)), members


@pytest.mark.parametrize("decide", [wanted_standbys, commit_waits_for])
def test_a_decision_looks_at_all_members_a_few_times_however_many_stages_there_are(
    decide: Callable[[State], object],
) -> None:
    for stages in (5, 20):
        state, members = large_run(stages)
        decide(state)
        assert members.passes <= 5
