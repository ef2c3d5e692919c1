"""Each lie of twisted.py is one that an audit sees, or that the two ends of a hop show."""

from __future__ import annotations

import math

import pytest

from dtfm.protos.control_pb2 import NodeMessage
from dtfm.protos.frame import Kind
from tests.attacks.twisted import LIES, TWISTS
from tests.cluster.runs import GPT2
from tests.node.in_process import InProcess
from tests.node.training.audits.auditors import Auditors, errors
from tests.node.training.audits.test_step_again import Nodes, trained

__all__ = ["trained"]

ACTIVATIONS, GRADIENTS, ADDENDS, LOSSES = range(4)


@pytest.mark.parametrize(
    ("lie", "accused", "by", "of", "size"),
    [
        ("poisons", "n2", "n3", ADDENDS, 31),
        ("flips", "n2", "n3", ADDENDS, 2),
        ("exaggerates", "n2", "n3", ADDENDS, 29),
        ("adds_noise", "n2", "n3", ADDENDS, math.sqrt(2)),
        ("adds_too_much", "n2", "n3", ADDENDS, 0.05),
        ("adds_up_wrong", "n2", "n3", ADDENDS, 2),
        ("biased_forward", "n0", "n1", ACTIVATIONS, 0.05),
        ("biased_back", "n4", "n5", GRADIENTS, 0.05),
        ("noisy", "n0", "n1", ACTIVATIONS, math.sqrt(2)),
        ("sends_zeros", "n0", "n1", ACTIVATIONS, 1),
        ("repeats", "n0", "n1", ACTIVATIONS, 1),
        ("mislabels", "n4", "n5", GRADIENTS, 1),
        ("mislabels", "n4", "n5", LOSSES, 0.005),
    ],
)
def test_an_audit_sees_it(trained: Nodes, lie: str, accused: str, by: str, of: int, size: float) -> None:
    """All nodes lie here, and the auditor does not."""
    with trained(model=GPT2) as nodes, LIES[lie]():
        step = Auditors(nodes)
        audit = step.asked(accused, bucket=_bucket(nodes, accused))
        if lie != "adds_up_wrong":
            del audit.sums[:]  # they have what the accused added of its own, and are of another size
        found = errors(step.answer(by, audit))
    if lie in ("repeats", "mislabels"):
        assert found[of] > size / 2
    else:
        assert found[of] == pytest.approx(size, rel=0.1)
    others = [error for kind, error in enumerate(found) if kind != of and error > 1e-6]
    assert not others or lie == "mislabels"


def test_who_denies_says_something_else_than_who_got_it(trained: Nodes) -> None:
    with trained(model=GPT2) as nodes:
        step = Auditors(nodes)
    (vote,) = [message.step_ready for message in TWISTS["denies"](NodeMessage(step_ready=step.votes["n0"]))]
    denied = {each.peer: each.digests[:16] for each in vote.sent if each.kind == Kind.ACTIVATION}
    for peer, digest in denied.items():
        assert digest not in step.received[peer].values()


def _bucket(nodes: InProcess, node: str) -> int:
    return min(nodes.generations[node].stage.buckets)
