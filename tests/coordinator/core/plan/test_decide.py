"""The decision about the plan, and its reason: `decide` of `plan/replanning.py`, on the states of scripted worlds."""

from __future__ import annotations

from dataclasses import replace

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.phases import Gathering, Pausing, Stepping
from dtfm.coordinator.core.plan.replanning import Ask, Decision, decide
from dtfm.coordinator.core.plan.waiting import Wait, WaitReason
from dtfm.coordinator.core.state.state import State
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from tests.coordinator.script import LEASE, LONG, World, fresh_state, training
from tests.coordinator.standbys import report, with_standbys


def decided(world: World, *, asked_for: bool = False) -> Decision:
    return decide(world.state, world.now, asked_for=asked_for)


def reason(world: World, *, asked_for: bool = False) -> WaitReason:
    decision = decided(world, asked_for=asked_for)
    assert isinstance(decision, Wait), decision
    assert decision.sentence
    return decision.reason


def unanswered(*nodes: str) -> World:
    """A world with these ready nodes, and a planner that does not answer."""
    world = World(fresh_state(**LONG))
    world.automatic_planning = False
    world.join(*nodes)
    return world


def test_a_run_with_too_few_nodes_waits() -> None:
    assert reason(unanswered("a")) is WaitReason.TOO_FEW_NODES


def test_with_enough_nodes_the_planner_is_asked_once() -> None:
    world = unanswered("a", "b")
    assert reason(world) is WaitReason.PLANNING
    unasked = replace(world.state, planner=replace(world.state.planner, asked=None))
    decision = decide(unasked, world.now)
    assert isinstance(decision, Ask)
    assert {node for node, _ in decision.question.nodes} == {"a", "b"}
    assert not decision.hasty  # nothing has trained yet: there is time to look for a good plan


def test_a_change_of_nodes_is_a_new_question_to_the_planner() -> None:
    world = unanswered("a", "b")
    first = world.state.planner.asked
    world.join("c")
    second = world.state.planner.asked
    assert first is not None
    assert second is not None
    assert second.number == first.number + 1


def test_the_planner_is_not_asked_again_about_the_same_nodes_unless_somebody_asks() -> None:
    world = unanswered("a", "b")
    world.planner = lambda _: "too little memory"
    world.plan()
    assert reason(world) is WaitReason.NO_PLAN
    assert isinstance(decided(world, asked_for=True), Ask)


def test_asking_for_a_plan_while_there_is_none_waits_for_the_planner() -> None:
    world = unanswered("a", "b")
    world.planner = lambda _: "too little memory"
    world.plan()
    world.feed(t.Asked(7, wire.PlanNowRequest(), "operator", 0.0))
    assert world.planned_now == {}
    world.planner = lambda ids: World().planner(ids)
    world.plan()
    assert [(ticket, reply.changed) for ticket, reply in world.planned_now.items()] == [(7, True)]


def test_a_node_that_keeps_changing_its_speed_does_not_keep_the_planner_from_answering() -> None:
    world = unanswered("a", "b")
    asked = world.state.planner.number
    for flops in (1e13, 1e11):
        world.state = replace(world.state, ledger=_after(world.state, ev.DeviceDrifted("a", flops, "why")))
        world.wait(LEASE / 4, beating=["a", "b"])
    assert world.state.planner.number == asked
    world.plan()
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.state.planner.number == asked + 1  # with the speeds of now


def test_during_training_the_planner_is_asked_only_after_a_change() -> None:
    world = training(**LONG)
    assert reason(world) is WaitReason.PLAN_IS_BEST
    assert isinstance(decided(world, asked_for=True), Ask)
    drifted = ev.DeviceDrifted("a", 1e9, "in training it is 100.0 times slower than planned")
    world.automatic_planning = False
    world.state = replace(world.state, ledger=_after(world.state, drifted))
    assert isinstance(decided(world), Ask)


def test_the_planner_is_not_asked_when_an_idle_node_leaves() -> None:
    world = training("a", "b", **LONG)
    world.stick_to_plan()
    world.join("c")
    asked = world.state.planner.number
    world.lose("c")
    assert world.state.planner.number == asked
    assert reason(world) is WaitReason.PLAN_IS_BEST


def test_nothing_is_decided_while_a_plan_is_adopted_or_training_pauses() -> None:
    world = World(fresh_state(**LONG))
    world.join("a", "b")
    assert reason(world) is WaitReason.SWITCHING
    world.settle()
    world.join("c")
    world.step()
    assert isinstance(world.state.phase, Pausing)
    assert reason(world) is WaitReason.SWITCHING


def test_when_every_node_wants_to_leave_no_plan_is_possible() -> None:
    world = training("a", "b", **LONG)
    for node in "ab":
        world.hear(node, leaving=wire.Leaving(reason="why"))
    assert reason(world) is WaitReason.EVERYBODY_LEAVES


def test_when_a_replica_is_lost_the_others_carry_the_plan_on() -> None:
    world = training("a", "b", "c", **LONG)
    world.step()
    lost = next(iter(stage.replicas[0] for stage in world.plan_in_force.stages if len(stage.replicas) > 1))
    gathering = _gathering_without(world, lost)
    decision = decide(gathering, world.now)
    assert isinstance(decision, Ask)
    assert decision.hasty, "the planner carries the plan on, if it can"
    assert lost not in {node for node, _ in decision.question.nodes}
    world.automatic_planning = False
    world.lose(lost)
    adopted = world.events(ev.PlanAdopted)[-1]
    assert adopted.reason.endswith(f"the same stages without {lost}")
    assert lost not in adopted.plan.nodes


def test_a_node_that_may_return_with_the_only_state_of_a_stage_is_waited_for() -> None:
    world = training("a", "b", **LONG)
    world.automatic_standbys = False
    world.now += 5.0
    world.step()
    world.lose("a")
    assert isinstance(world.state.phase, Gathering)
    if reason(world) is WaitReason.TOO_FEW_NODES:  # two stages are pinned
        world.join("c")
    assert reason(world) is WaitReason.NODES_MAY_RETURN
    world.now += 10 * LEASE
    assert not isinstance(decided(world), Wait)


def test_a_standby_of_lost_state_reports_before_training_goes_back() -> None:
    world = with_standbys("c")
    for node in "ab":
        world.vote(node)
    world.now += LEASE
    world.feed(t.TimePassed())
    assert world.state.ledger.training.step == 1  # c has not reported it
    world.hear("a", goodbye=wire.Goodbye(reason="why"))
    assert reason(world) is WaitReason.STANDBYS_MAY_REPORT
    report(world, "c", step=1, voted=0)
    assert world.plan_in_force.nodes == ("c", "b")
    assert world.events(ev.RolledBack) == []


def _after(state: State, event: ev.Event) -> Ledger:
    return event.apply(state.ledger)


def _gathering_without(world: World, node: str) -> State:
    ledger = _after(world.state, ev.NodeLeft(node, "why"))
    members = world.state.members.without_session(node)
    phase = Gathering(world.now, "why it stands still")
    return replace(world.state, ledger=ledger, members=members, phase=phase)
