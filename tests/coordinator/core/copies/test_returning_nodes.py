"""Before training goes back, it waits for nodes that may return with lost state: `core/copies/lost_state.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dtfm.coordinator.core.phases import Gathering, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire
from dtfm.scheduler.model.plan import Plan, Stage, from_routes
from tests.coordinator.ledgers import altered
from tests.coordinator.script import LEASE, LONG, World, fresh_state, prepared, restarted, two_stages
from tests.coordinator.snapshots import PAUSE, all_to_fetch, claim, report_files, report_written

STEP_SECONDS = 4.0
ANY_NUMBER = {"nodes": 1, "stages": "auto"}


def trained(*nodes: str, steps: int = 5, seconds: float = STEP_SECONDS) -> World:
    """These nodes have trained some steps without standbys. Each could train the whole model alone."""
    world = World(fresh_state(**LONG, cluster={"nodes": len(nodes), "stages": "auto"}), one_each)
    world.automatic_standbys = False
    world.join(*nodes)
    world.settle()
    for _ in range(steps):
        step(world, seconds)
    return world


def step(world: World, seconds: float = STEP_SECONDS) -> None:
    world.wait(seconds, beating=world.state.members.sessions)
    world.step()


def one_each(nodes: Any) -> Plan:
    """Three nodes get a stage each; other numbers of nodes get two stages."""
    names = sorted(nodes)
    if len(names) != 3:
        return two_stages(names)
    bounds = ((0, 1), (1, 2), (2, 4))
    stages = [Stage(layers, (name,), ()) for layers, name in zip(bounds, names, strict=True)]
    return from_routes(0, stages, [(names, 4)])


def test_nodes_that_return_with_their_disks_bring_the_snapshot_back() -> None:
    world = trained("a", "b", "c")
    step(world, PAUSE)
    report_written(world)
    disks = {node: set(range(*layers)) for node, layers in zip("abc", ((0, 1), (1, 2), (2, 4)), strict=True)}
    for node in "abc":
        fetched = all_to_fetch(world).get(node, {})
        disks[node] |= fetched.keys()
        report_files(world, node, world.state.ledger.training.step, fetched)
    (written,) = world.events(ev.SnapshotWritten)
    for node in "abc":
        world.lose(node)
    world.wait(LEASE)
    for incarnation, node in enumerate("abc", 2):
        assert world.events(ev.RolledBack) == []
        world.prepare(node, prepared(on_disk=[claim(written.step, sorted(disks[node]))]), incarnation=incarnation)
        assert world.last_to(node, "keep").steps == [written.step]
        world.report_links(node)
        world.wait(LEASE / 10, beating=world.state.members.sessions)
    assert [rolled.step for rolled in world.events(ev.RolledBack)] in ([], [written.step])
    assert world.state.ledger.training.step == written.step
    assert isinstance(world.state.phase, Switching)
    assert world.refolded() == world.state.ledger


def test_a_node_that_only_lost_its_connection_still_holds_its_state_when_it_returns() -> None:
    world = trained("a", "b")
    world.lose("a")
    assert isinstance(world.state.phase, Gathering)
    assert world.events(ev.Waiting)[-1].reason == (
        "a left (its connection broke): up to 20 seconds for a to return with the state as of step 5; "
        "otherwise training goes back to step 0"
    )
    world.wait(STEP_SECONDS, beating="b")
    world.join("a")
    assert world.events(ev.RolledBack) == []
    assert world.last_to("b", "assignment").step == 5
    assert world.donors_to("a") == [["a"], ["a"], ["b"], ["b"]]


def test_the_wait_for_a_return_is_no_longer_than_training_the_lost_steps_again() -> None:
    world = trained("a", "b")
    world.lose("a")
    world.wait(5 * STEP_SECONDS - 1, beating="b")
    assert world.events(ev.RolledBack) == []
    assert len([event for event in world.events(ev.Waiting) if "to return" in event.reason]) == 1
    world.wait(1, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 0
    assert isinstance(world.state.phase, Switching)


def test_unless_all_would_be_lost_the_wait_for_a_return_ends_after_some_leases() -> None:
    world = trained("a", "b", steps=100)
    saved = altered(
        world.state.ledger, checkpoints={1: ev.CheckpointWritten(1, "memory://checkpoints/step-00000001", "")}
    )
    world.state = replace(world.state, ledger=saved)
    world.lose("a")
    world.wait(GRACE_LEASES * LEASE - 1, beating="b")
    assert world.events(ev.RolledBack) == []
    world.wait(1, beating="b")
    assert world.events(ev.RolledBack)[-1].step == 1


def test_another_loss_does_not_prolong_the_wait_for_a_return() -> None:
    world = trained("a", "b", "c", steps=100)
    world.lose("a")
    world.wait(50 * STEP_SECONDS, beating="bc")
    world.lose("b")
    world.wait(50 * STEP_SECONDS, beating="c")
    assert world.events(ev.RolledBack)[-1].step == 0


def test_a_node_that_returns_as_a_new_process_is_not_waited_for() -> None:
    world = trained("a", "b")
    world.lose("a")
    world.join("a", incarnation=2)
    assert world.events(ev.RolledBack)[-1].step == 0


def test_a_node_that_said_goodbye_is_not_waited_for() -> None:
    world = trained("a", "b")
    world.hear("a", goodbye=wire.Goodbye(reason="SIGTERM"))
    assert world.events(ev.RolledBack)[-1].step == 0


def test_nobody_is_waited_for_if_a_replica_is_left_or_nothing_is_trained_yet() -> None:
    for world in (trained("a", "b", "c", "d"), trained("a", "b", steps=0)):
        world.lose("b")
        assert isinstance(world.state.phase, Switching)
        assert not any("to return" in event.reason for event in world.events(ev.Waiting))


def test_nodes_that_return_one_by_one_after_a_restart_lose_nothing() -> None:
    world = restarted(trained("a", "b"), **LONG, cluster=ANY_NUMBER)
    for node in "ab":
        assert world.events(ev.RolledBack) == []
        world.join(node)
        world.wait(1, beating=world.state.members.sessions)
    assert world.events(ev.RolledBack) == []
    assert isinstance(world.state.phase, Switching)
    assert (world.plan_in_force.nodes, world.last_to("a", "assignment").step) == (("a", "b"), 5)


def test_after_a_restart_a_missing_node_is_waited_for_however_little_would_be_lost() -> None:
    world = restarted(trained("a", "b", seconds=0.001), **LONG, cluster=ANY_NUMBER)
    world.wait(LEASE)
    world.join("a")
    world.wait((GRACE_LEASES - 1) * LEASE - 1, beating="a")
    assert world.events(ev.RolledBack) == []
    world.wait(1, beating="a")
    assert world.events(ev.RolledBack)[-1].step == 0


def test_a_leaving_node_stays_while_others_may_return_and_need_its_state() -> None:
    world = trained("a", "b", "c")
    world.lose("a")
    assert isinstance(world.state.phase, Gathering)
    world.hear("b", leaving=wire.Leaving(reason="SIGTERM"))
    assert "b" in world.state.members.sessions
    world.join("a")
    assert world.events(ev.RolledBack) == []
    assert world.last_to("c", "assignment").step == 5
