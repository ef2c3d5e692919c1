"""The events of the log. Everything the coordinator keeps for good is a fold of them (fold.py).

Their JSON is a contract: scripts read it from ``--json``, and the store keeps it. Events and fields that were renamed are still
read under their old names, and plans with routes as plans with flows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from blake3 import blake3
from pydantic import AliasChoices, BeforeValidator, Field, TypeAdapter, ValidationError

from dtfm.coordinator.log.charges import Charge
from dtfm.coordinator.log.older_plan import as_written_now
from dtfm.protos.bucket_layout import LAYOUT_BYTES
from dtfm.scheduler.model.plan import Plan
from dtfm.scheduler.model.workload import Workload

#: By destination, then by tensors ("activations", "gradients", "reduction"): the codec.
Codecs = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class RunStarted:
    """The first event of every log. ``run`` is the run file as JSON. ``run_id`` tells runs of the same name apart."""

    run_id: str
    run: dict[str, Any]
    event: Literal["run_started"] = "run_started"


@dataclass(frozen=True, slots=True)
class RunResumed:
    """A coordinator process continues the log; nodes have to join again. ``run`` is the run file from now on."""

    reason: str
    run: dict[str, Any]
    event: Literal["run_resumed"] = "run_resumed"


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
class Link:
    """A directed link: latency one way in seconds, bandwidth in bytes per second. An unreachable destination has bandwidth 0
    and a ``problem``. ``way``: how the source reaches the destination, as in the wire's LinkReport; empty: not known."""

    source: str
    destination: str
    latency_seconds: float
    bandwidth: float
    problem: str = ""
    way: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """How the source reaches the destination: "loopback", "lan", "public" or "direct" by dialling it, "dial-back" over
    connections that the destination lends it, "relay" over those that it lends to ``relay``."""

    source: str
    destination: str
    way: str
    relay: str = ""
    reason: str = ""

    @property
    def name(self) -> str:
        return f"relay {self.relay}" if self.relay else self.way

    @property
    def is_direct(self) -> bool:
        return self.way not in ("dial-back", "relay")


@dataclass(frozen=True, slots=True)
class WaysChosen:
    ways: tuple[Way, ...]
    event: Literal["ways_chosen"] = "ways_chosen"


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


@dataclass(frozen=True, slots=True)
class LinksMeasured:
    """``up`` and ``down``: bytes per second of the node's connection to, or from, several peers together; None: not measured this
    time. ``reason``: why, where training itself showed that a link has changed."""

    node: str
    links: tuple[Link, ...]
    event: Literal["links_measured"] = "links_measured"
    up: float | None = None
    down: float | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Described:
    """The model and the data, as the first node prepared them; all others must agree. The fingerprints are hex; that of
    weights is empty unless the run begins with pretrained ones. ``layouts``: the digests of the layouts of the buckets' files, in
    a row (hex, see protos/bucket_layout.py); empty in logs of older versions."""

    workload: Workload
    data_fingerprint: str
    training_samples: int
    evaluation_samples: int
    unigram_entropy: float
    tokens_per_sample: int
    buckets: int
    weights_fingerprint: str = ""
    layouts: str = ""

    def layout_of(self, bucket: int) -> str:
        """Of the bucket's file (hex); empty: not known."""
        return self.layouts[2 * LAYOUT_BYTES * bucket :][: 2 * LAYOUT_BYTES]

    @property
    def data_digest(self) -> str:
        """What the run file pins as trust.data (hex)."""
        return _digest(self.data_fingerprint, self.training_samples, self.evaluation_samples, self.tokens_per_sample)

    @property
    def workload_digest(self) -> str:
        """What the run file pins as trust.workload (hex): all that members must agree on exactly."""
        workload = self.workload
        layers = [[x.name, x.forward_flops, x.parameter_bytes, x.activation_bytes] for x in workload.layers]
        optimizer, own = workload.optimizer_bytes_per_parameter_byte, workload.own_bytes_per_parameter_byte
        copy = workload.copy_bytes_per_parameter_byte
        layouts = [self.layouts] if self.layouts else []
        return _digest(layers, optimizer, own, copy, self.buckets, self.weights_fingerprint, *layouts)


@dataclass(frozen=True, slots=True)
class RunDescribed:
    """``node``: who described it."""

    described: Described
    node: str = ""
    event: Literal["run_described"] = "run_described"


@dataclass(frozen=True, slots=True)
class DataConfirmed:
    """A second node, of somebody else, has read the data and found the same. Later ones may believe its fingerprint."""

    node: str
    event: Literal["data_confirmed"] = "data_confirmed"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing trains, for this reason."""

    reason: str
    event: Literal["waiting"] = "waiting"


@dataclass(frozen=True, slots=True)
class PlanAdopted:
    """``step`` is the last committed one. Work on the next step that was done since generation ``counts_from`` still counts.
    The seconds are the planner's prediction for a step, and its lower bound, if any."""

    generation: int
    plan: Annotated[Plan, BeforeValidator(as_written_now)]
    reason: str
    step: int
    predicted_seconds: float | None = None
    lower_bound_seconds: float | None = None
    counts_from: int = 0
    event: Literal["plan_adopted"] = "plan_adopted"


@dataclass(frozen=True, slots=True)
class PlanStarted:
    """Every node of the plan holds its state: ``step`` begins, or goes on, if ``finished`` micro-batches are done in some stage.
    ``codecs`` are by source."""

    generation: int
    step: int
    finished: int = 0
    codecs: Mapping[str, Codecs] = field(default_factory=dict)
    event: Literal["plan_started"] = "plan_started"


@dataclass(frozen=True, slots=True)
class CodecsChosen:
    """The node's links have changed, and with them the codecs of what it sends."""

    node: str
    codecs: Codecs
    event: Literal["codecs_chosen"] = "codecs_chosen"


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """A node could not take its part. ``snapshot_damaged``: a part of the snapshot that holds the state is damaged on every disk
    that has it; or the checkpoint is, or another one is in its place. ``lost``: layers whose state the node was expected to hold,
    and does not. ``silent``: it has not said so, it was waited for in vain, and it was one of the ``suspects``. Otherwise these
    are the node and those who alone could give it its state, if one party alone could."""

    generation: int
    node: str
    reason: str
    snapshot_damaged: Annotated[bool, Field(validation_alias=AliasChoices("snapshot_damaged", "backup"))] = False
    lost: tuple[int, ...] = ()
    silent: bool = False
    suspects: tuple[str, ...] = ()
    event: Literal["plan_failed"] = "plan_failed"


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """``loss`` is the mean over ``samples``; ``gradient_norm`` is the whole model's, before clipping; ``compute_seconds`` and
    ``wait_seconds`` are by node. ``resumed``: part of the step was done in an earlier generation, and ``seconds`` is the time of
    the rest."""

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
        """None if the time of the whole step is not known."""
        return self.tokens / self.seconds if self.seconds > 0 and not self.resumed else None


@dataclass(frozen=True, slots=True)
class GradientsClipped:
    """In an open run, replicas found the gradients of others too large for ``step``, and clipped them before they added them up.
    ``times``: by who did it, then by whose they were, how many times over the bound the worst piece was, at most 1e9."""

    step: int
    generation: int
    times: dict[str, dict[str, float]]
    event: Literal["gradients_clipped"] = "gradients_clipped"


@dataclass(frozen=True, slots=True)
class StepAborted:
    """``problem`` is the name of the wire's StepProblem, or NODE_LEFT, OVERDUE, SETTLED or UNAUDITED (ledger.py); ``node`` the
    node that reported it, was lost, waited for, quarantined or could not be audited; ``peer`` whom it lost, for PEER_LOST;
    ``suspects`` who all may be the cause, for OVERDUE."""

    step: int
    generation: int
    problem: str
    node: str
    reason: str
    peer: str = ""
    suspects: tuple[str, ...] = ()
    event: Literal["step_aborted"] = "step_aborted"


@dataclass(frozen=True, slots=True)
class DigestMismatch:
    """The replicas of a stage hold different state before ``step``. That is settled against some of them: NodeQuarantined."""

    step: int
    generation: int
    stage: int
    digests: dict[str, str]
    event: Literal["digest_mismatch"] = "digest_mismatch"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The loss over held-out samples, in nats per token, and that of a model that knows token frequencies alone."""

    step: int
    loss: float
    samples: int
    unigram_entropy: float
    event: Literal["evaluated"] = "evaluated"


@dataclass(frozen=True, slots=True)
class CheckpointWritten:
    """``manifest``: the BLAKE3 (hex) of its manifest; empty in logs of older versions."""

    step: int
    folder: str
    manifest: str = ""
    event: Literal["checkpoint_written"] = "checkpoint_written"


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """``node``: because of whom, if that is known."""

    step: int
    reason: str
    node: str = ""
    event: Literal["checkpoint_failed"] = "checkpoint_failed"


@dataclass(frozen=True, slots=True)
class StandbyPromoted:
    """A standby counts as a holder of ``layers`` [first, past_last): no replica of them is left, and its copy is as of
    ``step``."""

    node: str
    incarnation: str
    layers: tuple[int, int]
    step: int
    event: Literal["standby_promoted", "state_copied"] = "standby_promoted"


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """The file with one bucket's state. ``digest``: its BLAKE3 (hex); ``nonce``: what its name in a checkpoint has."""

    size_bytes: int
    digest: str
    nonce: str = ""


@dataclass(frozen=True, slots=True)
class StateAgreed:
    """All who trained the state after ``step``, of which there is a snapshot or may soon be one, agree on its digests (hex, by
    bucket; empty where it is not known)."""

    step: int
    digests: tuple[str, ...]
    event: Literal["state_agreed"] = "state_agreed"


@dataclass(frozen=True, slots=True)
class SnapshotWritten:
    """The state after ``step`` is on the nodes' own disks. ``parts`` are in order of bucket. ``holders``: by node, the
    buckets on its disk, as ranges [first, past_last). ``seconds``: since the commit of ``step``."""

    step: int
    parts: tuple[SnapshotPart, ...]
    holders: dict[str, tuple[tuple[int, int], ...]]
    seconds: float
    event: Literal["snapshot_written", "backup_kept"] = "snapshot_written"

    def buckets_of(self, node: str) -> frozenset[int]:
        """Those that the node had on its disk when the snapshot was whole."""
        return frozenset(bucket for first, past in self.holders.get(node, ()) for bucket in range(first, past))


@dataclass(frozen=True, slots=True)
class RolledBack:
    """No node holds some stage's state any more: training goes back from ``from_step`` to ``step``. ``folder`` is the checkpoint
    of that step; empty at step 0, and if the snapshot is on the nodes' disks."""

    step: int
    from_step: int
    folder: str
    reason: str
    event: Literal["rolled_back"] = "rolled_back"


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
class StateRefused:
    """Before ``generation`` began, ``node`` had other state of ``bucket`` after ``step`` than those who trained it. It says that
    it has it from ``donors``: several, if one of them broke off. It gets it again from others."""

    step: int
    generation: int
    node: str
    donors: tuple[str, ...]
    bucket: int
    event: Literal["state_refused"] = "state_refused"


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
class NodeForgiven:
    """The quarantine of the node, or of its ``key``, has ended. ``by``: an operator, or the coordinator (ledger.CLEARED_BY), as
    another was at fault."""

    node: str
    by: str
    key: str = ""
    event: Literal["node_forgiven"] = "node_forgiven"


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
    """On request. The run can be resumed."""

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
    | DeviceShown
    | LinksMeasured
    | WaysChosen
    | RunDescribed
    | DataConfirmed
    | Waiting
    | PlanAdopted
    | PlanStarted
    | PlanFailed
    | CodecsChosen
    | StepCommitted
    | GradientsClipped
    | StepAborted
    | DigestMismatch
    | Evaluated
    | CheckpointWritten
    | CheckpointFailed
    | StandbyPromoted
    | SnapshotWritten
    | RolledBack
    | InvitationMade
    | Enrolled
    | Revoked
    | NodeQuarantined
    | NodesBenched
    | StateRefused
    | StateAgreed
    | WorkAudited
    | AuditHindered
    | StrikesEnded
    | StandingChanged
    | NodeForgiven
    | RunFinished
    | RunFailed
    | CoordinatorStopped
)

_ADAPTER: TypeAdapter[Event] = TypeAdapter(Annotated[Event, Field(discriminator="event")])


def _digest(*values: object) -> str:
    return blake3(json.dumps(values).encode()).hexdigest()


def to_json(event: Event) -> dict[str, Any]:
    """The event as JSON values, its name first."""
    fields: dict[str, Any] = _ADAPTER.dump_python(event, mode="json")
    return {"event": fields.pop("event"), **fields}


def from_json(value: dict[str, Any]) -> Event:
    """The inverse of ``to_json``. Raises ValueError if this version knows no such event."""
    try:
        return _ADAPTER.validate_python(value)
    except ValidationError as error:
        raise _no_event(error) from None


def from_text(text: str) -> Event:
    """``from_json`` of JSON text, in half the time."""
    try:
        return _ADAPTER.validate_json(text)
    except ValidationError as error:
        raise _no_event(error) from None


def _no_event(error: ValidationError) -> ValueError:
    return ValueError(f"not an event of this version of dtfm: {error.errors(include_url=False)[0]['msg']}")
