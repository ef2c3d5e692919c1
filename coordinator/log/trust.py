"""Whom to believe: what audits have found, what members are suspected of, and who is quarantined for what."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.rounding import Rounding, learned, party_named, without
from dtfm.coordinator.log.wording import name_nodes

if TYPE_CHECKING:
    from dtfm.coordinator.log.ledger import Ledger

WITNESSES = 2
"""Parties that have to find a stranger's work right before it is proven, where so many could."""

MOST_WITNESSES = 8
"""The number of them that are remembered, the last ones."""

CLEARED_BY = "the coordinator"
"""NodeForgiven.by when another turned out to be at fault. No operator is called that: names have no spaces."""

MOST_FAILURES = 100
"""The number of failed checkpoints in a row of which it is remembered because of whom, and of attempts that waited in vain."""

MOST_KNOWN = 20_000
"""The number of nodes whose steps are remembered. From then on one that is no member is forgotten for each new one: that with the
fewest steps, of several the one that came last. So nobody loses what it has earned by others' coming and going."""

MOST_HINDERED = 1000
"""The number of strikes that are remembered, the last ones."""

MOST_QUARANTINED = 10_000
"""The number of quarantines that are remembered. From then on the oldest is forgotten for each new one."""


@dataclass(frozen=True, slots=True)
class Audits:
    """What audits of a party's work came to."""

    clean: int = 0
    """How often in a row its work was found right."""
    last: int = 0
    """The step of the last such audit."""
    differed: bool = False
    """Whether the last audit of all came to something else."""
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

    def and_another(self, event: WorkAudited) -> Audits:
        if not event.clean:
            return replace(self, clean=0, differed=True, by=(), could=0)
        done, by = {event.node: event.step}, party_named(event.by_key or event.by)
        added = done if "addends" in event.errors else {}
        return Audits(
            self.clean + 1,
            event.step,
            last_of={**self.last_of, **done},
            last_added={**self.last_added, **added},
            by=(*(who for who in self.by if who != by), by)[-MOST_WITNESSES:],
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
    """``by`` did work of ``node`` again, of ``step`` before it was committed. ``clean``: it came to the same within what
    rounding explains. ``tied``: neither that nor the opposite, as no more parties found it right than wrong. Then it counts
    neither for the node nor against it, but teaches what honest devices may be apart. ``errors``: the largest relative ones, by
    what was compared ("activations", "gradients", "addends", "losses", "evaluations"); ``key`` and ``by_key``: of the two
    (SubjectPublicKeyInfo in base64), if they have one. ``why``: the work was "drawn", or it was of
    the "evaluation" right before the step. If an evaluation was found right, that says nothing for the node. ``kinds`` of
    their devices, the node's first; empty: not known. ``codecs``: by what was to be compared, the roughest under which it was
    sent. ``others``: how many other parties could have been asked, as they hold the stage and kept what they sent."""

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
    why: Literal["drawn", "evaluation"] = "drawn"
    others: int = 1
    tied: bool = False
    event: Literal["work_audited"] = "work_audited"

    def apply(self, ledger: Ledger) -> Ledger:
        trust = ledger.trust
        if self.why != "drawn" and (self.clean or self.tied):
            return ledger
        known = replace(trust, rounding=learned(trust.rounding, self))
        if self.tied:
            return replace(ledger, trust=known)
        who = self.key or self.node
        now = trust.audits.get(who, Audits()).and_another(self)
        audits = {**{each: kept for each, kept in trust.audits.items() if each != who}, who: now}
        return replace(ledger, trust=replace(known, audits=dict(list(audits.items())[-MOST_KNOWN:])))

    def narrate(self) -> str:
        found = "found it right" if self.clean else "came to something else"
        found = "it was not settled whether they are right" if self.tied else found
        work = f"{self.micro_batches} micro-batches of {self.node}"
        where = f"the evaluation after step {self.step - 1}" if self.why == "evaluation" else f"step {self.step}"
        return f"{self.by} did {work} again in {where}, and {found}"


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

    def apply(self, ledger: Ledger) -> Ledger:
        return replace(ledger, trust=ledger.trust.with_strike(self))

    def narrate(self) -> str:
        if not self.of:
            return f"{self.node} did not answer an audit in step {self.step}"
        how = "it ended the step" if self.ended else "it withheld what that needs"
        said = f", say {name_nodes(self.by)}" if self.by else ""
        return f"an audit of {self.of} in step {self.step} came to nothing because of {self.node}: {how}{said}"


@dataclass(frozen=True, slots=True)
class StrikesEnded:
    """The oldest strike of the party ``who`` (a key, or a name where none is known) in audits of the party ``of`` (as in
    AuditHindered) is worked off; or ``all`` that it has end, whatever they were for, as a verdict takes their place."""

    who: str
    of: str = ""
    all: bool = False
    event: Literal["strikes_ended"] = "strikes_ended"

    def apply(self, ledger: Ledger) -> Ledger:
        def is_of(name: str, who: str) -> bool:
            return who in (name, ledger.party(name))

        strikes = ledger.trust.strikes
        its = [each for each in strikes if is_of(each.node, self.who)]
        if not self.all:
            its = [each for each in its if (is_of(each.of, self.of) if self.of else not each.of)][:1]
        left = tuple(each for each in strikes if not any(each is ended for ended in its))
        return replace(ledger, trust=replace(ledger.trust, strikes=left))

    def narrate(self) -> str:
        return "no strike is left against a member" if self.all else "a member has worked off a strike"


@dataclass(frozen=True, slots=True)
class StandingChanged:
    """What audits have made of a member: "new", "suspected" or "proven" (log/standing.py), and why. It follows from their events;
    this one tells people."""

    node: str
    standing: str
    reason: str
    event: Literal["standing_changed"] = "standing_changed"

    def apply(self, ledger: Ledger) -> Ledger:
        return ledger

    def narrate(self) -> str:
        return f"{self.node} is {self.standing}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodesBenched:
    """The ``nodes``, which are one party's, take no part until the next step is committed: it is tried whether it can be done
    without them. Then others take their part again."""

    nodes: tuple[str, ...]
    reason: str
    event: Literal["nodes_benched"] = "nodes_benched"

    def apply(self, ledger: Ledger) -> Ledger:
        tried = (*ledger.trust.tried_without, *self.nodes)
        trust = replace(ledger.trust, benched=self.nodes, benched_for=self.reason, tried_without=tried)
        return replace(ledger, trust=trust)

    def narrate(self) -> str:
        return f"the step is tried without {name_nodes(self.nodes)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class NodeQuarantined:
    """A member takes no part any more until somebody forgives it. ``step``: the last committed one. ``key``: whose names are all
    bound by this (SubjectPublicKeyInfo in base64); empty: the name alone. ``undecided``: it may not be at fault, as it
    was one word against another, that of ``against``, or something came from elsewhere. ``weighed``: it went as those had the
    better standing, which they have used up by that (core/trust/standing.py)."""

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

    def apply(self, ledger: Ledger) -> Ledger:
        """What the node had in memory counts no more. What was said by its party before is settled among strangers."""
        names = {name for name, holder in ledger.access.names.items() if self.key and holder.key == self.key}
        names |= {self.node}
        settled = names if ledger.is_open else set[str]()
        trust = ledger.trust.with_quarantine(self, settled)
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
        """Whom an operator forgives begins anew, as one who is suspected. Who was cleared is what it was before."""
        trust, of = ledger.trust, (self.node, self.key)
        ended = {who: why for who, why in trust.quarantined.items() if who in of}
        fresh = replace(
            trust,
            quarantined={who: why for who, why in trust.quarantined.items() if who not in of},
            refused=tuple((node, donors) for node, donors in trust.refused if self.node not in donors),
        )
        if self.by == CLEARED_BY:
            return replace(ledger, trust=fresh)
        forgiven = {**{who: why for who, why in trust.forgiven.items() if who not in of}, **ended}
        fresh = replace(fresh.without_audits(ended), forgiven=dict(list(forgiven.items())[-MOST_QUARANTINED:]))
        return replace(ledger, trust=fresh)

    def narrate(self) -> str:
        return f"{self.by} has forgiven {self.node}: it may come back"


@dataclass(frozen=True, slots=True)
class StateRefused:
    """Before ``generation`` began, ``node`` had other state of ``bucket`` after ``step`` than those who trained it. It says that
    it has it from ``donors``: several, if one of them broke off. It gets it again from others."""

    step: int
    generation: int
    node: str
    donors: tuple[str, ...]
    bucket: int
    event: Literal["state_refused"] = "state_refused"

    def apply(self, ledger: Ledger) -> Ledger:
        refused = (*ledger.trust.refused, (self.node, self.donors))[-MOST_FAILURES:]
        return replace(ledger, trust=replace(ledger.trust, refused=refused))

    def narrate(self) -> str:
        whose = f"from {name_nodes(self.donors)}" if self.donors else "that it has"
        return (
            f"the state of bucket {self.bucket} {whose} is refused on {self.node}: it differs from that of the others"
        )


@dataclass(frozen=True, slots=True)
class Trust:
    """What speaks for members and against them. Parties are named by their key, or by their name where none is known."""

    worked: Mapping[str, int] = field(default_factory=dict)
    """By node, in how many committed steps it took part; in the order in which they first came."""
    audits: Mapping[str, Audits] = field(default_factory=dict)
    """By party, what came of the audits of its work."""
    began: Mapping[str, int] = field(default_factory=dict)
    """By party, the last step before its work."""
    rounding: Rounding = field(default_factory=dict)
    """What audits have shown of how far apart honest devices are."""
    quarantined: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, the oldest first."""
    forgiven: Mapping[str, NodeQuarantined] = field(default_factory=dict)
    """By party, for what it was quarantined the last time, before an operator let it come back; the oldest first."""
    strikes: tuple[AuditHindered, ...] = ()
    """Because of whom audits came to nothing, the oldest first."""
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Who had another state than those who trained it, and from which donors, the oldest first."""
    failures: tuple[tuple[str, str], ...] = ()
    """Since the last commit, the reports of a step that was at fault itself, each a node and the problem."""
    peer_losses: tuple[tuple[str, str], ...] = ()
    """Since the last commit, who lost whom, without those who have left."""
    waited_for: tuple[frozenset[str], ...] = ()
    """Since the last commit, the suspects of each attempt that waited in vain, without those who have left."""
    evaded: Mapping[str, int] = field(default_factory=dict)
    """By node, how many of the last attempts in a row had waited for it when it left, since it last took part in a commit."""
    plan_failures: tuple[str, ...] = ()
    """Since a plan last started, the nodes that could not take their part."""
    losers: tuple[str, ...] = ()
    """Since then, those that have said once what state they have lost."""
    damaged_by: tuple[str, ...] = ()
    """Since then, who said that the snapshot to go on from is damaged."""
    checkpoint_failures: tuple[str, ...] = ()
    """Since a checkpoint was whole, the nodes because of which checkpoints failed."""
    benched: tuple[str, ...] = ()
    """They take no part until the next commit."""
    benched_for: str = ""
    """Why."""
    tried_without: tuple[str, ...] = ()
    """All who were benched since the last commit. Those without whom no plan was possible are tried again once another node is
    ready."""
    failed_without: tuple[str, ...] = ()
    """Those without whom the step was tried and failed."""

    def with_newcomer(self, node: str, members: Collection[str]) -> Trust:
        if node in self.worked:
            return self
        gone = [other for other in self.worked if other not in members] if len(self.worked) >= MOST_KNOWN else []
        forgotten = min(reversed(gone), key=lambda other: self.worked[other], default=None)
        worked = {other: steps for other, steps in self.worked.items() if other != forgotten}
        return replace(self, worked={**worked, node: 0})

    def with_another_ready(self) -> Trust:
        return replace(self, tried_without=self.failed_without)

    def without_member(self, node: str) -> Trust:
        """The node has left. What the last attempts in a row had waited for it is remembered apart."""
        times = next((n for n, suspects in enumerate(reversed(self.waited_for)) if node not in suspects), None)
        evaded = self.evaded
        if times := len(self.waited_for) if times is None else times:
            others = {other: before for other, before in evaded.items() if other != node}
            evaded = dict(list({**others, node: evaded.get(node, 0) + times}.items())[-MOST_KNOWN:])
        return replace(
            self,
            peer_losses=tuple(pair for pair in self.peer_losses if node not in pair),
            waited_for=tuple(suspects - {node} for suspects in self.waited_for),
            evaded=evaded,
        )

    def after_a_commit(self, step: int, nodes: Collection[str], party: Callable[[str], str]) -> Trust:
        """``nodes``: who took part in it."""
        did = {node: self.worked[node] + 1 for node in nodes if node in self.worked}
        began = self.began
        if new := {party(node) for node in did} - began.keys():
            began = dict(list({**began, **dict.fromkeys(sorted(new), step - 1)}.items())[-MOST_KNOWN:])
        evaded = {node: times for node, times in self.evaded.items() if node not in nodes}
        fresh = replace(self, worked={**self.worked, **did}, began=began, evaded=evaded)
        return replace(fresh.without_trial(), failures=(), peer_losses=(), waited_for=())

    def after_a_plan_began(self) -> Trust:
        return replace(self, plan_failures=(), losers=(), damaged_by=())

    def after_a_restart(self, step: int) -> Trust:
        """``step``: the last committed one. What made the step in hand fail may be mended now."""
        stay = {who: why for who, why in self.quarantined.items() if not why.is_of_the_step_after(step)}
        fresh = replace(self, quarantined=stay, failures=(), peer_losses=(), waited_for=(), evaded={})
        return replace(fresh.without_trial().after_a_plan_began(), checkpoint_failures=())

    def back_to(self, step: int) -> Trust:
        """Training has gone back to this step."""
        audits = {who: of.until(step) for who, of in self.audits.items()}
        return replace(self, audits=audits, began={who: min(each, step) for who, each in self.began.items()})

    def without_trial(self) -> Trust:
        return replace(self, benched=(), benched_for="", tried_without=(), failed_without=())

    def with_failure(self, node: str, problem: str) -> Trust:
        failed_without = tuple(dict.fromkeys((*self.failed_without, *self.benched)))
        return replace(self, failures=(*self.failures, (node, problem)), failed_without=failed_without)

    def with_loss(self, node: str, peer: str) -> Trust:
        return replace(self, peer_losses=(*self.peer_losses, (node, peer)))

    def with_waiting(self, node: str, suspects: Collection[str]) -> Trust:
        return replace(self, waited_for=(*self.waited_for, frozenset(suspects or (node,)))[-MOST_FAILURES:])

    def with_plan_failure(self, node: str, *, has_lost: bool) -> Trust:
        """With other state held the next plan differs, so the first such failure of a node does not count: it says all that it
        has lost at once."""
        if has_lost and node not in self.losers:
            return replace(self, losers=(*self.losers, node))
        return replace(self, plan_failures=(*self.plan_failures, node))

    def with_damage(self, node: str) -> Trust:
        return replace(self, damaged_by=(*self.damaged_by, node)[-MOST_FAILURES:])

    def with_checkpoint_failure(self, node: str) -> Trust:
        return replace(self, checkpoint_failures=(*self.checkpoint_failures, node)[-MOST_FAILURES:])

    def with_strike(self, strike: AuditHindered) -> Trust:
        return replace(self, strikes=(*self.strikes, strike)[-MOST_HINDERED:])

    def with_quarantine(self, event: NodeQuarantined, settled: Collection[str]) -> Trust:
        """It may have been the cause of all the waiting until now, and why a step failed: the trial of a step starts again if the
        node goes during it, or if an operator expels the node. What ``settled`` names said before counts no more."""
        who = event.key or event.node
        quarantined = dict(list({**self.quarantined, who: event}.items())[-MOST_QUARANTINED:])
        forgotten = self.quarantined.keys() - quarantined.keys()
        fresh = self
        if event.charge is Charge.OPERATOR or self.tried_without:
            fresh = replace(self.without_trial(), failures=())
        return replace(
            fresh.without_witness(who).without_audits(forgotten),
            quarantined=quarantined,
            waited_for=(),
            evaded={},
            plan_failures=tuple(node for node in self.plan_failures if node not in settled),
            checkpoint_failures=tuple(node for node in self.checkpoint_failures if node not in settled),
        )

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
            rounding=without(self.rounding, party),
            audits={
                each: replace(audits, by=tuple(by for by in audits.by if by != name)) if name in audits.by else audits
                for each, audits in self.audits.items()
            },
        )
