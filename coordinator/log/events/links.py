"""What tells of links: how fast they are, and over which ways nodes reach each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Link:
    """A directed link: latency one way in seconds, bandwidth in bytes per second. An unreachable destination has bandwidth 0
    and a ``problem``. ``way``: how the source reaches the destination, as in the wire's LinkReport; empty: not known."""

    source: str
    destination: str
    latency_seconds: float
    bandwidth: float
    problem: str = ""
    way: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """How the source reaches the destination: "loopback", "lan", "public" or "direct" by dialling it, "dial-back" over
    connections that the destination lends it, "relay" over those that it lends to ``relay``."""

    source: str
    destination: str
    way: str
    relay: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"relay {self.relay}" if self.relay else self.way

    @property
    def is_direct(self) -> bool:
        return self.way not in ("dial-back", "relay")


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """``up`` and ``down``: bytes per second of the node's connection to, or from, several peers together; None: not measured this
    time. ``reason``: why, where training itself showed that a link has changed."""

    node: str
    links: tuple[Link, ...]
    event: Literal["links_measured"] = "links_measured"
    up: float | None = None
    down: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WaysChosen:
    ways: tuple[Way, ...]
    event: Literal["ways_chosen"] = "ways_chosen"
