"""The plan from the wire: read as it was written, and refused by name when it cannot be."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dtfm.coordinator.core.messages import plan_message
from dtfm.node.model.placement import placement_of
from dtfm.node.model.received_plan import MOST_TAKEOVERS, read_plan
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from tests.coordinator.every_event import CARRIED_ON, PLAN


def test_a_plan_is_read_as_it_was_sent() -> None:
    for sent in (PLAN, CARRIED_ON):
        assert read_plan(plan_pb2.Plan.FromString(plan_message(sent).SerializeToString()), 3, 8) == sent


def test_each_node_learns_how_it_keeps_what_it_needs() -> None:
    message = plan_message(PLAN)
    for stage in message.stages:
        del stage.keeping[:]
        for number in range(len(stage.replicas)):
            stage.keeping.add(by_layer=True, in_host=bool(number))
    plan = read_plan(message, 3, 8)
    for read in plan.stages:
        for number, node in enumerate(read.replicas):
            placement = placement_of(plan, node, 0)
            assert placement is not None
            state = OptimizerState.HOST if number else OptimizerState.DEVICE
            assert placement.keeping == Keeping(Checkpointing.LAYER, state)


def add_takeovers(message: plan_pb2.Plan) -> None:
    message.takeovers.extend([plan_pb2.Plan.Takeover(node=str(n)) for n in range(MOST_TAKEOVERS + 1)])


def move_takeover(message: plan_pb2.Plan) -> None:
    message.takeovers[0].stage = 7


def misplace(message: plan_pb2.Plan) -> None:
    message.takeovers[0].place = 1 << 31


def rename_heir(message: plan_pb2.Plan) -> None:
    message.takeovers[0].heirs[0].node = "c"


def rename_receiver(message: plan_pb2.Plan) -> None:
    message.boundaries[0].flows[0].receiver = "e"


def drop_boundary(message: plan_pb2.Plan) -> None:
    del message.boundaries[:]


def drop_loads(message: plan_pb2.Plan) -> None:
    del message.stages[1].loads[:]


def hold_one_more(message: plan_pb2.Plan) -> None:
    message.stages[0].in_flight.append(4)


def hold_nothing(message: plan_pb2.Plan) -> None:
    message.stages[0].in_flight[0] = 0


def inflate(message: plan_pb2.Plan) -> None:
    message.stages[0].loads[0] = (1 << 32) - 1


def keep_in_one_way_more(message: plan_pb2.Plan) -> None:
    del message.stages[0].keeping[:]
    message.stages[0].keeping.extend([plan_pb2.Plan.Keeping()] * 2)


def clear(message: plan_pb2.Plan) -> None:
    message.Clear()


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (add_takeovers, "the plan has 1002 takeovers; it may have 1000"),
        (hold_one_more, "stage 0 has 2 numbers in flight; it has 1 replicas"),
        (hold_nothing, "stage 0 has 0 in flight; it must be 1 or above"),
        (move_takeover, "the takeover of 'b' names stage 7; there are 2"),
        (misplace, "the takeover of 'b' in stage 0 has place 2147483648"),
        (rename_heir, "gives 5 micro-batches to 'c', which then had 0"),
        (rename_receiver, "the flow from 'a' to 'e' after stage 0 is not between replicas of stages 0 and 1"),
        (drop_boundary, "there are flows for 0 boundaries; 2 stages have one fewer"),
        (drop_loads, "stage 1 has 0 loads; it has 1 replicas"),
        (inflate, "stage 0's loads add up to 4294967295; a step has 8 micro-batches"),
        (keep_in_one_way_more, "stage 0 says of 2 .* how they keep"),
        (clear, "the plan has no stages"),
    ],
)
def test_an_impossible_plan_is_refused_by_name(spoil: Callable[[plan_pb2.Plan], None], problem: str) -> None:
    message = plan_message(CARRIED_ON)
    spoil(message)
    with pytest.raises(ValueError, match=problem):
        read_plan(message, 3, 8)
