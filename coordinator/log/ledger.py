"""The ledger: what the log says. Restarts, ``watch`` and the audit all read it. It is a pure fold of the events (fold.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dtfm.coordinator.log import events as ev
from dtfm.coordinator.log.rounding import Rounding, party_named
from dtfm.scheduler.model.plan import Plan

NODE_LEFT = "NODE_LEFT"
"""StepAborted.problem when a node of the plan left. The step itself is not at fault."""

PEER_LOST = "PEER_LOST"
"""StepAborted.problem when a node could not reach a peer. The link is at fault, not the step."""

OVERDUE = "OVERDUE"
"""StepAborted.problem when votes did not come in time."""

SETTLED = "SETTLED"
"""StepAborted.problem when votes contradicted each other, and somebody was quarantined for that."""

UNAUDITED = "UNAUDITED"
"""StepAborted.problem when work of the step was being done again, and a node left, or withheld what it needed."""

WITNESSES = 2
"""Parties that have to find a stranger's work right before it is proven, where so many could."""

MOST_WITNESSES = 8
"""So many of them are remembered, the last ones."""

CLEARED_BY = "the coordinator"
"""NodeForgiven.by when another turned out to be at fault. No operator is called that: names have no spaces."""


@dataclass(frozen=True, slots=True)
class Carried:
    """The bandwidth of a node's connection, in bytes per second. ``least``: it may be more, since the links that were measured
    together were hardly slower than alone."""

    bandwidth: float
    least: bool = False


@dataclass(frozen=True, slots=True)
class Member:
    """``up`` and ``down`` as last measured (see LinksMeasured). ``leaving``: why the node wants to leave, if it does.
    ``shown``: see DeviceShown."""

    address: str
    device: ev.DeviceSeen
    incarnation: str
    ready: bool = False
    up: Carried | None = None
    down: Carried | None = None
    leaving: str = ""
    candidates: tuple[str, ...] = ()
    relay: str = ""
    shown: float = 0.0


@dataclass(frozen=True, slots=True)
class Invited:
    """An invitation. ``digest``: of its secret; ``expires``: seconds since 1970; ``used``: how many keys were enrolled by it;
    ``by``: who made it."""

    digest: str
    role: str
    expires: float
    uses: int
    by: str
    used: int = 0
    revoked: bool = False

    def is_usable(self, at: float) -> bool:
        """Whether somebody can still be enrolled by it."""
        return not self.revoked and at < self.expires and self.used < self.uses


@dataclass(frozen=True, slots=True)
class Holder:
    """To whom a name belongs. ``key``: SubjectPublicKeyInfo in base64; ``invitation``: by which it came, if by one."""

    key: str
    role: str
    invitation: str


@dataclass(frozen=True, slots=True)
class Audits:
    """``clean``: how often in a row work was found right; ``last``: the step of the last such audit, and ``last_of`` by name;
    ``last_added`` by name that of the last one that has compared what the node adds to gradients. ``differed``: the last audit of
    all came to something else. ``by``: the parties that found it right, named by a hash, at most MOST_WITNESSES. ``could``: how
    many could have done one of these audits, but no more than have to find it right."""

    clean: int = 0
    last: int = 0
    differed: bool = False
    last_of: Mapping[str, int] = field(default_factory=dict)
    last_added: Mapping[str, int] = field(default_factory=dict)
    by: tuple[str, ...] = ()
    could: int = 0

    @property
    def witnessed(self) -> bool:
        """Whether as many parties as have to, or as could, have found the work right. One alone may be a friend."""
        return len(self.by) >= self.could

    def and_another(self, event: ev.WorkAudited) -> Audits:
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
class Outcome:
    completed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Ledger:
    """``step`` is the last committed one, ``generation`` the last plan's.

    ``links`` are by source, then by destination, and so are ``ways``, where they are not direct. ``broken`` are the pairs of
    nodes, each in order of name, of which one could not reach the other. ``changes`` counts measurements that call for a new
    plan: a device or link that drifted, a link that
    broke or works again. ``codecs`` are by source. ``held``: per layer, the processes (node, incarnation) that had its state as
    of ``step`` in memory. They still have it when they return, unless they say otherwise. ``step_seconds``: the time of the last
    step that began and ended under one plan. ``checkpoints`` maps the steps of whole checkpoints to their folders, ``manifests``
    to the BLAKE3 (hex) of their manifests; ``on_disks`` is the last whole snapshot on the nodes' disks. ``agreed``: by step, the
    digests of the state in its snapshots (see StateAgreed), the last MOST_AGREED.
    Since the last commit: ``failures`` are the reports of a step that was at fault itself, each a node and the problem,
    ``peer_losses`` who lost whom, ``waited_for`` the suspects of each attempt that waited in vain, the last MOST_FAILURES. Who
    leaves is in neither of these two. ``evaded``: by node, how many of the last attempts in a row had waited for it when it left,
    since it last took part in a committed step. Since a plan last started: ``plan_failures`` are the nodes that could not take
    their part, ``losers`` those that have said once what state they have lost, ``damaged_by`` who said that the snapshot to go on
    from is damaged. ``checkpoint_failures`` are the nodes because of which checkpoints failed since one was whole.
    ``invitations`` are by id, ``access`` by name. ``revoked``: names, the oldest first, and when they were revoked (seconds
    since 1970). They belong to nobody again: a connection that was opened before may outlive every certificate.
    ``quarantined`` are by key, or by name where a name alone is bound, the oldest first. ``worked``: by node, in how many
    committed steps it took part; in the order in which they first came. ``audits``: what came of them, by key, or by name
    where no key is known, and ``began`` the last step before their work. ``forgiven``: whom an operator let come back, for
    what it was quarantined the last time, by key or by name, the oldest first; its audits begin anew. ``rounding``: what
    audits have shown of how far apart honest devices are. ``strikes``: because of whom audits came to nothing, the oldest
    first. ``benched`` take no part until the next commit, and ``benched_for`` says why; ``tried_without`` are all who were
    benched since the last one, but those without whom no plan was possible are tried again once another node is ready;
    ``failed_without`` are those without whom the step was tried and failed. ``refused``: who had another state than those who
    trained it, and from which donors, the oldest first.
    """

    run_id: str = ""
    run: Mapping[str, Any] = field(default_factory=dict)
    described: ev.Described | None = None
    described_by: str = ""
    data_confirmed: bool = False
    members: Mapping[str, Member] = field(default_factory=dict)
    links: Mapping[str, Mapping[str, ev.Link]] = field(default_factory=dict)
    broken: frozenset[tuple[str, str]] = frozenset()
    ways: Mapping[str, Mapping[str, ev.Way]] = field(default_factory=dict)
    changes: int = 0
    generation: int = 0
    counts_from: int = 0
    plan: Plan | None = None
    codecs: Mapping[str, ev.Codecs] = field(default_factory=dict)
    held: tuple[tuple[tuple[str, str], ...], ...] = ()
    step: int = 0
    last: ev.StepCommitted | None = None
    step_seconds: float | None = None
    evaluated: ev.Evaluated | None = None
    checkpoints: Mapping[int, str] = field(default_factory=dict)
    manifests: Mapping[int, str] = field(default_factory=dict)
    agreed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    on_disks: ev.SnapshotWritten | None = None
    failures: tuple[tuple[str, str], ...] = ()
    peer_losses: tuple[tuple[str, str], ...] = ()
    waited_for: tuple[frozenset[str], ...] = ()
    evaded: Mapping[str, int] = field(default_factory=dict)
    plan_failures: tuple[str, ...] = ()
    losers: tuple[str, ...] = ()
    damaged_by: tuple[str, ...] = ()
    checkpoint_failures: tuple[str, ...] = ()
    outcome: Outcome | None = None
    invitations: Mapping[str, Invited] = field(default_factory=dict)
    access: Mapping[str, Holder] = field(default_factory=dict)
    revoked: Mapping[str, float] = field(default_factory=dict)
    quarantined: Mapping[str, ev.NodeQuarantined] = field(default_factory=dict)
    worked: Mapping[str, int] = field(default_factory=dict)
    audits: Mapping[str, Audits] = field(default_factory=dict)
    began: Mapping[str, int] = field(default_factory=dict)
    rounding: Rounding = field(default_factory=dict)
    forgiven: Mapping[str, ev.NodeQuarantined] = field(default_factory=dict)
    strikes: tuple[ev.AuditHindered, ...] = ()
    refused: tuple[tuple[str, tuple[str, ...]], ...] = ()
    benched: tuple[str, ...] = ()
    benched_for: str = ""
    tried_without: tuple[str, ...] = ()
    failed_without: tuple[str, ...] = ()

    @property
    def checkpoint_step(self) -> int:
        """The step of the newest whole checkpoint; 0: there is none."""
        return max(self.checkpoints, default=0)

    @property
    def ready(self) -> tuple[str, ...]:
        """The nodes that can take part, by name."""
        return tuple(sorted(node for node, member in self.members.items() if member.ready))

    @property
    def staying(self) -> tuple[str, ...]:
        """The nodes to plan with, by name: those that are ready, do not want to leave and are not benched."""
        staying = (node for node, member in self.members.items() if member.ready and not member.leaving)
        return tuple(sorted(node for node in staying if node not in self.benched))

    def key_of(self, name: str) -> str:
        """The key to which the name belongs; empty: none is known."""
        return self.access[name].key if name in self.access else ""

    def party(self, name: str) -> str:
        """Who is behind the name: its key, or the name itself where none is known."""
        return self.key_of(name) or name

    def quarantine_of(self, name: str) -> ev.NodeQuarantined | None:
        """Why the name may take no part, if it may not."""
        return self.quarantined.get(name) or self.quarantined.get(self.key_of(name))

    @property
    def is_open(self) -> bool:
        """Whether the members are strangers to each other."""
        return bool(self.run.get("trust", {}).get("mode") == "open")

    @property
    def quarantined_names(self) -> tuple[str, ...]:
        """All names that may take no part, in order: those of keys, and those that are bound alone."""
        of_keys = (name for name, holder in self.access.items() if holder.key in self.quarantined)
        alone = (why.node for why in self.quarantined.values() if not why.key)
        return tuple(sorted({*of_keys, *alone}))

    @property
    def leaver_at_work(self) -> bool:
        """Whether a node that wants to leave has a part in the plan."""
        return self.plan is not None and any(
            member.leaving and node in self.plan.nodes for node, member in self.members.items()
        )

    @property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """Per layer, the members that hold its state as of ``step`` in memory."""
        present = {(node, member.incarnation) for node, member in self.members.items()}
        return tuple(tuple(who[0] for who in layer if who in present) for layer in self.held)

    @property
    def state_is_held(self) -> bool:
        """Whether members hold the whole state as of ``step`` in memory; at step 0 it follows from the seed."""
        return self.step == 0 or (bool(self.holders) and all(self.holders))
