"""With which code a node ends: services start it again after 1, and not after 2."""

from __future__ import annotations

import pytest
import torch

from dtfm.node.session import Session
from dtfm.node.training.failure import exit_code
from dtfm.protos.control_pb2 import RefusalReason


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("the run names /data, which --allow-data does not"), 2),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), 1),
        (OSError("no space left on device"), 1),
    ],
)
def test_a_failed_device_may_do_when_started_again_and_a_mistake_has_to_be_corrected(
    error: Exception, code: int
) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize("reason", RefusalReason.keys())
def test_only_refusals_that_pass_by_themselves_are_worth_another_start(reason: str) -> None:
    session = Session.__new__(Session)
    session._refused(reason, "why")
    assert session._exit == (1 if reason in ("BUSY", "FULL") else 2)
