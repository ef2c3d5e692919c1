"""Who becomes a standby, for its place in the next plan or to save a stage, and what that saves:
`core/copies/standby.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dtfm.coordinator.core.copies.keeping_up import COMMIT_WAIT_FRACTION
from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES, LAST_REPORT_LEASES, TOGETHER_LEASES
from dtfm.coordinator.core.transition import TimePassed
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Stage, from_routes
from tests.coordinator.answers import links
from tests.coordinator.script import LAYERS, LEASE, LONG, World, training, two_stages
from tests.coordinator.snapshots import plan_only_with
from tests.coordinator.standbys import caught_up, layers_of, without_reports


def test_a_node_that_gets_a_place_catches_up_while_the_others_train() -> None:
    world = without_reports("a", "b")
    world.step()
    world.join("c")
    asked = world.last_to("c", "standby")
    assert layers_of(world, "c") == (2, 4)
    assert [list(donors.nodes) for donors in asked.donors] == [[], [], ["b"], ["b"]]
    assert [peer.node for peer in asked.peers] == ["b"]
    for _ in range(3):
        world.step()
        assert not world.last_to("a", "commit").pause
    caught_up(world, "c")
    world.step()
    assert not world.last_to("a", "commit").pause  # b, which moves to the other stage, is still catching up
    caught_up(world, "b")
    world.step()
    assert world.last_to("a", "commit").pause
    world.apply()
    assert isinstance(world.state.phase, Switching)


def test_nodes_that_have_to_free_memory_first_are_waited_for_no_longer_than_till_the_next_commit() -> None:
    """The nodes have no room for a copy."""
    world = without_reports("a", "b")
    world.planner = lambda nodes: replace(two_stages(nodes), frees_first=("b",))
    world.step()
    world.join("c")
    assert layers_of(world, "c") == (2, 4)
    assert "standby" not in world.kinds_to("b")
    caught_up(world, "c")
    world.step()
    assert world.last_to("a", "commit").pause
    world.apply()
    assert isinstance(world.state.phase, Switching)
    assert world.state.ledger.training.in_force.frees_first == ("b",)


def test_a_node_that_never_says_that_it_has_caught_up_holds_up_a_plan_for_six_leases_alone() -> None:
    world = without_reports("a", "b", steps=500)
    world.step()
    world.join("c")
    caught_up(world, "b")
    began, patience = world.now, GRACE_LEASES * LEASE
    while not world.last_to("a", "commit").pause:
        world.wait(LEASE, beating="abc")
        world.step()
    assert patience < world.now - began < patience + 3 * LEASE


def test_over_slow_links_it_has_more_patience() -> None:
    world = without_reports("a", "b")
    world.step()
    world.prepare("c")
    report = links("c", "ab")
    for link in report.links.links:
        link.bandwidth = 1e4  # 2 layers of 1 MiB, with moments, take ten minutes
    world.hear("c", report)
    world.wait(TOGETHER_LEASES * LEASE, beating="abc")
    standby = world.state.members.sessions["c"].standby
    assert standby is not None
    assert standby.due - world.now == pytest.approx(10 * 2 * 3 * 2**20 / 1e4, rel=0.01)


def test_a_node_that_cannot_catch_up_gets_its_state_in_the_pause() -> None:
    world = without_reports("a", "b")
    world.join("c")
    caught_up(world, "b")
    caught_up(world, "c", step=0, problem="TOO_SLOW: steps are quicker than this link")
    world.step()
    assert world.last_to("a", "commit").pause


@pytest.mark.parametrize(("bandwidth", "catches_up"), [(8 << 20, True), (1 << 20, False)])
def test_a_node_whose_link_cannot_keep_up_with_the_steps_gets_its_state_in_the_pause(
    bandwidth: float, catches_up: bool
) -> None:
    world = without_reports("a", "b")
    world.now += 1.0
    world.step()  # of a second, with 2 MiB of gradients for each stage
    world.prepare("c")
    report = links("c", ["a", "b"])
    for link in report.links.links:
        link.bandwidth = bandwidth
    world.hear("c", report)
    world.now += TOGETHER_LEASES * LEASE
    world.feed(TimePassed())
    assert ("standby" in world.kinds_to("c")) == catches_up
    for node in ("b", "c") if catches_up else ("b",):
        caught_up(world, node)
    world.step()
    assert world.last_to("a", "commit").pause


def test_a_report_about_an_earlier_request_is_ignored() -> None:
    world = without_reports("a", "b")
    world.join("c")
    caught_up(world, "b")
    caught_up(world, "c", number=99)
    world.step()
    assert not world.last_to("a", "commit").pause


def test_a_newcomer_while_others_catch_up_gets_a_place_too() -> None:
    world = without_reports("a", "b")
    world.join("c")
    world.join("d")
    assert world.state.planner.chosen is not None
    assert world.state.planner.chosen.plan.nodes == ("a", "b", "c", "d")
    for node in ("b", "c"):
        caught_up(world, node)
    world.step()
    assert not world.last_to("a", "commit").pause
    caught_up(world, "d")
    world.step()
    assert world.last_to("a", "commit").pause


def test_nodes_stop_catching_up_when_the_chosen_plan_is_dropped() -> None:
    world = without_reports("a", "b")
    world.join("c")
    world.planner = lambda _: "nothing better"
    world.lose("c")
    assert world.last_to("b", "standby") == wire.Standby()
    world.step()
    assert not world.last_to("a", "commit").pause


def with_idle_node() -> World:
    """a and b train. c has no place in the plan, and is a standby of the first stage."""
    world = training("a", "b", train={"steps": 20, "evaluate_every": 0})
    world.stick_to_plan()
    world.join("c")
    return world


def test_idle_nodes_become_standbys_of_the_stages_with_the_fewest_holders_first() -> None:
    world = with_idle_node()
    world.join("d", "e")
    assert [layers_of(world, node) for node in "cde"] == [(0, 2), (2, 4), (0, 2)]


@pytest.mark.parametrize(
    ("device", "is_standby"),
    [
        ({"kind": "cpu", "memory_bytes": 1 << 20}, False),
        ({"kind": "cuda", "memory_bytes": 1 << 30, "host_memory_bytes": 3 * 2 * 2**20}, True),
        ({"kind": "cuda", "memory_bytes": 1 << 30, "host_memory_bytes": 3 * 2 * 2**20 - 1}, False),
        ({"kind": "cuda", "memory_bytes": 2 * 2 * 2**20, "host_memory_bytes": 1 << 33}, True),
        ({"kind": "cuda", "memory_bytes": 2 * 2 * 2**20 - 1, "host_memory_bytes": 1 << 33}, False),
    ],
    ids=["a small CPU", "room in the host", "no room in the host", "a GPU that could train it", "one that could not"],
)
def test_an_idle_node_without_enough_memory_is_no_standby(device: dict[str, Any], is_standby: bool) -> None:
    """Of two layers of 1 MiB each: weights and two moments lie in the host's memory; to train, weights and gradients lie on
    the GPU."""
    world = training("a", "b", train={"steps": 20, "evaluate_every": 0})
    world.stick_to_plan()
    world.join("c", device=wire.Device(name="a device", flops=1e11, **device))
    assert ("standby" in world.kinds_to("c")) == is_standby


def test_a_stage_that_lost_its_only_replica_goes_on_from_its_standby_and_loses_no_step() -> None:
    world = with_idle_node()
    world.step()
    caught_up(world, "c")
    world.planner = lambda ids: from_routes(
        0, (Stage((0, 2), ("c",), ()), Stage((2, LAYERS), ("b",), ())), [(("c", "b"), 4)]
    )
    world.lose("a")
    assert world.events(ev.RolledBack) == []
    assert world.events(ev.StandbyPromoted) == [ev.StandbyPromoted("c", f"{1:016x}", (0, 2), 1)]
    assignment = world.last_to("c", "assignment")
    assert assignment.step == 1
    assert world.donors_to("c") == [["c"], ["c"], ["b"], ["b"]]
    assert fold(world.log, world.start) == world.state.ledger


def test_a_standby_that_turned_out_to_hold_nothing_is_counted_on_once() -> None:
    world = with_idle_node()
    world.step()
    caught_up(world, "c")
    world.lose("a")
    world.fail_plan("c", "it is not here", lost=[0, 1])
    assert world.events(ev.RolledBack) == []  # a may return with it
    world.wait(7 * LEASE, beating="bc")
    assert len(world.events(ev.StandbyPromoted)) == 1
    assert world.events(ev.RolledBack)[-1].from_step == 1


def test_a_standby_that_is_a_step_behind_cannot_save_the_stage() -> None:
    world = with_idle_node()
    world.step()
    world.automatic_standbys = False
    caught_up(world, "c")
    world.step()
    world.lose("a")
    caught_up(world, "c", step=1, problem="a is gone")
    world.wait(LEASE, beating=["b", "c"])  # training the lost steps again would take no longer
    assert world.events(ev.StandbyPromoted) == []
    assert world.events(ev.RolledBack)[-1].from_step == 2


def test_a_standby_with_the_gradients_of_the_last_commit_saves_the_stage() -> None:
    world = with_idle_node()
    world.automatic_standbys = False
    caught_up(world, "c", voted=1)
    world.step()
    world.lose("a")
    assert world.events(ev.StandbyPromoted) == [ev.StandbyPromoted("c", f"{1:016x}", (0, 2), 1)]
    assert world.events(ev.RolledBack) == []


def test_a_standby_with_the_gradients_of_another_attempt_cannot_save_the_stage() -> None:
    world = with_idle_node()
    world.step()
    world.automatic_standbys = False
    caught_up(world, "c", voted=7)
    world.step()
    world.lose("a")
    assert world.events(ev.StandbyPromoted) == []


def test_a_neighbour_becomes_the_standby_of_a_stage_with_one_replica_if_links_allow() -> None:
    world = training("a", "b", **LONG)
    assert "standby" not in world.kinds_to("a")
    world.now += 1
    world.step()
    assert [layers_of(world, node) for node in "ab"] == [(2, 4), (0, 2)]
    plan_only_with(world, "a")
    world.lose("b")
    assert world.events(ev.RolledBack) == []
    assert world.donors_to("a") == [["a"]] * 4


def test_a_standby_that_the_next_plan_does_not_need_ends_even_if_its_node_takes_part() -> None:
    world = training("a", "b", **LONG)
    world.now += 1
    world.step()
    assert layers_of(world, "a") == (2, 4)
    world.now += 0.01  # steps this short leave a standby no time
    world.step()
    world.fail_step("a", wire.PEER_LOST, peer="b")
    world.settle()
    assert world.last_to("a", "standby") == wire.Standby()
    assert world.state.members.sessions["a"].standby is None


@pytest.mark.parametrize(("factor", "wanted"), [(0.95, False), (1.05, True)])
def test_a_neighbour_is_no_standby_if_no_commit_would_wait_for_it(factor: float, wanted: bool) -> None:
    world = training("a", "b", **LONG)
    world.now += factor * 2 * 2**20 / 1e9 / COMMIT_WAIT_FRACTION  # 2 MiB of gradients a step, over 1 GB/s
    world.step()
    assert ("standby" in world.kinds_to("a")) is wanted


def test_a_chosen_plan_that_an_aborted_step_dropped_is_chosen_again() -> None:
    world = without_reports("a", "b")
    world.join("c")
    assert world.state.planner.chosen is not None
    world.fail_step("a", wire.INTERNAL)
    world.settle()
    world.wait(1.2 * LEASE, beating="abc")
    assert world.state.planner.chosen is not None


def test_a_plan_is_chosen_again_without_a_newcomer_that_left() -> None:
    world = without_reports("a", "b")
    world.join("c")
    world.join("d")
    world.lose("d")
    assert world.state.planner.chosen is not None
    assert world.state.planner.chosen.plan.nodes == ("a", "b", "c")


def test_a_stage_has_at_most_two_standbys() -> None:
    world = with_idle_node()
    world.join(*"defgh")
    assert [node for node in "cdefgh" if "standby" in world.kinds_to(node)] == ["c", "d", "e", "f"]


def with_late_standby() -> World:
    """a and b compute step 2. c is the standby of the first stage, and has not reported step 1."""
    world = training("a", "b", train={"steps": 10})
    world.stick_to_plan()
    world.join("c")
    world.automatic_standbys = False
    world.step()
    return world


def test_a_standby_of_lost_state_may_first_report_how_far_it_came() -> None:
    world = with_late_standby()
    caught_up(world, "c")
    world.step()  # which c has not reported
    world.planner = two_stages
    world.lose("a")
    assert world.events(ev.RolledBack) == []
    caught_up(world, "c", problem="a is gone")
    assert world.plan_in_force.stages[0].replicas == ("c",)
    assert world.last_to("c", "assignment").step == 2
    assert world.events(ev.RolledBack) == []


def test_the_wait_for_the_last_report_of_a_standby_is_short() -> None:
    world = with_late_standby()
    world.planner = two_stages
    world.lose("a")
    world.wait(LAST_REPORT_LEASES * LEASE, beating=["b", "c"])
    assert world.events(ev.RolledBack)[-1].step == 0
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_a_standby_that_was_asked_again_just_before_may_report_too() -> None:
    world = with_late_standby()
    world.automatic_standbys = False
    world.fail_step("b", wire.PEER_LOST, peer="a")
    world.settle()
    world.lose("a")
    assert world.events(ev.RolledBack) == []
    caught_up(world, "c", problem="a is gone")
    assert world.plan_in_force.stages[0].replicas == ("c",)
    assert world.events(ev.RolledBack) == []
