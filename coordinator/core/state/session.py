"""A node's live stream, and what the coordinator knows of the node while the stream is open."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.core.state.copies import Standby
from dtfm.protos import control_pb2 as wire


class Admission(enum.Enum):
    """How far a node has come since its stream opened."""

    JOINED = "joined"
    RELAY = "relay"  # it passes on messages of other nodes, and computes nothing
    PROBING = "probing"
    ARRIVED = "arrived"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Session:
    """A node's live stream. Times are the coordinator's clock, in seconds."""

    node: str
    """The node's name."""
    stream: int
    """The stream's number."""
    heard: float
    """The time of its last sign of life."""
    admission: Admission = Admission.JOINED
    """How far the node has come."""
    probe_until: float = 0.0
    """When its link report is due. A relay's: when link tests first included it; 0: not yet."""
    arrived: float = 0.0
    """When it had everything that a plan needs."""
    standby: Standby | None = None
    """What it copies as a standby; None: the coordinator has not asked it to."""
    on_disk: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By step, the buckets of that snapshot on its disk."""
    certified: float = -math.inf
    """When it last got a certificate."""
    probing: frozenset[str] = frozenset()
    """While it is PROBING, the nodes that it still measures its links to."""
    reaching: frozenset[str] = frozenset()
    """While it is PROBING, the nodes that try to dial it."""
    to_measure: Mapping[str, int] = field(default_factory=dict)
    """By other node, the number of unanswered requests to measure the links to that node."""
    told: tuple[tuple[tuple[str, str], ...], tuple[str, ...]] = ((), ())
    """The ways and holders that the coordinator last sent it (reach/ways.py)."""
    prepared: wire.Prepared | None = None
    """Its description of the run, while the node is JOINED and the coordinator does not believe any description yet."""
    origin: str = ""
    """Where it came from (candidates.origin_of); empty: not known, or the coordinator's own machine."""
    copies_from: Givers = ()
    """The donors that were named to it as a standby of the same layers."""
    links_changed: int = 0
    """The number of times that it was told its links changed, and has not answered by choosing codecs."""
    prepares: tuple[int, int] = (0, -1)
    """What it last said that it does before it is ready (wire.Preparing), and how many tenths of that are done."""
    disk_bytes: int = 0
    """Bytes free on its disk when it had read the run; 0: not known."""
    beat: wire.Heartbeat | None = None
    """Its last heartbeat. The page shows what the heartbeat reports from the driver."""
    device: tuple[str, bool] = ("", False)
    """The kind of its device, and whether the device has bf16."""
    precision: str = ""
    """The precision that it was told to prepare the run with."""
    timed: float = -math.inf
    """When it last reported a new timing of its device."""
    told_idle: str = ""
    """The last explanation that it got of why it is idle."""
    frozen: Mapping[int, str] = field(default_factory=dict)
    """By layer, the digest (hex) of the frozen weights that it holds, as of the last plan that it was ready for."""
    work: Work | None = None
    """What its heartbeats say of its work; None: nothing."""

    def without_peer(self, node: str) -> Session:
        if not (node in self.probing or node in self.reaching or node in self.to_measure):
            return self
        to_measure = {peer: times for peer, times in self.to_measure.items() if peer != node}
        return replace(self, probing=self.probing - {node}, reaching=self.reaching - {node}, to_measure=to_measure)


@dataclass(frozen=True, slots=True)
class Work:
    """What a node's process says of its work (control.proto, Heartbeat.Work). ``since``: the time since which it says the
    same."""

    done: int
    waits: bool
    since: float
