"""Whom to believe: what audits have found, what members are suspected of, and who is quarantined for what."""

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
"""The number of parties that must find a stranger's work right before it is proven. Where only one could, one is enough."""

MOST_WITNESSES = 8
"""The number of them that are remembered, the last ones."""

CLEARED_BY = "the coordinator"
"""NodeForgiven.by when another turned out to be at fault. No operator is called that: names have no spaces."""

MOST_KNOWN = 20_000
"""The number of parties whose audits are remembered, and when they began: the last ones."""

MOST_SUSPICIONS = 1000
"""The number of suspicions that are remembered, the last ones."""

BOUNDED_COMMITS = 200
"""The number of commits for which plans do without a party as a stage's only one, once a norm that it alone says was bounded."""

MOST_QUARANTINED = 10_000
"""The number of quarantines that are remembered. From then on the oldest is forgotten for each new one."""


def party_named(key_or_name: str) -> str:
    """How `Audits` names a party, which is known by its key, or by its name where none is known."""
    return blake3(key_or_name.encode()).hexdigest(8)


@dataclass(frozen=True, slots=True)
class Audits:
    """The results of the audits of a party's work."""

    clean: int = 0
    """How often in a row its work was found right."""
    last: int = 0
    """The step of the last such audit."""
    last_of: Mapping[str, int] = field(default_factory=dict)
    """``last`` by name."""
    last_added: Mapping[str, int] = field(default_factory=dict)
    """By name, the step of the last audit that has compared what the node adds to gradients."""
    by: tuple[str, ...] = ()
    """The parties that found it right, named by a hash, at most MOST_WITNESSES."""
    could: int = 0
    """How many could have done one of these audits, but no more than WITNESSES."""

    @property
    def witnessed(self) -> bool:
        """Whether as many parties as have to, or as could, have found the work right. One alone may be a friend."""
        return len(self.by) >= self.could

    def and_another(self, event: WorkAudited, by: str) -> Audits:
        """With one more audit that found the work right, by the party ``by``."""
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
        """Where the run has gone back to this step."""

        def earlier(steps: Mapping[str, int]) -> Mapping[str, int]:
            return {name: min(each, step) for name, each in steps.items()}

        return replace(
            self, last=min(self.last, step), last_of=earlier(self.last_of), last_added=earlier(self.last_added)
        )


@dataclass(frozen=True, slots=True)
class WorkAudited:
    """``by`` repeated work of ``node`` of ``step`` before it was committed. ``clean``: it got the same within what rounding
    explains. Otherwise the two contradict each other, and neither is proven right: see Suspected. ``errors``: the largest
    relative ones, by what was compared ("activations", "gradients", "addends", "losses"). ``others``: the number of other parties
    that could have been asked, as they hold the stage and kept what they sent."""

    step: int
    generation: int
    node: str
    by: str
    micro_batches: int
    clean: bool
    errors: dict[str, float]
    others: int = 1
    event: Literal["work_audited"] = "work_audited"

    def apply(self, ledger: Ledger) -> Ledger:
        if not self.clean:
            return ledger
        trust, who = ledger.trust, ledger.party(self.node)
        now = trust.audits.get(who, Audits()).and_another(self, ledger.party(self.by))
        audits = {**{each: kept for each, kept in trust.audits.items() if each != who}, who: now}
        bounded = {each: last for each, last in trust.bounded.items() if each != who}
        audits = dict(list(audits.items())[-MOST_KNOWN:])
        return replace(ledger, trust=replace(trust, audits=audits, bounded=bounded))

    def narrate(self) -> str:
        found = "found it right" if self.clean else "got another result"
        return f"{self.by} repeated {self.micro_batches} micro-batches of {self.node} in step {self.step}, and {found}"


@dataclass(frozen=True, slots=True)
class Suspected:
    """In this attempt at ``step`` one of the ``nodes`` is at fault, and it is not known which; if there is one, it is that one.
    ``by``: the members that say so; empty: the coordinator saw it itself. What follows from all suspicions together stands in
    core/trust/verdict.py."""

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
    """What was ``said``, and the number of commits of the run until then."""

    said: Suspected
    commits: int

    @property
    def nodes(self) -> tuple[str, ...]:
        """One of them is at fault."""
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
    """What audits have made of a member: "new" or "proven" (log/standing.py), and why. It follows from their events; this one
    tells people."""

    node: str
    standing: str
    reason: str
    event: Literal["standing_changed"] = "standing_changed"

    def narrate(self) -> str:
        return f"{self.node} is {self.standing}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """A member takes no part any more until somebody forgives it. ``step``: the last committed one. ``key``: whose names are all
    bound by this (SubjectPublicKeyInfo in base64); empty: the name alone. ``undecided``: it may not be at fault, as it
    was one word against another, that of ``against``, or something came from elsewhere."""

    node: str
    charge: Charge
    reason: str
    step: int
    undecided: bool = False
    against: tuple[str, ...] = ()
    key: str = ""
    event: Literal["node_quarantined"] = "node_quarantined"

    def apply(self, ledger: Ledger) -> Ledger:
        """What the node had in memory counts no more, and neither does what its party said or was suspected of."""
        names = {name for name, holder in ledger.access.names.items() if self.key and holder.key == self.key}
        names |= {self.node}
        trust = ledger.trust.with_quarantine(self, names)
        return replace(ledger, training=ledger.training.without_holders(names), trust=trust)

    def narrate(self) -> str:
        return f"{self.node} is quarantined: {self.charge}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeForgiven:
    """The quarantine of the node, or of its ``key``, has ended. ``by``: an operator, or the coordinator (CLEARED_BY), as
    another was at fault."""

    node: str
    by: str
    key: str = ""
    event: Literal["node_forgiven"] = "node_forgiven"

    def apply(self, ledger: Ledger) -> Ledger:
        """A node that an operator forgives starts again as suspected. One that the coordinator clears keeps its standing."""
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
class Trust:
    """What speaks for members and against them. Parties are named by their key, or by their name where none is known."""

    worked: Mapping[str, int] = field(default_factory=dict)
    """By node that came and was not revoked since, in how many committed steps it took part; in the order in which they first
    came."""
    audits: Mapping[str, Audits] = field(default_factory=dict)
    """By party, the results of the audits of its work."""
    began: Mapping[str, int] = field(default_factory=dict)
    """By party, the last step before its work."""
    quarantined: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, the oldest first."""
    forgiven: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, for what it was quarantined the last time, before an operator let it come back; the oldest first."""
    suspicions: tuple[Suspicion, ...] = ()
    """Those that are not forgotten yet, the oldest first."""
    commits: int = 0
    """The number of commits of the run, those included that were undone."""
    bounded: Mapping[str, int] = field(default_factory=dict)
    """By party, at how many commits one of its stages was last bounded (StageBounded). An audit that finds its work right, or
    BOUNDED_COMMITS without that, end it."""
    damaged_by: tuple[str, ...] = ()
    """Since a plan last started, who said that the snapshot to go on from is damaged, each once."""

    def after_a_commit(self, step: int, nodes: Collection[str], party: Callable[[str], str]) -> Trust:
        """``nodes``: who took part in it."""
        did = {node: self.worked[node] + 1 for node in nodes if node in self.worked}
        began = self.began
        if new := {party(node) for node in did} - began.keys():
            began = dict(list({**began, **dict.fromkeys(sorted(new), step - 1)}.items())[-MOST_KNOWN:])
        commits, left = self.commits + 1, self.suspicions
        if left:
            left = tuple(each for each in left if not each.is_over(commits))
        bounded = self.bounded
        if bounded:
            bounded = {who: last for who, last in bounded.items() if commits - last < BOUNDED_COMMITS}
        worked = {**self.worked, **did}
        return replace(self, worked=worked, began=began, commits=commits, suspicions=left, bounded=bounded)

    def with_bounded(self, parties: Iterable[str]) -> Trust:
        return replace(self, bounded={**self.bounded, **dict.fromkeys(parties, self.commits)})

    def back_to(self, step: int) -> Trust:
        """Training has gone back to this step."""
        audits = {who: of.until(step) for who, of in self.audits.items()}
        return replace(self, audits=audits, began={who: min(each, step) for who, each in self.began.items()})

    def with_quarantine(self, event: NodeQuarantined, names: Collection[str]) -> Trust:
        """``names``: all that it binds."""
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
        """What this party has found counts for nobody any more."""
        name = party_named(party)
        return replace(
            self,
            audits={
                each: replace(audits, by=tuple(by for by in audits.by if by != name)) if name in audits.by else audits
                for each, audits in self.audits.items()
            },
        )

    def but(self, over: Callable[[Suspicion], bool]) -> Trust:
        """Without the suspicions that are over."""
        left = tuple(each for each in self.suspicions if not over(each))
        return self if len(left) == len(self.suspicions) else replace(self, suspicions=left)
