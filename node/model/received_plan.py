"""The plan that the coordinator sends, checked before it is used."""

from __future__ import annotations

from dtfm.protos import plan_pb2
from dtfm.scheduler.model.memory import Checkpointing, Keeping, OptimizerState
from dtfm.scheduler.model.plan import Flow, Plan, Stage, Takeover, check
from dtfm.scheduler.model.rounds import Rounds

MOST_TAKEOVERS = 1000
"""As many as nodes can be members of a run."""


def read_plan(message: plan_pb2.Plan, layers: int, micro_batches: int) -> Plan:
    """The plan in the message. ``layers`` and ``micro_batches`` are those of the model and of a step.

    Raises ValueError, which names what is wrong, unless its parts fit together (plan.check).
    """
    if len(message.takeovers) > MOST_TAKEOVERS:
        raise ValueError(f"the plan has {len(message.takeovers)} takeovers; it may have {MOST_TAKEOVERS}")
    plan = Plan(
        message.generation,
        tuple(
            Stage(
                (stage.first_layer, stage.past_last_layer),
                tuple(stage.replicas),
                tuple(stage.loads),
                tuple(stage.in_flight),
                tuple(map(_keeping, stage.keeping)),
                stage.island,
            )
            for stage in message.stages
        ),
        tuple(
            tuple(Flow(flow.sender, flow.receiver, flow.micro_batches) for flow in boundary.flows)
            for boundary in message.boundaries
        ),
        tuple(message.idle),
        tuple(
            Takeover(
                takeover.stage,
                takeover.node,
                takeover.place,
                tuple((heir.node, heir.micro_batches) for heir in takeover.heirs),
            )
            for takeover in message.takeovers
        ),
        read_rounds(message.rounds),
    )
    check(plan, layers, micro_batches)
    if len(plan.islands) > 1 and not plan.rounds.count:
        raise ValueError(
            f"there are {len(plan.islands)} islands, and no rounds after which they exchange what they learn"
        )
    return plan


def read_rounds(message: plan_pb2.Rounds) -> Rounds:
    return Rounds(message.since, message.steps, message.count, message.before)


def _keeping(message: plan_pb2.Plan.Keeping) -> Keeping:
    return Keeping(
        Checkpointing.LAYER if message.by_layer else Checkpointing.NONE,
        OptimizerState.HOST if message.in_host else OptimizerState.DEVICE,
    )
