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
"""A party may fail in this number of attempts, at steps or at plans."""

Layers = tuple[int, int]
"""[first, past_last)."""

StageKey = tuple[int, int, int]
"""A stage: its island, and its layers [first, past_last)."""


class Admission(enum.Enum):
    """How far a node has come since its stream opened."""

    JOINED = "joined"
    RELAY = "relay"  # it passes on messages of other nodes, and computes nothing
    PROBING = "probing"
    ARRIVED = "arrived"
    READY = "ready"


@dataclass(frozen=True, slots=True)
class Standby:
    """A node that copies the state of some layers from other nodes, and keeps the copy up to date."""

    number: int
    """The number of the coordinator's request. A report with another number is ignored."""
    generation: int
    """The generation when the coordinator made the request."""
    layers: Layers
    """The layers that the standby copies."""
    caught_up: int | None = None
    """The last committed step when the standby first reported; None: it is still copying."""
    step: int = 0
    """The step of its copy, from its last report."""
    voted: int = 0
    """From its last report: if it has the gradients of the next step, the generation of their votes; 0: it has none."""
    reported: float = -math.inf
    """When it first reported this much."""
    ended: bool = False
    """Whether it has reported that it cannot go on."""
    caught_up_before: bool = False
    """Whether it had caught up under an earlier request for the same layers."""
    due: float = math.inf
    """When it should have caught up."""
    rounds: Rounds = NO_ROUNDS
    """The rounds of the plan in force when the request was made."""

    @property
    def is_of_all(self) -> bool:
        """Whether it copies the whole state. With rounds it copies no moments."""
        return not self.rounds.count


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


@dataclass(frozen=True, slots=True)
class Dialled:
    """The result when one node dialled another: the ``way`` that worked (as in LinkReport), or the ``problem``."""

    way: str
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Retry:
    """When a broken link is measured again, and the pause before that. ``works_since``: None while the link is broken.
    ``is_first``: the link has not been measured since it broke."""

    due: float
    pause: float
    works_since: float | None = None
    is_first: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """When a node that is out of use is tested. ``asked``: when the node was asked for the test; None: not yet."""

    due: float
    asked: float | None = None


@dataclass(frozen=True, slots=True)
class Away:
    """A node that left without a goodbye, and may still have state in memory. ``heard``: its last sign of life.
    ``silent``: its lease ended; otherwise its connection broke. ``back``: when it came back; None: it has not."""

    heard: float
    silent: bool
    back: float | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """The connected nodes, and memories of nodes that left. A pair is two nodes in order of name."""

    sessions: Mapping[str, Session] = field(default_factory=dict)
    """By node."""
    streams: Mapping[int, str] = field(default_factory=dict)
    """By stream, its node."""
    retries: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    """By pair with a broken link, when the link is measured again."""
    tests: Mapping[str, Test] = field(default_factory=dict)
    """By node that is out of use, its test."""
    lost: Mapping[str, tuple[int, frozenset[str]]] = field(default_factory=dict)
    """By node: the run's number of commits, and the peers that the node has reported lost since that commit."""
    slow: Mapping[tuple[str, str], Retry] = field(default_factory=dict)
    """By pair whose link became slow, when the link is measured again."""
    dialled: Mapping[str, Mapping[str, Dialled]] = field(default_factory=dict)
    """By dialling node, then by dialled node: the result."""
    tried: Mapping[tuple[str, str], frozenset[str]] = field(default_factory=dict)
    """By pair, the relays that did not work between the two."""
    ended: tuple[str, ...] = ()
    """The nodes that last left for good, the oldest first."""
    away: Mapping[str, Away] = field(default_factory=dict)
    """By node that left without a goodbye: when it left, and when it came back."""
    decisions: int = 0
    """The number of times that a plan has decided the run's precision."""
    looked: float = -math.inf
    """When this process last looked at the clock."""
    hearing: float = -math.inf
    """When this process began to look at the clock without gaps. Since then it has heard nodes as they spoke."""

    def session_of(self, stream: int) -> Session | None:
        return self.sessions.get(self.streams.get(stream, ""))

    def with_session(self, session: Session) -> Members:
        streams = self.streams
        if session.stream not in streams:  # with it, the node's last one ends
            streams = {**self.without_session(session.node).streams, session.stream: session.node}
        return replace(self, sessions={**self.sessions, session.node: session}, streams=streams)

    def without_session(self, node: str) -> Members:
        """Other nodes stop waiting for this node and measuring its links. If it comes back, its links are measured again."""
        sessions = {name: session.without_peer(node) for name, session in self.sessions.items() if name != node}
        return replace(self, sessions=sessions, streams={session.stream: name for name, session in sessions.items()})


@dataclass(frozen=True, slots=True)
class Question:
    """A question to the planner: the best plan for ``nodes`` (each with its process). The measurements are those after
    ``changes`` surprises (Ledger.changes). ``shown``: what each node has shown of itself (trust/claims.py). ``disputes``: the
    pairs in dispute (trust/disputes.py)."""

    nodes: frozenset[tuple[str, str]]
    changes: int
    shown: frozenset[tuple[str, int]] = frozenset()
    disputes: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class PlanChosen:
    """A plan to adopt. ``length``: of a round, as in the run file; None: the plan in force, or the rest of that plan."""

    plan: Plan
    reason: str
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    length: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A question that the planner is working on. ``hasty``: the planner takes the first good plan. ``tickets``: the callers that
    wait for the answer."""

    number: int
    question: Question
    hasty: bool
    tickets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The planner's answer: the best ``plan``, or None and the ``problem``. ``at``: the time of the answer."""

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
    """An evaluation after ``step`` that is not finished. ``chains``: the held_out_chains, by micro-batch. ``reports``: by last
    node of a chain, the mean loss of each micro-batch that ended there."""

    step: int
    generation: int
    chains: tuple[tuple[str, ...], ...]
    reports: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def expected(self) -> Mapping[str, tuple[int, ...]]:
        """By node that reports losses, the numbers of its micro-batches."""
        numbers: dict[str, list[int]] = {}
        for number, chain in enumerate(self.chains):
            numbers.setdefault(chain[-1], []).append(number)
        return {end: tuple(own) for end, own in numbers.items()}


@dataclass(frozen=True, slots=True)
class SnapshotTally:
    """A snapshot that is being written to disks."""

    step: int
    """The snapshot has the state after this step."""
    since: float
    """When the snapshot began."""
    writers: Mapping[str, Layers]
    """By node that has not reported yet, the layers that it writes to its disk."""
    due: float
    """Until when nodes are waited for."""
    heard: float
    """The time of the last report."""
    spread: bool
    """Whether parts on only one machine are copied to another."""
    checkpoint: bool
    """Whether the snapshot goes to a checkpoint when all of it is written."""
    parts: Mapping[int, SnapshotPart] = field(default_factory=dict)
    """By bucket, the file that counts. Empty until all writers have reported."""
    written: Mapping[int, Mapping[str, SnapshotPart]] = field(default_factory=dict)
    """By bucket and node, the file that the node reported."""
    fetching: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """By node, the buckets that it copies from other disks."""
    unable: frozenset[str] = frozenset()
    """Nodes that could not keep a part."""
    problem: str = ""
    """Why the first of the ``unable`` could not; empty if all could."""


@dataclass(frozen=True, slots=True)
class Sending:
    """The buckets that a node sends to a checkpoint, and when all of them should have arrived."""

    buckets: frozenset[int]
    due: float


@dataclass(frozen=True, slots=True)
class Upload:
    """A checkpoint that nodes are sending."""

    step: int
    """The checkpoint has the state after this step. The step names its folder."""
    place: str
    """The run's place for checkpoints."""
    weights: bool
    """Whether the checkpoint gets only weights."""
    parts: Mapping[int, SnapshotPart]
    """By bucket, the snapshot's file on the nodes' disks."""
    files: Mapping[int, CheckpointFile] = field(default_factory=dict)
    """By bucket, the file that has arrived."""
    sent_by: Mapping[int, str] = field(default_factory=dict)
    """By bucket that has arrived, its sender."""
    sending: Mapping[str, Sending] = field(default_factory=dict)
    """By node, the buckets that are on their way."""
    finishing: bool = False
    """Whether the manifest is being written."""
    failed: frozenset[str] = frozenset()
    """Nodes that failed to send. Other nodes send the rest."""
    problem: str = ""
    """The last problem; empty before the first."""
    again: float | None = None
    """When the missing files are tried again, as no other node is left; None: nothing waits for that."""
    attempts: int = 0
    """The number of times that the checkpoint had to wait for ``again``."""

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
        """The upload when this node sends nothing."""
        return replace(self, sending={name: sending for name, sending in self.sending.items() if name != node})


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The inputs to the choice of standbys. ``timed``: a whole step of this generation has shown how long a step takes."""

    generation: int
    timed: bool
    chosen: PlanChosen | None
    ready: tuple[str, ...]
    staying: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Safekeeping:
    """Standbys, snapshots and checkpoints in progress."""

    standby_number: int = 0
    """The number of the last standby request."""
    arranged: Arrangement | None = None
    """The inputs to the last choice of standbys."""
    snapshot: SnapshotTally | None = None
    """The snapshot that nodes are writing, if there is one."""
    upload: Upload | None = None
    """The checkpoint that nodes are sending, if there is one."""
    next_spread: float | None = None
    """When parts on only one machine may next be copied to another; None: not known yet."""
    checkpoint_due: bool = False
    """Whether the next commit begins a checkpoint that had to wait for another."""
    next_checkpoint: float = -math.inf
    """If the last checkpoint failed, the time before which it is not tried again."""
    unfinished: frozenset[int] = frozenset()
    """The steps whose checkpoints began after old checkpoints were last deleted, and are not whole."""


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
    """The logarithm of the last change; 0 before the first."""
    changed_at: float = 0.0
    """When that was found."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The ``last`` gradient norms of a stage, and whether each was ``large`` for the stage (step/norms.py)."""

    last: tuple[float, ...] = ()
    large: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of one device or link in this generation's steps. ``recent``: the last ones, measured at ``times``. ``first``: the
    median of the first ones. ``changed_since``: since when the recent speeds have been far from ``first``. ``noise`` outlives
    the generation."""

    recent: tuple[float, ...] = ()
    first: float | None = None
    changed_since: float | None = None
    times: tuple[float, ...] = ()
    noise: Noise = Noise()


@dataclass(frozen=True, slots=True)
class State:
    """All that the coordinator knows: the ledger, and what this process remembers beside the ledger."""

    run: RunFile
    """The run file."""
    message: plan_pb2.Run
    """The run as nodes are told."""
    ledger: Ledger
    """The fold of the log."""
    phase: Phase
    """The phase of training."""
    secret: bytes = field(repr=False)
    """32 random bytes of this process, so that nobody can foresee which work is audited."""
    members: Members = field(default_factory=Members)
    """The connected nodes."""
    planner: Planner = field(default_factory=Planner)
    """The planner's question and answer, and the chosen plan."""
    evaluation: Evaluation | None = None
    """The unfinished evaluation, if there is one."""
    safekeeping: Safekeeping = field(default_factory=Safekeeping)
    """Standbys, snapshots and checkpoints."""
    speeds: Mapping[tuple[str, str], Speeds] = field(default_factory=dict)
    """Keys: (node, "") for devices; (source, destination) for links; (node, node) for the fraction of its claimed speed that a
    node delivers (plan/drift.py)."""
    auditing: Auditing = field(default_factory=Auditing)
    """What is remembered between audits."""
    norms: Mapping[StageKey, Norms] = field(default_factory=dict)
    """The last gradient norms of each stage of the plan (step/norms.py)."""
    overdue: int | None = None
    """The last step that passed its deadline and may resume with the work done so far (plan/adoption.py), if there was one."""
    stalls: tuple[int, int] = (0, 0)
    """The run's number of commits, and how often a deadline has passed since the last commit."""
    disk_bytes: float = math.inf
    """Bytes free on the coordinator's own disk when this process started."""
    exit_code: int | None = None
    """The exit code of this process when it has ``stopped``; from then on only farewells are sent. None: it runs."""

    def afresh(self) -> State:
        """The state as after a restart, but with the connected nodes: forgets what this process remembers beside the ledger."""
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
        """Whether no step follows the last committed step: all steps are trained, or the run is to stop."""
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
        """The seconds allowed for loading state, or for a step whose length is hardly known."""
        return self.lease * PATIENCE_LEASES

    @property
    def wakes_at(self) -> float | None:
        """When a tick is due even if nothing happens until then; None: not before the next beat."""
        if not isinstance(self.phase, Stepping):
            return None
        due = (request.until for audit in self.phase.audits for request in audit.awaited.values())
        return min(due, default=self.phase.commit_by)
