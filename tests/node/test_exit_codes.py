"""With which code a node ends: services start it again after 1, and not after 2."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from dtfm.node.session import Session
from dtfm.node.training.failure import exit_code, is_device_lost, problem_of
from dtfm.programs import START_AGAIN
from dtfm.protos.control_pb2 import NodeMessage, RefusalReason, StepProblem
from tests.protos.members import member


class CUDARuntimeError(RuntimeError):
    """As CuPy's."""


class Answered(OSError):
    """As of an HTTP client."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status} from the hub")
        self.response = SimpleNamespace(status_code=status)


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


ILLEGAL = "CUDA error: an illegal memory access was encountered"
DAMAGED = [
    torch.AcceleratorError(ILLEGAL),
    RuntimeError(f"{ILLEGAL}\nCompile with TORCH_USE_CUDA_DSA"),
    CUDARuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered"),
]
OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    CUDARuntimeError("cudaErrorMemoryAllocation: out of memory"),
]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("the run names /data, which --allow-data does not"), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (OSError("no space left on device"), 1),
        *((error, START_AGAIN) for error in DAMAGED),
        *((error, 1) for error in OUT_OF_MEMORY),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"), 1),
        (RuntimeError("element 0 of tensors does not require grad"), 1),
        (raised_from(ValueError("data.source: 'hf:wiki' cannot be loaded"), ConnectionError("the hub")), 1),
        (raised_from(ValueError("model.pretrained: it cannot be read"), Answered(503)), 1),
        (raised_from(ValueError("model.pretrained: it cannot be read"), Answered(404)), 2),
        (raised_from(RuntimeError("timing the device failed"), DAMAGED[0]), START_AGAIN),
    ],
    ids=str,
)
def test_a_failed_device_may_do_when_started_again_and_a_mistake_has_to_be_corrected(
    error: Exception, code: int
) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_running_out_of_memory_is_told_as_that_whoever_says_so(error: Exception) -> None:
    assert problem_of(error) == StepProblem.OUT_OF_MEMORY
    assert not is_device_lost(error)


@pytest.mark.parametrize(
    ("error", "goodbye"), [(RuntimeError("a bug"), True), *((error, False) for error in DAMAGED)], ids=str
)
def test_a_node_whose_device_has_failed_leaves_without_a_goodbye_which_would_end_its_membership(
    error: Exception, goodbye: bool
) -> None:
    session, sent, hung_up = Session.__new__(Session), list[NodeMessage](), list[bool]()
    session._send = sent.append  # type: ignore[method-assign, assignment]
    session._hang_up = lambda: hung_up.append(True)
    session._fail(error)
    assert [message.HasField("goodbye") for message in sent] == [True] * goodbye
    assert bool(hung_up) is not goodbye


@pytest.mark.parametrize("reason", ["WRONG_AUTHORITY", "WRONG_CLOCK", "QUARANTINED"])
def test_who_was_let_in_before_waits_until_the_coordinator_has_set_its_clock(reason: str) -> None:
    session = Session.__new__(Session)
    session._identity, session._exit = member("a"), None
    session._refused(reason, "why")
    assert session._exit == (2 if reason == "QUARANTINED" else None)


@pytest.mark.parametrize("reason", RefusalReason.keys())
def test_only_refusals_that_pass_by_themselves_are_worth_another_start(reason: str) -> None:
    session = Session.__new__(Session)
    session._identity = None
    session._refused(reason, "why")
    assert session._exit == (1 if reason in ("BUSY", "FULL") else 2)
