"""Everything a tick knows: the ledger, and beside it what lives only as long as this coordinator process."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from dtfm.coordinator.config.run_file import RunFile
from dtfm.coordinator.log.events import BackupPart, Codecs, Link
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire
from dtfm.protos import plan_pb2
from dtfm.scheduler.model.plan import Plan

ATTEMPTS = 3
"""So many failures in a row, of a step or of a plan, end the run."""

HEARTBEAT_LEASES = 0.25
"""Nodes give a sign of life so often."""

HASTE_LEASES = 0.01
"""A plan may take so many leases to be found while nothing trains; PLANNING_LEASES else."""

PLANNING_LEASES = 0.5
"""The planner may search for so many leases: a plan that comes later than nodes come and go is worth little."""

PATIENCE_LEASES = 100
"""A node that still gives signs of life may take so many leases for a step or for loading its state."""

PROBE_LEASES = 6
"""So many leases for measuring links; a node that has not by then is planned with as if its links were average ones."""

GRACE_LEASES = 6
"""So many leases are left for nodes to come back with what nobody else has: after a restart, or after they were lost."""

LAST_WORD_LEASES = 0.5
"""For so many leases a node that copied what nobody else has any more is waited for, to say how far it came."""

WORD_LEASES = 0.01
"""A commit may wait for so many leases, or copying.WORD_SHARE, to hear that a copy has the step too: however short steps are,
gradients and word have to travel, and devices are busy at times."""

MOST_PROBED = 64
"""A newcomer measures its links to at most so many others, which takes about PROBE_LEASES where the lease is 10 seconds; its
other links count as average ones."""

REMEMBERED_LEASES = 100
"""For so many leases the links of a node that left count as measured, should it come back."""

TOGETHER_LEASES = 0.05
"""Nodes that come within so many leases of one another are planned with together, so that a storm of them ends in one plan."""

LONGEST_WAVE_LEASES = 1.0
"""So many leases after the first of them came, they are planned with even if more keep coming."""

SIGN_OF_LIFE_LEASES = 0.5
"""Within so many leases, two heartbeats, a live node is heard of: who has its identity by then takes its place if not."""


class Standing(enum.Enum):
    """How far a node has come since its stream opened."""

    JOINED = "joined"
    PROBING = "probing"
    ARRIVED = "arrived"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Seen:
    """Speeds of one device or link in the steps of this generation: the last ones, and the median of the first.
    ``otherwise_since``: when they began to be far from that, if they are."""

    recent: tuple[float, ...] = ()
    before: float | None = None
    otherwise_since: float | None = None


@dataclass(frozen=True, slots=True)
class Copying:
    """A node copies the state of ``layers`` in advance, asked under ``number`` in ``generation``. ``near``: it keeps up with
    those who train, or cannot (``ended``); ``kept_up``: it did, when it was last asked for the same. What it has is as of after
    ``step``; ``voted``: it has the gradients of the next one, as voted for in that generation. ``late``: a commit has waited in
    vain for its word on that, and none came in time since."""

    number: int
    generation: int
    layers: tuple[int, int]
    near: bool = False
    kept_up: bool = False
    ended: bool = False
    late: bool = False
    step: int = 0
    voted: int = 0


@dataclass(frozen=True, slots=True)
class Session:
    """A node's live stream. ``heard``: when it last gave a sign of life; ``probe_until``: when its link report is due;
    ``arrived``: when nothing was missing any more to plan with it; ``leaving``: why it wants to go, if it does; ``kept``: by
    step, the buckets that it has on disk of that backup."""

    node: str
    stream: int
    incarnation: int
    address: str
    heard: float
    standing: Standing = Standing.JOINED
    probe_until: float = 0.0
    arrived: float = 0.0
    leaving: str = ""
    copying: Copying | None = None
    kept: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contender:
    """A process that has the identity of a node which is here, another process of old that may be dead. ``since``: when it
    said hello."""

    stream: int
    hello: wire.Hello
    since: float


@dataclass(frozen=True, slots=True)
class Mending:
    """A link that could not be used: when it is measured again, and how long to wait after that."""

    due: float
    pause: float


@dataclass(frozen=True, slots=True)
class Remembered:
    """What was known of the links of a node that left: good ``until`` then, where both ends are on the ``hosts`` where they
    were."""

    until: float
    hosts: Mapping[str, str]
    links: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class Gathering:
    """Nothing trains: too few nodes are ready, or a plan is being made. ``said``: the sentence of the last Waiting;
    ``waiting``: since when those are waited for that may come back with what training would else go back behind."""

    since: float
    reason: str
    said: str = ""
    waiting: float | None = None


@dataclass(frozen=True, slots=True)
class Switching:
    """A plan is adopted; ``awaiting`` are the nodes that do not hold their state yet, ``progress`` is what the others have of
    the next step, ``codecs`` what they send, by node."""

    awaiting: frozenset[str]
    deadline: float
    progress: Mapping[str, wire.Progress] = field(default_factory=dict)
    codecs: Mapping[str, Codecs] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stepping:
    """``resumed``: some of the step was done in an earlier generation. ``commit_by``: all votes are in, and the commit comes then
    at the latest, or once the copies that it waits for have the step too; ``committed_by``: that of the step before."""

    step: int
    since: float
    deadline: float
    resumed: bool = False
    commit_by: float | None = None
    committed_by: float = -math.inf
    votes: Mapping[str, wire.StepReady] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pausing:
    """The last commit said pause, because it was the run's last or because a plan is chosen; its aftermath is not all
    there. ``applied``: digests of the nodes' state, of those that have applied it."""

    deadline: float
    applied: Mapping[str, bytes] = field(default_factory=dict)


Phase = Gathering | Switching | Stepping | Pausing


@dataclass(frozen=True, slots=True)
class EvaluationTally:
    generation: int
    expected: frozenset[str]
    reports: Mapping[str, wire.Evaluated] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointTally:
    """Buckets of one step that are said to be in ``folder``, by number; ``writers`` are the plan's nodes at that step."""

    folder: str
    writers: frozenset[str]
    buckets: Mapping[int, wire.BucketWritten] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backing:
    """A backup of ``step`` is under way, begun at ``since``. ``writers``, each with the layers it then had, have still to say
    what they have written; ``parts``, by bucket, are what those said that have; ``asked``: by node, the buckets it is fetching
    from others; ``unable`` could not. Who is awaited is so until ``due``; ``heard``: when somebody last did its part."""

    step: int
    since: float
    writers: Mapping[str, tuple[int, int]]
    due: float
    heard: float
    parts: Mapping[int, BackupPart] = field(default_factory=dict)
    asked: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unable: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanChosen:
    plan: Plan
    reason: str
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """The planner is at work; ``hasty``: on the first good plan. ``tickets``: who waits for an answer."""

    number: int
    ready: frozenset[str]
    tickets: tuple[int, ...] = ()
    hasty: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """``sessions``, ``contenders`` and ``remembered`` by node, ``mending`` by the two nodes, in order of name. ``left``: by node,
    when it was lost; long ago, if it went for good. ``looked``: when this process last looked at the clock; ``hearing``: since
    when it does so all the time, and hears nodes as they speak.
    ``considered`` are the nodes that the last finished planning knew; ``gathered``: whether this process has had a plan yet;
    ``timed`` is the last generation of which it is known how long a step takes; ``asked`` counts requests to the planner,
    ``copies`` those to copy state in advance; ``chosen`` waits for the next commit; ``saving``: nobody can take over from a node
    that wants to go, so that the next commit ends in a checkpoint; once ``stopped``, nothing but farewells happens. Before
    ``next_backup`` none begins; None: that is not known yet.
    """

    run: RunFile
    message: plan_pb2.Run
    ledger: Ledger
    phase: Phase
    sessions: Mapping[str, Session] = field(default_factory=dict)
    contenders: Mapping[str, Contender] = field(default_factory=dict)
    mending: Mapping[tuple[str, str], Mending] = field(default_factory=dict)
    remembered: Mapping[str, Remembered] = field(default_factory=dict)
    left: Mapping[str, float] = field(default_factory=dict)
    looked: float = -math.inf
    hearing: float = -math.inf
    planning: PlanAsked | None = None
    chosen: PlanChosen | None = None
    considered: frozenset[str] = frozenset()
    asked: int = 0
    copies: int = 0
    seen: Mapping[tuple[str, str], Seen] = field(default_factory=dict)
    gathered: bool = False
    timed: int = 0
    saving: bool = False
    stopped: bool = False
    evaluations: Mapping[int, EvaluationTally] = field(default_factory=dict)
    checkpoints: Mapping[int, CheckpointTally] = field(default_factory=dict)
    backing: Backing | None = None
    next_backup: float | None = None

    @property
    def lease(self) -> float:
        return self.run.cluster.lease

    @property
    def heartbeat(self) -> float:
        return self.lease * HEARTBEAT_LEASES

    @property
    def patience(self) -> float:
        return self.lease * PATIENCE_LEASES

    @property
    def ready(self) -> tuple[str, ...]:
        """Nodes that can take part, by name."""
        return tuple(sorted(s.node for s in self.sessions.values() if s.standing is Standing.READY))

    @property
    def staying(self) -> tuple[str, ...]:
        """Nodes to plan with: of those that are ready, the ones that do not want to go."""
        return tuple(node for node in self.ready if not self.sessions[node].leaving)

    @property
    def leaver_at_work(self) -> bool:
        """Whether a node that wants to go has a part in the plan."""
        plan = self.ledger.plan
        return plan is not None and any(s.leaving and s.node in plan.nodes for s in self.sessions.values())

    @property
    def wakes_at(self) -> float | None:
        """When a tick is due even if nothing happens until then; None: not before the next beat."""
        return self.phase.commit_by if isinstance(self.phase, Stepping) else None

    def session_of(self, stream: int) -> Session | None:
        return next((session for session in self.sessions.values() if session.stream == stream), None)
