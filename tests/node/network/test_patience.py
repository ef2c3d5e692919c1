"""How long a node goes on trying to connect, and what it says meanwhile."""

from __future__ import annotations

import logging
from typing import cast

import pytest

from dtfm.node.network.patience import LONGEST_PAUSE_SECONDS, SAY_AGAIN_SECONDS, Patience
from dtfm.protos.identity.enrolment import Entry

LEASE, MOST = 2.0, 1000.0


class Attempts:
    """Attempts to connect at times that a test sets. Pauses are never drawn longer or shorter."""

    def __init__(self) -> None:
        self.now = 0.0
        self._patience = Patience(cast(Entry, "here:1"), lambda: self.now, lambda _least, _most: 1.0)

    def fail_at(
        self, now: float, *, answered: bool = False, lapsed: str = "", began: float | None = None
    ) -> float | None:
        self.now = now
        attempt = (now if began is None else began, "no route", answered, lapsed)
        return self._patience.pause(*attempt, lease=LEASE, patience=MOST, longer="--give-up-after SECONDS")


def test_pauses_grow_with_the_silence_up_to_a_most() -> None:
    attempts = Attempts()
    assert [attempts.fail_at(now) for now in (0, 20, 60, 900)] == [0.5, 2.0, 6.0, LONGEST_PAUSE_SECONDS]


def test_an_answer_ends_the_silence() -> None:
    attempts = Attempts()
    assert attempts.fail_at(60) == 6.0
    assert attempts.fail_at(61, answered=True) == 0.5


def test_the_last_pause_ends_with_the_patience_and_then_the_node_gives_up(caplog: pytest.LogCaptureFixture) -> None:
    attempts = Attempts()
    assert attempts.fail_at(MOST - 3) == 3.0
    assert attempts.fail_at(MOST) is None
    assert "Gave up after 1000 s" in caplog.text
    assert "(--give-up-after SECONDS waits longer)" in caplog.text


def test_it_says_now_and_then_that_nobody_answers_and_at_once_after_a_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attempts = Attempts()

    def says(now: float, **attempt: bool | float | str) -> int:
        caplog.clear()
        attempts.fail_at(now, **attempt)  # type: ignore[arg-type]
        return len([record for record in caplog.records if record.levelno == logging.WARNING])

    assert [says(now) for now in (0, 1, SAY_AGAIN_SECONDS - 1, SAY_AGAIN_SECONDS)] == [1, 0, 0, 1]
    assert says(SAY_AGAIN_SECONDS + 1) == 0
    assert says(SAY_AGAIN_SECONDS + 10, answered=True, began=SAY_AGAIN_SECONDS + 1) == 1, "it was connected for a while"
    assert says(SAY_AGAIN_SECONDS + 11, lapsed="Its lease has ended") == 1
    assert "Its lease has ended. It connects again" in caplog.text
