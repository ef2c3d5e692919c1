"""What the coordinator is told of an error that kept this node from doing its part."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dtfm.node.data.problems import sentence_of
from dtfm.node.network.dialling import Lost
from dtfm.node.state.snapshot_files import SnapshotDamaged
from dtfm.node.training.step.pipeline import NonFinite
from dtfm.programs import START_AGAIN
from dtfm.protos.control_pb2 import PlanFailed, StepFailed, StepProblem

PASSING = frozenset({"ConnectionError", "TimeoutError", "Timeout", "TransportError", "ClientConnectionError"})
"""Names of types of errors of a network, in Python and in the libraries with which data sets, models and storage are read."""
PASSING_STATUS = frozenset({408, 425, 429})
"""Answers of an HTTP server that may be others soon, beside those from 500 on."""


def problem_of(error: Exception) -> StepProblem:
    match error:
        case NonFinite():
            return StepProblem.NON_FINITE
        case Lost():
            return StepProblem.PEER_LOST
        case _ if _is_out_of_memory(error):
            return StepProblem.OUT_OF_MEMORY
        case _:
            return StepProblem.INTERNAL


def peer_of(error: Exception) -> str:
    """The lost peer, or the peer that sent the bad data; empty: none."""
    return error.source if isinstance(error, NonFinite) else error.peer if isinstance(error, Lost) else ""


def step_failed(generation: int, step: int, error: Exception) -> StepFailed:
    return StepFailed(
        generation=generation,
        step=step,
        problem=problem_of(error),
        peer=peer_of(error),
        sentence=sentence_of(error),
    )


def plan_failed(generation: int, error: Exception) -> PlanFailed:
    damaged = isinstance(error, SnapshotDamaged)
    peer = next((cause.peer for cause in _causes(error) if isinstance(cause, Lost)), "")
    return PlanFailed(generation=generation, problem=sentence_of(error), snapshot_damaged=damaged, peer=peer)


def exit_code(error: Exception) -> int:
    """The exit code of a node that cannot take part: 2 if somebody has to change something, START_AGAIN if its device has failed
    until a restart, and 1 if the node may be started again then."""
    if is_device_lost(error):
        return START_AGAIN
    return 2 if isinstance(error, ValueError) and not may_pass(error) else 1


def is_device_lost(error: BaseException) -> bool:
    """Whether the device answers nothing but errors from now on, until this process has ended: CUDA's context is damaged."""
    return any(
        (isinstance(cause, torch.AcceleratorError) or (isinstance(cause, RuntimeError) and _is_from_cuda(cause)))
        and not _is_out_of_memory(cause)
        for cause in _causes(error)
    )


def may_pass(error: BaseException) -> bool:
    """Whether a network or a server caused the error, so that a new try may succeed soon."""
    for cause in _causes(error):
        status = getattr(getattr(cause, "response", None), "status_code", 0)
        if status in PASSING_STATUS or (isinstance(status, int) and status >= 500):
            return True
        if not PASSING.isdisjoint(kind.__name__ for kind in type(cause).__mro__):
            return True
    return False


def _is_from_cuda(error: RuntimeError) -> bool:
    """An error of CUDA as PyTorch or CuPy reports it, except the errors of its libraries, which damage nothing."""
    said = "CUDA error:" in str(error) and "CUBLAS_STATUS" not in str(error)
    return said or type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")


def _is_out_of_memory(error: BaseException) -> bool:
    is_cuda = isinstance(error, torch.AcceleratorError) or (isinstance(error, RuntimeError) and _is_from_cuda(error))
    return isinstance(error, torch.OutOfMemoryError) or (is_cuda and "out of memory" in str(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
