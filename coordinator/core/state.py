"""The state of a tick: the ledger, the phase, and one value for each part of the core that remembers something.

The ledger is the fold of the log and outlives this process. Everything else here lives as long as the process does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dtfm.coordinator.core.audits import Auditing
from dtfm.coordinator.core.givers import Givers
from dtfm.coordinator.core.phases import Phase, Stepping
from dtfm.coordinator.core.timeouts import PATIENCE_LEASES
from dtfm.coordinator.log.events import CheckpointFile, SnapshotPart
from dtfm.coordinator.log.ledger import Ledger
from dtfm.protos import control_pb2 as wire, plan_pb2
from dtfm.protos.run_file.run_file import RunFile
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.rounds import NO_ROUNDS, Rounds

ATTEMPTS = 3
"""The number of attempts, at a step or at a plan, in which somebody may fail."""

Layers = tuple[int, int]
"""[first, past_last)."""

StageKey = tuple[int, int, int]
"""A stage: its island, and its layers [first, past_last)."""


class Admission(enum.Enum):
    """How far a node has come since its stream opened."""

    JOINED = "joined"
    RELAY = "relay"  # it passes on what others say, and computes nothing
    PROBING = "probing"
    ARRIVED = "arrived"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Standby:
    """A node that copies the state of ``layers`` and keeps up with it, as asked by request ``number``,
    made in ``generation``.

    ``caught_up``: the last committed step when it first reported; None: it is still copying. ``step`` and ``voted`` are its last
    report: its copy is as of ``step``, and it has the gradients of the next step as voted in generation ``voted`` (0: not yet).
    ``reported``: when it first reported to have that much. ``ended``: it could not go on. ``caught_up_before``: whether it had
    caught up under an earlier request for the same layers. ``due``: when it should have caught up. ``rounds``: of the plan then.
    """

    number: int
    generation: int
    layers: Layers
    caught_up: int | None = None
    step: int = 0
    voted: int = 0
    reported: float = -math.inf
    ended: bool = False
    caught_up_before: bool = False
    due: float = math.inf
    rounds: Rounds = NO_ROUNDS

    @property
    def is_of_all(self) -> bool:
        """Whether it copies all of the state: with rounds it has no moments."""
        return not self.rounds.count


@dataclass(frozen=True, slots=True)
class Session:
    """A node's live stream. ``heard``: when it last gave a sign of life; ``probe_until``: when its link report is due;
    ``arrived``: when it had everything that a plan needs; ``on_disk``: by step, the buckets of that snapshot on its disk;
    ``certified``: when it last got a certificate. While it is PROBING, ``probing`` are those whose links it still measures,
    ``reaching`` those who try to dial it. ``to_measure``: by node, how often it was asked to measure its links to that one and
    has not answered. ``told``: the ways and holders that it was last told (reach/ways.py). ``prepared``: what it would train,
    while it is JOINED and nobody is believed yet who says what the run is. ``origin``: from where it came (candidates.origin_of);
    empty: not known, or the coordinator's own machine. ``copies_from``: who was named to it to copy from, as a standby of the
    same layers. ``prepares``: what it last said that it does before it is ready (wire.Preparing), and how many tenths of that are
    done. ``links_changed``: how often it was told so, and has not answered by choosing codecs. ``disk_bytes``: free on its
    disk when it had read the run; 0: not known. ``beat``: its last heartbeat; the page shows what the driver says.
    ``device``: its kind, and whether that has bf16. ``precision``: the one that it was told to prepare the run in. ``timed``:
    when it last told that it had timed its device again. ``told_idle``: what it was last told of why it is idle.
    ``work``: what its heartbeats say of its work; None: nothing."""

    node: str
    stream: int
    heard: float
    admission: Admission = Admission.JOINED
    probe_until: float = 0.0
    arrived: float = 0.0
    standby: Standby | None = None
    on_disk: Mapping[int, frozenset[int]] = field(default_factory=dict)
    certified: float = -math.inf
    probing: frozenset[str] = frozenset()
    reaching: frozenset[str] = frozenset()
    to_measure: Mapping[str, int] = field(default_factory=dict)
    told: tuple[tuple[tuple[str, str], ...], tuple[str, ...]] = ((), ())
    prepared: wire.Prepared | None = None
    origin: str = ""
    copies_from: Givers = ()
    links_changed: int = 0
    prepares: tuple[int, int] = (0, -1)
    disk_bytes: int = 0
    beat: wire.Heartbeat | None = None
    device: tuple[str, bool] = ("", False)
    precision: str = ""
    timed: float = -math.inf
    told_idle: str = ""
    work: Work | None = None

    def without_peer(self, node: str) -> Session:
        if not (node in self.probing or node in self.reaching or node in self.to_measure):
            return self
        to_measure = {peer: times for peer, times in self.to_measure.items() if peer != node}
        return replace(self, probing=self.probing - {node}, reaching=self.reaching - {node}, to_measure=to_measure)


@dataclass(frozen=True, slots=True)
class Work:
    """What a process of a node says of its work (control.proto, Heartbeat.Work), and ``since`` when it has said just that."""

    done: int
    waits: bool
    since: float


@dataclass(frozen=True, slots=True)
class Dialled:
    """What came of one node's attempt to dial another: the ``way`` that worked (as in LinkReport), or the ``problem``."""

    way: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a broken link is measured again, and the pause before that. ``works_since``: None while it is broken. ``is_first``: it
    has not been measured since it broke."""

    due: float
    pause: float
    works_since: float | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """When a node that is out of use is tested. ``asked``: when it was asked for the test; None: it was not yet."""

    due: float
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Away:
    """A node that left without a word, and may have kept the state that it had in memory. ``heard``: its last sign of life.
    ``silent``: its lease ended; otherwise its connection broke. ``back``: when it came back; None: it has not."""

    heard: float
    silent: bool
    back: float | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """Who is connected, and what is remembered of those who left.

    ``sessions`` are by node, and ``streams`` says whose each is. ``ended``: those that left for good last, the oldest first.
    ``away``: by node, those that left without a word, and when they came back. ``retries`` are of broken links, and ``slow`` of
    those that became slow, by their two nodes in order of name. ``dialled``: by who, then by whom, what came of dialling;
    ``tried``: by two nodes in order of name, the relays that did not work between them. ``tests`` are by node that is out of
    use. ``lost``: by node, those that it says to have lost since the last commit, after so many commits of the run.
    ``looked``: when this process last looked at the clock; ``hearing``: since when it has done so without a gap, and heard
    nodes as they spoke. ``decisions``: the number of times a plan has decided the run's precision.
    """

    sessions: Mapping[str, Session] = field(default_factory=dict)
    streams: Mapping[int, str] = field(default_factory=dict)
    retries: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    tests: Mapping[str, Test] = field(default_factory=dict)
    lost: Mapping[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    slow: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    dialled: Mapping[str, Mapping[str, Dialled]] = field(default_factory=dict)
    tried: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    ended: tuple[str, ...] = ()
    away: Mapping[str, Away] = field(default_factory=dict)
    decisions: int = 0
    looked: float = -math.inf
    hearing: float = -math.inf

    def session_of(self, stream: int) -> Session | None:
        return self.sessions.get(self.streams.get(stream, ""))

    def with_session(self, session: Session) -> Members:
        streams = self.streams
        if session.stream not in streams:  # with it, the node's last one ends
            streams = {**self.without_session(session.node).streams, session.stream: session.node}
        return replace(self, sessions={**self.sessions, session.node: session}, streams=streams)

    def without_session(self, node: str) -> Members:
        """Nobody waits for this node or measures its links any more. If it comes back, its links are measured anew."""
        sessions = {name: session.without_peer(node) for name, session in self.sessions.items() if name != node}
        return replace(self, sessions=sessions, streams={session.stream: name for name, session in sessions.items()})


@dataclass(frozen=True, slots=True)
class Question:
    """What the planner is asked: the best plan for ``nodes`` (each with its process), as measured after ``changes`` surprises
    (Ledger.changes). ``shown``: what each has shown of itself (trust/claims.py). ``disputes``: those of
    trust/disputes.py."""

    nodes: frozenset[tuple[str, str]]
    changes: int
    shown: frozenset[tuple[str, int]] = frozenset()
    disputes: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """``length``: of a round, as in the run file; None: the plan is the one in force, or what is left of it."""

    plan: Plan
    reason: str
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that the planner is working on. ``hasty``: it takes the first good plan. ``tickets``: who waits for the
    answer."""

    number: int
    question: Question
    hasty: bool
    tickets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a question: the best ``plan``, or None and the ``problem``. ``at``: when that was."""

    question: Question
    hasty: bool
    plan: Plan | None
    problem: str = ""
    at: float = math.inf


@dataclass(frozen=True, slots=True)
class Planner:
    """``number`` is the last question's. ``chosen`` is a plan that waits to be adopted. ``has_planned``: this process has adopted
    a plan."""

    number: int = 0
    asked: Asked | None = None
    answer: Answer | None = None
    chosen: PlanChosen | None = None
    has_planned: bool = False


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation in hand, after ``step``. ``chains``: those of held_out_chains, by micro-batch; ``reports``: by node at the
    end of some, the mean loss of each of these."""

    step: int
    generation: int
    chains: tuple[tuple[str, ...], ...]
    reports: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """By node that reports a part, the numbers of its micro-batches."""
        numbers: dict[str, list[int]] = {}
        for number, chain in enumerate(self.chains):
            numbers.setdefault(chain[-1], []).append(number)
        return {end: tuple(own) for end, own in numbers.items()}


@dataclass(frozen=True, slots=True)
class SnapshotTally:
    """A snapshot under way of the state after ``step``, begun at ``since``.

    ``writers``, each with its layers, have still to report what they wrote to their disks. ``written`` is reported, by bucket and
    node; ``parts``: what of it counts, once all have, by bucket. ``spread``: what is on one machine alone is copied to another.
    ``checkpoint``: once all is written, it goes to a checkpoint. ``fetching``: by node, the buckets that it copies from other
    disks; ``unable``: nodes that could not keep a part; ``problem``: why the first of these could not. Nodes are waited for until
    ``due``; ``heard`` is when one last reported.
    """

    step: int
    since: float
    writers: Mapping[str, Layers]
    due: float
    heard: float
    spread: bool
    checkpoint: bool
    parts: Mapping[int, SnapshotPart] = field(default_factory=dict)
    written: Mapping[int, Mapping[str, SnapshotPart]] = field(default_factory=dict)
    fetching: Mapping[str, frozenset[int]] = field(default_factory=dict)
    unable: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Sending:
    """The buckets that a node sends to a checkpoint, and when all should have arrived."""

    buckets: frozenset[int]
    due: float


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint under way, in the folder of ``step`` at ``place``: ``parts`` are by bucket the files of the snapshot, on the
    nodes' disks. ``weights``: it gets these alone.

    ``files`` have arrived, by bucket, and were ``sent_by`` these nodes; those of ``sending`` are on their way, by node.
    ``finishing``: the manifest is being written. After a ``problem``, those that ``failed`` leave the rest to others. If no
    others are left, all is tried ``again`` at this time; ``attempts``: how often that was so.
    """

    step: int
    place: str
    weights: bool
    parts: Mapping[int, SnapshotPart]
    files: Mapping[int, CheckpointFile] = field(default_factory=dict)
    sent_by: Mapping[int, str] = field(default_factory=dict)
    sending: Mapping[str, Sending] = field(default_factory=dict)
    finishing: bool = False
    failed: frozenset[str] = frozenset()
    problem: str = ""
    again: float | None = None
    attempts: int = 0

    @property
    def missing(self) -> frozenset[int]:
        """The buckets whose files have not arrived."""
        return frozenset(self.parts.keys() - self.files.keys())

    @property
    def on_the_way(self) -> frozenset[int]:
        """The buckets that nodes are sending."""
        return frozenset[int]().union(*(sending.buckets for sending in self.sending.values()))

    @property
    def is_in_trouble(self) -> bool:
        return self.again is not None

    def without(self, node: str) -> Upload:
        """The node sends nothing."""
        return replace(self, sending={name: sending for name, sending in self.sending.items() if name != node})


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What the choice of standbys depends on. ``timed``: a whole step of this generation has shown how long one takes."""

    generation: int
    timed: bool
    chosen: PlanChosen | None
    ready: tuple[str, ...]
    staying: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Safekeeping:
    """``standby_number`` is that of the last standby request; ``arranged``: for what standbys were last chosen. ``snapshot`` and
    ``upload`` are under way. ``next_spread``: when what is on one machine alone is copied to another again; None: not known yet.
    ``checkpoint_due``: the next commit begins the checkpoint for which another one was in the way. The last checkpoint, if it
    failed, is not tried again before ``next_checkpoint``. ``unfinished``: the steps whose checkpoints have begun since the last
    ones were tidied, and are not whole."""

    standby_number: int = 0
    arranged: Arrangement | None = None
    snapshot: SnapshotTally | None = None
    upload: Upload | None = None
    next_spread: float | None = None
    checkpoint_due: bool = False
    next_checkpoint: float = -math.inf
    unfinished: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the measurements of one device or link differ from each other while nothing has changed (plan/noise.py)."""

    variance: float = 0.0
    """Of the logarithm of its level."""
    count: int = 0
    """The number of levels that are in ``variance``."""
    level: float = 0.0
    """The last of them."""
    at: float = -math.inf
    """When that was."""
    reversals: float = 0.0
    """The number of times that a change was followed by one the other way; it fades."""
    change: float = 0.0
    """The logarithm of the last change; 0: there was none."""
    changed_at: float = 0.0
    """When that was found."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The ``last`` gradient norms of a stage, and whether each was ``large`` for it (step/norms.py)."""

    last: tuple[float, ...] = ()
    large: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one device or link in this generation's steps: the ``recent`` ones, the ``times`` when they were measured, and
    the median of the ``first``. ``changed_since``: since when the recent ones have been far from the first. ``noise`` outlives
    the generation."""

    recent: tuple[float, ...] = ()
    first: float | None = None
    changed_since: float | None = None
    times: tuple[float, ...] = ()
    noise: Noise = Noise()


@dataclass(frozen=True, slots=True)
class State:
    """``secret``: 32 random bytes of this process, so that nobody can foresee what is audited. ``speeds`` are by (node, "") for
    devices, by (source, destination) for links, and by (node, node) for what a node delivers of what it claims (plan/drift.py).
    ``norms``: the last gradient norms of each stage of the plan (step/norms.py).
    ``overdue``: the last step that may go on from where it stood, as its deadline had passed (plan/adoption.py).
    ``stalls``: the number of commits of the run, and how often a deadline has passed since the last of them.
    ``disk_bytes``: free on the coordinator's own disk when this process started.
    ``exit_code``: of this process, once it has ``stopped``. Then nothing but farewells happens."""

    run: RunFile
    message: plan_pb2.Run
    ledger: Ledger
    phase: Phase
    secret: bytes = field(repr=False)
    members: Members = field(default_factory=Members)
    planner: Planner = field(default_factory=Planner)
    evaluation: Evaluation | None = None
    safekeeping: Safekeeping = field(default_factory=Safekeeping)
    speeds: Mapping[tuple[str, str], Speeds] = field(default_factory=dict)
    auditing: Auditing = field(default_factory=Auditing)
    norms: Mapping[StageKey, Norms] = field(default_factory=dict)
    overdue: int | None = None
    stalls: tuple[int, int] = (0, 0)
    disk_bytes: float = math.inf
    exit_code: int | None = None

    def afresh(self) -> State:
        """As after a restart, but with the nodes that are here: what this process remembers beside the ledger is forgotten."""
        kept = self.safekeeping
        return replace(
            self,
            planner=Planner(number=self.planner.number),
            evaluation=None,
            safekeeping=Safekeeping(standby_number=kept.standby_number, unfinished=kept.unfinished),
            speeds={},
            norms={},
            auditing=Auditing(self.auditing.number),
            overdue=None,
            stalls=(0, 0),
        )

    @property
    def stalls_since_commit(self) -> int:
        """How often a deadline has passed since the last commit."""
        commits, times = self.stalls
        return times if commits == self.ledger.trust.commits else 0

    @property
    def with_stall(self) -> tuple[int, int]:
        """``stalls``, now that another deadline has passed."""
        return self.ledger.trust.commits, self.stalls_since_commit + 1

    @property
    def stopped(self) -> bool:
        return self.exit_code is not None

    @property
    def is_complete(self) -> bool:
        """Whether the run is over, and not because it failed."""
        return self.ledger.outcome is not None and self.ledger.outcome.completed

    @property
    def is_closing(self) -> bool:
        """Whether no step follows the last committed one: all are trained, or the run is to stop."""
        hold, step = self.ledger.hold, self.ledger.training.step
        ends = step >= self.run.train.steps or (hold is not None and hold.ends)
        return ends and self.rounds.at_rest(step)

    @property
    def rounds(self) -> Rounds:
        return self.ledger.training.rounds

    @property
    def lease(self) -> float:
        return self.run.cluster.lease

    @property
    def patience(self) -> float:
        """Seconds for loading state, or for a step of which little is known."""
        return self.lease * PATIENCE_LEASES

    @property
    def wakes_at(self) -> float | None:
        """When a tick is due even if nothing happens until then; None: not before the next beat."""
        if not isinstance(self.phase, Stepping):
            return None
        due = (request.until for audit in self.phase.audits for request in audit.awaited.values())
        return min(due, default=self.phase.commit_by)
