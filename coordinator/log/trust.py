"""Trust: the results of audits, the suspicions of members, and quarantines with their charges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from blake3 import blake3

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.wording import Remark, name_first

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

WITNESSES = 2
"""The number of parties that must find a stranger's work right before it is proven. If only one party could, one is enough."""

MOST_WITNESSES = 8
"""The number of witnesses that are remembered: the last ones."""

CLEARED_BY = "the coordinator"
"""NodeForgiven.by when another node turned out to be at fault. No operator has this name: names have no spaces."""

MOST_KNOWN = 20_000
"""The number of parties that are remembered with their audits and their beginning: the last ones."""

MOST_SUSPICIONS = 1000
"""The number of suspicions that are remembered, the last ones."""

BOUNDED_COMMITS = 200
"""The number of commits for which plans give a party no stage alone, after a norm that it alone says was bounded."""

MOST_QUARANTINED = 10_000
"""The number of quarantines that are remembered. From then on the oldest is forgotten for each new one."""


def party_named(key_or_name: str) -> str:
    """The name of a party in `Audits`. The party is known by its key, or by its name if the key is not known."""
    return blake3(key_or_name.encode()).hexdigest(8)


@dataclass(frozen=True, slots=True)
class Audits:
    """The results of the audits of a party's work."""

    clean: int = 0
    """The number of audits in a row that found its work right."""
    last: int = 0
    """The step of the last such audit."""
    last_of: Mapping[str, int] = field(default_factory=dict)
    """``last`` by name."""
    last_added: Mapping[str, int] = field(default_factory=dict)
    """By name, the step of the last audit that compared the node's addends to gradients."""
    by: tuple[str, ...] = ()
    """The parties that found the work right, named by a hash, at most MOST_WITNESSES."""
    could: int = 0
    """The number of parties that could have done one of these audits, at most WITNESSES."""

    @property
    def witnessed(self) -> bool:
        """Whether enough parties have found the work right: all that could, up to WITNESSES. A single party may be a friend."""
        return len(self.by) >= self.could

    def and_another(self, event: WorkAudited, by: str) -> Audits:
        """The audits with one more that found the work right, by the party ``by``."""
        done, witness = {event.node: event.step}, party_named(by)
        added = done if "addends" in event.errors else {}
        return Audits(
            self.clean + 1,
            event.step,
            last_of={**self.last_of, **done},
            last_added={**self.last_added, **added},
            by=(*(who for who in self.by if who != witness), witness)[-MOST_WITNESSES:],
            could=max(self.could, min(event.others, WITNESSES)),
        )

    def until(self, step: int) -> Audits:
        """The audits after the run has gone back to this step."""

        def earlier(steps: Mapping[str, int]) -> Mapping[str, int]:
            return {name: min(each, step) for name, each in steps.items()}

        return replace(
            self, last=min(self.last, step), last_of=earlier(self.last_of), last_added=earlier(self.last_added)
        )


@dataclass(frozen=True, slots=True)
class WorkAudited:
    """A node has repeated work of another node before the step was committed."""

    step: int
    """The step of the work."""
    generation: int
    """The generation of the plan."""
    node: str
    """The node whose work was repeated."""
    by: str
    """The auditor."""
    micro_batches: int
    """The number of micro-batches that were repeated."""
    clean: bool
    """Whether the auditor got the same result, apart from rounding. If not, the two contradict each other, and neither is proven
    right: see Suspected."""
    errors: dict[str, float]
    """The largest relative errors, by what was compared ("activations", "gradients", "addends", "losses")."""
    others: int = 1
    """The number of other parties that could have been asked: they hold the stage and kept the tensors they sent."""
    event: Literal["work_audited"] = "work_audited"

    def apply(self, ledger: Ledger) -> Ledger:
        if not self.clean:
            return ledger
        trust, who = ledger.trust, ledger.party(self.node)
        now = trust.audits.get(who, Audits()).and_another(self, ledger.party(self.by))
        audits = {**{each: kept for each, kept in trust.audits.items() if each != who}, who: now}
        bounded = {each: when for each, when in trust.bounded.items() if each != who}
        audits = dict(list(audits.items())[-MOST_KNOWN:])
        return replace(ledger, trust=replace(trust, audits=audits, bounded=bounded))

    def narrate(self) -> str:
        found = "found it right" if self.clean else "got another result"
        return f"{self.by} repeated {self.micro_batches} micro-batches of {self.node} in step {self.step}, and {found}"


@dataclass(frozen=True, slots=True)
class Suspected:
    """In this attempt at ``step`` one of the ``nodes`` is at fault, and it is not known which. If there is only one, that node
    is. ``by``: the members that say so; empty: the coordinator saw it itself. core/trust/verdict.py reads all suspicions
    together."""

    step: int
    generation: int
    charge: Charge
    nodes: tuple[str, ...]
    reason: str
    by: tuple[str, ...] = ()
    event: Literal["suspected"] = "suspected"

    def apply(self, ledger: Ledger) -> Ledger:
        trust = ledger.trust
        if self.charge.is_health:
            return ledger
        held = (*trust.suspicions, Suspicion(self, trust.commits))[-MOST_SUSPICIONS:]
        return replace(ledger, trust=replace(trust, suspicions=held))

    def narrate(self) -> str:
        whom = " or ".join(self.nodes) if len(self.nodes) <= 2 else f"one of {name_first(self.nodes)}"
        said = f", says {name_first(self.by)}" if self.by and set(self.by) != set(self.nodes) else ""
        apart = "; plans keep the two apart" if self.charge.is_contradiction and len(self.nodes) == 2 else ""
        return f"step {self.step}: {whom} is suspected{said}: {self.charge}: {self.reason}{apart}"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """The suspicion that was ``said``, and the run's number of commits until then."""

    said: Suspected
    commits: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """The suspected nodes: one of them is at fault."""
        return self.said.nodes

    @property
    def attempt(self) -> tuple[int, int]:
        return self.said.generation, self.said.step

    def is_over(self, commits: int) -> bool:
        """Whether it is forgotten after commit number ``commits``."""
        return commits - self.commits >= self.said.charge.commits


@dataclass(frozen=True, slots=True)
class StandingLost:
    """The node failed, or left, while its work was being audited. It begins again as a newcomer: audits have to find its work
    right once more."""

    node: str
    reason: str
    event: Literal["standing_lost"] = "standing_lost"

    def apply(self, ledger: Ledger) -> Ledger:
        trust, who = ledger.trust, ledger.party(self.node)
        if (audits := trust.audits.get(who)) is None:
            return ledger
        again = replace(audits, clean=0, by=(), could=0)
        return replace(ledger, trust=replace(trust, audits={**trust.audits, who: again}))

    def narrate(self) -> str:
        return f"{self.node} begins again as a newcomer: {self.reason}"


@dataclass(frozen=True, slots=True)
class StandingChanged(Remark):
    """Audits have changed the standing of a member to "new" or "proven" (log/standing.py), and why. The standing follows from the
    audits' events; this event tells people."""

    node: str
    standing: str
    reason: str
    event: Literal["standing_changed"] = "standing_changed"

    def narrate(self) -> str:
        return f"{self.node} is {self.standing}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """A member takes no part until an operator forgives it."""

    node: str
    """The member."""
    charge: Charge
    """The wrong work."""
    reason: str
    """A sentence for people."""
    step: int
    """The last committed step."""
    undecided: bool = False
    """Whether the member may be innocent: it was its word against the word of ``against``, or the error came from elsewhere."""
    against: tuple[str, ...] = ()
    """The members that contradict it."""
    key: str = ""
    """All names of this key are bound (SubjectPublicKeyInfo in base64); empty: only the member's name."""
    event: Literal["node_quarantined"] = "node_quarantined"

    def apply(self, ledger: Ledger) -> Ledger:
        """The state in the node's memory no longer counts, and neither do statements of its party, or suspicions of it."""
        names = {name for name, holder in ledger.access.names.items() if self.key and holder.key == self.key}
        names |= {self.node}
        trust = ledger.trust.with_quarantine(self, names)
        return replace(ledger, training=ledger.training.without_holders(names), trust=trust)

    def narrate(self) -> str:
        return f"{self.node} is quarantined: {self.charge}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeForgiven:
    """The quarantine of the node, or of its ``key``, has ended. ``by``: an operator, or the coordinator (CLEARED_BY) because
    another node was at fault."""

    node: str
    by: str
    key: str = ""
    event: Literal["node_forgiven"] = "node_forgiven"

    def apply(self, ledger: Ledger) -> Ledger:
        """A node that an operator forgives starts again as suspected. A node that the coordinator clears keeps its standing."""
        trust, of = ledger.trust, (self.node, self.key)
        ended = {who: why for who, why in trust.quarantined.items() if who in of}
        fresh = replace(trust, quarantined={who: why for who, why in trust.quarantined.items() if who not in of})
        if self.by == CLEARED_BY:
            return replace(ledger, trust=fresh)
        forgiven = {**{who: why for who, why in trust.forgiven.items() if who not in of}, **ended}
        fresh = replace(fresh.without_audits(ended), forgiven=dict(list(forgiven.items())[-MOST_QUARANTINED:]))
        return replace(ledger, trust=fresh)

    def narrate(self) -> str:
        return f"{self.by} has forgiven {self.node}: it may come back"


@dataclass(frozen=True, slots=True)
class Bounded:
    """When stages of a party were bounded: ``first`` in this step, and last at this number of the run's ``commits``."""

    first: int
    commits: int


@dataclass(frozen=True, slots=True)
class Trust:
    """Evidence for and against members. Parties are named by their key, or by their name if the key is not known."""

    worked: Mapping[str, int] = field(default_factory=dict)
    """By node that has joined and was not revoked since, the number of committed steps that it took part in; in the order in
    which nodes first joined."""
    audits: Mapping[str, Audits] = field(default_factory=dict)
    """By party, the results of the audits of its work."""
    began: Mapping[str, int] = field(default_factory=dict)
    """By party, the last step before its work."""
    quarantined: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, the oldest first."""
    forgiven: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, the last quarantine before an operator let it come back; the oldest first."""
    suspicions: tuple[Suspicion, ...] = ()
    """The suspicions that are not forgotten yet, the oldest first."""
    commits: int = 0
    """The run's number of commits, including commits that were undone."""
    bounded: Mapping[str, Bounded] = field(default_factory=dict)
    """By party, when its stages were bounded (StageBounded). An entry ends when an audit finds the party's work right, or
    BOUNDED_COMMITS after the last time."""
    damaged_by: tuple[str, ...] = ()
    """The nodes that have reported a damaged snapshot since a plan last started, each once."""

    def after_a_commit(self, step: int, nodes: Collection[str], party: Callable[[str], str]) -> Trust:
        """``nodes``: the nodes that took part in the commit."""
        did = {node: self.worked[node] + 1 for node in nodes if node in self.worked}
        began = self.began
        if new := {party(node) for node in did} - began.keys():
            began = dict(list({**began, **dict.fromkeys(sorted(new), step - 1)}.items())[-MOST_KNOWN:])
        commits, left = self.commits + 1, self.suspicions
        if left:
            left = tuple(each for each in left if not each.is_over(commits))
        bounded = self.bounded
        if bounded:
            bounded = {who: when for who, when in bounded.items() if commits - when.commits < BOUNDED_COMMITS}
        worked = {**self.worked, **did}
        return replace(self, worked=worked, began=began, commits=commits, suspicions=left, bounded=bounded)

    def with_bounded(self, step: int, parties: Iterable[str]) -> Trust:
        known = self.bounded
        now = {who: Bounded(min(step, known[who].first if who in known else step), self.commits) for who in parties}
        return replace(self, bounded={**known, **now})

    def back_to(self, step: int) -> Trust:
        """The trust after training has gone back to this step."""
        audits = {who: of.until(step) for who, of in self.audits.items()}
        return replace(self, audits=audits, began={who: min(each, step) for who, each in self.began.items()})

    def with_quarantine(self, event: NodeQuarantined, names: Collection[str]) -> Trust:
        """``names``: all names that the quarantine binds."""
        who = event.key or event.node
        quarantined = dict(list({**self.quarantined, who: event}.items())[-MOST_QUARANTINED:])
        forgotten = self.quarantined.keys() - quarantined.keys()
        fresh = self.but(lambda each: not set(names).isdisjoint((*each.nodes, *each.said.by)))
        return replace(fresh.without_witness(who).without_audits(forgotten), quarantined=quarantined)

    def without_audits(self, parties: Collection[str]) -> Trust:
        return replace(
            self,
            audits={who: audits for who, audits in self.audits.items() if who not in parties},
            began={who: step for who, step in self.began.items() if who not in parties},
        )

    def without_witness(self, party: str) -> Trust:
        """The trust when audits by this party no longer count."""
        name = party_named(party)
        return replace(
            self,
            audits={
                each: replace(audits, by=tuple(by for by in audits.by if by != name)) if name in audits.by else audits
                for each, audits in self.audits.items()
            },
        )

    def but(self, over: Callable[[Suspicion], bool]) -> Trust:
        """The trust without the suspicions that are over."""
        left = tuple(each for each in self.suspicions if not over(each))
        return self if len(left) == len(self.suspicions) else replace(self, suspicions=left)
