"""What a node tells the coordinator of a step that it has done."""

from __future__ import annotations

from dtfm.node.training.generation import Generation
from dtfm.node.training.pipeline import Outcome
from dtfm.protos.control_pb2 import StepReady


def vote_on(generation: Generation, step: int, outcome: Outcome, squared_norm: float, state_digest: bytes) -> StepReady:
    """The vote for ``step``, which `Generation.train` has done with this outcome. ``state_digest``: of the state before it. Waits
    for what is still being encoded, if work is audited."""
    commitments = generation.commitments
    sent, received = commitments.report() if commitments is not None else ((), ())
    return StepReady(
        generation=generation.number,
        step=step,
        squared_gradient_norm=squared_norm,
        loss_sum=outcome.loss_sum,
        samples=outcome.samples,
        state_digest=state_digest,
        compute_seconds=outcome.compute_seconds,
        wait_seconds=outcome.wait_seconds,
        arrived=generation.receiver.take_paces(),
        clipped=(clipped for _, clipped in sorted(generation.reducer.clipped.items())),
        sent=sent,
        received=received,
        losses=outcome.losses if commitments is not None else (),
        kept=commitments is not None and generation.progress.keeps_all,
    )
