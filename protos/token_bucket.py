"""A token bucket: how much of something is allowed, over a while and at once. Pure: the time is passed in."""

from __future__ import annotations


class TokenBucket:
    """Fills by ``rate`` tokens a second up to ``most``, and is full at first. ``now`` is in seconds, of any clock that never goes
    back."""

    __slots__ = ("_at", "_left", "most", "rate")

    def __init__(self, rate: float, most: float) -> None:
        self.rate = rate
        self.most = most
        self._left = most
        self._at = -float("inf")

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Takes the tokens if they are there. Returns whether they were."""
        self._fill(now)
        if self._left < tokens:
            return False
        self._left -= tokens
        return True

    def draw(self, now: float, tokens: float = 1.0) -> float:
        """Takes the tokens whether they are there or not. Returns the seconds until they will be, so that who waits that long
        keeps to the rate."""
        self._fill(now)
        self._left -= tokens
        return max(0.0, -self._left / self.rate)

    def give_back(self, tokens: float) -> None:
        self._left = min(self.most, self._left + tokens)

    def is_full(self, now: float) -> bool:
        """Whether it says nothing that a new one would not."""
        self._fill(now)
        return self._left >= self.most

    def _fill(self, now: float) -> None:
        if now > self._at:
            self._left = min(self.most, self._left + (now - self._at) * self.rate)
            self._at = now
