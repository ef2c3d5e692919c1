"""What islands keep when their nodes return, when the coordinator does, and when all go back to a snapshot."""

from __future__ import annotations

import pytest
from blake3 import blake3

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.core.timeouts import GRACE_LEASES
from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.events import RunResumed
from dtfm.coordinator.log.ledger import fold
from dtfm.protos import control_pb2 as wire
from tests.coordinator.islands import ROUNDS, EachAlone, each_alone, exchange
from tests.coordinator.script import LAYERS, LEASE, World, fresh_state
from tests.coordinator.standbys import caught_up, report

CHECKPOINTS = {"every": ROUNDS + 1, "holds": "state"}


def state_of(island: int) -> list[wire.BucketState]:
    """After an exchange: moments of its own, and what all islands share."""
    return [
        wire.BucketState(bucket=bucket, digest=bytes([bucket, island]) * 16, shared=bytes([bucket]) * 32)
        for bucket in range(LAYERS)
    ]


def whole(island: int) -> bytes:
    return blake3(b"".join(each.digest for each in state_of(island))).digest()


def vote(world: World, **islands: int) -> None:
    for node, island in islands.items():
        world.vote(node, states=state_of(island), state_digest=whole(island))


def with_a_checkpoint(**islands: int) -> World:
    """Of step 3, of whose state the votes for step 4 say the digests."""
    world = each_alone(*islands, checkpoint=CHECKPOINTS)
    exchange(world)
    world.save()
    vote(world, **islands)
    return world


def restarted(world: World, nodes: int = 1) -> World:
    """Another coordinator goes on with the log."""
    resumed = RunResumed("from the log", dict(world.state.ledger.run), dict(world.state.ledger.file))
    ledger = fold([resumed], world.refolded())
    after = EachAlone(fresh_state(ledger, train=ledger.run["train"], cluster={"nodes": nodes, "stages": "auto"}))
    after.automatic_standbys = False
    return after


def apply_all(world: World, **islands: int) -> None:
    plan = world.plan_in_force
    for node, island in islands.items():
        applied = wire.Applied(generation=plan.generation, step=3, state_digest=whole(island), states=state_of(island))
        world.hear(node, applied=applied)


def come(world: World, *nodes: str, incarnation: int = 1) -> None:
    for node in nodes:
        world.prepare(node, incarnation=incarnation)
        world.report_links(node)
    world.wait(LEASE / 2, beating=world.state.members.sessions)


def islands_of(world: World) -> list[tuple[int, tuple[str, ...]]]:
    return [(stage.island, stage.replicas) for stage in world.plan_in_force.stages]


def test_after_going_back_only_the_first_island_must_have_the_moments_of_the_snapshot() -> None:
    world = restarted(with_a_checkpoint(a=0, b=1), nodes=2)
    come(world, "a", "b", incarnation=2)
    assert world.last_to("b", "assignment").island_began == 3
    world.plan_ready("a", states=state_of(0))
    world.plan_ready("b", states=state_of(9))
    assert isinstance(world.state.phase, Stepping)


def with_a_new_first_island() -> World:
    """a, which was island 0, has left after a checkpoint of step 3. c is island 0 from step 6 on."""
    world = with_a_checkpoint(a=0, b=1)
    world.lose("a")
    world.settle()
    world.join("c")
    caught_up(world, "c", step=3)
    exchange(world)
    report(world, "c", step=3)
    world.apply()
    world.settle()
    assert islands_of(world) == [(0, ("c",)), (1, ("b",))]
    assert world.state.ledger.training.began == {0: 6}
    return world


def all_start_anew(world: World) -> None:
    for node in ("b", "c"):
        world.lose(node)
    come(world, "b", "c", incarnation=2)
    world.wait((GRACE_LEASES + 1) * LEASE, beating="bc")


def test_after_going_back_the_first_island_began_when_that_did_whose_snapshot_it_is() -> None:
    world = with_a_new_first_island()
    all_start_anew(world)
    assert world.events(ev.RolledBack)[-1].step == 3
    assert {world.last_to(node, "assignment").island_began for node in world.plan_in_force.nodes} == {0}
    world = with_a_new_first_island()
    world.save()
    exchange(world)
    world.save()
    vote(world, b=1, c=0)
    all_start_anew(world)
    assert world.events(ev.RolledBack)[-1].step == 9
    first, *others = (world.last_to(stage.replicas[0], "assignment") for stage in world.plan_in_force.stages)
    assert first.island_began == 6
    assert all(other.island_began == 9 for other in others)


def test_an_island_still_knows_when_it_began_after_a_plan_without_it_that_failed() -> None:
    ledger = with_a_new_first_island().state.ledger
    plan, step = ledger.training.in_force, ledger.training.step
    without = fold([ev.PlanAdopted(8, plan.islands[1], "for a test", step)], ledger)
    assert fold([ev.PlanAdopted(9, plan, "for a test", step)], without).training.began == {0: 6}
    assert fold([ev.PlanStarted(8, step + 1)], without).training.began == {}


def test_the_checkpoint_does_not_have_the_state_of_another_island() -> None:
    world = each_alone("a", "b", checkpoint=CHECKPOINTS)
    exchange(world)
    world.save()
    world.lose("a")
    world.plan_ready("b", states=state_of(1))
    assert isinstance(world.state.phase, Stepping)
    assert world.state.ledger.copies.agreed == {}


def test_of_the_last_state_that_counts_which_the_checkpoint_has() -> None:
    """a's island is gone before its state is in the last checkpoint. Then b's is."""
    train = {"rounds": ROUNDS, "steps": ROUNDS + 1, "evaluate_every": 0}
    world = each_alone("a", "b", train=train, checkpoint={"every": 0})
    exchange(world)
    apply_all(world, a=0, b=1)
    world.evaluate()
    assert world.state.ledger.copies.digests(3) == tuple(each.digest.hex() for each in state_of(0))
    world.lose("a")
    world.plan_ready("b", states=state_of(1))
    apply_all(world, b=1)
    world.evaluate()
    world.save()
    assert world.exit_code == 0
    assert world.state.ledger.copies.digests(3) == tuple(each.digest.hex() for each in state_of(1))


@pytest.mark.parametrize(("returning", "other"), ["ab", "ba"])
def test_training_does_not_go_back_while_a_node_with_another_island_may_return(returning: str, other: str) -> None:
    world = each_alone("a", "b", checkpoint=CHECKPOINTS)
    for _ in range(2):
        world.now += LEASE
        world.step()
    for node in "ab":
        world.lose(node)
    come(world, returning, incarnation=2)
    assert world.events(ev.RolledBack) == []
    come(world, other)
    assert world.plan_in_force.island_of(other) == world.state.ledger.training.islands[other]
    assert world.events(ev.RolledBack) == []


def test_a_new_coordinator_waits_until_all_islands_are_back() -> None:
    world = each_alone("a", "b", "c")
    world.step()
    after = restarted(world)
    come(after, "b", "c")
    assert after.state.ledger.training.plan is None
    assert "for a to return" in after.events(ev.Waiting)[-1].reason
    come(after, "a")
    assert islands_of(after) == [(0, ("a",)), (1, ("b",)), (2, ("c",))]


def test_a_new_coordinator_does_not_wait_for_them_for_ever() -> None:
    world = each_alone("a", "b", "c")
    world.step()
    after = restarted(world)
    come(after, "b", "c")
    after.wait(GRACE_LEASES * LEASE, beating="bc")
    assert islands_of(after) == [(1, ("b",)), (2, ("c",))]


def test_what_another_island_holds_never_counts_for_the_checkpoint_however_often_its_plan_begins() -> None:
    world = each_alone("a", "b", checkpoint=CHECKPOINTS)
    exchange(world)
    world.save()
    world.lose("a")
    for _ in range(2):
        world.plan_ready("b", states=state_of(1))
        assert isinstance(world.state.phase, Stepping)
        world.fail_step("b", wire.INTERNAL)
    world.plan_ready("b", states=state_of(1))
    assert world.state.ledger.copies.agreed == {}


def test_of_a_last_state_that_two_islands_wrote_nothing_is_known() -> None:
    """a is gone when its snapshot is on its disk, and not in the checkpoint yet."""
    train = {"rounds": ROUNDS, "steps": ROUNDS + 1, "evaluate_every": 0}
    world = each_alone("a", "b", train=train, checkpoint={"every": 0})
    exchange(world)
    apply_all(world, a=0, b=1)
    world.evaluate()
    world.write_snapshot()
    world.lose("a")
    while not isinstance(world.state.phase, Switching):
        world.wait(LEASE, beating="b")
    world.plan_ready("b", states=state_of(1))
    apply_all(world, b=1)
    world.evaluate()
    world.save()
    assert world.exit_code == 0
    assert world.state.ledger.copies.digests(3) == ()


def test_a_new_coordinator_does_not_wait_for_nodes_that_said_goodbye() -> None:
    world = each_alone("a", "b", "c")
    world.step()
    after = restarted(world)
    come(after, "a")
    after.hear("a", goodbye=wire.Goodbye(reason="its owner gives up"))
    come(after, "b", "c")
    assert islands_of(after) == [(1, ("b",)), (2, ("c",))]
