"""Models of real size get plans on GPUs that people rent, even if the search gets no time."""

from __future__ import annotations

import pytest

from dtfm.coordinator.command.planning.gpus import GPUS
from dtfm.coordinator.command.planning.rented import parse_gpus, rented_cluster
from dtfm.scheduler.model.cluster import Cluster
from dtfm.scheduler.model.decision import Decision, Infeasible
from dtfm.scheduler.model.keeping import held_by
from dtfm.scheduler.model.memory import OptimizerState, in_flight
from dtfm.scheduler.model.problem import Problem
from dtfm.scheduler.model.workload import Workload
from dtfm.scheduler.schedule import schedule
from tests.scheduler.llama import llama

DEVICE, HOST = OptimizerState


def rented(count: int, memory: str = "32") -> Cluster:
    """GPUs of 24 GiB on connections of 500 Mbit/s, 40 ms apart."""
    return rented_cluster(parse_gpus(f"{count}x RTX 4090"), 62.5e6, 0.04, float(memory) * 2**30, "bf16")


def planned(cluster: Cluster, workload: Workload) -> Decision:
    return schedule(cluster, workload, time_used=lambda: 1.0)


@pytest.mark.parametrize(
    ("model", "count", "optimizer_state"),
    [
        ("1.1B", 1, None),
        ("7B", 6, None),
        ("7B", 6, DEVICE),
        ("13B", 12, DEVICE),
        ("70B", 96, DEVICE),
        ("7B", 3, HOST),
        ("70B", 48, HOST),
    ],
)
def test_a_model_has_a_plan_whose_every_node_has_room(
    model: str, count: int, optimizer_state: OptimizerState | None
) -> None:
    cluster, workload = rented(count), llama(model, optimizer_state=optimizer_state)
    plan = planned(cluster, workload).plan
    problem = Problem(cluster, workload)
    for index, stage in enumerate(plan.stages):
        fewest = min(in_flight(index, len(plan.stages)), workload.micro_batches)
        for node, most in zip(stage.replicas, stage.in_flight, strict=True):
            held = held_by(problem, stage.layers, fewest, min(most, workload.micro_batches), cluster.ids.index(node))
            assert held.device_bytes <= cluster.nodes[0].memory_bytes + 1
            assert held.host_bytes <= 32 * 2**30 + 1
            assert optimizer_state in (None, held.keeping.optimizer_state)


@pytest.mark.parametrize(
    ("model", "count", "sentence"),
    [
        (
            "7B",
            2,
            r"which take [\d.]+ GiB of host memory with micro-batches in flight, and lacks [\d.]+ GiB; add nodes",
        ),
        ("70B", 20, r"no plan fits the memory: .*; add nodes or memory, or shrink the model"),
    ],
)
def test_what_is_short_is_named(model: str, count: int, sentence: str) -> None:
    with pytest.raises(Infeasible, match=sentence):
        planned(rented(count), llama(model))


def test_a_fix_in_the_run_file_comes_first() -> None:
    with pytest.raises(Infeasible, match=r'of device memory .*; set optimizer_state = "auto", or add nodes or memory'):
        planned(rented(3), llama("7B", optimizer_state=DEVICE))


@pytest.mark.soak
def test_a_layer_larger_than_any_device_is_named() -> None:
    small = rented_cluster(parse_gpus("90x RTX 3080"), 62.5e6, 0.04, 8 * 2**30, "bf16")
    sentence = r"layer 1 \(decoder\) is larger than any device: alone, .* of host memory, .* more than rtx-3080-0 has"
    with pytest.raises(Infeasible, match=sentence):
        planned(small, llama("70B"))


def test_every_gpu_in_the_table_has_room_for_something() -> None:
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert all(0 < gpu.memory_bytes < gpu.memory_gib * 2**30 for gpu in GPUS)
    assert all(0 < gpu.flops("fp64") <= gpu.flops("fp32") <= gpu.flops("bf16") for gpu in GPUS)
