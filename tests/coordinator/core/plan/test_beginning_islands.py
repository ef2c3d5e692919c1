"""Islands that begin within a round: of nodes that join or return, and of the rest of an island that has lost a stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtfm.coordinator.core.phases import Pausing, Stepping
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.counted import Counted
from dtfm.scheduler.model.owed import Owed
from tests.coordinator.islands import each_alone
from tests.coordinator.script import LAYERS, World
from tests.coordinator.standbys import caught_up
from tests.coordinator.stores import checked

LENGTH = 5
ROUNDS = {"train": {"rounds": LENGTH, "steps": 2 * (LENGTH + 1), "evaluate_every": 0}}


def with_a_newcomer(**changes: dict[str, float]) -> World:
    """a and b are islands. Two steps of the first round are over, and c is to begin within it."""
    world = each_alone("a", "b", **ROUNDS, **changes)
    world.plans_within_rounds = True
    for _ in range(2):
        world.step()
    world.join("c")
    return world


def begun(world: World) -> World:
    """c has the weights of the last exchange, and its island begins after step 3."""
    caught_up(world, "c", step=0)
    world.step()
    world.apply()
    world.settle()
    return world


def adopted(world: World) -> ev.PlanAdopted:
    return world.events(ev.PlanAdopted)[-1]


def test_its_nodes_copy_the_weights_of_the_last_exchange_while_the_others_train() -> None:
    world = with_a_newcomer()
    asked = world.last_to("c", "standby")
    assert (asked.first_layer, asked.past_last_layer) == (0, LAYERS)
    world.step()
    assert isinstance(world.state.phase, Stepping)
    assert world.plan_in_force.nodes == ("a", "b")


def test_once_they_have_these_the_next_commit_pauses_and_the_island_begins() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    world.step()
    assert world.last_to("a", "commit").pause
    assert isinstance(world.state.phase, Pausing)
    world.apply()
    assert world.plan_in_force.nodes == ("a", "b", "c")
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert (world.state.phase.step, world.state.rounds.exchanges(4)) == (4, False)


def test_it_gets_the_moments_of_an_island_that_goes_on_and_counts_its_steps() -> None:
    world = begun(with_a_newcomer())
    assert adopted(world).moments == {2: 0}
    assignment = world.last_to("c", "assignment")
    assert assignment.takes_moments
    assert (assignment.island_began, assignment.trained_before) == (0, 0)
    assert [list(donors.nodes) for donors in assignment.donors] == [["a"]] * LAYERS
    assert not world.last_to("a", "assignment").takes_moments
    assert "with the weights of the last exchange and the moments of island 0" in adopted(world).narrate()
    assert world.state.ledger.training.moments == {}


def test_the_moments_come_from_where_they_come_fastest() -> None:
    world = with_a_newcomer()
    links = dict(world.state.ledger.reach.links)
    links["a"] = {**links["a"], "c": replace(links["a"]["c"], bandwidth=1e6)}
    reach = replace(world.state.ledger.reach, links=links)
    world.state = replace(world.state, ledger=replace(world.state.ledger, reach=reach))
    caught_up(world, "c", step=0)
    world.step()
    world.apply()
    assert adopted(world).moments == {2: 1}


def test_an_island_that_began_with_others_moments_counts_its_steps_from_when_these_began() -> None:
    """a's began at the first exchange, so that c's of the next round did."""
    world = with_a_newcomer()
    training = replace(world.state.ledger.training, began={0: 1, 1: 1})
    world.state = replace(world.state, ledger=replace(world.state.ledger, training=training))
    begun(world)
    assert world.last_to("c", "assignment").trained_before == 1
    assert world.state.ledger.training.began == {0: 1, 1: 1, 2: 1}


def test_where_moments_begin_at_zero_in_each_round_it_gets_none() -> None:
    world = begun(with_a_newcomer(trust={"audit_rate": 1.0}))
    assert adopted(world).moments == {}
    assignment = world.last_to("c", "assignment")
    assert not assignment.takes_moments
    assert (assignment.island_began, assignment.trained_before) == (3, 3)


def test_where_the_planner_finds_that_moments_take_too_long_they_are_zero() -> None:
    world = with_a_newcomer()
    world.plans_with_moments = False
    world.lose("c")
    world.join("c", incarnation=2)
    begun(world)
    assert adopted(world).moments == {}
    assert world.last_to("c", "assignment").island_began == 3
    assert world.state.ledger.training.began == {2: 3}


def test_in_the_exchange_it_counts_by_what_it_has_trained() -> None:
    """Of a step's four micro-batches a has three at first, and then two."""
    world = begun(with_a_newcomer())
    plan = world.plan_in_force
    assert unpack_plan(world.last_to("c", "assignment").plan).counted == Counted(3, ((0, 9), (1, 3)))
    assert plan.weights(LENGTH + 1) == {0: 13 / 20, 1: 5 / 20, 2: 2 / 20}
    assert plan.weights(2 * (LENGTH + 1)) == {0: 0.5, 1: 0.25, 2: 0.25}


def test_right_before_the_exchange_it_waits_for_that() -> None:
    world = with_a_newcomer()
    while world.state.ledger.training.step < LENGTH - 1:
        world.step()
    caught_up(world, "c", step=0)
    world.step()
    assert not world.state.rounds.at_rest(world.state.ledger.training.step)
    assert not world.last_to("a", "commit").pause


def test_a_plan_that_is_no_plan_for_within_the_round_waits_for_the_exchange() -> None:
    world = each_alone("a", "b", **ROUNDS)
    world.step()
    world.join("c")
    caught_up(world, "c", step=0)
    world.step()
    assert not world.last_to("a", "commit").pause


def test_who_leaves_before_it_begins_keeps_nobody() -> None:
    world = with_a_newcomer()
    world.lose("c")
    world.step()
    assert isinstance(world.state.phase, Stepping)
    assert world.plan_in_force.nodes == ("a", "b")


def test_a_plan_that_does_not_begin_as_the_newcomer_is_lost_is_carried_on_without_it() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    world.step()
    world.apply()
    world.lose("c")
    assert world.plan_in_force.nodes == ("a", "b")
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.state.ledger.training.moments == {}


def test_the_island_whose_moments_are_wanted_may_be_lost_in_the_switch() -> None:
    world = with_a_newcomer()
    caught_up(world, "c", step=0)
    world.step()
    world.apply()
    world.lose("a")
    assert "b" in world.plan_in_force.nodes
    assert adopted(world).moments in ({}, {2: 1})
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_restart_knows_the_same() -> None:
    world = begun(with_a_newcomer())
    world.step()
    assert world.refolded() == world.state.ledger


def test_the_log_proves_what_islands_count_and_whose_moments_there_were() -> None:
    world = begun(with_a_newcomer())
    assert checked(world.records).findings == ()
    right = adopted(world)
    wrong = [
        (replace(right, plan=replace(right.plan, counted=Counted(3, ((0, 8), (1, 4))))), "does not count what"),
        (replace(right, moments={2: 7}), "with the moments of 7, which has none"),
    ]
    for event, sentence in wrong:
        forged = [replace(record, event=event) if record.event == right else record for record in world.records]
        assert sentence in checked(forged).findings[0].sentence


def test_what_a_lost_island_had_trained_comes_again_and_does_not_count_for_its_node_that_is_back() -> None:
    """b is gone after step 2, and back as another process."""
    world = each_alone("a", "b", **ROUNDS)
    world.plans_within_rounds = True
    for _ in range(2):
        world.step()
    world.lose("b")
    world.settle()
    world.join("b", incarnation=2)
    caught_up(world, "b", step=0)
    world.step()
    world.apply()
    plan = world.plan_in_force
    assert plan.owed == Owed(2, ((3, 4), (7, 8)), 8)
    assert plan.nodes == ("a", "b")
    assert plan.counted == Counted(3, ((0, 10),))
    assert adopted(world).moments == {plan.island_of("b"): 0}
    world.settle()
    world.step()
    assert checked(world.records).findings == ()


def test_a_newcomer_does_not_wait_for_a_search_that_does_not_know_it() -> None:
    """The planner looks for islands of idle nodes first, and answers at once."""
    world = each_alone("a", "b", **ROUNDS)
    world.automatic_planning = False
    world.join("c")
    world.wanted.clear()
    world.join("d")
    assert len(world.wanted) == 1
    assert {node for node, _ in asked_about(world)} == {*"abcd"}
    world.step()
    assert len(world.wanted) == 1


def test_a_newcomer_does_not_wait_for_a_plan_that_is_adopted_at_the_exchange() -> None:
    world = each_alone("a", "b", "c", **ROUNDS)
    world.step()
    planner = world.planner
    world.planner = lambda _: planner("bc")
    world.hear("a", leaving=wire.Leaving(reason="its owner needs it"))
    assert world.state.planner.chosen is not None
    assert not world.state.planner.chosen.within_round
    world.automatic_planning = False
    world.join("d")
    assert {node for node, _ in asked_about(world)} == {*"bcd"}


def asked_about(world: World) -> frozenset[tuple[str, str]]:
    asked = world.state.planner.asked
    assert asked is not None
    return asked.question.nodes


@pytest.mark.parametrize("steps", [0, 2])
def test_the_planner_is_told_how_many_steps_are_left_to_train(steps: int) -> None:
    world = each_alone("a", "b", **ROUNDS)
    for _ in range(steps):
        world.step()
    world.automatic_planning = False
    world.join("c")
    assert world.wanted[-1].steps_left == LENGTH - 1 - steps
