"""Pairs in dispute are kept apart as long as their suspicions last, whatever becomes of their links."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core.plan.planner_input import measured_cluster
from dtfm.coordinator.core.trust.disputes import disputes, kept_apart
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.ledger import fold
from tests.coordinator.audit_scripts import all_find_it_right_in_one_step, answer_all, auditing, trains_again
from tests.coordinator.script import World


def contradicted() -> World:
    """a stands against b and c, and is out of the plan."""
    world = auditing("a", "b", "c", mode="open")
    answer_all(world, of="a", addends=2.0)
    assert disputes(world.state.ledger) == {("a", "b"), ("a", "c")}
    return world


def bandwidth(world: World, source: str, destination: str) -> float:
    cluster = measured_cluster(world.state.ledger, "abc")
    return float(cluster.bandwidth["abc".index(source), "abc".index(destination)])


def test_plans_see_no_link_between_two_in_dispute() -> None:
    world = contradicted()
    assert [bandwidth(world, *pair) for pair in ("ab", "ba", "ac", "ca")] == [0] * 4
    assert bandwidth(world, "b", "c") > 0


def test_a_dispute_outlasts_new_measurements_of_the_link_and_ends_with_its_suspicions() -> None:
    world = contradicted()
    world.planner = lambda _: auditing("b", "c").plan_in_force
    while (commits := world.state.ledger.trust.commits) < Charge.AUDIT.commits:
        assert kept_apart(world.state.ledger) == {("a", "b"), ("a", "c")}, f"after {commits} commits"
        trains_again(world)
        world.wait(world.state.lease, beating="abc")
        assert "probe" not in world.kinds_to("a")[-20:], "nobody measures a link that works"
        if commits == 5:
            again = ev.LinksMeasured("a", tuple(ev.Link(a, b, 0.001, 1e9) for a, b in ("ab", "ba", "ac", "ca")))
            world.state = replace(world.state, ledger=fold([again], world.state.ledger))
        all_find_it_right_in_one_step(world)
        assert world.state.ledger.trust.commits == commits + 1
    assert kept_apart(world.state.ledger) == frozenset()
