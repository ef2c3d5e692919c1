"""A commit waits a while until a standby of each stage with one replica has the new state too: `commit_waits_for` and
`commit_patience` in `core/copies/standby.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from dtfm.coordinator.core.copies.availability import standbys_of
from dtfm.coordinator.core.copies.keeping_up import COMMIT_WAIT_FRACTION, commit_patience, keeping_up
from dtfm.coordinator.core.copies.snapshot import PAUSE_LEASES
from dtfm.coordinator.core.phases import Gathering, Stepping, Switching
from dtfm.coordinator.core.timeouts import COMMIT_WAIT_LEASES
from dtfm.coordinator.core.transition import StopAsked, TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from tests.coordinator.audit_scripts import all_vote
from tests.coordinator.ledgers import altered
from tests.coordinator.script import LEASE, World, training
from tests.coordinator.standbys import caught_up, report, with_standbys

SHORT = COMMIT_WAIT_LEASES * LEASE
"""How long a commit waits where steps are short, in seconds."""


def pass_time(world: World, seconds: float) -> None:
    world.now += seconds
    world.feed(TimePassed())


def with_late_standby() -> World:
    """Step 1 was committed without a report of c, the standby of the first stage."""
    world = with_standbys("c")
    all_vote(world)
    pass_time(world, SHORT)
    assert world.state.ledger.training.step == 1
    return world


def test_the_commit_comes_once_the_standby_has_the_step_too() -> None:
    world = with_standbys("c")
    all_vote(world)
    assert world.state.ledger.training.step == 0
    assert "commit" not in world.kinds_to("a")
    world.now += 0.01
    report(world, "c")
    assert world.state.ledger.training.step == 1
    assert world.last_to("a", "commit").step == 1
    assert isinstance(world.state.phase, Stepping)


def test_a_standby_that_reports_before_the_last_vote_costs_no_time() -> None:
    world = with_standbys("c")
    world.vote("a")
    report(world, "c")
    assert world.state.ledger.training.step == 0  # not before all have voted
    world.vote("b")
    assert world.state.ledger.training.step == 1


def test_the_commit_comes_without_a_report_that_is_late() -> None:
    world = with_standbys("c")
    all_vote(world)
    pass_time(world, SHORT * 0.99)
    assert world.state.ledger.training.step == 0
    assert world.state.wakes_at == pytest.approx(world.now + SHORT * 0.01)
    pass_time(world, SHORT * 0.01)
    assert world.state.ledger.training.step == 1
    assert world.state.wakes_at is None


@pytest.mark.parametrize(
    ("seconds", "patience"),
    [(0.2, SHORT), (50.0, COMMIT_WAIT_FRACTION * 50.0), (1e6, LEASE)],
    ids=["short", "long", "absurd"],
)
def test_the_commit_waits_for_a_fraction_of_a_step_and_never_for_long(seconds: float, patience: float) -> None:
    world = with_standbys("c")
    report(world, "c")
    all_vote(world)
    ledger = altered(world.state.ledger, step_seconds=seconds)
    assert commit_patience(replace(world.state, ledger=ledger)) == pytest.approx(patience)


def test_a_standby_that_has_not_caught_up_is_not_waited_for() -> None:
    world = with_standbys()
    world.join("c")  # is asked to be a standby
    all_vote(world)
    assert world.state.ledger.training.step == 1


def test_the_commit_does_not_wait_if_every_stage_has_two_replicas() -> None:
    world = with_standbys("e", trainers="abcd")
    assert "standby" in world.kinds_to("e")
    all_vote(world)
    assert world.state.ledger.training.step == 1


def test_one_standby_of_each_stage_is_enough() -> None:
    world = with_standbys("c", "d", "e", "f")  # c and e of the first stage, d and f of the second
    all_vote(world)
    report(world, "c")
    report(world, "e")
    assert world.state.ledger.training.step == 0
    report(world, "f")
    assert world.state.ledger.training.step == 1


def test_gradients_of_an_aborted_attempt_do_not_count() -> None:
    world = with_standbys("c")
    world.vote("a")
    report(world, "c")
    world.fail_step("b", wire.PEER_LOST, peer="a")
    world.settle()
    report(world, "c", voted=1)
    all_vote(world)
    assert world.state.ledger.training.step == 0
    report(world, "c")
    assert world.state.ledger.training.step == 1


@pytest.mark.parametrize("after_the_votes", [False, True])
def test_a_standby_that_is_in_time_again_is_waited_for_again(after_the_votes: bool) -> None:
    world = with_late_standby()
    if after_the_votes:
        all_vote(world)  # and the commit does not wait
        world.now += SHORT / 2
        report(world, "c", step=1)
    else:
        report(world, "c")
        all_vote(world)
    assert world.state.ledger.training.step == 2
    all_vote(world)
    assert world.state.ledger.training.step == 2
    report(world, "c")
    assert world.state.ledger.training.step == 3


def test_a_standby_that_is_late_every_time_is_never_waited_for() -> None:
    world = with_late_standby()
    for step in range(2, 6):
        all_vote(world)
        assert world.state.ledger.training.step == step
        world.now += 2 * SHORT
        report(world, "c", step=step - 1)  # the gradients of the step that is committed
        world.now += SHORT
        report(world, "c", step=step, voted=0)  # it has applied them


def test_a_standby_that_had_the_gradients_in_time_may_apply_them_after_the_commit() -> None:
    world = with_standbys("c")
    report(world, "c")
    all_vote(world)
    world.now += 2 * SHORT
    report(world, "c", step=1, voted=0)
    all_vote(world)
    assert world.state.ledger.training.step == 1  # the commit waits
    report(world, "c")
    assert world.state.ledger.training.step == 2


def test_a_standby_that_was_late_still_saves_the_stage() -> None:
    world = with_late_standby()
    report(world, "c", step=0)
    world.lose("a")
    assert world.events(ev.RolledBack) == []
    assert world.events(ev.StandbyPromoted)[-1].node == "c"


def test_a_stage_whose_standby_is_late_is_written_to_disks() -> None:
    world = with_standbys("c", "d")
    for _ in range(2):
        world.now += PAUSE_LEASES * LEASE
        report(world, "c")
        report(world, "d")
        all_vote(world)
        assert not world.last_to("a", "commit").snapshot
    report(world, "d")
    all_vote(world)
    pass_time(world, LEASE)
    assert world.last_to("a", "commit").step == 3
    assert world.last_to("a", "commit").snapshot


def test_a_standby_that_is_lost_is_not_waited_for() -> None:
    world = with_standbys("c")
    all_vote(world)
    world.lose("c")
    assert world.state.ledger.training.step == 1


def test_a_standby_that_cannot_go_on_is_not_waited_for() -> None:
    world = with_standbys("c")
    all_vote(world)
    report(world, "c", voted=0, problem="TOO_SLOW")
    assert world.state.ledger.training.step == 1


def test_a_replica_that_dies_while_the_commit_waits_costs_only_the_step_in_hand() -> None:
    world = with_standbys("c")
    report(world, "c")
    all_vote(world)
    report(world, "c", voted=0)  # it has applied step 1
    all_vote(world)
    world.lose("a")
    assert [(event.step, event.problem) for event in world.events(ev.StepAborted)] == [(2, "NODE_LEFT")]
    assert world.last_to("b", "abort").step == 2
    assert world.events(ev.RolledBack) == []
    assert world.last_to("c", "assignment").step == 1
    world.settle()
    world.step()
    assert [event.step for event in world.events(ev.StepCommitted)] == [1, 2]


@pytest.mark.parametrize("stays", [True, False])
def test_a_step_that_waits_for_its_commit_counts_if_the_others_hold_its_new_state(stays: bool) -> None:
    world = with_standbys(trainers="abc")  # a and b are replicas of the first stage
    world.join("d")
    caught_up(world, "d")
    all_vote(world)
    assert world.state.ledger.training.step == 0  # d does not have the second stage's gradients yet
    world.lose("b" if stays else "c")
    assert world.state.ledger.training.step == (1 if stays else 0)
    if stays:
        assert world.last_to("c", "commit").step == 1


def test_the_short_rest_of_an_interrupted_step_does_not_shorten_the_wait() -> None:
    world = with_standbys("c")
    report(world, "c")
    world.now += 50.0
    all_vote(world)
    patience = commit_patience(world.state)
    assert patience >= COMMIT_WAIT_FRACTION * 50.0
    assert world.state.ledger.training.last is not None
    rest = replace(world.state.ledger.training.last, step=2, seconds=0.5, resumed=True)
    assert commit_patience(replace(world.state, ledger=rest.apply(world.state.ledger))) == patience


def test_a_link_that_breaks_while_the_commit_waits_aborts_the_step() -> None:
    world = with_standbys("c")
    all_vote(world)
    world.fail_step("b", wire.PEER_LOST, peer="a")
    assert isinstance(world.state.phase, Switching)
    report(world, "c")
    pass_time(world, SHORT)
    assert world.state.ledger.training.step == 0


def test_a_stop_does_not_wait_for_standbys() -> None:
    world = with_standbys("c")
    all_vote(world)
    world.feed(StopAsked("somebody asked"))
    report(world, "c")
    pass_time(world, SHORT)
    assert world.exit_code == 1
    assert world.state.ledger.training.step == 0


def test_a_step_with_all_votes_is_not_aborted_at_its_deadline() -> None:
    world = with_standbys("c")
    assert isinstance(world.state.phase, Stepping)
    deadline = world.state.phase.deadline
    world.wait(deadline - SHORT / 4 - world.now, beating="abc")
    all_vote(world)
    pass_time(world, SHORT / 2)
    assert world.now > deadline
    assert world.events(ev.StepAborted) == []
    pass_time(world, SHORT / 2)
    assert world.state.ledger.training.step == 1


def test_the_last_commit_waits_for_standbys_too() -> None:
    world = training("a", "b", train={"steps": 1})
    world.stick_to_plan()
    world.join("c")
    world.automatic_standbys = False
    all_vote(world)
    assert world.state.ledger.training.step == 0
    report(world, "c")
    assert world.last_to("a", "commit").pause


MOVES = st.one_of(
    *[st.tuples(st.just("vote"), st.sampled_from("ab"))] * 2,
    st.tuples(st.just("report"), st.integers(0, 1)),
    st.tuples(st.just("wait"), st.sampled_from([SHORT / 3, SHORT, 3 * SHORT])),
    st.tuples(st.just("fail"), st.sampled_from("ab")),
)


@given(st.lists(MOVES, max_size=40))
def test_a_standby_that_counts_as_keeping_up_loses_no_step_when_the_only_replica_dies(
    moves: list[tuple[str, Any]],
) -> None:
    world = with_standbys("c")
    offered: list[tuple[int, int]] = []
    heard = 0
    for move, how in moves:
        phase = world.state.phase
        if isinstance(phase, Switching):
            world.settle()
            continue
        assert isinstance(phase, Stepping)
        if phase.commit_by is not None:
            assert world.now < phase.commit_by  # otherwise the step would be committed
        match move:
            case "vote" if how not in phase.votes:
                if how == "a":
                    offered.append((world.state.ledger.training.step, world.state.ledger.training.generation))
                world.vote(how)
            case "report" if offered:  # the newest that it can have, or the one before, but none before its last report
                heard = max(heard, len(offered) - 1 - how)
                report(world, "c", step=offered[heard][0], voted=offered[heard][1])
            case "fail":
                world.state = replace(world.state, ledger=altered(world.state.ledger, suspicions=()))
                world.fail_step(how, wire.PEER_LOST, peer="b" if how == "a" else "a")
            case "wait":
                pass_time(world, how)
    keeps_up = isinstance(world.state.phase, Stepping) and keeping_up(world.state, standbys_of(world.state)) == {"c"}
    step = world.state.ledger.training.step
    world.lose("a")
    if keeps_up:
        assert world.events(ev.RolledBack) == []
        assert not isinstance(world.state.phase, Gathering)
        assert world.state.ledger.training.step == step
