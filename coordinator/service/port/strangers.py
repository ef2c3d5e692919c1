"""The limits on strangers' connections, before it is known who makes them. Pure: the time is passed in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from dtfm.protos.token_bucket import TokenBucket

Who = TypeVar("Who", bound=Hashable)
"""A connection."""

MOST_REMEMBERED = 4096
"""The most origins of members to remember."""
CONNECTIONS_OF_A_MEMBER = 2
"""A newcomer looks at the certificate over one connection, and calls over the next."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on connections. A TLS handshake takes about a millisecond of a core. A household, a university or a rack that
    returns all together is one origin."""

    open_of_one: int = 256
    """Strangers' connections of one origin at a time."""
    rate_of_one: float = 8.0
    """New connections of one origin a second."""
    burst_of_one: float = 512.0
    """New connections of one origin in a burst."""
    open: int = 512
    """Strangers' connections at a time. From origins of members as many more may come."""
    rate: float = 256.0
    """New connections a second."""
    burst: float = 2048.0
    """New connections in a burst."""
    members: int = 16384
    """Members' connections at a time."""
    rate_of_key: float = 2.0
    """Connections of one key a second that do not count against their origin."""
    burst_of_key: float = 256.0
    """The same in a burst."""

    @classmethod
    def within(cls, files: int) -> Limits:
        """The limits for a process that may have this number of ``files`` open. Each connection takes three. Strangers get a
        quarter of all files, half of these for origins of members; members get a half. About half of the rest is for the page
        and the metrics, and the other half is the coordinator's own."""
        usual = cls()
        most = min(usual.open, files // 24)
        return cls(open=most, open_of_one=min(usual.open_of_one, most), members=min(usual.members, files // 6))


class Strangers(Generic[Who]):
    """Counts the connections of callers that have not shown who they are, by origin. ``members``: origins of members."""

    def __init__(self, limits: Limits, members: Iterable[str] = ()) -> None:
        self._limits = limits
        self._unknown = _Places[Who](limits.open)
        self._known = _Places[Who](limits.open)  # connections from an origin of members
        self._all = TokenBucket(limits.rate, limits.burst)
        self._each: OrderedDict[str, TokenBucket] = OrderedDict()  # the one that was used last is last
        self._keys: OrderedDict[str, TokenBucket] = OrderedDict()  # of members; as above
        self._members = OrderedDict.fromkeys(members)

    @property
    def open(self) -> int:
        """The number of connections."""
        return len(self._unknown.origins) + len(self._known.origins)

    def come(self, who: Who, origin: str, now: float) -> list[Who] | None:
        """Takes another connection from ``origin``. Returns the connections that have to end for it, at most one. None: it is
        refused.

        Call `go` later for each connection that is taken. An origin of members has its own limits alone. When there are too
        many connections, the new one takes the place of the oldest connection of the most crowded origin. If its own origin has
        as many, it is refused.
        """
        places = self._known if origin in self._members else self._unknown
        if places.count(origin) >= self._limits.open_of_one:
            return None
        bucket = self._each.get(origin)
        if bucket is not None and not bucket.take(now):
            return None
        if places is self._unknown and not self._all.take(now):
            return None
        if bucket is None:
            bucket = self._each[origin] = TokenBucket(self._limits.rate_of_one, self._limits.burst_of_one)
            bucket.take(now)
        self._each.move_to_end(origin)
        _forget(self._each, now)
        return places.take(who, origin)

    def go(self, who: Who) -> None:
        """Call it when the connection has ended, or has been told to end."""
        self._unknown.free(who)
        self._known.free(who)

    def let_in(self, who: Who, origin: str, key: str, now: float) -> None:
        """Call it when the connection turns out to be a member's with this key. Gives its part of the origin's limits back,
        unless this key makes too many connections: a handshake costs the same for everybody."""
        self.go(who)
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


class _Places(Generic[Who]):
    """Room for ``most`` connections. ``origins``: by connection, its origin."""

    def __init__(self, most: int) -> None:
        self.origins: dict[Who, str] = {}
        self._most = most
        self._of: dict[str, dict[Who, None]] = {}  # by origin, the oldest first

    def count(self, origin: str) -> int:
        return len(self._of.get(origin, ()))

    def take(self, who: Who, origin: str) -> list[Who] | None:
        oldest = None
        if len(self.origins) >= self._most:
            crowded = max(self._of.values(), key=len, default={})
            if len(crowded) <= self.count(origin):
                return None
            oldest = next(iter(crowded))
            self.free(oldest)
        self.origins[who] = origin
        self._of.setdefault(origin, {})[who] = None
        return [] if oldest is None else [oldest]

    def free(self, who: Who) -> None:
        if (origin := self.origins.pop(who, None)) is not None:
            del self._of[origin][who]
            if not self._of[origin]:
                del self._of[origin]


def _forget(buckets: OrderedDict[str, TokenBucket], now: float) -> None:
    """Drops full buckets. The others were used within the seconds that a bucket takes to fill. There are few of these: members
    are limited by their names, and origins by `Strangers._all`."""
    while buckets:
        name, bucket = next(iter(buckets.items()))
        if not bucket.is_full(now):
            return
        del buckets[name]
