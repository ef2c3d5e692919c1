"""A stranger adds wrong gradients. Whenever it is asked for them it leaves, and comes back under the same key."""

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
def test_nothing_counts_of_who_leaves_whenever_it_is_asked_for_what_it_sent(tmp_path: Path) -> None:
    """It is audited whenever it has a part again. The step is done again without it each time; nobody is accused, as people come
    and go, unless an auditor has its tensors before it is gone."""
    with audited(tmp_path, "flips_and_leaves", [3], ("a", "b", LIAR), steps=100_000) as cluster:
        for _ in range(3):
            cluster.wait_for("node_joined", where=partial(is_of, LIAR), after=len(cluster.events), timeout=100)
        cluster.wait_for("step_committed", after=len(cluster.events))
        assert cluster.coordinator is not None
        cluster.coordinator.send(signal.SIGINT)
        assert cluster.finish() == 1
        assert GONE in cluster.nodes[LIAR].errors
    assert {event["node"] for event in cluster.of("node_quarantined")} <= {LIAR}
    assert not any(map(partial(has_part, LIAR), cluster.of("step_committed"))), "nothing of it counts"
    # Where auditors have its tensors before it is gone, two go on alone. Then a bound holds for what they add, too, now and then.
    exact = min((event["step"] for event in cluster.of("gradients_clipped")), default=len(cluster.losses))
    assert exact > 3
    assert cluster.losses[:exact] == pytest.approx(losses_alone(cluster.run_file, steps=exact), rel=1e-8)
