"""`[train] batch_grows`: a step has as many batches of the run file as the plan has islands."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core.phases import Gathering
from dtfm.coordinator.core.plan.asking import ask, question_of
from dtfm.coordinator.core.transition import PlanWanted, Transition
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.store.record import Record
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.plan import Plan, Stage, from_routes, joined
from dtfm.scheduler.model.rounds import Rounds
from tests.coordinator.islands import ROUNDS, EachAlone, fresh
from tests.coordinator.script import LAYERS, World
from tests.coordinator.stores import checked

BATCH = 8  # samples
TRAIN = {
    **{"rounds": ROUNDS, "steps": 60, "evaluate_every": 0, "batch_grows": True},
    **{"warmup_steps": 0, "schedule": "linear", "learning_rate": 0.01},
}


class Grown(EachAlone):
    """Each node is an island with the micro-batches of a batch."""

    def _each_alone(self, nodes: Iterable[str]) -> Plan:
        known = super()._each_alone(nodes)
        alone = [
            from_routes(0, [Stage((0, LAYERS), island.nodes, (), island=island.stages[0].island)], [(island.nodes, 4)])
            for island in known.islands
        ]
        return joined(alone, 0)


def grown(*nodes: str, **changes: Any) -> World:
    """These nodes compute step 1, each as an island."""
    world = Grown(fresh(nodes, {"train": {**TRAIN, **changes}, "checkpoint": {"every": 0}}))
    world.join(*nodes)
    world.settle()
    world.automatic_standbys = False
    return world


def go_on(world: World) -> None:
    """One step or exchange. If the plan changes after it, the next plan begins."""
    last, generation = world.state.ledger.training.step, world.plan_in_force.generation
    exchanges = world.state.rounds.exchanges(last + 1)
    for node in world.plan_in_force.nodes:
        world.vote(node, **({"samples": 0, "loss_sum": 0.0} if exchanges else {}))
    assert world.state.ledger.training.step == last + 1
    if not world.state.is_closing and world.last_to(world.plan_in_force.nodes[0], "commit").pause:
        world.apply()
    if world.plan_in_force.generation != generation:
        world.settle()


def commits(world: World) -> list[ev.StepCommitted]:
    return world.events(ev.StepCommitted)


def test_a_step_has_as_many_batches_as_there_are_islands_and_the_run_as_many_fewer_steps() -> None:
    """A round of two steps and an exchange does seven of the run file's steps. Nodes are told how many steps there will be."""
    world = grown("a", "b", "c")
    assert world.state.rounds == Rounds(0, 26, 9, batches_each=3)
    assert unpack_plan(world.last_to("a", "assignment").plan).rounds == world.state.rounds
    while not world.state.is_closing:
        go_on(world)
    samples = [step.samples for step in commits(world)]
    assert samples == [0 if step.exchange else 3 * BATCH for step in commits(world)]
    assert 60 <= sum(samples) / BATCH + samples.count(0) < 60 + 3
    assert world.last_to("a", "commit").status.steps == len(samples) == 26
    assert checked(world.records).findings == ()


def test_the_rate_goes_by_the_samples_trained_and_follows_the_root_of_the_batch() -> None:
    """The schedule is a line from its highest rate to a tenth of it over 60 steps; the first step does three of these."""
    world = grown("a", "b", "c")
    for _ in range(4):
        go_on(world)
    done = [3, 6, 7, 10]
    told = [step.learning_rate for step in commits(world)]
    assert told == pytest.approx([0.01 * (0.1 + 0.9 * (1 - each / 60)) * math.sqrt(3) for each in done], rel=1e-12)


def test_evaluations_come_as_often_by_samples() -> None:
    world = grown("a", "b", "c", evaluate_every=14)
    evaluated = []
    for _ in range(13):
        go_on(world)
        evaluated += [world.state.ledger.training.step] * world.last_to("a", "commit").evaluate
        world.evaluate()
    progress = [world.state.rounds.progress(step) for step in evaluated]
    assert [each // 14 for each in progress] == [1, 2]


def test_a_newcomer_reads_from_the_samples_that_come_next() -> None:
    world = grown("a", "b", "c")
    for _ in range(4):
        go_on(world)
    assert [step.exchange for step in commits(world)].count(False) == 3
    world.join("d")
    assert world.last_to("d", "welcome").trained_samples == 3 * 3 * BATCH


def with_a_death() -> World:
    """c is gone after a step of the second round."""
    world = grown("a", "b", "c")
    while not world.state.rounds.at_rest(world.state.ledger.training.step) or not commits(world):
        go_on(world)
    go_on(world)
    world.lose("c")
    world.settle()
    return world


def test_within_a_round_the_batch_stays_whoever_dies_and_what_is_owed_comes_first() -> None:
    world = with_a_death()
    plan = world.plan_in_force
    assert (plan.nodes, plan.micro_batches, plan.rounds.batches_each) == (("a", "b"), 12, 3)
    trained = len([step for step in commits(world) if not step.exchange])
    assert plan.owed.since == 3 * trained
    assert plan.owed.again == ((12 * trained - 4, 12 * trained),)  # c's four of the round's only step
    assert checked(world.records).owed == BATCH
    go_on(world)
    assert (checked(world.records).owed, checked(world.records).findings) == (0, ())


def test_the_next_round_has_as_many_batches_as_there_are_islands_then_and_every_sample_counts_once() -> None:
    world = with_a_death()
    while not world.state.is_closing:
        go_on(world)
    plan = world.plan_in_force
    assert (plan.nodes, plan.micro_batches, plan.rounds.batches_each) == (("a", "b"), 8, 2)
    assert plan.rounds.batches(plan.rounds.since) * BATCH == sum(
        step.samples for step in commits(world) if step.step <= plan.rounds.since
    )
    result = checked(world.records)
    assert (result.findings, result.owed) == ((), 0)
    assert 60 <= result.samples / BATCH + sum(step.exchange for step in commits(world)) < 60 + 3
    assert world.refolded().training == world.state.ledger.training


def test_going_back_to_before_the_batch_changed_takes_the_samples_that_follow() -> None:
    world = with_a_death()
    while world.state.rounds.batches_each == 3:
        go_on(world)
    ledger, since = world.state.ledger, world.state.rounds.since
    back = ev.RolledBack(3, since, "lost").apply(ledger).training
    assert (back.batches(3), back.progress(3), back.rounds.batches_each) == (6, 7, 3)
    other = ev.RolledBack(40, 40, "this log begins", 13, ahead=54).apply(grown("a").state.ledger).training
    assert (other.trained(40), other.batches(40), other.progress(40)) == (27, 81, 94)


def test_a_log_that_trains_other_samples_than_it_says_is_found_out() -> None:
    world = with_a_death()
    while world.state.rounds.batches_each == 3:
        go_on(world)
    forgeries: dict[str, dict[str, Any]] = {
        "goes on after": {"ahead": 1},
        "counts 16 samples, the run says 8": {"batches_each": 1},
    }
    for finding, forged in forgeries.items():
        go_on(world)
        records = [
            Record(record.sequence, record.time, replace(event, plan=replace(event.plan, rounds=rounds)))
            if isinstance(event := record.event, ev.PlanAdopted)
            and event.plan.rounds.batches_each == 2
            and (rounds := replace(event.plan.rounds, **forged))
            else record
            for record in world.records
        ]
        assert finding in checked(records).findings[0].sentence


def test_the_planner_may_change_the_batch_between_two_rounds_alone() -> None:
    def asked(world: World) -> int | None:
        transition = Transition(world.state, world.now)
        ask(transition, question_of(world.state), hasty=True, tickets=())
        (wanted,) = (command for command in transition.commands if isinstance(command, PlanWanted))
        return wanted.batches

    world = grown("a", "b", "c")
    go_on(world)
    assert asked(world) is None  # the plan would begin at the next exchange
    world.state = replace(world.state, phase=Gathering(world.now, "a death"))
    assert asked(world) == 3
    assert asked(grown("a", "b", batch_grows=False)) == 1
