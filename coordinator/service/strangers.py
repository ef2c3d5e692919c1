"""How many connections strangers may have, before it is known who makes them. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from dtfm.protos.token_bucket import TokenBucket

MOST_REMEMBERED = 4096
"""Origins of members that are remembered."""
CONNECTIONS_OF_A_MEMBER = 2
"""Who comes looks at the certificate over one, and calls over the next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """``open``: connections of strangers at a time; ``rate`` and ``burst``: new ones a second, and at once. Those of one origin,
    and those of all. ``members``: connections of members at a time. ``rate_of_key`` and ``burst_of_key``: of one key's, those
    that give back what they have used up. A TLS handshake takes about a millisecond of a core, and a household, a university or
    a rack that comes back at once is one origin."""

    open_of_one: int = 256
    rate_of_one: float = 8.0
    burst_of_one: float = 512.0
    open: int = 1024
    rate: float = 256.0
    burst: float = 2048.0
    members: int = 16384
    rate_of_key: float = 2.0
    burst_of_key: float = 256.0

    @classmethod
    def within(cls, files: int) -> Limits:
        """For a process that may have so many files open: a connection takes three, of which strangers have three eighths and
        members a half. The rest is the coordinator's own."""
        usual = cls()
        most = min(usual.open, files // 8)
        return cls(open=most, open_of_one=min(usual.open_of_one, most), members=min(usual.members, files // 6))


class Strangers:
    """Counts the connections of those who have not shown yet who they are, by origin."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open: Counter[str] = Counter()
        self._all = TokenBucket(limits.rate, limits.burst)
        self._each: OrderedDict[str, TokenBucket] = OrderedDict()  # the one that was used last is last
        self._keys: OrderedDict[str, TokenBucket] = OrderedDict()  # of members; as above
        self._members: OrderedDict[str, None] = OrderedDict()

    def come(self, origin: str, now: float) -> bool:
        """Whether another connection from there is taken. Each that is must be followed by `go`. An origin from which a member
        has come has its own bounds alone."""
        limits = self._limits
        if self._open[origin] >= limits.open_of_one or self._open.total() >= limits.open:
            return False
        bucket = self._each.get(origin)
        if bucket is not None and not bucket.take(now):
            return False
        if origin not in self._members and not self._all.take(now):
            return False
        if bucket is None:
            bucket = self._each[origin] = TokenBucket(limits.rate_of_one, limits.burst_of_one)
            bucket.take(now)
        self._each.move_to_end(origin)
        _forget(self._each, now)
        self._open[origin] += 1
        return True

    def go(self, origin: str) -> None:
        """A connection from there has ended."""
        self._open[origin] -= 1
        if not self._open[origin]:
            del self._open[origin]

    def let_in(self, origin: str, key: str, now: float) -> None:
        """A connection from there turned out to be a member's who has this key. What it has used up of its origin's bounds is
        given back, unless this key makes too many: a handshake costs as much, whoever makes it."""
        self.go(origin)
        its = self._keys.setdefault(key, TokenBucket(self._limits.rate_of_key, self._limits.burst_of_key))
        if not its.take(now):
            return
        self._keys.move_to_end(key)
        _forget(self._keys, now)
        if (bucket := self._each.get(origin)) is not None:
            bucket.give_back(CONNECTIONS_OF_A_MEMBER)
        self._members[origin] = None
        self._members.move_to_end(origin)
        if len(self._members) > MOST_REMEMBERED:
            self._members.popitem(last=False)


def _forget(buckets: OrderedDict[str, TokenBucket], now: float) -> None:
    """Drops those that say nothing any more. The rest was used within the seconds in which a bucket fills, and those who are
    enrolled are as few as their names, and origins as `Strangers._all` allows."""
    while buckets:
        name, bucket = next(iter(buckets.items()))
        if not bucket.is_full(now):
            return
        del buckets[name]
