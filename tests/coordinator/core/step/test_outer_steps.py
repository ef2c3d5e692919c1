"""`train.outer_rate = "auto"`: islands try outer steps before an exchange, and the log and the commit name the choice."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core.step.outer_steps import MOST_OF_ROUND, NO_MOMENTUM, OUTER_STEPS, ends, to_try
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.protos.outer import OuterStep
from tests.coordinator.islands import ROUNDS, each_alone, islands
from tests.coordinator.script import World, restarted
from tests.coordinator.stores import checked

AUTO: dict[str, Any] = {
    "train": {"rounds": ROUNDS, "steps": 12, "evaluate_every": 0, "outer_rate": "auto", "warmup_steps": 0}
}
DILOCO = OUTER_STEPS[1]


def until_exchange(world: World) -> None:
    """Each step takes a second."""
    while not world.state.rounds.exchanges(world.state.ledger.training.step + 1):
        world.now += 1.0
        world.step()


def tell(world: World, node: str, *losses: float, seconds: float = 0.0) -> None:
    """The node votes on an exchange. ``losses``: by outer step, the loss of each micro-batch that it tries it on."""
    number = ends(world.plan_in_force).get(node, 0)
    looked = [loss for loss in losses for _ in range(number)]
    world.vote(node, samples=0, loss_sum=0.0, looked=looked, looking_seconds=seconds)


def asked_of(world: World, node: str) -> list[OuterStep]:
    """What the node was told to try in the next step."""
    kind = [kind for kind in world.kinds_to(node) if kind in ("begin", "commit")][-1]
    return [OuterStep(each.rate, each.momentum) for each in world.last_to(node, kind).look_at]


def exchanged(world: World, *losses: float, seconds: float = 0.0) -> ev.StepCommitted:
    """The next exchange, in which all say the same."""
    until_exchange(world)
    told = losses if asked_of(world, world.plan_in_force.nodes[0]) else ()
    for node in world.plan_in_force.nodes:
        tell(world, node, *told, seconds=seconds if told else 0.0)
    return world.events(ev.StepCommitted)[-1]


def test_nodes_try_them_in_the_exchange_alone_and_all_get_the_choice() -> None:
    world = each_alone("a", "b", "c", **AUTO)
    assert asked_of(world, "a") == []
    until_exchange(world)
    assert {node: asked_of(world, node) for node in "abc"} == {node: [*OUTER_STEPS] for node in "abc"}
    event = exchanged(world, 2.0, 1.9, 2.1)
    assert event.outer == DILOCO
    assert event.looked is not None
    assert event.looked.losses == {"0": (2.0, 1.9, 2.1), "1": (2.0, 1.9, 2.1), "2": (2.0, 1.9, 2.1)}
    assert "rate 0.7, momentum 0.9 has the least loss, 0.1000 below the last exchange's rate 1" in event.narrate()
    for node in "abc":
        assert world.last_to(node, "commit").outer == wire.OuterStep(rate=0.7, momentum=0.9)
    assert checked(world.records).findings == ()


def test_the_last_choice_comes_first_at_the_next() -> None:
    world = each_alone("a", "b", **AUTO)
    exchanged(world, 2.0, 1.9, 2.1)
    until_exchange(world)
    assert asked_of(world, "a") == [DILOCO, OUTER_STEPS[0], OUTER_STEPS[2]]
    assert exchanged(world, 2.0, 2.0, 2.0).outer == DILOCO


def test_in_a_pipeline_the_last_stage_says_the_losses() -> None:
    world = islands("a", "b", "c", **AUTO)
    assert ends(world.plan_in_force) == {"b": 3, "c": 1}
    until_exchange(world)
    tell(world, "b", 2.0, 1.0, 3.0)
    tell(world, "c", 2.0, 1.0, 3.0)
    tell(world, "a")
    assert world.events(ev.StepCommitted)[-1].outer == DILOCO


@pytest.mark.parametrize("looked", [(), (2.0,) * 5, (2.0,) * 7], ids=["none", "too few", "too many"])
def test_a_vote_without_what_was_asked_for_is_refused(looked: tuple[float, ...]) -> None:
    world = each_alone("a", "b", **AUTO)
    until_exchange(world)
    world.vote("b", samples=0, loss_sum=0.0, looked=looked)
    assert world.streams["b"] in world.hung_up


def test_no_island_chooses_for_the_others_whatever_it_says() -> None:
    for lie in (-1e300, math.inf, math.nan, 0.0):
        world = each_alone("a", "b", "c", **AUTO)
        until_exchange(world)
        tell(world, "a", 2.0, 2.1, 2.1)
        tell(world, "b", 2.0, 2.1, 2.1)
        tell(world, "c", 2.0, lie, 2.1)
        event = world.events(ev.StepCommitted)[-1]
        assert (event.step, event.outer) == (ROUNDS + 1, NO_MOMENTUM)
        assert event.looked is not None
        assert all(math.isfinite(loss) for told in event.looked.losses.values() for loss in told)


def test_two_islands_must_agree_on_another() -> None:
    world = each_alone("a", "b", **AUTO)
    until_exchange(world)
    tell(world, "a", 2.0, 2.01, 2.01)
    tell(world, "b", 2.0, 0.1, 2.01)
    assert world.events(ev.StepCommitted)[-1].outer == NO_MOMENTUM


def test_an_outer_step_that_diverges_is_not_chosen_and_stops_nothing() -> None:
    world = each_alone("a", "b", **AUTO)
    assert exchanged(world, 2.0, math.nan, 1.5).outer == OUTER_STEPS[2]


def test_nothing_is_tried_before_the_warm_up_is_over() -> None:
    world = each_alone("a", "b", train={**AUTO["train"], "warmup_steps": 4})
    until_exchange(world)
    assert asked_of(world, "a") == []
    assert exchanged(world).outer == NO_MOMENTUM
    until_exchange(world)
    assert asked_of(world, "a") == [*OUTER_STEPS]


@pytest.mark.parametrize("named", [{}, {"outer_rate": 0.7, "outer_momentum": 0.9}])
def test_numbers_in_the_run_file_are_applied_as_they_are(named: dict[str, float]) -> None:
    train = {key: value for key, value in AUTO["train"].items() if key != "outer_rate"}
    world = each_alone("a", "b", train={**train, **named})
    until_exchange(world)
    assert asked_of(world, "a") == []
    due = OuterStep(*named.values()) if named else NO_MOMENTUM
    event = exchanged(world)
    assert (event.outer, event.looked) == (due, None)
    assert world.last_to("a", "commit").outer == wire.OuterStep(rate=due.rate, momentum=due.momentum)


def test_where_trying_takes_much_of_a_round_only_some_exchanges_try() -> None:
    """And the last one of the run."""
    world, tried = each_alone("a", "b", train={**AUTO["train"], "steps": 30}), list[bool]()
    for number in range(10):
        event = exchanged(world, 2.0, 1.0, 3.0, seconds=2.5 * MOST_OF_ROUND * ROUNDS)
        tried.append(event.looked is not None)
        assert event.outer == DILOCO or number
    assert tried == [True, False, False, True, False, False, True, False, False, True]


def test_the_choice_stays_until_the_next_exchange_that_tries() -> None:
    world = each_alone("a", "b", **AUTO)
    assert exchanged(world, 2.0, 1.9, 2.1, seconds=1.0).outer == DILOCO
    event = exchanged(world)
    assert (event.outer, event.looked) == (DILOCO, None)


def test_an_exchange_that_is_given_up_tries_again_and_a_death_leaves_the_choice_to_the_others() -> None:
    world = each_alone("a", "b", "c", **AUTO)
    until_exchange(world)
    tell(world, "a", 2.0, 1.9, 2.1)
    world.lose("c")
    world.settle()
    assert asked_of(world, "a") == [*OUTER_STEPS]
    for node in "ab":
        tell(world, node, 2.0, 1.9, 2.1)
    event = world.events(ev.StepCommitted)[-1]
    assert event.exchange
    assert event.outer == DILOCO


def test_a_restarted_coordinator_knows_the_choice_and_tells_who_has_not_heard_of_it() -> None:
    world = each_alone("a", "b", **AUTO)
    exchanged(world, 2.0, 1.9, 2.1)
    again = restarted(world, **AUTO, cluster={"stages": "auto"})
    assert again.state.ledger.training.outer == DILOCO
    again.join("a", "b")
    assert again.last_to("a", "assignment").last_commit.outer == wire.OuterStep(rate=0.7, momentum=0.9)


def test_a_log_of_before_says_it_by_its_run_file() -> None:
    world = each_alone("a", "b", train={**AUTO["train"], "outer_rate": 0.7, "outer_momentum": 0.9})
    until_exchange(world)
    event = ev.StepCommitted(3, 1, 1.0, 0, 1.0, 1.0, 0, {}, {}, exchange=True)
    assert event.apply(world.state.ledger).training.outer == DILOCO


def test_after_going_back_nothing_is_known_of_the_last_choice() -> None:
    world = each_alone("a", "b", **AUTO)
    exchanged(world, 2.0, 1.9, 2.1)
    ledger = ev.RolledBack(0, 3, "lost").apply(world.state.ledger)
    assert to_try(replace(world.state, ledger=ledger), 3) == OUTER_STEPS


def test_check_finds_a_choice_that_the_losses_do_not_give() -> None:
    world = each_alone("a", "b", **AUTO)
    event = exchanged(world, 2.0, 1.9, 2.1)
    world.log[world.log.index(event)] = replace(event, outer=NO_MOMENTUM)
    assert [each.sentence for each in checked(world.records).findings] == [
        "step 3 applied rate 1, momentum 0, but rate 0.7, momentum 0.9 had the least loss"
    ]
