"""How long a node goes on trying to connect to a coordinator, and what it says meanwhile."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable

from dtfm.protos.identity.enrolment import Entry

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 15.0
"""Between attempts to connect. A pause is a tenth of the time since the coordinator was heard last: a reserve that takes over
after a lease does not wait long for its nodes."""
SAY_AGAIN_SECONDS = 60.0
"""After which it is said again that the coordinator does not answer."""


class Patience:
    """One row of attempts to connect to a ``coordinator``. ``clock`` is in seconds, and ``between`` draws a number."""

    def __init__(
        self,
        coordinator: Entry,
        clock: Callable[[], float] = time.monotonic,
        between: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self._coordinator = coordinator
        self._clock = clock
        self._between = between
        self._silent_since = clock()
        self._said = -math.inf  # when it was said last that the coordinator does not answer

    def pause(
        self, began: float, problem: str, answered: bool, lapsed: str, *, lease: float, patience: float, longer: str
    ) -> float | None:
        """The seconds until the next attempt, after one that ``began`` then and has ended; None: this node gives up. Either is
        logged.

        ``problem``: what ended it. ``answered``: the coordinator was heard. ``lapsed``: the sentence that the membership has
        lapsed, if it has. ``patience``: the most seconds without a coordinator. ``longer``: the setting that makes them more.
        """
        if answered:
            self._silent_since = self._clock()
        if self._silent_since - began > lease:
            self._said = -math.inf  # it was connected for a while
        silent = self._clock() - self._silent_since
        left = patience - silent
        if left <= 0:
            log.error(
                "Gave up after %.0f s without the coordinator at %s: %s. Is it running there, and is that port open? (%s "
                "waits longer)",
                *(patience, self._coordinator, problem, longer),
            )
            return None
        pause = min(max(silent / 10, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)
        wait = min(pause * self._between(0.8, 1.2), max(left, 0.05))
        if lapsed:
            log.warning("%s. It connects again and keeps its state.", lapsed)
        elif self._clock() - self._said >= SAY_AGAIN_SECONDS:
            self._said = self._clock()
            log.warning(
                "The coordinator at %s does not answer (%s); trying again at least each %.0f s, giving up in %.0f s",
                *(self._coordinator, problem, LONGEST_PAUSE_SECONDS, left),
            )
        log.debug("trying again in %.1f s", wait)
        return wait
