"""Members: nodes that come and go, and the speeds of their devices."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.health import without_process
from dtfm.coordinator.log.wording import Remark, memory_in_words
from dtfm.protos.identity.access import Role

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """``flops``: sustained FLOP/s as measured. ``host_memory_bytes``: 0 if the device computes in the host's own memory."""

    kind: str
    name: str
    memory_bytes: int
    flops: float
    host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Member:
    """A node that was let in."""

    address: str
    device: DeviceSeen
    incarnation: str
    ready: bool = False
    """Whether it can be planned with."""
    preparing: str = ""
    """Its work before it is ready, like "reads data (40 %)"; empty: it is ready, or has not said."""
    leaving: str = ""
    """Why it wants to leave; empty: it does not."""
    candidates: tuple[str, ...] = ()
    relay: str = ""
    shown: float = 0.0
    """FLOP/s, see DeviceShown."""
    in_training: float = 0.0
    """FLOP/s that it delivers in steps; 0: as its ``device`` was timed (DeviceDrifted)."""
    timed_beside: bool = False
    """Whether its ``device`` was timed while other programs used its machine."""


def recounted(ledger: Ledger) -> Ledger:
    """The ledger after its members or their names have changed: knows again which members are leaving, and whether one party is
    alone. Among strangers a party is not alone while names of others are enrolled: people who know each other may end the run
    while the others are away, and a stranger may not."""
    names = [*ledger.members]
    if ledger.is_open:
        names += [name for name, holder in ledger.access.names.items() if holder.role == Role.NODE]
    leaving = tuple(sorted(name for name, member in ledger.members.items() if member.leaving))
    return replace(ledger, leaving=leaving, is_alone=len({ledger.key_of(name) or name for name in names}) <= 1)


def planned_flops(ledger: Ledger, nodes: Sequence[str]) -> list[float]:
    """By node, the FLOP/s that its device should deliver in steps.

    Steps may have shown that speed. Otherwise it is the device's timing, times the share of their timings that the plan's devices
    usually deliver: they may share their cores, or be below their peak. If two shares are in the middle, the share nearer to 1
    counts: one slow device of two does not make the other slow. A device that was timed beside other programs is not reduced by
    that share again: the programs may be the plan's nodes.
    """
    plan, members = ledger.training.plan, ledger.members
    at_work = [members[node] for node in (plan.nodes if plan is not None else ()) if node in members]
    shares = [member.in_training / member.device.flops if member.in_training else 1.0 for member in at_work]
    middle = (statistics.median_low(shares), statistics.median_high(shares)) if shares else (1.0,)
    usual = min(middle, key=lambda share: abs(math.log(share)))
    of = [members[node] for node in nodes]
    return [m.in_training or m.device.flops * (max(usual, 1.0) if m.timed_beside else usual) for m in of]


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node was let in."""

    node: str
    """The node's name."""
    reason: str
    """Why it joined now, like "reconnected"."""
    address: str
    """The first of ``candidates``, or the address that the coordinator saw."""
    device: DeviceSeen
    """Its device."""
    package_version: str = ""
    """The version of dtfm on the node."""
    incarnation: str = ""
    """Hex; each process of a node draws one. While it stays the same, so does the state in the node's memory."""
    candidates: tuple[str, ...] = ()
    """Where peers may reach it."""
    relay: str = ""
    """Either "also" or "only" if connections of others may pass through it; empty: they may not."""
    event: Literal["node_joined"] = "node_joined"

    def apply(self, ledger: Ledger) -> Ledger:
        member = Member(self.address, self.device, self.incarnation, candidates=self.candidates, relay=self.relay)
        members, worked = {**ledger.members, self.node: member}, ledger.trust.worked
        worked = {**worked, self.node: worked.get(self.node, 0)}
        health = without_process(ledger.health, self.node, self.incarnation)
        return recounted(replace(ledger, members=members, trust=replace(ledger.trust, worked=worked), health=health))

    def narrate(self) -> str:
        device = self.device
        if self.relay == "only":
            return f"{self.node} joined from {self.address} as a relay; {self.reason}"
        power = f"{memory_in_words(device.memory_bytes)}, {device.flops / 1e9:.0f} GFLOP/s"
        return f"{self.node} joined from {self.address}: {device.name} ({device.kind}, {power}); {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeRefused(Remark):
    """``refusal`` is the name of the wire's RefusalReason, ``reason`` the sentence that the node was sent."""

    node: str
    refusal: str
    reason: str
    event: Literal["node_refused"] = "node_refused"

    def narrate(self) -> str:
        return f"{self.node or 'a node'} was refused: {self.refusal}: {self.reason}"


Preparing = Literal[
    "loads the model", "reads data", "compiles", "times its device", "waits for a second opinion", "measures links"
]
IN_PERCENT = ("reads data",)
"""Work that is counted in parts which mean nothing to people."""


@dataclass(frozen=True, slots=True)
class NodePrepares:
    """A node's report of its work before it is ready. ``done`` of ``of``: how far that is; 0 of 0: not known."""

    node: str
    doing: Preparing
    done: int = 0
    of: int = 0
    event: Literal["node_prepares"] = "node_prepares"

    def apply(self, ledger: Ledger) -> Ledger:
        return ledger.with_member(self.node, replace(ledger.members[self.node], preparing=self.sentence))

    def narrate(self) -> str:
        return f"{self.node} {self.sentence}"

    @property
    def sentence(self) -> str:
        """Like "reads data (40 %)" or "measures links (5 of 7)"."""
        if not self.of:
            return self.doing
        far = f"{100 * self.done // self.of} %" if self.doing in IN_PERCENT else f"{self.done} of {self.of}"
        return f"{self.doing} ({far})"


@dataclass(frozen=True, slots=True)
class NodeReady:
    """The node has prepared the run and measured its links: plans may use it."""

    node: str
    event: Literal["node_ready"] = "node_ready"

    def apply(self, ledger: Ledger) -> Ledger:
        ready = ledger.with_member(self.node, replace(ledger.members[self.node], ready=True, preparing=""))
        return replace(
            ready, reach=ledger.reach.changed()
        )  # links were measured just now, even if the process is the same

    def narrate(self) -> str:
        return f"{self.node} is ready"


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The node wants to leave. It works on until its part is handed over."""

    node: str
    reason: str
    event: Literal["node_leaving"] = "node_leaving"

    def apply(self, ledger: Ledger) -> Ledger:
        leaving = ledger.with_member(self.node, replace(ledger.members[self.node], leaving=self.reason))
        return recounted(replace(leaving, training=ledger.training.with_loss(self.node)))

    def narrate(self) -> str:
        return f"{self.node} is leaving ({self.reason}) and hands over its work first"


@dataclass(frozen=True, slots=True)
class NodeLeft:
    node: str
    reason: str
    event: Literal["node_left"] = "node_left"

    def apply(self, ledger: Ledger) -> Ledger:
        members = {name: member for name, member in ledger.members.items() if name != self.node}
        reach, training = ledger.reach.without(self.node), ledger.training.with_loss(self.node)
        return recounted(replace(ledger, members=members, reach=reach, training=training))

    def narrate(self) -> str:
        return f"{self.node} left: {self.reason}"


@dataclass(frozen=True, slots=True)
class DeviceTimed:
    """The node has timed its device with the run's own layers, beside no other work of its own: ``flops`` (FLOP/s). ``reason``:
    if the device was timed again, a sentence with the previous speed; empty the first time. ``beside``: other programs used its
    machine."""

    node: str
    flops: float
    reason: str = ""
    beside: bool = False
    event: Literal["device_timed"] = "device_timed"

    def apply(self, ledger: Ledger) -> Ledger:
        member, device = ledger.members[self.node], ledger.members[self.node].device
        timed = replace(member, device=replace(device, flops=self.flops), in_training=0.0, timed_beside=self.beside)
        known = ledger.with_member(self.node, timed)
        return replace(known, reach=ledger.reach.changed(by=bool(self.reason) and member.ready))

    def narrate(self) -> str:
        if self.reason:
            return f"{self.node} changed its speed: {self.reason}"
        beside = ", beside other programs" if self.beside else ""
        return f"{self.node} computes this model's layers at {self.flops / 1e9:.0f} GFLOP/s{beside}"


@dataclass(frozen=True, slots=True)
class DeviceDrifted:
    """In steps, the node's device is slower or faster than its planned speed. From now on it is planned with ``flops``
    (FLOP/s)."""

    node: str
    flops: float
    reason: str
    event: Literal["device_drifted"] = "device_drifted"

    def apply(self, ledger: Ledger) -> Ledger:
        member = ledger.members[self.node]
        known = ledger.with_member(self.node, replace(member, in_training=self.flops))
        training = replace(ledger.training, corrected=ledger.training.step)
        return replace(known, reach=ledger.reach.changed(by=member.ready), training=training)

    def narrate(self) -> str:
        return f"{self.node}: {self.reason}"


@dataclass(frozen=True, slots=True)
class DeviceShown:
    """In an open run, a node has shown its speed: a device with fewer ``flops`` (FLOP/s) would not have finished its share of
    recent steps in time, by the coordinator's clock. More of its claim counts from now on (core/trust/claims.py)."""

    node: str
    flops: float
    event: Literal["device_shown"] = "device_shown"

    def apply(self, ledger: Ledger) -> Ledger:
        member = ledger.members[self.node]
        shown = ledger.with_member(self.node, replace(member, shown=self.flops))
        return replace(shown, reach=ledger.reach.changed(by=member.ready))

    def narrate(self) -> str:
        return f"{self.node} has shown {self.flops / 1e9:,.0f} GFLOP/s in training: more of what it claims counts"
