"""The event log's vocabulary. Everything the coordinator knows for good is a fold of these (ledger.py).

Their JSON is a contract (DESIGN.md, Commands): scripts read it from ``--json``, and the store keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

#: By destination: what goes there, and under which codec.
Codecs = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """First of every log. ``run`` is the run file as JSON, ``run_id`` tells it from another of the same name."""

    run_id: str
    run: dict[str, Any]
    event: Literal["run_started"] = "run_started"


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A coordinator took the log up again; whoever was a node then has to join anew. ``run`` is the run file from now on."""

    reason: str
    run: dict[str, Any]
    event: Literal["run_resumed"] = "run_resumed"


@dataclass(frozen=True, slots=True)
class DeviceSeen:
    """``memory_bytes``; ``flops``: sustained FLOP/s as measured."""

    kind: str
    name: str
    memory_bytes: int
    flops: float


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """``incarnation`` (hex) is drawn by every process of a node: with the same one comes what it had in memory."""

    node: str
    reason: str
    address: str
    device: DeviceSeen
    package_version: str = ""
    incarnation: str = ""
    event: Literal["node_joined"] = "node_joined"


@dataclass(frozen=True, slots=True)
class NodeRefused:
    """``refusal`` is the wire's RefusalReason by name, ``reason`` the sentence that the node got."""

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
    """The node wants to go, and works on until its part is handed over."""

    node: str
    reason: str
    event: Literal["node_leaving"] = "node_leaving"


@dataclass(frozen=True, slots=True)
class NodeLeft:
    node: str
    reason: str
    event: Literal["node_left"] = "node_left"


@dataclass(frozen=True, slots=True)
class Link:
    """Directed. Latency in seconds one way, bandwidth in bytes per second; 0 with a ``problem``: not reachable."""

    source: str
    destination: str
    latency_seconds: float
    bandwidth: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DeviceTimed:
    """The node has timed its device with the run's own layers; ``flops`` is what it counts for from now on."""

    node: str
    flops: float
    event: Literal["device_timed"] = "device_timed"


@dataclass(frozen=True, slots=True)
class DeviceDrifted:
    """The node's device has become slower or faster for good; ``flops`` is what it counts for from now on."""

    node: str
    flops: float
    reason: str
    event: Literal["device_drifted"] = "device_drifted"


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """``up`` and ``down``: bytes per second that the node's connection carries to, or from, several peers together; None: not
    measured now."""

    node: str
    links: tuple[Link, ...]
    event: Literal["links_measured"] = "links_measured"
    up: float | None = None
    down: float | None = None


@dataclass(frozen=True, slots=True)
class Described:
    """What is trained and on what, as the first node prepared it; all others must agree. The fingerprint is hex."""

    workload: Workload
    data_fingerprint: str
    training_samples: int
    evaluation_samples: int
    unigram_entropy: float
    tokens_per_sample: int
    buckets: int


@dataclass(frozen=True, slots=True)
class RunDescribed:
    described: Described
    event: Literal["run_described"] = "run_described"


@dataclass(frozen=True, slots=True)
class Waiting:
    """No plan is possible with the nodes that are ready."""

    reason: str
    event: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """``step`` is the last committed one; what nodes have done of the next one since generation ``counts_from`` still counts.
    Seconds: the planner's prediction and its lower bound, if any."""

    generation: int
    plan: Plan
    reason: str
    step: int
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    counts_from: int = 0
    event: Literal["plan_adopted"] = "plan_adopted"


@dataclass(frozen=True, slots=True)
class PlanStarted:
    """Every node of the plan holds its state: ``step`` begins under it; or goes on, where ``finished`` micro-batches
    are done in some stage already. ``codecs``: by source and destination, what the plan has sent there (as in the run file's
    [network]) and under which codec."""

    generation: int
    step: int
    finished: int = 0
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    event: Literal["plan_started"] = "plan_started"


@dataclass(frozen=True, slots=True)
class CodecsChosen:
    """Links have changed, and with them the codecs of all that the node sends."""

    node: str
    codecs: Codecs
    event: Literal["codecs_chosen"] = "codecs_chosen"


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """``backup``: the reason is that a part of the backup, from which the state was to come, is damaged with all that have it;
    where these are but out of reach, it is a failure like others. ``lost``: layers of which the node does not have the state that
    it was taken to hold."""

    generation: int
    node: str
    reason: str
    backup: bool = False
    lost: tuple[int, ...] = ()
    event: Literal["plan_failed"] = "plan_failed"


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """``loss`` is the mean over ``samples``, ``gradient_norm`` the whole model's before clipping; ``compute_seconds``
    and ``wait_seconds`` are per node. ``resumed``: some of the step was done in an earlier generation, and ``seconds`` are those
    of the rest."""

    step: int
    generation: int
    loss: float
    tokens: int
    gradient_norm: float
    seconds: float
    samples: int
    compute_seconds: dict[str, float]
    wait_seconds: dict[str, float]
    resumed: bool = False
    event: Literal["step_committed"] = "step_committed"

    @property
    def tokens_per_second(self) -> float | None:
        """None where it is not known how long all of the step took."""
        return self.tokens / self.seconds if self.seconds > 0 and not self.resumed else None


@dataclass(frozen=True, slots=True)
class StepAborted:
    """``problem`` is the wire's StepProblem by name, ``node`` the one that named it or was lost."""

    step: int
    generation: int
    problem: str
    node: str
    reason: str
    event: Literal["step_aborted"] = "step_aborted"


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """Replicas of one stage hold different state: a bug, and the end of the run."""

    step: int
    generation: int
    stage: int
    digests: dict[str, str]
    event: Literal["digest_mismatch"] = "digest_mismatch"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Loss over held-out samples, in nats per token, beside what frequencies alone would give."""

    step: int
    loss: float
    samples: int
    unigram_entropy: float
    event: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    step: int
    folder: str
    event: Literal["checkpoint_written"] = "checkpoint_written"


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    step: int
    reason: str
    event: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, slots=True)
class StateCopied:
    """The node has the state of ``layers`` [first, past_last) as of ``step``, copied in advance from who then had it."""

    node: str
    incarnation: str
    layers: tuple[int, int]
    step: int
    event: Literal["state_copied"] = "state_copied"


@dataclass(frozen=True, slots=True)
class BackupPart:
    """The file with one bucket's state; ``digest``: its BLAKE3 (hex)."""

    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class BackupKept:
    """The state as of after ``step`` is on the nodes' own disks. ``parts`` are in order of bucket; ``holders`` says of each node
    which buckets it has, as ranges [first, past_last). It took so many ``seconds`` since the step's commit."""

    step: int
    parts: tuple[BackupPart, ...]
    holders: dict[str, tuple[tuple[int, int], ...]]
    seconds: float
    event: Literal["backup_kept"] = "backup_kept"


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No node holds some stage's state any more: training goes back from ``from_step`` to ``step``. ``folder`` is the
    checkpoint that holds it; empty at step 0, and where the nodes' backup has it."""

    step: int
    from_step: int
    folder: str
    reason: str
    event: Literal["rolled_back"] = "rolled_back"


@dataclass(frozen=True, slots=True)
class RunFinished:
    step: int
    reason: str
    event: Literal["run_finished"] = "run_finished"


@dataclass(frozen=True, slots=True)
class RunFailed:
    step: int
    reason: str
    event: Literal["run_failed"] = "run_failed"


@dataclass(frozen=True, slots=True)
class CoordinatorStopped:
    """On request; the run can be resumed."""

    reason: str
    event: Literal["coordinator_stopped"] = "coordinator_stopped"


Event = (
    RunStarted
    | RunResumed
    | NodeJoined
    | NodeRefused
    | NodeReady
    | NodeLeaving
    | NodeLeft
    | DeviceTimed
    | DeviceDrifted
    | LinksMeasured
    | RunDescribed
    | Waiting
    | PlanAdopted
    | PlanStarted
    | PlanFailed
    | CodecsChosen
    | StepCommitted
    | StepAborted
    | DigestMismatch
    | Evaluated
    | CheckpointWritten
    | CheckpointFailed
    | StateCopied
    | BackupKept
    | RolledBack
    | RunFinished
    | RunFailed
    | CoordinatorStopped
)

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def to_json(event: Event) -> dict[str, Any]:
    """The event as JSON values, its name first."""
    fields: dict[str, Any] = _ADAPTER.dump_python(event, mode="json")
    return {"event": fields.pop("event"), **fields}


def from_json(value: dict[str, Any]) -> Event:
    """Inverse of ``to_json``. Raises ValueError for what is no event of this version."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise _no_event(error) from None


def from_text(text: str) -> Event:
    """``from_json`` of what is still JSON text, in half the time."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise _no_event(error) from None


def _no_event(error: ValidationError) -> ValueError:
    return ValueError(f"not an event of this version of dtfm: {error.errors(include_url=False)[0]['msg']}")
