"""What the coordinator is told of an error that kept this node from doing its part."""

from __future__ import annotations

import torch

from dtfm.node.state.snapshot_files import CheckpointDamaged
from dtfm.node.state.snapshots import SnapshotDamaged
from dtfm.node.training.pipeline import NonFinite
from dtfm.protos.control_pb2 import PlanFailed, StepProblem

MOST_CHARACTERS = 1000


def problem_of(error: Exception) -> StepProblem:
    match error:
        case NonFinite():
            return StepProblem.NON_FINITE
        case torch.OutOfMemoryError():
            return StepProblem.OUT_OF_MEMORY
        case _:
            return StepProblem.INTERNAL


def peer_of(error: Exception) -> str:
    """Who has sent what the error is about; empty: nobody."""
    return error.source if isinstance(error, NonFinite) else ""


def plan_failed(generation: int, error: Exception) -> PlanFailed:
    damaged = isinstance(error, SnapshotDamaged | CheckpointDamaged)
    return PlanFailed(generation=generation, problem=sentence_of(error), snapshot_damaged=damaged)


def exit_code(error: Exception) -> int:
    """Of a node that cannot take part: 2 if somebody has to change something, 1 if it may do when it is started again."""
    return 2 if isinstance(error, ValueError) else 1


def sentence_of(error: Exception) -> str:
    """The error in a sentence, with its type unless our own wording makes that clear."""
    ours = isinstance(error, (ValueError, ConnectionError, NonFinite, SnapshotDamaged))
    return (str(error) if ours else f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]
