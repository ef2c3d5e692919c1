"""What tells of members: who is let in, comes and goes, and what their devices do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class InvitationMade:
    """``digest``: SHA-256 of its secret (hex). ``name``: who is invited, for people. ``at`` and ``expires``: seconds since 1970.
    ``uses``: how many keys may be enrolled by it. ``by``: who made it."""

    invitation: str
    digest: str
    name: str
    role: str
    at: float
    expires: float
    uses: int
    by: str
    event: Literal["invitation_made"] = "invitation_made"


@dataclass(frozen=True, slots=True)
class Enrolled:
    """From now on the name belongs to ``key`` (SubjectPublicKeyInfo in base64). ``invitation``: that was used; empty for the user
    who runs the coordinator."""

    name: str
    role: str
    key: str
    invitation: str
    event: Literal["enrolled"] = "enrolled"


@dataclass(frozen=True, slots=True)
class Revoked:
    """``name`` may do nothing any more, and the ``invitations`` are not good any more. ``at``: seconds since 1970."""

    name: str
    invitations: tuple[str, ...]
    at: float
    by: str
    event: Literal["revoked"] = "revoked"


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """``memory_bytes``; ``flops``: sustained FLOP/s as measured; ``host_memory_bytes``: 0 where the device computes in the host's
    own memory."""

    kind: str
    name: str
    memory_bytes: int
    flops: float
    host_memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """``incarnation`` (hex) is drawn by each process of a node: while it stays the same, so does what the node has in memory.
    ``candidates`` are where peers may reach it; ``address`` is the first of them, or where the coordinator saw it come from.
    ``relay``: "also" or "only", if connections of others may pass through it."""

    node: str
    reason: str
    address: str
    device: DeviceSeen
    package_version: str = ""
    incarnation: str = ""
    candidates: tuple[str, ...] = ()
    relay: str = ""
    event: Literal["node_joined"] = "node_joined"


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """``refusal`` is the name of the wire's RefusalReason, ``reason`` the sentence that the node was sent."""

    node: str
    refusal: str
    reason: str
    event: Literal["node_refused"] = "node_refused"


@dataclass(frozen=True, slots=True)
class NodeReady:
    """The node has prepared the run and measured its links: it can be planned with."""

    node: str
    event: Literal["node_ready"] = "node_ready"


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """The node wants to leave. It works on until its part is handed over."""

    node: str
    reason: str
    event: Literal["node_leaving"] = "node_leaving"


@dataclass(frozen=True, slots=True)
class NodeLeft:
    node: str
    reason: str
    event: Literal["node_left"] = "node_left"


@dataclass(frozen=True, slots=True)
class DeviceTimed:
    """The node has timed its device with the run's own layers. It is planned with ``flops`` (FLOP/s) from now on."""

    node: str
    flops: float
    event: Literal["device_timed"] = "device_timed"


@dataclass(frozen=True, slots=True)
class DeviceDrifted:
    """The node's device has become slower or faster. It is planned with ``flops`` (FLOP/s) from now on."""

    node: str
    flops: float
    reason: str
    event: Literal["device_drifted"] = "device_drifted"


@dataclass(frozen=True, slots=True)
class DeviceShown:
    """In an open run, by the coordinator's clock, the node's share of steps took at least so many ``flops`` (FLOP/s) to be done
    in time. So more of what it claims counts from now on (core/trust/claims.py)."""

    node: str
    flops: float
    event: Literal["device_shown"] = "device_shown"
