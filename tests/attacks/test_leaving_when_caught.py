"""A stranger adds wrong gradients, and whenever it is asked for them it is gone, and comes back under the same key."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.attacks.test_poisoners import audited
from tests.attacks.test_the_run_goes_on import LIAR, has_part, is_of
from tests.attacks.twisted import GONE
from tests.cluster.runs import losses_alone


@pytest.mark.soak  # it waits for the node to come back, again and again
def test_who_leaves_when_it_is_caught_does_not_get_away(tmp_path: Path) -> None:
    """It is done again without it each time, until it has three strikes, or an auditor has its tensors before it is gone."""
    with audited(tmp_path, "flips_and_leaves", [3], ("a", "b", LIAR), steps=100_000) as cluster:
        cluster.wait_for("node_quarantined", timeout=100)
        cluster.wait_for("step_committed", after=len(cluster.events))
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
        assert len([event for event in cluster.of("node_joined") if is_of(LIAR, event)]) >= 2
        assert GONE in cluster.nodes[LIAR].errors
        assert "QUARANTINED" in cluster.nodes[LIAR].errors
    (found,) = cluster.of("node_quarantined")
    assert found["node"] == LIAR
    assert (found["charge"], found["undecided"]) in (("WITHHELD", True), ("AUDIT", False))
    assert not any(map(partial(has_part, LIAR), cluster.of("step_committed"))), "nothing of it counts"
    assert cluster.losses == pytest.approx(losses_alone(cluster.run_file, steps=len(cluster.losses)), rel=1e-8)
