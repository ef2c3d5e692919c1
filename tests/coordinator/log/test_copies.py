"""Which snapshots the ledger knows, and for how long: `log/copies.py`."""

from __future__ import annotations

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.copies import MOST_AGREED
from dtfm.coordinator.log.ledger import Ledger, fold


def with_checkpoints(steps: int, *, keep: int, every: int = 1) -> Ledger:
    """The digests of each step's state are agreed on, and there is a checkpoint every given number of steps."""
    events: list[ev.Event] = [ev.RunStarted("id", {"checkpoint": {"keep": keep}})]
    for step in range(1, steps + 1):
        events.append(ev.StateAgreed(step, (f"state {step}",)))
        if step % every == 0:
            events.append(ev.CheckpointWritten(step, f"folder {step}", f"manifest {step}"))
    return fold(events)


def test_the_checkpoints_that_the_run_keeps_are_known_and_no_others() -> None:
    copies = with_checkpoints(100, keep=3).copies
    assert list(copies.checkpoints) == [98, 99, 100]
    assert copies.checkpoints[99].manifest == "manifest 99"


def test_the_digests_of_a_checkpoint_are_known_as_long_as_it_is_kept() -> None:
    """Otherwise what a liar wrote into it would be believed."""
    copies = with_checkpoints(100, keep=3, every=30).copies
    assert list(copies.checkpoints) == [30, 60, 90]
    assert list(copies.agreed) == [30, 60, *range(100 - MOST_AGREED + 1, 101)]


def test_going_back_forgets_later_steps() -> None:
    ledger = fold([ev.RolledBack(75, 100, "why")], with_checkpoints(100, keep=3, every=30))
    assert list(ledger.copies.checkpoints) == [30, 60]
    assert max(ledger.copies.agreed) <= 75
