"""What tells of whom to believe: audits, standing and quarantine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from dtfm.coordinator.log.charges import Charge


@dataclass(frozen=True, slots=True)
class WorkAudited:
    """``by`` did work of ``node`` again, of ``step`` before it was committed. ``clean``: it came to the same within what
    rounding explains. ``tied``: neither that nor the opposite, as no more parties found it right than wrong. Then it counts
    neither for the node nor against it, but teaches what honest devices may be apart. ``errors``: the largest relative ones, by
    what was compared ("activations", "gradients", "addends", "losses", "evaluations"); ``key`` and ``by_key``: of the two
    (SubjectPublicKeyInfo in base64), if they have one. ``why``: the work was "drawn", or it was "unusual": so said
    ``raised_by``; if that is empty, its digests did; or it was of the "evaluation" right before the step. What was found right
    because of an alarm says nothing for the node, as whoever raised it chose the step; nor does an evaluation. ``kinds`` of
    their devices, the node's first; empty: not known. ``codecs``: by what was to be compared, the roughest under which it was
    sent. ``others``: how many other parties could have been asked, as they hold the stage and kept what they sent; logs of
    older versions do not say."""

    step: int
    generation: int
    node: str
    by: str
    micro_batches: int
    clean: bool
    errors: dict[str, float]
    key: str = ""
    by_key: str = ""
    kinds: tuple[str, ...] = ()
    codecs: Mapping[str, str] = field(default_factory=dict)
    why: Literal["drawn", "unusual", "evaluation"] = "drawn"
    raised_by: str = ""
    others: int = 1
    tied: bool = False
    event: Literal["work_audited"] = "work_audited"


@dataclass(frozen=True, slots=True)
class AuditHindered:
    """A strike (core/trust/strikes.py): in this attempt at ``step`` an audit ``of`` a node's work came to nothing because of
    ``node``, as ``by`` say, or could not be finished, as it ``ended`` the step. If ``of`` is empty, it was to do the audit
    itself, and did not answer."""

    step: int
    generation: int
    node: str
    of: str = ""
    by: tuple[str, ...] = ()
    ended: bool = False
    event: Literal["audit_hindered"] = "audit_hindered"


@dataclass(frozen=True, slots=True)
class StrikesEnded:
    """The oldest strike of the party ``who`` (a key, or a name where none is known) in audits of the party ``of`` (as in
    AuditHindered) is worked off; or ``all`` that it has end, whatever they were for, as a verdict takes their place."""

    who: str
    of: str = ""
    all: bool = False
    event: Literal["strikes_ended"] = "strikes_ended"


@dataclass(frozen=True, slots=True)
class StandingChanged:
    """What audits have made of a member: "new", "suspected" or "proven" (log/standing.py), and why. It follows from their events;
    this one tells people."""

    node: str
    standing: str
    reason: str
    event: Literal["standing_changed"] = "standing_changed"


@dataclass(frozen=True, slots=True)
class NodesBenched:
    """The ``nodes``, which are one party's, take no part until the next step is committed: it is tried whether it can be done
    without them. Then others take their part again."""

    nodes: tuple[str, ...]
    reason: str
    event: Literal["nodes_benched"] = "nodes_benched"


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """A member takes no part any more until somebody forgives it. ``step``: the last committed one. ``key``: whose names are all
    bound by this (SubjectPublicKeyInfo in base64); empty: the name alone. ``undecided``: it may not be at fault, as it
    was one word against another, that of ``against``, or something came from elsewhere. ``weighed``: it went as those had the
    better standing, which they have used up by that (trust/standing.py)."""

    node: str
    charge: Charge
    reason: str
    step: int
    undecided: bool = False
    against: tuple[str, ...] = ()
    key: str = ""
    weighed: bool = False
    event: Literal["node_quarantined"] = "node_quarantined"

    def is_of_the_step_after(self, step: int) -> bool:
        """Whether it is for what was said of the step after this one, which another may have spoilt: NaN, or, among strangers,
        that it fails, where it did so without each of them alone."""
        nan, spoilt = self.charge is Charge.NON_FINITE, self.charge is Charge.SPOILS and self.weighed
        return self.step == step and (nan or spoilt)


@dataclass(frozen=True, slots=True)
class NodeForgiven:
    """The quarantine of the node, or of its ``key``, has ended. ``by``: an operator, or the coordinator (ledger.CLEARED_BY), as
    another was at fault."""

    node: str
    by: str
    key: str = ""
    event: Literal["node_forgiven"] = "node_forgiven"
