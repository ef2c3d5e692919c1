"""The precision of a run whose run file leaves it open: decided with the first plan, by its nodes (`core/plan/precision.py`)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from dtfm.coordinator.core.phases import Stepping, Switching
from dtfm.coordinator.log import events as ev
from dtfm.protos import control_pb2 as wire, plan_pb2
from dtfm.scheduler.model.plan import Plan
from tests.coordinator.script import LEASE, World, fresh_state, prepared, restarted, two_stages

GPU = wire.Device(kind="cuda", name="a GPU", memory_bytes=1 << 33, flops=1e13, bf16=True)
OLD = wire.Device(kind="cuda", name="an old GPU", memory_bytes=1 << 33, flops=1e12)
CPU = wire.Device(kind="cpu", name="a CPU", memory_bytes=1 << 33, flops=1e11)
FP32, BF16 = plan_pb2.FP32, plan_pb2.BF16


def fresh(nodes: int = 2, precision: str = "auto") -> World:
    return World(fresh_state(train={"precision": precision}, cluster={"nodes": nodes, "stages": "auto"}))


def told(world: World, node: str) -> plan_pb2.Precision:
    """What the node was welcomed to last."""
    run: plan_pb2.Run = world.last_to(node, "welcome").run
    return run.train.precision


def prepare(world: World, *nodes: str) -> None:
    """The nodes, which are welcomed, prepare what they were told, and measure their links."""
    for node in nodes:
        world.hear(node, prepared(precision=told(world, node)))
        world.report_links(node)


def join(world: World, device: wire.Device, *nodes: str) -> None:
    for node in nodes:
        world.greet(node, device=device)
        prepare(world, node)


def settings(world: World) -> list[str]:
    """What the log says of it."""
    return [event.value for event in world.events(ev.RunChanged)]


@pytest.mark.parametrize(("device", "precision"), [(GPU, BF16), (OLD, FP32), (CPU, FP32)])
def test_nodes_that_are_alike_decide_it_once(device: wire.Device, precision: plan_pb2.Precision) -> None:
    world = fresh()
    join(world, device, "a", "b")
    assert [told(world, node) for node in "ab"] == [precision, precision]
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    (changed,) = world.events(ev.RunChanged)
    assert changed.narrate().startswith(
        f"a, the first node that has read the run ({device.name}), set train.precision to"
    )
    assert world.refolded().run["train"]["precision"] == world.state.run.train.precision
    assert not world.events(ev.DescriptionDropped)


def test_a_machine_that_goes_before_it_has_read_the_run_decides_nothing() -> None:
    world = fresh()
    world.greet("laptop", device=CPU)
    assert told(world, "laptop") == FP32
    assert not settings(world)
    world.lose("laptop")
    join(world, GPU, "a", "b")
    assert settings(world) == ["bf16"]


def test_gpus_that_come_after_a_cpu_compute_in_bf16_if_the_plan_has_them() -> None:
    world = fresh(3)
    join(world, CPU, "c")
    world.greet("a", device=GPU)
    world.greet("b", device=GPU)
    assert settings(world) == ["fp32"]
    assert [told(world, node) for node in "abc"] == [FP32] * 3
    prepare(world, "a", "b")
    assert settings(world) == ["fp32", "bf16"]
    by = world.events(ev.RunChanged)[-1].narrate()
    assert by == (
        "the first plan, which has a GPU, and all of its GPUs have bf16, set train.precision to bf16; it was fp32"
    )
    assert [told(world, node) for node in "abc"] == [BF16] * 3
    assert not world.events(ev.PlanAdopted)
    assert not world.hung_up, "they stay connected"
    prepare(world, *"abc")
    world.settle()
    assert isinstance(world.state.phase, Stepping)
    assert world.state.ledger.description.workload.copy_bytes_per_parameter_byte == 0.5
    assert world.refolded() == world.state.ledger


def test_what_a_node_had_prepared_before_it_was_told_otherwise_does_not_count() -> None:
    world = fresh(3)
    world.greet("a", device=GPU)
    join(world, CPU, "c")
    assert told(world, "a") == BF16
    world.hear("a", prepared(precision=BF16))  # c has been faster
    assert told(world, "a") == FP32
    world.hear("a", prepared(precision=BF16))  # as if it had crossed the welcome
    assert not world.state.ledger.members["a"].ready
    prepare(world, "a")
    assert {node: session.precision for node, session in world.state.members.sessions.items()} == {
        "a": "fp32",
        "c": "fp32",
    }
    assert "a" in {event.node for event in world.events(ev.LinksMeasured)}


def only(*nodes: str) -> Plan:
    return two_stages(nodes)


def test_an_old_gpu_counts_if_the_plan_has_it_and_ends_by_itself_if_not() -> None:
    for used in ("abo", "ab"):
        world = fresh(3)
        world.planner = lambda ids, used=used: only(*used) if {*used} <= {*ids} else "not yet"  # type: ignore[misc]
        join(world, GPU, "a", "b")
        assert settings(world) == ["bf16"]
        join(world, OLD, "o")
        assert settings(world)[:2] == ["bf16", "fp32"]
        assert world.events(ev.RunChanged)[1].by == "o, whose GPU has no bf16,"
        prepare(world, "a", "b")
        assert settings(world)[2:] == ([] if "o" in used else ["bf16"])
        assert told(world, "o") == (FP32 if "o" in used else BF16), "which it says that it cannot"
        if "o" not in used:
            world.lose("o")
            prepare(world, "a", "b")
            world.greet("o", incarnation=2, device=OLD)
            assert told(world, "o") == BF16, "it is decided"


def test_once_a_step_is_trained_it_stays() -> None:
    world = fresh(1)
    join(world, CPU, "c")
    world.settle()
    world.step()
    join(world, GPU, "a")
    world.lose("c")
    while not isinstance(world.state.phase, Switching):
        world.wait(LEASE, beating="a")
    assert (told(world, "a"), settings(world)) == (FP32, ["fp32"])


def test_other_nodes_before_the_first_step_decide_again_also_after_a_restart() -> None:
    world = fresh(2)
    join(world, GPU, "a", "b")
    assert world.events(ev.PlanAdopted)
    for node in "ab":
        world.lose(node)
    world = restarted(world, train={"precision": "bf16"}, cluster={"nodes": 2, "stages": "auto"})
    assert world.state.ledger.file["train"]["precision"] == "auto"
    join(world, CPU, "c", "d")
    assert told(world, "c") == FP32
    assert settings(world) == ["fp32"]
    prepare(world, "c", "d")
    world.settle()
    assert isinstance(world.state.phase, Stepping)


def test_strangers_decide_again_too_before_the_first_step() -> None:
    """They wait for each other's opinion once more, although there was a plan."""
    world = World(
        fresh_state(
            train={"precision": "auto"},
            cluster={"nodes": 2, "stages": "auto"},
            trust={"mode": "open", "audit_rate": 0.0},
        )
    )
    for node in "abcd":
        world.belong_together(node, key=f"key of {node}")
    for node in "ab":
        world.greet(node, device=GPU)
    prepare(world, "a", "b")
    world.report_links("a")
    assert world.state.ledger.training.generation == 1
    for node in "cd":
        world.greet(node, device=CPU)
        prepare(world, node)
    for node in "ab":
        world.lose(node)
    while told(world, "c") != FP32:
        world.wait(LEASE, beating="cd")
    prepare(world, "c", "d")
    assert all(session.prepared is None for session in world.state.members.sessions.values())
    assert world.state.ledger.data_confirmed


def test_plans_that_want_it_otherwise_each_time_are_adopted_in_the_end() -> None:
    world = fresh(2)

    def contrary(ids: Iterable[str]) -> Plan:
        return only("c") if world.state.run.train.precision == "bf16" else only("a", "c")

    world.planner = contrary
    join(world, GPU, "a")
    join(world, CPU, "c")
    for _ in range(10):
        if world.events(ev.PlanAdopted):
            break
        prepare(world, "a", "c")
    assert world.events(ev.PlanAdopted)
    assert settings(world) == ["bf16", "fp32", "bf16", "fp32"]


def test_an_operator_decides_it_first() -> None:
    world = fresh(1, precision="fp64")
    join(world, GPU, "a")
    assert told(world, "a") == plan_pb2.FP64
    assert not settings(world)
