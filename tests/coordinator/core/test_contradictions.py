"""What members say against each other, or against the plan, is settled against one of them, and the run goes on: the parts of
the core that use `core/trust`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core import transition as t
from dtfm.coordinator.core.state import ATTEMPTS, Gathering, Pausing, Stepping, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES, PATIENCE_LEASES, STEP_LEASES, step_patience
from dtfm.coordinator.core.trust.verdict import WITHOUT_ONE_CAUSE
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.charges import Charge
from dtfm.protos import control_pb2 as wire
from tests.coordinator.answers import DIGEST, FILE_DIGEST, snapshot_parts
from tests.coordinator.script import LEASE, LONG, World, fresh_state, refusal_of, restarted, training

LIE = b"something else".ljust(32)


def verdicts(world: World) -> list[tuple[str, Charge, bool]]:
    return [(why.node, why.charge, why.undecided) for why in world.events(ev.NodeQuarantined)]


def of_strangers(*nodes: str, stages: int = 2, **changes: dict[str, Any]) -> World:
    """As `training`, in mode "open", each with a key of its own."""
    cluster = {"nodes": len(nodes), "stages": stages}
    world = World(fresh_state(**{**LONG, **changes}, trust={"mode": "open"}, cluster=cluster))
    for node in nodes:
        world.belong_together(node, key=f"key of {node}")
    world.join(*nodes)
    world.settle()
    return world


def goes_on_without(world: World, *nodes: str) -> None:
    """These nodes are gone, and the others commit the next step."""
    assert world.exit_code is None
    assert not set(nodes) & world.state.members.sessions.keys()
    if isinstance(world.state.phase, Pausing):
        world.apply()
    if isinstance(world.state.phase, Switching):
        world.settle()
    step = world.state.ledger.step
    world.step()
    assert world.state.ledger.step == step + 1
    assert world.refolded() == world.state.ledger


def test_a_quarantined_node_is_told_why_and_who_can_let_it_come_back() -> None:
    world = training("a", "b", "c", **LONG)
    world.vote("c", samples=7)
    refusal = refusal_of(world, world.streams["c"])
    assert refusal.reason == wire.QUARANTINED
    assert "SAMPLE_COUNT: in step 1 it counted 7 samples; its part in plan 1 is 8" in refusal.sentence
    assert "dtfm-coordinator forgive c" in refusal.sentence


@pytest.mark.parametrize("samples", [0, 7, 2**32 - 1])
def test_who_counts_other_samples_than_its_own_is_quarantined(samples: int) -> None:
    world = training("a", "b", "c", **LONG)
    world.vote("c", samples=samples)
    assert verdicts(world) == [("c", Charge.SAMPLE_COUNT, False)]
    goes_on_without(world, "c")


def test_who_counts_samples_without_being_on_the_last_stage_is_quarantined() -> None:
    world = training("a", "b", "c", **LONG)
    world.vote("a", samples=8)
    assert verdicts(world) == [("a", Charge.SAMPLE_COUNT, False)]
    goes_on_without(world, "a")


def of_three_replicas(**changes: dict[str, object]) -> World:
    """a, b and c train the first stage, d and e the second."""
    return training(*"abcde", **{**LONG, **changes})


def test_the_replica_whose_state_differs_from_that_of_two_others_is_quarantined() -> None:
    world = of_three_replicas()
    world.step()
    for node in "abcde":
        world.vote(node, **({"state_digest": LIE} if node == "b" else {}))
    mismatch = world.events(ev.DigestMismatch)[-1]
    assert (mismatch.step, mismatch.stage, set(mismatch.digests)) == (2, 0, set("abc"))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]
    went = world.events(ev.NodeQuarantined)[-1]
    assert went.against == ("a", "c"), "one of them may have sent it another result"
    assert not went.weighed, "their number has decided, so neither has used up its standing"
    assert world.events(ev.RolledBack) == []
    goes_on_without(world, "b")


def test_the_names_of_one_key_do_not_outvote_another() -> None:
    world = of_three_replicas()
    world.belong_together("b", "c")
    world.step()
    for node in "abcde":
        world.vote(node, **({"state_digest": LIE} if node in "bc" else {}))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]
    assert set(world.state.members.sessions) == set("ade")


def test_between_two_replicas_the_one_of_less_standing_is_suspended_and_all_go_back_to_what_both_agreed_on() -> None:
    world = training("a", "b", "c", train=LONG["train"], checkpoint={"every": 2})
    for _ in range(4):
        world.step()
        if world.state.ledger.step % 2 == 0:
            world.save()
    for node in "abc":
        world.vote(node, **({"state_digest": LIE} if node == "a" else {}))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]  # it came after a
    suspended = world.events(ev.NodeQuarantined)[-1]
    assert (suspended.against, suspended.weighed) == (("a",), True)
    assert "it may not be at fault: `dtfm-coordinator forgive b`" in suspended.reason
    back = world.events(ev.RolledBack)[-1]
    assert (back.from_step, back.step) == (4, 2), "that of step 4 is of the state on which they differ"
    assert world.state.ledger.checkpoints.keys() == {2}
    goes_on_without(world, "b")


def test_a_different_gradient_is_settled_too_and_nobody_goes_back() -> None:
    world = of_three_replicas()
    for node in "abcde":
        world.vote(node, squared_gradient_norm=2.1 if node == "c" else 2.0)
    assert verdicts(world) == [("c", Charge.GRADIENT_NORM, True)]
    goes_on_without(world, "c")


def test_gradients_of_other_kinds_of_devices_may_differ_in_the_last_digits() -> None:
    world = of_three_replicas()
    for node in "abcde":
        world.vote(node, squared_gradient_norm=2.0001 if node == "c" else 2.0)
    assert world.state.ledger.step == 1


def test_a_digest_after_the_last_step_is_settled_too() -> None:
    world = of_three_replicas(train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    world.evaluate()
    world.save()
    for node in "abcde":
        digest = LIE if node == "b" else DIGEST
        world.hear(node, applied=wire.Applied(generation=1, step=1, state_digest=digest))
    assert verdicts(world) == [("b", Charge.DIGEST, True)]
    assert world.exit_code == 0  # its checkpoint is whole


def test_three_nan_votes_of_one_alone_are_its_own_fault() -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        assert isinstance(world.state.phase, Stepping)
        world.vote("b", loss_sum=math.nan)
        world.settle()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True)]
    assert "Lower train.learning_rate" in world.events(ev.NodeQuarantined)[-1].reason
    goes_on_without(world, "b")


def test_losses_whose_sum_overflows_are_no_different() -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        world.vote("c", loss_sum=1.7e308)
        world.settle()
    assert verdicts(world) == [("c", Charge.NON_FINITE, True)]
    assert world.exit_code is None


def vote_nan(world: World, spoiler: str) -> None:
    """All attempts at the next step, as long as they fail: every node of the plan votes NaN, if the ``spoiler`` is among them (or
    is empty). The second vote comes too late to abort the step, and counts all the same."""
    for _ in range(20):
        if isinstance(world.state.phase, Switching):
            world.settle()
        if world.exit_code is not None or not isinstance(world.state.phase, Stepping):
            return
        plan = world.plan_in_force
        if spoiler and spoiler not in plan.nodes:
            return
        for node in plan.nodes:
            world.vote(node, squared_gradient_norm=math.nan, generation=plan.generation)
    raise AssertionError("it goes on for ever")


def test_what_two_parties_report_is_tried_without_each_and_then_it_is_the_runs_own_fault() -> None:
    world = training("a", "b", "c", **LONG)
    vote_nan(world, spoiler="")
    assert verdicts(world) == []
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("c",), ("b",), ("a",)]
    failed = world.events(ev.RunFailed)[-1].reason
    assert "3 attempts in a row failed at step 1: NON_FINITE" in failed
    assert "Lower train.learning_rate" in failed
    assert world.refolded() == world.state.ledger


@pytest.mark.parametrize("spoiler", ["a", "b", "c"])
def test_who_makes_all_others_report_nan_is_found_by_trying_without_it(spoiler: str) -> None:
    world = training("a", "b", "c", "d", **LONG)
    world.step()
    vote_nan(world, spoiler)
    assert verdicts(world) == []
    assert spoiler in world.state.ledger.benched
    world.step()
    assert verdicts(world) == [(spoiler, Charge.SPOILS, True)]
    assert set(world.events(ev.NodeQuarantined)[-1].against) >= {"abcd".replace(spoiler, "")[0]}
    assert set(world.state.members.sessions) == set("abcd") - {spoiler}
    assert not world.state.ledger.benched
    goes_on_without(world, spoiler)


def test_who_reported_what_another_did_is_forgiven() -> None:
    world = training("a", "b", "c", "d", **LONG)
    for node in ("b", "b", "b", "c", "c"):
        world.fail_step(node, wire.NON_FINITE)
        world.settle()
    for _ in range(4):
        plan = set(world.plan_in_force.nodes)
        if "a" in plan:
            world.fail_step(min(plan - {"a"}), wire.NON_FINITE)
            world.settle()
    world.step()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True), ("a", Charge.SPOILS, True)]
    assert [forgiven.node for forgiven in world.events(ev.NodeForgiven)] == ["b"]
    world.join("b", incarnation=2)


def test_if_no_plan_is_possible_without_anybody_it_waits_for_more_strangers_and_accuses_nobody() -> None:
    world = of_strangers("a", "b")
    vote_nan(world, spoiler="b")
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("b",), ("a",)]
    assert (world.exit_code, verdicts(world)) == (None, [])
    assert "to find who is at fault, the step is tried without a: 1 of 2 nodes are ready" in (
        world.events(ev.Waiting)[-1].reason
    )
    world.join("c")
    vote_nan(world, spoiler="b")
    world.step()
    assert verdicts(world) == [("b", Charge.SPOILS, True)]
    assert world.exit_code is None


def test_once_the_step_has_failed_without_each_of_them_one_goes_though_some_were_impossible_before() -> None:
    world = of_strangers("a", "b")
    vote_nan(world, spoiler="")
    world.join("c")
    vote_nan(world, spoiler="")
    assert world.exit_code is None
    assert verdicts(world)[0] == ("c", Charge.SPOILS, True)


@pytest.mark.parametrize("both", [True, False], ids=["both", "one"])
def test_two_who_know_each_other_are_told_at_once_when_their_loss_is_nan(both: bool) -> None:
    """Whether both have said so, or the one who is first to know."""
    world = training("a", "b", **LONG)
    if both:
        vote_nan(world, spoiler="")
    else:
        fail_in_turn(world, *[("b", wire.NON_FINITE)] * ATTEMPTS)
    assert world.exit_code == 1
    assert "Lower train.learning_rate" in world.events(ev.RunFailed)[-1].reason
    assert world.state.ledger.quarantined == {}
    assert world.refolded() == world.state.ledger


def test_it_fails_only_once_it_is_tried_without_each_without_whom_it_can_be() -> None:
    world = training("a", "b", "c", **LONG)
    needs(world, 2, "c")
    vote_nan(world, spoiler="")
    assert [benched.nodes for benched in world.events(ev.NodesBenched)] == [("c",), ("b",), ("a",), ("c",)]
    assert world.state.ledger.failed_without == ("b", "a")
    assert world.exit_code == 1


def test_it_does_not_fail_while_somebody_may_return() -> None:
    world = training(*"abc", **LONG)
    for node in "abab":
        world.fail_step(node, wire.NON_FINITE)
        if isinstance(world.state.phase, Switching):
            world.settle()
    world.lose("a")
    assert (world.state.ledger.benched, world.exit_code) == (("b",), None)
    world.wait(GRACE_LEASES * LEASE / 2, beating="bc")
    assert world.exit_code is None
    world.wait(GRACE_LEASES * LEASE, beating="bc")
    assert world.exit_code == 1


def needs(world: World, least: int, *nodes: str) -> None:
    """From now on no plan is possible with fewer nodes than ``least``, or without these."""
    able = world.planner
    world.planner = lambda ids: able(ids) if len(set(ids)) >= least and set(nodes) <= set(ids) else "too few"


def test_whom_no_plan_can_do_without_is_not_cleared_by_that() -> None:
    world = of_strangers("a", "b", "c")
    needs(world, 2, "c")
    vote_nan(world, spoiler="c")
    assert world.state.ledger.benched == ("c",)
    assert (world.exit_code, verdicts(world)) == (None, [])


def test_another_node_lets_it_be_tried_without_whom_it_could_not_be_before() -> None:
    world = of_strangers("a", "b", "c")
    needs(world, 3, "a")
    vote_nan(world, spoiler="c")
    assert world.state.ledger.benched == ("a",)
    world.join("d")
    vote_nan(world, spoiler="c")
    world.step()
    assert verdicts(world) == [("c", Charge.SPOILS, True)]


def test_a_trial_during_which_a_node_leaves_does_not_count() -> None:
    world = training(*"abcd", **LONG)
    world.step()
    for _ in range(2):
        for node in world.plan_in_force.nodes[:2]:
            world.fail_step(node, wire.NON_FINITE)
            world.settle()
    benched = world.state.ledger.benched
    assert len(benched) == 1
    world.lose(min(set("abcd") - set(benched)))
    assert world.state.ledger.benched == benched
    assert world.state.ledger.failed_without == ()


def test_when_the_run_is_at_fault_who_was_suspended_for_its_nan_is_forgiven() -> None:
    world = training(*"abcd", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("b", wire.NON_FINITE)
        world.settle()
    assert verdicts(world) == [("b", Charge.NON_FINITE, True)]
    vote_nan(world, spoiler="")
    assert world.exit_code == 1
    assert [forgiven.node for forgiven in world.events(ev.NodeForgiven)] == ["b"]


def fail_in_turn(world: World, *said: tuple[str, wire.StepProblem]) -> None:
    for node, problem in said:
        assert world.exit_code is None
        world.fail_step(node, problem)
        if isinstance(world.state.phase, Switching):
            world.settle()


def test_only_if_two_parties_lack_memory_the_run_ends_for_that() -> None:
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.NON_FINITE), ("b", wire.OUT_OF_MEMORY)] * 2)
    assert (world.exit_code, len(world.state.ledger.benched)) == (None, 1)
    world = training(*"abcd", **LONG)
    fail_in_turn(world, *[("a", wire.OUT_OF_MEMORY), ("b", wire.OUT_OF_MEMORY)] * 2)
    assert world.exit_code == 1
    assert "Lower train.micro_batch" in world.events(ev.RunFailed)[-1].reason


def test_two_strangers_who_lack_memory_are_suspended_and_the_others_go_on() -> None:
    world = of_strangers(*"abcdkl")
    fail_in_turn(world, *[("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY)] * 2)
    assert verdicts(world) == [("k", Charge.OUT_OF_MEMORY, True), ("l", Charge.OUT_OF_MEMORY, True)]
    goes_on_without(world, "k", "l")


def test_what_two_said_before_they_were_suspended_for_it_counts_against_nobody_else() -> None:
    world = of_strangers(*"abcdkl")
    fail_in_turn(world, *[("k", wire.OUT_OF_MEMORY), ("l", wire.OUT_OF_MEMORY)] * 2)
    world.settle()
    fail_in_turn(world, ("a", wire.OUT_OF_MEMORY), ("a", wire.OUT_OF_MEMORY))
    assert world.state.ledger.benched == ()
    goes_on_without(world, "k", "l")


def test_two_strangers_who_cannot_take_their_parts_are_suspended_and_the_others_go_on() -> None:
    world = of_strangers(*"abcdkl", stages=1)
    world.step()
    world.fail_step("a", wire.INTERNAL)
    for node in "klkl":
        world.fail_plan(node)
    assert verdicts(world) == [("k", Charge.PLAN_FAILED, True), ("l", Charge.PLAN_FAILED, True)]
    assert world.state.ledger.plan_failures == ()
    goes_on_without(world, "k", "l")


@pytest.mark.parametrize("fault", ["memory", "plans"])
def test_where_it_is_too_much_for_all_strangers_the_run_waits_and_says_so(fault: str) -> None:
    world = of_strangers(*"abcd", stages=1)
    while world.state.ledger.ready:
        if fault == "plans" and isinstance(world.state.phase, Stepping):
            world.fail_step(world.plan_in_force.nodes[0], wire.INTERNAL)
        elif fault == "memory" and isinstance(world.state.phase, Switching):
            world.settle()
        for node in world.plan_in_force.nodes[:2]:
            if fault == "plans":
                world.fail_plan(node, "no memory")
            elif isinstance(world.state.phase, Stepping):
                fail_in_turn(world, (node, wire.OUT_OF_MEMORY))
    assert world.exit_code is None
    assert {undecided for _, _, undecided in verdicts(world)[:2]} == {True}
    said = world.events(ev.Waiting)[-1].reason
    assert "0 of " in said
    assert ("Lower train.micro_batch, or add nodes" if fault == "memory" else "no memory") in said


def test_if_nobody_can_take_its_place_the_run_waits_and_says_for_whom() -> None:
    world = training("a", "b", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("b", wire.OUT_OF_MEMORY)
        if isinstance(world.state.phase, Switching):
            world.settle()
    assert verdicts(world) == [("b", Charge.OUT_OF_MEMORY, False)]
    assert world.exit_code is None
    assert isinstance(world.state.phase, Gathering)
    said = world.events(ev.Waiting)[-1].reason
    assert "1 of 2 nodes are ready; quarantined: b (`dtfm-coordinator forgive NODE` lets one come back)" in said


@pytest.mark.parametrize("fault", ["NaN", "plans"])
def test_a_stranger_that_is_left_alone_cannot_end_the_run(fault: str) -> None:
    world = of_strangers("a", "b", "c", stages=1)
    world.step()
    for node in "ac":
        world.lose(node)
    world.wait(20 * LEASE, beating="b")  # it goes on alone, from the start
    for _ in range(ATTEMPTS):
        if fault == "NaN":
            world.settle()
            world.vote("b", loss_sum=math.nan)
        else:
            world.fail_plan("b")
    assert [why.node for why in world.events(ev.NodeQuarantined)] == ["b"]
    assert world.exit_code is None
    world.join("a", "c", incarnation=2)
    world.settle()
    goes_on_without(world, "b")


def test_who_goes_on_alone_with_a_run_of_people_who_know_each_other_is_told_what_is_wrong() -> None:
    changes = {**LONG, "cluster": {"nodes": 2, "stages": 1}}
    before = training("a", "b", **changes)
    before.step()
    world = restarted(before, **changes)
    world.join("b")
    world.wait(20 * LEASE, beating="b")
    for _ in range(ATTEMPTS):
        world.settle()
        world.vote("b", loss_sum=math.nan)
    assert world.exit_code == 1
    assert "Lower train.learning_rate" in world.events(ev.RunFailed)[-1].reason


def test_who_cannot_take_its_part_three_times_is_left_out() -> None:
    world = World()
    world.join("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.fail_plan("b", "no memory")
    assert verdicts(world) == [("b", Charge.PLAN_FAILED, False)]
    goes_on_without(world, "b")


def test_an_idle_node_cannot_fail_a_plan() -> None:
    world = World(planner=lambda ids: training("a", "b").plan_in_force if {"a", "b"} <= set(ids) else "too few")
    world.join("a", "b", "c")
    for _ in range(5):
        world.fail_plan("c")
        world.fail_plan("c", lost=[0])
    assert world.events(ev.PlanFailed) == []
    goes_on_without(world)


def lose_peers(world: World, *losses: str) -> None:
    """The first of each pair of letters loses the second."""
    for node, peer in map(tuple, losses):
        world.fail_step(node, wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()


def test_one_that_loses_several_others_is_left_out_and_not_their_links() -> None:
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ca", "da")
    assert verdicts(world) == [("a", Charge.PEER_LOST, True)]
    assert world.state.ledger.broken == frozenset()
    goes_on_without(world, "a")


def test_a_lossy_link_is_given_up_before_one_of_its_ends_is_blamed_for_it() -> None:
    world = training(*"abcd", **LONG)
    lose_peers(world, "ab", "ac", "ab", "ac")
    assert verdicts(world) == []
    lose_peers(world, "ba")
    assert verdicts(world) == []
    assert world.state.ledger.broken == {("a", "b")}
    lose_peers(world, "ca")
    assert verdicts(world) == [("a", Charge.PEER_LOST, True)]
    goes_on_without(world, "a")


@pytest.mark.parametrize("peer", ["a", "nobody", ""])
def test_a_loss_of_who_is_no_peer_is_ones_own_failure(peer: str) -> None:
    world = training("a", "b", "c", **LONG)
    for _ in range(ATTEMPTS):
        world.fail_step("a", wire.PEER_LOST, peer=peer)
        if isinstance(world.state.phase, Switching):
            world.settle()
    assert verdicts(world) == [("a", Charge.STEP_FAILED, False)]
    goes_on_without(world, "a")


def wait_for_the_deadline(world: World) -> None:
    assert isinstance(world.state.phase, Stepping | Switching)
    world.wait(world.state.phase.deadline - world.now + 0.1, beating=world.state.members.sessions)


def test_a_step_past_its_deadline_is_tried_again_from_where_it_stands() -> None:
    world = training(**LONG)
    world.vote("a")
    wait_for_the_deadline(world)
    aborted = world.events(ev.StepAborted)[-1]
    assert (aborted.problem, aborted.node) == ("OVERDUE", "b")
    assert "no vote from b within 1000 seconds, though heartbeats came" in aborted.reason
    assert world.last_to("a", "assignment").counts_from == 0


def test_who_does_not_deliver_what_it_has_all_for_is_left_out_after_three_attempts() -> None:
    """c, on the last stage, gets all activations and does nothing. Nobody else can vote either."""
    world = training("a", "b", "c", **LONG)
    world.step()
    for attempt in range(ATTEMPTS):
        assert verdicts(world) == []
        wait_for_the_deadline(world)
        if attempt < ATTEMPTS - 1:
            for node in world.plan_in_force.nodes:
                has = wire.Progress(activations=range(4) if node == "c" else ())
                world.plan_ready(node, progress=has)
    assert verdicts(world) == [("c", Charge.STALLED, False)]
    goes_on_without(world, "c")


def test_two_who_are_silent_in_turn_are_found_one_after_the_other_and_no_honest_one_is_lost() -> None:
    world = training(*"abcde", **LONG)
    world.step()
    deadlines = 0
    while world.state.ledger.step == 1:
        plan, colluding = world.plan_in_force.nodes, set("be") - {node for node, _, _ in verdicts(world)}
        silent = sorted(colluding)[deadlines % len(colluding)] if colluding else ""
        for node in plan:
            if node != silent:
                world.vote(node)
        if silent:
            wait_for_the_deadline(world)
            deadlines += 1
            world.settle()
    assert verdicts(world) == [("b", Charge.STALLED, True), ("e", Charge.STALLED, False)]
    assert deadlines == WITHOUT_ONE_CAUSE + ATTEMPTS
    assert set(world.plan_in_force.nodes) == set("acd")
    assert "5 attempts stood at it" in world.events(ev.NodeQuarantined)[0].reason
    assert world.refolded() == world.state.ledger


def test_who_says_that_nothing_has_come_is_weighed_against_who_should_have_sent_it() -> None:
    world = training("a", "b", "c", **LONG)
    world.step()
    for attempt in range(ATTEMPTS):
        wait_for_the_deadline(world)
        if attempt < ATTEMPTS - 1:
            world.settle()
    assert verdicts(world) == [("c", Charge.STALLED, True)]
    assert world.events(ev.NodeQuarantined)[-1].against == ("b",)
    goes_on_without(world, "c")


def test_who_does_not_become_ready_for_a_plan_is_left_out_after_three_attempts() -> None:
    world = World()
    world.join("a", "b", "c")
    for _ in range(ATTEMPTS):
        for node in set(world.plan_in_force.nodes) - {"b"}:
            world.plan_ready(node)
        wait_for_the_deadline(world)
    assert verdicts(world) == [("b", Charge.STALLED, True)]
    goes_on_without(world, "b")


def test_a_newcomer_that_is_given_its_state_too_slowly_is_weighed_against_who_alone_can_give_it() -> None:
    world = training("a", "b", **LONG)
    world.step()
    world.join("c")
    world.step()
    world.apply()
    for _ in range(ATTEMPTS):
        for node in set(world.plan_in_force.nodes) - {"c"}:
            world.plan_ready(node)
        wait_for_the_deadline(world)
    assert verdicts(world) == [("c", Charge.STALLED, True)]
    assert world.events(ev.NodeQuarantined)[-1].against == ("b",), "b alone has what c needs"


def test_who_has_survived_many_others_is_not_blamed_for_the_losses() -> None:
    world = training("a", "b", "c", "d", **LONG)
    for killed in "bc":
        for _ in range(2):
            world.fail_step("a", wire.PEER_LOST, peer=killed)
            world.settle()
        world.lose(killed)
        world.settle()
        assert world.state.ledger.peer_losses == ()
    world.fail_step("a", wire.PEER_LOST, peer="d")
    assert verdicts(world) == []


def waits_in_vain(world: World, node: str, times: int) -> None:
    """All others are ready for the plan, so many times, and the node says nothing but that it is alive."""
    assert isinstance(world.state.phase, Switching)
    for _ in range(times):
        for other in set(world.plan_in_force.nodes) - {node}:
            world.plan_ready(other)
        world.wait(PATIENCE_LEASES * LEASE + 1, beating=world.state.members.sessions)


def comes_into_the_plan(world: World, node: str, incarnation: int) -> None:
    world.join(node, incarnation=incarnation)
    world.step()
    if isinstance(world.state.phase, Pausing):
        world.apply()
    assert node in world.plan_in_force.nodes


def test_who_leaves_before_it_is_found_and_comes_back_is_as_silent_as_before() -> None:
    world = of_strangers("a", "b", stages=1)
    comes_into_the_plan(world, "m", 1)
    waits_in_vain(world, "m", ATTEMPTS - 1)
    world.lose("m")
    world.settle()
    comes_into_the_plan(world, "m", 2)
    assert world.state.ledger.waited_for == ()
    waits_in_vain(world, "m", 1)
    assert verdicts(world) == [("m", Charge.STALLED, True)]
    goes_on_without(world, "m")


def test_who_has_done_a_step_since_it_was_silent_begins_anew() -> None:
    world = of_strangers("a", "b", stages=1)
    comes_into_the_plan(world, "m", 1)
    waits_in_vain(world, "m", ATTEMPTS - 1)
    world.lose("m")
    world.settle()
    comes_into_the_plan(world, "m", 2)
    world.settle()
    world.step()
    assert world.state.ledger.evaded == {}
    assert world.refolded() == world.state.ledger


@pytest.mark.parametrize(
    ("last", "usual", "overdue", "leases"),
    [
        (None, True, 0, PATIENCE_LEASES),
        (0.1, True, 0, STEP_LEASES),
        (0.1, True, 1, 2 * STEP_LEASES),
        (0.1, True, 10, PATIENCE_LEASES),
        (0.1, False, 0, PATIENCE_LEASES),
        (20 * LEASE, True, 0, 400),
        (20 * LEASE, False, 0, 400),
    ],
)
def test_deadlines_follow_from_the_last_step(last: float | None, usual: bool, overdue: int, leases: float) -> None:
    assert step_patience(LEASE, last, usual=usual, overdue=overdue) == leases * LEASE


def after_the_last_step(*nodes: str) -> World:
    world = training(*nodes, train={"steps": 1}, checkpoint={"every": 0})
    world.step()
    world.evaluate()
    return world


def confirm(world: World, *nodes: str) -> None:
    """These nodes have applied the last commit, and no other has when the pause is over."""
    step, generation = world.state.ledger.step, world.state.ledger.generation
    for node in nodes:
        world.hear(node, applied=wire.Applied(generation=generation, step=step, state_digest=DIGEST))
    assert isinstance(world.state.phase, Pausing)
    world.wait(world.state.phase.deadline - world.now + 0.1, beating=world.state.members.sessions)


def test_a_run_whose_last_checkpoint_is_whole_ends_well_without_a_word_that_does_not_come() -> None:
    world = after_the_last_step("a", "b", "c")
    world.save()
    confirm(world, "a", "c")
    assert verdicts(world) == []
    assert world.exit_code == 0


def before_another_plan() -> World:
    world = training("a", "b", "c", **LONG)
    world.step()
    world.join("d")
    world.step()
    return world


def test_who_does_not_confirm_a_commit_is_left_out_after_three_attempts() -> None:
    world = before_another_plan()
    confirm(world, "a", "c")
    assert verdicts(world) == []
    world.settle()
    assert isinstance(world.state.phase, Stepping), "the next commit begins anew"
    world = before_another_plan()
    waited = (frozenset("b"),) * (ATTEMPTS - 1)
    world.state = replace(world.state, ledger=replace(world.state.ledger, waited_for=waited))
    confirm(world, "a", "c")
    assert verdicts(world) == [("b", Charge.STALLED, False)]
    assert world.exit_code is None
    world.settle()
    world.step()


def test_who_does_not_write_its_part_of_the_last_checkpoint_is_left_out_and_the_others_write_it() -> None:
    world = after_the_last_step("a", "b", "c")
    for attempt in range(ATTEMPTS):
        assert verdicts(world) == []
        world.apply()
        world.write_checkpoint("a", "b")
        world.now += 100 * LEASE + 1
        world.feed(t.TimePassed())
        if attempt < ATTEMPTS - 1:
            world.settle()
            world.evaluate()
    assert verdicts(world) == [("c", Charge.SNAPSHOT, False)]
    assert world.exit_code is None
    world.join("d")
    assert isinstance(world.state.phase, Switching)


def do_it_again(world: World) -> None:
    """What follows the last commit, from the beginning, if the run is not over."""
    if world.exit_code is None:
        world.apply()
        world.settle()
        world.evaluate()


def fail_last_checkpoint(world: World, node: str) -> None:
    """This node could not write its part; then all are ready to do it again."""
    world.hear(node, snapshot_parts(1, wire.CHECKPOINT, {}, "no room"))
    do_it_again(world)


def test_the_last_checkpoint_is_written_again_and_without_the_one_that_cannot() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        fail_last_checkpoint(world, "b")
        assert world.exit_code is None
    assert verdicts(world) == [("b", Charge.SNAPSHOT, False)]
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_a_last_checkpoint_that_two_parties_cannot_write_fails_the_run() -> None:
    world = after_the_last_step("a", "b", "c")
    for node in "abab":
        if world.exit_code is None:
            fail_last_checkpoint(world, node)
    assert "the last checkpoint could not be written: b could not write its part: no room" in (
        world.events(ev.RunFailed)[-1].reason
    )


def strangers_after_the_last_step(*nodes: str) -> World:
    world = of_strangers(*nodes, train={"steps": 1})
    world.step()
    world.evaluate()
    return world


def test_two_strangers_who_cannot_write_the_last_checkpoint_are_suspended_and_the_others_write_it() -> None:
    world = strangers_after_the_last_step(*"abklcd")
    for node in "klkl":
        fail_last_checkpoint(world, node)
    assert verdicts(world) == [("k", Charge.SNAPSHOT, True), ("l", Charge.SNAPSHOT, True)]
    assert world.state.ledger.checkpoint_failures == ()
    world.settle()
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_strangers_who_all_keep_silent_after_a_commit_do_not_end_the_run() -> None:
    world = of_strangers("k", "l")
    world.step()
    world.join("c")
    world.step()
    waited = (frozenset("kl"),) * (ATTEMPTS - 1)
    world.state = replace(world.state, ledger=replace(world.state.ledger, waited_for=waited))
    confirm(world)
    assert verdicts(world) == [("l", Charge.STALLED, True)]
    goes_on_without(world, "l")


def test_who_says_that_it_wrote_what_is_not_there_is_found_by_the_bucket() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.write_checkpoint()
        world.feed(t.ManifestDone(1, "bucket 3 is not there", bucket=3))
        do_it_again(world)
    assert verdicts(world) == [("c", Charge.SNAPSHOT, True)], "others may have removed it"


def test_who_leaves_a_bucket_out_is_found_too() -> None:
    world = after_the_last_step("a", "b", "c")
    for _ in range(ATTEMPTS):
        world.write_checkpoint("a", "b")
        world.hear("c", snapshot_parts(1, wire.CHECKPOINT, {2: (10, FILE_DIGEST)}))
        do_it_again(world)
    assert verdicts(world) == [("c", Charge.SNAPSHOT, False)]


def test_a_problem_of_an_idle_node_with_a_snapshot_changes_nothing() -> None:
    world = training("a", "b", train={"steps": 1}, checkpoint={"every": 0})
    world.stick_to_plan()
    world.join("c")
    world.step()
    world.hear("c", snapshot_parts(1, wire.CHECKPOINT, {}, "no room"))
    assert world.events(ev.CheckpointFailed) == []
    world.evaluate()
    world.apply()
    world.save()
    assert world.exit_code == 0


def test_an_evaluation_of_other_micro_batches_than_its_own_is_refused() -> None:
    world = training("a", "b", train={"steps": 10, "evaluate_every": 1})
    world.step()
    world.hear("b", evaluated=wire.Evaluated(generation=1, step=1, losses=[1.0] * 3))
    assert refusal_of(world, world.streams["b"]).reason == wire.MALFORMED
