"""`[train] rounds`: a plan has rounds, and a plan that begins between two rounds may have other rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.config.changes import check_same, goes_on_with
from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.plan.adoption import rounds_of
from dtfm.coordinator.core.plan.asking import round_lengths
from dtfm.coordinator.core.state.planner import PlanChosen
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.recent_losses import WINDOW, Losses, Recent
from dtfm.protos.run_file.run_file import RunFile, parse_run
from dtfm.scheduler.formats.plan import unpack_plan
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds, spread
from tests.coordinator.core.test_steering import set_key
from tests.coordinator.script import LEASE, World, fresh_state, two_stages
from tests.coordinator.stores import checked

AUTO: dict[str, Any] = {"rounds": "auto", "steps": 60, "evaluate_every": 0, "warmup_steps": 0}


def asked(*, calm: bool = True, **changes: dict[str, Any]) -> World:
    """A world where a and b have joined, and the planner has got the first question. ``calm``: the log has losses from after the
    steep start."""
    state = fresh_state(**{"train": AUTO, "cluster": {"nodes": 2, "stages": "auto"}, **changes})
    if calm:
        flat = Losses(training=Recent(((1, 0.5),) * WINDOW))
        state = replace(state, ledger=replace(state.ledger, losses=flat))
    world = World(state)
    world.automatic_planning = False
    world.join("a", "b")
    return world


def answer(world: World, length: int, nodes: str = "ab") -> None:
    wanted = world.wanted.pop(0)
    world.feed(t.Planned(wanted.number, PlanChosen(two_stages([*nodes]), "so it pays", 1.0, 0.5, length)))


def begun(length: int) -> World:
    """The first step is in progress, with rounds of this length."""
    world = asked()
    answer(world, length)
    world.settle()
    world.wanted = []
    return world


def step(world: World) -> None:
    exchanges = world.state.rounds.exchanges(world.state.ledger.training.step + 1)
    for node in world.plan_in_force.nodes:
        world.vote(node, **({"samples": 0, "loss_sum": 0.0} if exchanges else {}))


def about_to_begin() -> World:
    """After step 6 a plan with rounds is adopted. c has joined, and has no part in the plan."""
    world = begun(0)
    for _ in range(5):
        step(world)
    world.join("c")
    answer(world, 10)
    step(world)
    world.apply()
    return world


def test_the_first_plan_comes_with_them_and_each_node_is_told_of_them() -> None:
    world = asked()
    assert world.wanted[0].lengths == (0, 10, 30)  # 100 are more than the run's steps
    answer(world, 10)
    for node in "ab":
        assert unpack_plan(world.last_to(node, "assignment").plan).rounds == Rounds(0, 60, 5)
    assert world.state.rounds == Rounds(0, 60, 5)
    assert not world.hung_up
    assert world.refolded().training.rounds == world.state.rounds


def test_without_gain_there_are_none() -> None:
    assert begun(0).state.rounds == NO_ROUNDS


def test_those_that_the_run_file_names_are_not_asked_about() -> None:
    assert asked(train={**AUTO, "rounds": 7}).wanted[0].lengths == (7,)


@pytest.mark.parametrize(
    ("network", "lengths"), [({}, (0, 100)), ({"exchange": "topk"}, (0,))], ids=["long ones alone", "none"]
)
def test_where_work_is_audited_each_begins_without_moments_so_that_short_ones_learn_less(
    network: dict[str, Any], lengths: tuple[int, ...]
) -> None:
    """What a sparse codec leaves out of other exchanges nobody can audit."""
    world = asked(train={**AUTO, "steps": 300}, trust={"audit_rate": 0.1}, network=network)
    assert world.wanted[0].lengths == lengths


def test_short_rounds_that_began_where_nothing_was_audited_do_not_go_on_where_work_is() -> None:
    """The planner is not asked about them. If the run file names their length, new ones begin at the next exchange."""
    world = World(fresh_state(train={**AUTO, "steps": 500}, cluster={"nodes": 2, "stages": "auto"}))
    world.automatic_planning = False
    world.join("a", "b")
    answer(world, 10)
    world.settle()
    run = world.state.run.model_copy(update={"trust": world.state.run.trust.model_copy(update={"audit_rate": 0.1})})
    world.state = replace(world.state, run=run)
    assert round_lengths(world.state, hasty=False) == (0, 100)
    named = run.model_copy(update={"train": run.train.model_copy(update={"rounds": 10})})
    chosen = PlanChosen(world.plan_in_force, "so it pays", 1.0, 0.5, 10)
    state = replace(world.state, run=named)
    assert rounds_of(state, chosen, at_rest=False) == state.rounds
    assert rounds_of(state, chosen, at_rest=True).restarts


def test_rounds_that_came_out_shorter_than_was_asked_for_are_those_that_were_asked_for() -> None:
    """Otherwise new rounds would begin whenever the planner answers."""
    world = World(
        fresh_state(train={**AUTO, "steps": 250}, trust={"audit_rate": 0.1}, cluster={"nodes": 2, "stages": "auto"})
    )
    world.automatic_planning = False
    world.join("a", "b")
    answer(world, 100)
    world.settle()
    assert world.state.rounds == Rounds(0, 250, 3, restarts=True)
    chosen = PlanChosen(world.plan_in_force, "so it pays", 1.0, 0.5, 100)
    assert rounds_of(world.state, chosen, at_rest=True) == world.state.rounds


def test_once_there_are_more_nodes_they_may_begin_and_samples_go_on_where_they_were() -> None:
    world = begun(0)
    for _ in range(9):
        step(world)
    world.join("c")
    assert world.wanted[-1].lengths == (0, 10, 30)
    answer(world, 10)
    step(world)
    assert world.last_to("a", "commit").pause
    world.apply()
    assert world.state.rounds == Rounds(10, 50, 5)
    assert world.plan_in_force.rounds.trained(20) == 19
    world.settle()
    for _ in range(50):
        step(world)
    assert world.state.ledger.training.trained(60) == 55
    assert world.events(ev.StepCommitted)[-1].exchange
    assert checked(world.records).findings == ()


def test_what_the_run_file_says_after_a_restart_counts_from_the_next_exchange_on() -> None:
    world = begun(10)
    step(world)
    run = world.state.run
    changed = run.model_copy(update={"train": run.train.model_copy(update={"rounds": 0})})
    world.state = replace(world.state, run=changed)
    world.lose("b")
    world.join("b2")
    world.feed(
        t.Planned(
            world.wanted[-1].number,
            PlanChosen(replace(two_stages(["a", "b2"]), rounds=world.state.rounds), "as before", 1.0, 0.5),
        )
    )
    world.wanted = []
    world.settle()
    assert world.plan_in_force.rounds.count
    step(world)
    assert [wanted.lengths for wanted in world.wanted] == [(0,)]


def test_a_plan_with_the_same_rounds_is_asked_for_once() -> None:
    world = begun(0)
    for _ in range(8):
        step(world)
    world.join("c")
    answer(world, 10, "abc")
    step(world)
    step(world)
    world.apply()
    world.wanted = []
    world.settle()
    step(world)
    assert not world.wanted


def test_a_plan_that_is_adopted_later_than_was_thought_has_rounds_all_the_same() -> None:
    world = begun(0)
    for _ in range(57):
        step(world)
    world.join("c")
    world.wanted = world.wanted[-1:]
    step(world)
    step(world)
    answer(world, 10)
    step(world)
    assert world.state.is_closing
    assert spread(10, -3, 60) == Rounds(60, 2, 1)


def test_a_run_of_whose_rounds_the_run_file_says_nothing_goes_on_as_it_began() -> None:
    exact = parse_run({"train": {"rounds": 0}}, "before").model_dump(mode="json")
    assert goes_on_with(RunFile(), exact, exact, 1).train.rounds == 0
    assert goes_on_with(parse_run({"train": {"rounds": "auto"}}, "now"), exact, exact, 1).train.rounds == "auto"


def test_another_length_in_the_run_file_counts_from_the_next_plan_on() -> None:
    world = begun(10)
    for rounds, lengths in (("auto", (11, 0, 10, 30)), (11, (11,)), (10, (11,)), (20, (20,)), (0, (0,))):
        run = world.state.run
        changed = run.model_copy(update={"train": run.train.model_copy(update={"rounds": rounds})})
        assert round_lengths(replace(world.state, run=changed), hasty=False) == lengths
        check_same(run, changed, 1)


def test_a_standby_that_has_all_of_the_state_takes_over_before_they_have_begun() -> None:
    world = about_to_begin()
    assert isinstance(world.state.phase, Switching)
    world.lose("a")
    world.wait(2 * LEASE, beating="bc")
    while world.wanted:
        answer(world, world.wanted[0].lengths[0], "cb")
    assert [event.node for event in world.events(ev.StandbyPromoted)] == ["c"]
    assert not world.events(ev.RolledBack)


def test_they_may_end_and_only_at_an_exchange() -> None:
    world = begun(10)
    world.join("c")
    assert world.wanted[-1].lengths == (11, 0, 10, 30)
    answer(world, 0, "abc")
    for number in range(1, 13):
        assert not (number > 1 and world.last_to("a", "commit").pause)
        step(world)
    assert world.last_to("a", "commit").pause
    world.apply()
    assert world.state.rounds == Rounds(12, before=1)
    assert unpack_plan(world.last_to("a", "assignment").plan).rounds == Rounds(12, before=1)


def test_between_two_exchanges_what_is_in_force_stays() -> None:
    world = begun(10)
    step(world)
    world.lose("b")
    world.join("b2")
    assert isinstance(world.state.phase, Gathering)
    assert world.state.ledger.training.step == 1
    assert {wanted.lengths for wanted in world.wanted} == {(11,)}


def test_going_back_to_before_they_began_undoes_them() -> None:
    world = about_to_begin()
    assert world.state.rounds == Rounds(6, 54, 5)
    ledger = ev.RolledBack(3, 6, "lost").apply(world.state.ledger)
    assert ledger.training.rounds == NO_ROUNDS
    assert ledger.training.trained(6) == 6


def test_a_log_that_begins_with_a_checkpoint_knows_how_many_exchanges_it_has_had() -> None:
    ledger = ev.RolledBack(40, 40, "this log begins", 3).apply(fresh_state().ledger)
    assert ledger.training.rounds == Rounds(40, before=3)
    assert (ledger.training.trained(0), ledger.training.trained(40)) == (0, 37)
    assert ev.RolledBack(0, 41, "lost").apply(ledger).training.rounds == NO_ROUNDS


def test_a_run_that_gets_more_steps_ends_with_the_first_exchange_after_them() -> None:
    world = begun(10)
    assert "70" in set_key(world, "train.steps", 70)
    for _ in range(72):
        assert isinstance(world.state.phase, Stepping)
        step(world)
    assert world.last_to("a", "commit").pause
    assert world.state.ledger.training.step == 72


def test_the_log_is_checked_against_the_plans_rounds() -> None:
    world = begun(10)
    world.log += [ev.StepCommitted(number, 1, 0.5, 112, 2.0, 1.0, 8, {}, {}) for number in range(1, 13)]
    assert "step 12 is no exchange, against the plan's rounds" in [
        each.sentence for each in checked(world.records).findings
    ]
