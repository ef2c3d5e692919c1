"""How nodes become a new island: they copy what all islands share, and enter at the first exchange whose sum they have."""

from __future__ import annotations

from collections.abc import Iterable

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.transition import TimePassed
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from tests.coordinator.script import LAYERS, World, training, two_stages
from tests.coordinator.standbys import caught_up, report

ROUNDS = 2


def first_and_others(nodes: Iterable[str]) -> Plan:
    """Two nodes are two stages of one island. A third one is an island of its own."""
    first, *others = sorted(nodes)
    if len(others) < 2:
        return two_stages([first, *others])
    alone = from_routes(0, [Stage((0, LAYERS), (others[1],), (), island=1)], [((others[1],), 2)])
    return joined([two_stages([first, others[0]], 2), alone], 0)


def with_a_newcomer() -> World:
    """Step 1 of a round is over, and c has been asked to copy for an island of its own."""
    rounds = {"rounds": ROUNDS, "steps": 12, "evaluate_every": 0}
    world = training("a", "b", train=rounds, cluster={"stages": "auto"})
    world.planner, world.automatic_standbys = first_and_others, False
    world.step()
    world.join("c")
    return world


def exchange(world: World) -> None:
    """The steps until the next exchange, and that one's votes."""
    while world.state.ledger.training.step % (ROUNDS + 1) != ROUNDS:
        world.step()
    for node in world.plan_in_force.nodes:
        world.vote(node, samples=0, loss_sum=0.0)


def pass_patience(world: World) -> None:
    """The time for which a commit waits passes."""
    assert world.state.wakes_at is not None
    world.now = world.state.wakes_at
    world.feed(TimePassed())


def test_it_copies_all_layers_from_whoever_has_them() -> None:
    asked = with_a_newcomer().last_to("c", "standby")
    assert (asked.first_layer, asked.past_last_layer) == (0, LAYERS)
    assert [list(donors.nodes) for donors in asked.donors] == [["a"], ["a"], ["b"], ["b"]]


def test_the_others_go_on_through_exchanges_while_it_copies() -> None:
    world = with_a_newcomer()
    for step in (3, 6):
        exchange(world)
        pass_patience(world)
        assert world.state.ledger.training.step == step
        assert isinstance(world.state.phase, Stepping)
        assert world.plan_in_force.nodes == ("a", "b")


def test_it_enters_with_the_exchange_whose_sum_it_has() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    exchange(world)
    assert world.state.ledger.training.step == 2  # the commit waits for it
    report(world, "c", step=0)
    assert world.state.ledger.training.step == 3
    assert world.last_to("a", "commit").pause
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert world.state.ledger.training.began == {1: 3}
    assert world.last_to("c", "assignment").island_began == 3
    assert world.last_to("a", "assignment").island_began == 0


def test_without_the_sum_it_waits_for_the_next_exchange() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    exchange(world)
    pass_patience(world)
    assert world.state.ledger.training.step == 3
    assert not world.last_to("a", "commit").pause
    caught_up(world, "c", step=3)
    exchange(world)
    assert world.state.ledger.training.step == 5
    report(world, "c", step=3)
    assert world.state.ledger.training.step == 6
    assert world.last_to("a", "commit").pause
