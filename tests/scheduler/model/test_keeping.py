"""How nodes keep what they need: against the model in plain Python, and by hand."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from dtfm.scheduler.cost.simulate import simulate
from dtfm.scheduler.model.cluster import Cluster, Node
from dtfm.scheduler.model.keeping import held_by, keepings
from dtfm.scheduler.model.memory import LADDER, Checkpointing, Keeping, OptimizerState, in_flight
from dtfm.scheduler.model.problem import Draft, Problem
from dtfm.scheduler.model.tables import tables
from dtfm.scheduler.model.workload import Layer, Workload
from tests.scheduler import yardstick_keeping as plain
from tests.scheduler.drafts import drafts
from tests.scheduler.plans import memory_shortfall

NONE, LAYER = Checkpointing
DEVICE, HOST = OptimizerState


@given(drafts())
def test_every_node_keeps_what_it_needs_as_the_plain_model_says(drawn: tuple[Problem, Draft]) -> None:
    problem, draft = drawn
    expected = [
        [plain.chosen(problem, draft, stage, node) for node in group] for stage, group in enumerate(draft.groups)
    ]
    assert [list(ways) for ways in keepings(problem, draft)] == [[way.keeping for way in ways] for ways in expected]
    assert memory_shortfall(problem, draft.groups, draft.cuts) == pytest.approx(
        plain.shortfall(problem, draft), rel=1e-9
    )
    for stage, group in enumerate(draft.groups):
        for node, way in zip(group, expected[stage], strict=True):
            fewest = min(in_flight(stage, len(draft.groups)), problem.workload.micro_batches)
            held = held_by(problem, (draft.cuts[stage], draft.cuts[stage + 1]), fewest, 7, node)
            assert held.keeping == way.keeping
            assert held.device_bytes == pytest.approx(way.fixed + 7 * way.each, rel=1e-9)
            assert held.host_bytes == pytest.approx(way.host, rel=1e-9)


def one_node(memory: float, host: float | None, **more: object) -> Problem:
    """Three layers of 100 parameter bytes, output 10, kept 60 and working 5 each, in bf16; 4 micro-batches, one in flight."""
    layers = tuple(Layer(f"layer{i}", 1e9, 100.0, 10.0, 60.0, 5.0) for i in range(3))
    workload = Workload(layers, 4, copy_bytes_per_parameter_byte=0.5, checkpointing=None, optimizer_state=None)
    return Problem(
        Cluster((Node("a", 1e9, memory, host_memory_bytes=host),), np.zeros((1, 1)), np.zeros((1, 1))),
        replace(workload, **more),  # type: ignore[arg-type]
    )


# State: 300 x (1 + 0.5 + 1 + 2) = 1350 on the device; or 300 x (0.5 + 1) = 450 there and 300 x (1 + 2) = 900 in the host's.
# Activations: 3 x 60 + 5 = 185; or the inputs of two layers, 20, and 65 for the one that is computed again = 85.
@pytest.mark.parametrize(
    ("memory", "host", "keeping", "device_bytes", "host_bytes"),
    [
        (1535.0, None, Keeping(NONE, DEVICE), 1535.0, 0.0),
        (1533.0, 1e6, Keeping(LAYER, DEVICE), 1435.0, 0.0),
        (1433.0, 900.0, Keeping(NONE, HOST), 635.0, 900.0),
        (633.0, 900.0, Keeping(LAYER, HOST), 535.0, 900.0),
    ],
)
def test_a_node_takes_the_first_way_for_which_it_has_room(
    memory: float, host: float | None, keeping: Keeping, device_bytes: float, host_bytes: float
) -> None:
    held = held_by(one_node(memory, host), (0, 3), 1, 1, 0)
    assert held == (keeping, device_bytes, host_bytes)


@pytest.mark.parametrize(("memory", "host"), [(1433.0, None), (1433.0, 898.0), (533.0, 900.0)])
def test_without_room_in_any_way_a_plan_lacks_memory(memory: float, host: float | None) -> None:
    assert memory_shortfall(one_node(memory, host), ((0,),), (0, 3)) > 0


def test_every_node_keeps_memory_as_the_run_fixes_it() -> None:
    for keeping in LADDER:
        fixed = one_node(1e9, 1e9, checkpointing=keeping.checkpointing, optimizer_state=keeping.optimizer_state)
        assert held_by(fixed, (0, 3), 1, 1, 0).keeping == keeping


def test_to_compute_layers_again_costs_one_forward_pass_more() -> None:
    draft = Draft.of(((0,),), (0, 3), (np.array([4]),), ())
    plainly, again = (simulate(one_node(1e9, 1e9, checkpointing=ways), draft) for ways in (NONE, LAYER))
    assert [plainly, again] == pytest.approx([4 * 3 * 3.0, 4 * 3 * 4.0])


def test_muons_matrices_take_one_moment_and_updates_of_16_bits_in_every_account() -> None:
    """Of 100 bytes, 80 are matrices: by parameter byte, weights, gradients and two moments, without one of these."""
    layer = Layer("a", 1.0, 100.0, 1.0, orthogonal_bytes=80.0)
    workload = Workload((layer, replace(layer, orthogonal_bytes=0.0)), 1, optimizer_state=None)
    parameters, orthogonal = np.array([100.0, 100.0]), np.array([80.0, 0.0])
    assert workload.kept_on_device(parameters, orthogonal).tolist() == [400 - 80 + 40, 400]
    assert workload.kept_beside_host(parameters, orthogonal).tolist() == [200 + 40, 200]
    assert workload.kept_on_host(parameters, orthogonal).tolist() == [300 - 80, 300]
    assert workload.moved(parameters, orthogonal).tolist() == [300 - 80, 300]
    assert workload.least_on_device(parameters, orthogonal).tolist() == [240, 200]
    problem = Problem(Cluster((Node("a", 1.0, 1e3),), np.zeros((1, 1)), np.zeros((1, 1))), workload)
    of_layers = tables(problem).layer
    assert np.diff(of_layers["state_before"]).tolist() == [360, 400]
    assert np.diff(of_layers["host_before"]).tolist() == [220, 300]
    assert np.diff(problem.reduced_before).tolist() == [100 + 20, 100]
