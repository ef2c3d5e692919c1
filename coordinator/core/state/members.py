"""The connected nodes, and what is remembered of nodes that left and of pairs that do not reach each other."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.state.session import Session


@dataclass(frozen=True, slots=True)
class Dialled:
    """The result when one node dialled another: the ``way`` that worked (as in LinkReport), or the ``problem``."""

    way: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a broken link is measured again, and the pause before that. ``works_since``: None while the link is broken.
    ``is_first``: the link has not been measured since it broke."""

    due: float
    pause: float
    works_since: float | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """When a node that is out of use is tested. ``asked``: when the node was asked for the test; None: not yet."""

    due: float
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Away:
    """A node that left without a goodbye, and may still have state in memory. ``heard``: its last sign of life.
    ``silent``: its lease ended; otherwise its connection broke. ``back``: when it came back; None: it has not."""

    heard: float
    silent: bool
    back: float | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """The connected nodes, and memories of nodes that left. A pair is two nodes in order of name."""

    sessions: Mapping[str, Session] = field(default_factory=dict)
    """By node."""
    streams: Mapping[int, str] = field(default_factory=dict)
    """By stream, its node."""
    retries: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    """By pair with a broken link, when the link is measured again."""
    tests: Mapping[str, Test] = field(default_factory=dict)
    """By node that is out of use, its test."""
    lost: Mapping[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """By node: the run's number of commits, and the peers that the node has reported lost since that commit."""
    slow: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    """By pair whose link became slow, when the link is measured again."""
    dialled: Mapping[str, Mapping[str, Dialled]] = field(default_factory=dict)
    """By dialling node, then by dialled node: the result."""
    tried: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """By pair, the relays that did not work between the two."""
    ended: tuple[str, ...] = ()
    """The nodes that last left for good, the oldest first."""
    away: Mapping[str, Away] = field(default_factory=dict)
    """By node that left without a goodbye: when it left, and when it came back."""
    decisions: int = 0
    """The number of times that a plan has decided the run's precision."""
    read: Mapping[str, str] = field(default_factory=dict)
    """By node, the digest of the data that it has read itself before the first plan (members/describing.py)."""
    looked: float = -math.inf
    """When this process last looked at the clock."""
    hearing: float = -math.inf
    """When this process began to look at the clock without gaps. Since then it has heard nodes as they spoke."""

    def session_of(self, stream: int) -> Session | None:
        return self.sessions.get(self.streams.get(stream, ""))

    def with_session(self, session: Session) -> Members:
        streams = self.streams
        if session.stream not in streams:  # with it, the node's last one ends
            streams = {**self.without_session(session.node).streams, session.stream: session.node}
        return replace(self, sessions={**self.sessions, session.node: session}, streams=streams)

    def without_session(self, node: str) -> Members:
        """Other nodes stop waiting for this node and measuring its links. If it comes back, its links are measured again."""
        sessions = {name: session.without_peer(node) for name, session in self.sessions.items() if name != node}
        return replace(self, sessions=sessions, streams={session.stream: name for name, session in sessions.items()})
