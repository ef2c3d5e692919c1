from dtfm.protos import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    PROTOCOL_VERSION: _ClassVar[RefusalReason]
    MALFORMED: _ClassVar[RefusalReason]
    IDENTITY_IN_USE: _ClassVar[RefusalReason]
    WORKLOAD_DIFFERS: _ClassVar[RefusalReason]
    DATA_DIFFERS: _ClassVar[RefusalReason]
    RUN_OVER: _ClassVar[RefusalReason]
    FULL: _ClassVar[RefusalReason]
    INVITATION_UNKNOWN: _ClassVar[RefusalReason]
    INVITATION_EXPIRED: _ClassVar[RefusalReason]
    INVITATION_USED_UP: _ClassVar[RefusalReason]
    REVOKED: _ClassVar[RefusalReason]
    NAME_TAKEN: _ClassVar[RefusalReason]
    WRONG_CLOCK: _ClassVar[RefusalReason]
    ROLE: _ClassVar[RefusalReason]
    UNKNOWN_KEY: _ClassVar[RefusalReason]
    BUSY: _ClassVar[RefusalReason]
    QUARANTINED: _ClassVar[RefusalReason]

class Preparing(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTHING_TO_SAY: _ClassVar[Preparing]
    LOADING_MODEL: _ClassVar[Preparing]
    READING_DATA: _ClassVar[Preparing]
    COMPILING: _ClassVar[Preparing]
    TIMING_DEVICE: _ClassVar[Preparing]
    MEASURING_LINKS: _ClassVar[Preparing]

class StepProblem(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_PROBLEM_UNSPECIFIED: _ClassVar[StepProblem]
    NON_FINITE: _ClassVar[StepProblem]
    PEER_LOST: _ClassVar[StepProblem]
    OUT_OF_MEMORY: _ClassVar[StepProblem]
    INTERNAL: _ClassVar[StepProblem]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
PROTOCOL_VERSION: RefusalReason
MALFORMED: RefusalReason
IDENTITY_IN_USE: RefusalReason
WORKLOAD_DIFFERS: RefusalReason
DATA_DIFFERS: RefusalReason
RUN_OVER: RefusalReason
FULL: RefusalReason
INVITATION_UNKNOWN: RefusalReason
INVITATION_EXPIRED: RefusalReason
INVITATION_USED_UP: RefusalReason
REVOKED: RefusalReason
NAME_TAKEN: RefusalReason
WRONG_CLOCK: RefusalReason
ROLE: RefusalReason
UNKNOWN_KEY: RefusalReason
BUSY: RefusalReason
QUARANTINED: RefusalReason
NOTHING_TO_SAY: Preparing
LOADING_MODEL: Preparing
READING_DATA: Preparing
COMPILING: Preparing
TIMING_DEVICE: Preparing
MEASURING_LINKS: Preparing
STEP_PROBLEM_UNSPECIFIED: StepProblem
NON_FINITE: StepProblem
PEER_LOST: StepProblem
OUT_OF_MEMORY: StepProblem
INTERNAL: StepProblem

class NodeMessage(_message.Message):
    __slots__ = ("hello", "prepared", "heartbeat", "links", "plan_ready", "plan_failed", "step_ready", "step_failed", "evaluated", "moved", "applied", "goodbye", "leaving", "standby_progress", "codecs_chosen", "reached", "audited", "timed", "texts")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    PLAN_READY_FIELD_NUMBER: _ClassVar[int]
    PLAN_FAILED_FIELD_NUMBER: _ClassVar[int]
    STEP_READY_FIELD_NUMBER: _ClassVar[int]
    STEP_FAILED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STANDBY_PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CODECS_CHOSEN_FIELD_NUMBER: _ClassVar[int]
    REACHED_FIELD_NUMBER: _ClassVar[int]
    AUDITED_FIELD_NUMBER: _ClassVar[int]
    TIMED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    prepared: Prepared
    heartbeat: Heartbeat
    links: LinkReport
    plan_ready: PlanReady
    plan_failed: PlanFailed
    step_ready: StepReady
    step_failed: StepFailed
    evaluated: Evaluated
    moved: Moved
    applied: Applied
    goodbye: Goodbye
    leaving: Leaving
    standby_progress: StandbyProgress
    codecs_chosen: CodecsChosen
    reached: Reached
    audited: Audited
    timed: Timed
    texts: Texts
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., links: _Optional[_Union[LinkReport, _Mapping]] = ..., plan_ready: _Optional[_Union[PlanReady, _Mapping]] = ..., plan_failed: _Optional[_Union[PlanFailed, _Mapping]] = ..., step_ready: _Optional[_Union[StepReady, _Mapping]] = ..., step_failed: _Optional[_Union[StepFailed, _Mapping]] = ..., evaluated: _Optional[_Union[Evaluated, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., applied: _Optional[_Union[Applied, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., standby_progress: _Optional[_Union[StandbyProgress, _Mapping]] = ..., codecs_chosen: _Optional[_Union[CodecsChosen, _Mapping]] = ..., reached: _Optional[_Union[Reached, _Mapping]] = ..., audited: _Optional[_Union[Audited, _Mapping]] = ..., timed: _Optional[_Union[Timed, _Mapping]] = ..., texts: _Optional[_Union[Texts, _Mapping]] = ...) -> None: ...

class CoordinatorMessage(_message.Message):
    __slots__ = ("welcome", "refusal", "probe", "assignment", "begin", "commit", "abort", "finish", "standby", "links_changed", "keep", "move", "certificate", "revoked", "reach", "ways", "audit", "quarantined", "status", "lapsed", "test", "write_texts")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PROBE_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENT_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    LINKS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    REACH_FIELD_NUMBER: _ClassVar[int]
    WAYS_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LAPSED_FIELD_NUMBER: _ClassVar[int]
    TEST_FIELD_NUMBER: _ClassVar[int]
    WRITE_TEXTS_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    probe: Probe
    assignment: Assignment
    begin: Begin
    commit: Commit
    abort: Abort
    finish: Finish
    standby: Standby
    links_changed: LinksChanged
    keep: Keep
    move: Move
    certificate: Certificate
    revoked: Revoked
    reach: Reach
    ways: Ways
    audit: Audit
    quarantined: Quarantined
    status: RunStatus
    lapsed: Lapsed
    test: Test
    write_texts: WriteTexts
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., probe: _Optional[_Union[Probe, _Mapping]] = ..., assignment: _Optional[_Union[Assignment, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., standby: _Optional[_Union[Standby, _Mapping]] = ..., links_changed: _Optional[_Union[LinksChanged, _Mapping]] = ..., keep: _Optional[_Union[Keep, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., certificate: _Optional[_Union[Certificate, _Mapping]] = ..., revoked: _Optional[_Union[Revoked, _Mapping]] = ..., reach: _Optional[_Union[Reach, _Mapping]] = ..., ways: _Optional[_Union[Ways, _Mapping]] = ..., audit: _Optional[_Union[Audit, _Mapping]] = ..., quarantined: _Optional[_Union[Quarantined, _Mapping]] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., lapsed: _Optional[_Union[Lapsed, _Mapping]] = ..., test: _Optional[_Union[Test, _Mapping]] = ..., write_texts: _Optional[_Union[WriteTexts, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_version", "package_version", "node", "incarnation", "candidates", "device", "port", "relay")
    class Relay(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        NO: _ClassVar[Hello.Relay]
        ALSO: _ClassVar[Hello.Relay]
        ONLY: _ClassVar[Hello.Relay]
    NO: Hello.Relay
    ALSO: Hello.Relay
    ONLY: Hello.Relay
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    PACKAGE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    package_version: str
    node: str
    incarnation: int
    candidates: _containers.RepeatedScalarFieldContainer[str]
    device: Device
    port: int
    relay: Hello.Relay
    def __init__(self, protocol_version: _Optional[int] = ..., package_version: _Optional[str] = ..., node: _Optional[str] = ..., incarnation: _Optional[int] = ..., candidates: _Optional[_Iterable[str]] = ..., device: _Optional[_Union[Device, _Mapping]] = ..., port: _Optional[int] = ..., relay: _Optional[_Union[Hello.Relay, str]] = ...) -> None: ...

class Device(_message.Message):
    __slots__ = ("kind", "name", "memory_bytes", "flops", "host_memory_bytes", "bf16")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    BF16_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    memory_bytes: int
    flops: float
    host_memory_bytes: int
    bf16: bool
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., flops: _Optional[float] = ..., host_memory_bytes: _Optional[int] = ..., bf16: _Optional[bool] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run", "authority", "certificate", "revoked", "data_fingerprint", "unigram_entropy", "quarantined", "worked_steps", "status", "wait_for_coordinator_seconds", "trained_samples")
    RUN_FIELD_NUMBER: _ClassVar[int]
    AUTHORITY_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    DATA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    UNIGRAM_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    WORKED_STEPS_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    WAIT_FOR_COORDINATOR_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    run: _plan_pb2.Run
    authority: bytes
    certificate: bytes
    revoked: _containers.RepeatedScalarFieldContainer[str]
    data_fingerprint: bytes
    unigram_entropy: float
    quarantined: _containers.RepeatedScalarFieldContainer[str]
    worked_steps: int
    status: RunStatus
    wait_for_coordinator_seconds: float
    trained_samples: int
    def __init__(self, run: _Optional[_Union[_plan_pb2.Run, _Mapping]] = ..., authority: _Optional[bytes] = ..., certificate: _Optional[bytes] = ..., revoked: _Optional[_Iterable[str]] = ..., data_fingerprint: _Optional[bytes] = ..., unigram_entropy: _Optional[float] = ..., quarantined: _Optional[_Iterable[str]] = ..., worked_steps: _Optional[int] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., wait_for_coordinator_seconds: _Optional[float] = ..., trained_samples: _Optional[int] = ...) -> None: ...

class RunStatus(_message.Message):
    __slots__ = ("step", "steps", "generation", "loss", "tokens", "seconds", "waiting", "lease_seconds", "heartbeat_seconds", "idle")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    step: int
    steps: int
    generation: int
    loss: float
    tokens: int
    seconds: float
    waiting: str
    lease_seconds: float
    heartbeat_seconds: float
    idle: str
    def __init__(self, step: _Optional[int] = ..., steps: _Optional[int] = ..., generation: _Optional[int] = ..., loss: _Optional[float] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., waiting: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., idle: _Optional[str] = ...) -> None: ...

class Lapsed(_message.Message):
    __slots__ = ("lease_seconds",)
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    def __init__(self, lease_seconds: _Optional[float] = ...) -> None: ...

class Certificate(_message.Message):
    __slots__ = ("certificate",)
    CERTIFICATE_FIELD_NUMBER: _ClassVar[int]
    certificate: bytes
    def __init__(self, certificate: _Optional[bytes] = ...) -> None: ...

class Revoked(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Quarantined(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "sentence")
    REASON_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    reason: RefusalReason
    sentence: str
    def __init__(self, reason: _Optional[_Union[RefusalReason, str]] = ..., sentence: _Optional[str] = ...) -> None: ...

class Prepared(_message.Message):
    __slots__ = ("layers", "data_fingerprint", "training_samples", "evaluation_samples", "unigram_entropy", "tokens_per_sample", "buckets", "on_disk", "flops", "weights_fingerprint", "data_read", "layouts", "disk_bytes", "precision", "timed_beside", "files")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DATA_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    UNIGRAM_ENTROPY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    ON_DISK_FIELD_NUMBER: _ClassVar[int]
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DATA_READ_FIELD_NUMBER: _ClassVar[int]
    LAYOUTS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    TIMED_BESIDE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Layer]
    data_fingerprint: bytes
    training_samples: int
    evaluation_samples: int
    unigram_entropy: float
    tokens_per_sample: int
    buckets: int
    on_disk: _containers.RepeatedCompositeFieldContainer[Moved]
    flops: float
    weights_fingerprint: bytes
    data_read: bool
    layouts: bytes
    disk_bytes: int
    precision: _plan_pb2.Precision
    timed_beside: bool
    files: _containers.RepeatedCompositeFieldContainer[SourceFile]
    def __init__(self, layers: _Optional[_Iterable[_Union[_plan_pb2.Layer, _Mapping]]] = ..., data_fingerprint: _Optional[bytes] = ..., training_samples: _Optional[int] = ..., evaluation_samples: _Optional[int] = ..., unigram_entropy: _Optional[float] = ..., tokens_per_sample: _Optional[int] = ..., buckets: _Optional[int] = ..., on_disk: _Optional[_Iterable[_Union[Moved, _Mapping]]] = ..., flops: _Optional[float] = ..., weights_fingerprint: _Optional[bytes] = ..., data_read: _Optional[bool] = ..., layouts: _Optional[bytes] = ..., disk_bytes: _Optional[int] = ..., precision: _Optional[_Union[_plan_pb2.Precision, str]] = ..., timed_beside: _Optional[bool] = ..., files: _Optional[_Iterable[_Union[SourceFile, _Mapping]]] = ...) -> None: ...

class SourceFile(_message.Message):
    __slots__ = ("key", "name", "size", "digest", "range_bytes", "ranges")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    key: str
    name: str
    size: int
    digest: bytes
    range_bytes: int
    ranges: bytes
    def __init__(self, key: _Optional[str] = ..., name: _Optional[str] = ..., size: _Optional[int] = ..., digest: _Optional[bytes] = ..., range_bytes: _Optional[int] = ..., ranges: _Optional[bytes] = ...) -> None: ...

class Test(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Timed(_message.Message):
    __slots__ = ("flops", "beside")
    FLOPS_FIELD_NUMBER: _ClassVar[int]
    BESIDE_FIELD_NUMBER: _ClassVar[int]
    flops: float
    beside: bool
    def __init__(self, flops: _Optional[float] = ..., beside: _Optional[bool] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("count", "preparing", "done", "of", "load", "celsius", "arriving", "work")
    class Work(_message.Message):
        __slots__ = ("done", "waits")
        DONE_FIELD_NUMBER: _ClassVar[int]
        WAITS_FIELD_NUMBER: _ClassVar[int]
        done: int
        waits: bool
        def __init__(self, done: _Optional[int] = ..., waits: _Optional[bool] = ...) -> None: ...
    COUNT_FIELD_NUMBER: _ClassVar[int]
    PREPARING_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OF_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    CELSIUS_FIELD_NUMBER: _ClassVar[int]
    ARRIVING_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    count: int
    preparing: Preparing
    done: int
    of: int
    load: float
    celsius: float
    arriving: _containers.RepeatedCompositeFieldContainer[StepReady.Arrived]
    work: Heartbeat.Work
    def __init__(self, count: _Optional[int] = ..., preparing: _Optional[_Union[Preparing, str]] = ..., done: _Optional[int] = ..., of: _Optional[int] = ..., load: _Optional[float] = ..., celsius: _Optional[float] = ..., arriving: _Optional[_Iterable[_Union[StepReady.Arrived, _Mapping]]] = ..., work: _Optional[_Union[Heartbeat.Work, _Mapping]] = ...) -> None: ...

class Probe(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Peer(_message.Message):
    __slots__ = ("node", "candidates")
    NODE_FIELD_NUMBER: _ClassVar[int]
    CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    node: str
    candidates: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., candidates: _Optional[_Iterable[str]] = ...) -> None: ...

class Reach(_message.Message):
    __slots__ = ("peers",)
    PEERS_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class Reached(_message.Message):
    __slots__ = ("outcomes",)
    class Outcome(_message.Message):
        __slots__ = ("node", "way", "problem")
        NODE_FIELD_NUMBER: _ClassVar[int]
        WAY_FIELD_NUMBER: _ClassVar[int]
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        node: str
        way: str
        problem: str
        def __init__(self, node: _Optional[str] = ..., way: _Optional[str] = ..., problem: _Optional[str] = ...) -> None: ...
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Reached.Outcome]
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Reached.Outcome, _Mapping]]] = ...) -> None: ...

class Ways(_message.Message):
    __slots__ = ("ways", "holders")
    class Way(_message.Message):
        __slots__ = ("node", "relay")
        NODE_FIELD_NUMBER: _ClassVar[int]
        RELAY_FIELD_NUMBER: _ClassVar[int]
        node: str
        relay: Peer
        def __init__(self, node: _Optional[str] = ..., relay: _Optional[_Union[Peer, _Mapping]] = ...) -> None: ...
    WAYS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    ways: _containers.RepeatedCompositeFieldContainer[Ways.Way]
    holders: _containers.RepeatedCompositeFieldContainer[Peer]
    def __init__(self, ways: _Optional[_Iterable[_Union[Ways.Way, _Mapping]]] = ..., holders: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ...) -> None: ...

class LinkReport(_message.Message):
    __slots__ = ("links", "up", "down")
    class Link(_message.Message):
        __slots__ = ("source", "destination", "latency_seconds", "bandwidth", "problem", "way")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        DESTINATION_FIELD_NUMBER: _ClassVar[int]
        LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
        BANDWIDTH_FIELD_NUMBER: _ClassVar[int]
        PROBLEM_FIELD_NUMBER: _ClassVar[int]
        WAY_FIELD_NUMBER: _ClassVar[int]
        source: str
        destination: str
        latency_seconds: float
        bandwidth: float
        problem: str
        way: str
        def __init__(self, source: _Optional[str] = ..., destination: _Optional[str] = ..., latency_seconds: _Optional[float] = ..., bandwidth: _Optional[float] = ..., problem: _Optional[str] = ..., way: _Optional[str] = ...) -> None: ...
    LINKS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkReport.Link]
    up: float
    down: float
    def __init__(self, links: _Optional[_Iterable[_Union[LinkReport.Link, _Mapping]]] = ..., up: _Optional[float] = ..., down: _Optional[float] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("generation", "plan", "peers", "step", "donors", "snapshot", "reason", "links", "last_commit", "counts_from", "island_began", "trained_before", "takes_moments", "frozen")
    class Donors(_message.Message):
        __slots__ = ("nodes",)
        NODES_FIELD_NUMBER: _ClassVar[int]
        nodes: _containers.RepeatedScalarFieldContainer[str]
        def __init__(self, nodes: _Optional[_Iterable[str]] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMIT_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FROM_FIELD_NUMBER: _ClassVar[int]
    ISLAND_BEGAN_FIELD_NUMBER: _ClassVar[int]
    TRAINED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    TAKES_MOMENTS_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    plan: bytes
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    step: int
    donors: _containers.RepeatedCompositeFieldContainer[Assignment.Donors]
    snapshot: SnapshotSource
    reason: str
    links: _containers.RepeatedCompositeFieldContainer[LinkReport.Link]
    last_commit: Commit
    counts_from: int
    island_began: int
    trained_before: int
    takes_moments: bool
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenLayer]
    def __init__(self, generation: _Optional[int] = ..., plan: _Optional[bytes] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., step: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Assignment.Donors, _Mapping]]] = ..., snapshot: _Optional[_Union[SnapshotSource, _Mapping]] = ..., reason: _Optional[str] = ..., links: _Optional[_Iterable[_Union[LinkReport.Link, _Mapping]]] = ..., last_commit: _Optional[_Union[Commit, _Mapping]] = ..., counts_from: _Optional[int] = ..., island_began: _Optional[int] = ..., trained_before: _Optional[int] = ..., takes_moments: _Optional[bool] = ..., frozen: _Optional[_Iterable[_Union[FrozenLayer, _Mapping]]] = ...) -> None: ...

class Standby(_message.Message):
    __slots__ = ("number", "first_layer", "past_last_layer", "donors", "peers", "rounds", "trained_before", "frozen")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    PAST_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_BEFORE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    number: int
    first_layer: int
    past_last_layer: int
    donors: _containers.RepeatedCompositeFieldContainer[Assignment.Donors]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    rounds: _plan_pb2.Rounds
    trained_before: int
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenLayer]
    def __init__(self, number: _Optional[int] = ..., first_layer: _Optional[int] = ..., past_last_layer: _Optional[int] = ..., donors: _Optional[_Iterable[_Union[Assignment.Donors, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., rounds: _Optional[_Union[_plan_pb2.Rounds, _Mapping]] = ..., trained_before: _Optional[int] = ..., frozen: _Optional[_Iterable[_Union[FrozenLayer, _Mapping]]] = ...) -> None: ...

class StandbyProgress(_message.Message):
    __slots__ = ("number", "step", "voted", "problem")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    VOTED_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    number: int
    step: int
    voted: int
    problem: str
    def __init__(self, number: _Optional[int] = ..., step: _Optional[int] = ..., voted: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class Part(_message.Message):
    __slots__ = ("bucket", "size_bytes", "digest", "nodes", "nonce", "moments")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    MOMENTS_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    size_bytes: int
    digest: bytes
    nodes: _containers.RepeatedScalarFieldContainer[str]
    nonce: str
    moments: bytes
    def __init__(self, bucket: _Optional[int] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., nodes: _Optional[_Iterable[str]] = ..., nonce: _Optional[str] = ..., moments: _Optional[bytes] = ...) -> None: ...

class Keep(_message.Message):
    __slots__ = ("steps",)
    STEPS_FIELD_NUMBER: _ClassVar[int]
    steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, steps: _Optional[_Iterable[int]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("step", "parts", "peers", "folder", "weights", "bytes_per_second")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    step: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    peers: _containers.RepeatedCompositeFieldContainer[Peer]
    folder: str
    weights: bool
    bytes_per_second: float
    def __init__(self, step: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[Peer, _Mapping]]] = ..., folder: _Optional[str] = ..., weights: _Optional[bool] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("step", "parts", "problem", "in_checkpoint")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    IN_CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    step: int
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    problem: str
    in_checkpoint: bool
    def __init__(self, step: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., problem: _Optional[str] = ..., in_checkpoint: _Optional[bool] = ...) -> None: ...

class SnapshotSource(_message.Message):
    __slots__ = ("folder", "parts", "manifest", "states", "weights")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    folder: str
    parts: _containers.RepeatedCompositeFieldContainer[Part]
    manifest: bytes
    states: _containers.RepeatedCompositeFieldContainer[BucketState]
    weights: bool
    def __init__(self, folder: _Optional[str] = ..., parts: _Optional[_Iterable[_Union[Part, _Mapping]]] = ..., manifest: _Optional[bytes] = ..., states: _Optional[_Iterable[_Union[BucketState, _Mapping]]] = ..., weights: _Optional[bool] = ...) -> None: ...

class PlanReady(_message.Message):
    __slots__ = ("generation", "progress", "codecs", "states", "frozen")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    generation: int
    progress: Progress
    codecs: _containers.RepeatedCompositeFieldContainer[LinkCodec]
    states: _containers.RepeatedCompositeFieldContainer[BucketState]
    frozen: _containers.RepeatedCompositeFieldContainer[FrozenLayer]
    def __init__(self, generation: _Optional[int] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., codecs: _Optional[_Iterable[_Union[LinkCodec, _Mapping]]] = ..., states: _Optional[_Iterable[_Union[BucketState, _Mapping]]] = ..., frozen: _Optional[_Iterable[_Union[FrozenLayer, _Mapping]]] = ...) -> None: ...

class FrozenLayer(_message.Message):
    __slots__ = ("layer", "digest", "nodes")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    digest: bytes
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer: _Optional[int] = ..., digest: _Optional[bytes] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class BucketState(_message.Message):
    __slots__ = ("bucket", "digest", "donors", "shared")
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DONORS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    bucket: int
    digest: bytes
    donors: _containers.RepeatedScalarFieldContainer[str]
    shared: bytes
    def __init__(self, bucket: _Optional[int] = ..., digest: _Optional[bytes] = ..., donors: _Optional[_Iterable[str]] = ..., shared: _Optional[bytes] = ...) -> None: ...

class LinkCodec(_message.Message):
    __slots__ = ("destination", "tensors", "codec")
    DESTINATION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    destination: str
    tensors: str
    codec: str
    def __init__(self, destination: _Optional[str] = ..., tensors: _Optional[str] = ..., codec: _Optional[str] = ...) -> None: ...

class LinksChanged(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[LinkReport.Link]
    def __init__(self, links: _Optional[_Iterable[_Union[LinkReport.Link, _Mapping]]] = ...) -> None: ...

class CodecsChosen(_message.Message):
    __slots__ = ("generation", "codecs")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CODECS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    codecs: _containers.RepeatedCompositeFieldContainer[LinkCodec]
    def __init__(self, generation: _Optional[int] = ..., codecs: _Optional[_Iterable[_Union[LinkCodec, _Mapping]]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("activations", "gradients", "finished")
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    activations: _containers.RepeatedScalarFieldContainer[int]
    gradients: _containers.RepeatedScalarFieldContainer[int]
    finished: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, activations: _Optional[_Iterable[int]] = ..., gradients: _Optional[_Iterable[int]] = ..., finished: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanFailed(_message.Message):
    __slots__ = ("generation", "problem", "snapshot_damaged", "lost", "peer")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    generation: int
    problem: str
    snapshot_damaged: bool
    lost: _containers.RepeatedScalarFieldContainer[int]
    peer: str
    def __init__(self, generation: _Optional[int] = ..., problem: _Optional[str] = ..., snapshot_damaged: _Optional[bool] = ..., lost: _Optional[_Iterable[int]] = ..., peer: _Optional[str] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("generation", "step", "activations", "gradients", "look_at")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    LOOK_AT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    activations: _containers.RepeatedScalarFieldContainer[int]
    gradients: _containers.RepeatedScalarFieldContainer[int]
    look_at: _containers.RepeatedCompositeFieldContainer[OuterStep]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., activations: _Optional[_Iterable[int]] = ..., gradients: _Optional[_Iterable[int]] = ..., look_at: _Optional[_Iterable[_Union[OuterStep, _Mapping]]] = ...) -> None: ...

class OuterStep(_message.Message):
    __slots__ = ("rate", "momentum")
    RATE_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    rate: float
    momentum: float
    def __init__(self, rate: _Optional[float] = ..., momentum: _Optional[float] = ...) -> None: ...

class StepReady(_message.Message):
    __slots__ = ("generation", "step", "squared_gradient_norm", "loss_sum", "samples", "state_digest", "compute_seconds", "wait_seconds", "arrived", "clipped", "sent", "received", "losses", "kept", "states", "looked", "looking_seconds", "squared_change_norm")
    class Arrived(_message.Message):
        __slots__ = ("source", "bytes", "seconds")
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        SECONDS_FIELD_NUMBER: _ClassVar[int]
        source: str
        bytes: int
        seconds: float
        def __init__(self, source: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...
    class Clipped(_message.Message):
        __slots__ = ("node", "pieces", "worst")
        NODE_FIELD_NUMBER: _ClassVar[int]
        PIECES_FIELD_NUMBER: _ClassVar[int]
        WORST_FIELD_NUMBER: _ClassVar[int]
        node: str
        pieces: int
        worst: float
        def __init__(self, node: _Optional[str] = ..., pieces: _Optional[int] = ..., worst: _Optional[float] = ...) -> None: ...
    class Passed(_message.Message):
        __slots__ = ("peer", "kind", "indices", "parts", "digests")
        PEER_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        INDICES_FIELD_NUMBER: _ClassVar[int]
        PARTS_FIELD_NUMBER: _ClassVar[int]
        DIGESTS_FIELD_NUMBER: _ClassVar[int]
        peer: str
        kind: int
        indices: _containers.RepeatedScalarFieldContainer[int]
        parts: _containers.RepeatedScalarFieldContainer[int]
        digests: bytes
        def __init__(self, peer: _Optional[str] = ..., kind: _Optional[int] = ..., indices: _Optional[_Iterable[int]] = ..., parts: _Optional[_Iterable[int]] = ..., digests: _Optional[bytes] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SQUARED_GRADIENT_NORM_FIELD_NUMBER: _ClassVar[int]
    LOSS_SUM_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    CLIPPED_FIELD_NUMBER: _ClassVar[int]
    SENT_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    LOOKED_FIELD_NUMBER: _ClassVar[int]
    LOOKING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SQUARED_CHANGE_NORM_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    squared_gradient_norm: float
    loss_sum: float
    samples: int
    state_digest: bytes
    compute_seconds: float
    wait_seconds: float
    arrived: _containers.RepeatedCompositeFieldContainer[StepReady.Arrived]
    clipped: _containers.RepeatedCompositeFieldContainer[StepReady.Clipped]
    sent: _containers.RepeatedCompositeFieldContainer[StepReady.Passed]
    received: _containers.RepeatedCompositeFieldContainer[StepReady.Passed]
    losses: _containers.RepeatedScalarFieldContainer[float]
    kept: bool
    states: _containers.RepeatedCompositeFieldContainer[BucketState]
    looked: _containers.RepeatedScalarFieldContainer[float]
    looking_seconds: float
    squared_change_norm: float
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., squared_gradient_norm: _Optional[float] = ..., loss_sum: _Optional[float] = ..., samples: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., arrived: _Optional[_Iterable[_Union[StepReady.Arrived, _Mapping]]] = ..., clipped: _Optional[_Iterable[_Union[StepReady.Clipped, _Mapping]]] = ..., sent: _Optional[_Iterable[_Union[StepReady.Passed, _Mapping]]] = ..., received: _Optional[_Iterable[_Union[StepReady.Passed, _Mapping]]] = ..., losses: _Optional[_Iterable[float]] = ..., kept: _Optional[bool] = ..., states: _Optional[_Iterable[_Union[BucketState, _Mapping]]] = ..., looked: _Optional[_Iterable[float]] = ..., looking_seconds: _Optional[float] = ..., squared_change_norm: _Optional[float] = ...) -> None: ...

class Audit(_message.Message):
    __slots__ = ("number", "generation", "step", "node", "micro_batches", "bucket", "pieces", "sums", "seconds", "trained")
    class Trained(_message.Message):
        __slots__ = ("learning_rate", "borders", "clip_norm", "weight_decay")
        LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
        BORDERS_FIELD_NUMBER: _ClassVar[int]
        CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
        learning_rate: float
        borders: _containers.RepeatedScalarFieldContainer[int]
        clip_norm: float
        weight_decay: float
        def __init__(self, learning_rate: _Optional[float] = ..., borders: _Optional[_Iterable[int]] = ..., clip_norm: _Optional[float] = ..., weight_decay: _Optional[float] = ...) -> None: ...
    class MicroBatch(_message.Message):
        __slots__ = ("number", "previous", "next", "activation_in", "activation_out", "gradient_in", "gradient_out", "loss")
        NUMBER_FIELD_NUMBER: _ClassVar[int]
        PREVIOUS_FIELD_NUMBER: _ClassVar[int]
        NEXT_FIELD_NUMBER: _ClassVar[int]
        ACTIVATION_IN_FIELD_NUMBER: _ClassVar[int]
        ACTIVATION_OUT_FIELD_NUMBER: _ClassVar[int]
        GRADIENT_IN_FIELD_NUMBER: _ClassVar[int]
        GRADIENT_OUT_FIELD_NUMBER: _ClassVar[int]
        LOSS_FIELD_NUMBER: _ClassVar[int]
        number: int
        previous: str
        next: str
        activation_in: bytes
        activation_out: bytes
        gradient_in: bytes
        gradient_out: bytes
        loss: float
        def __init__(self, number: _Optional[int] = ..., previous: _Optional[str] = ..., next: _Optional[str] = ..., activation_in: _Optional[bytes] = ..., activation_out: _Optional[bytes] = ..., gradient_in: _Optional[bytes] = ..., gradient_out: _Optional[bytes] = ..., loss: _Optional[float] = ...) -> None: ...
    class Piece(_message.Message):
        __slots__ = ("piece", "digest", "bucket")
        PIECE_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        BUCKET_FIELD_NUMBER: _ClassVar[int]
        piece: int
        digest: bytes
        bucket: int
        def __init__(self, piece: _Optional[int] = ..., digest: _Optional[bytes] = ..., bucket: _Optional[int] = ...) -> None: ...
    class Sum(_message.Message):
        __slots__ = ("piece", "addends")
        PIECE_FIELD_NUMBER: _ClassVar[int]
        ADDENDS_FIELD_NUMBER: _ClassVar[int]
        piece: int
        addends: _containers.RepeatedCompositeFieldContainer[Audit.Addend]
        def __init__(self, piece: _Optional[int] = ..., addends: _Optional[_Iterable[_Union[Audit.Addend, _Mapping]]] = ...) -> None: ...
    class Addend(_message.Message):
        __slots__ = ("node", "digest")
        NODE_FIELD_NUMBER: _ClassVar[int]
        DIGEST_FIELD_NUMBER: _ClassVar[int]
        node: str
        digest: bytes
        def __init__(self, node: _Optional[str] = ..., digest: _Optional[bytes] = ...) -> None: ...
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_FIELD_NUMBER: _ClassVar[int]
    number: int
    generation: int
    step: int
    node: str
    micro_batches: _containers.RepeatedCompositeFieldContainer[Audit.MicroBatch]
    bucket: int
    pieces: _containers.RepeatedCompositeFieldContainer[Audit.Piece]
    sums: _containers.RepeatedCompositeFieldContainer[Audit.Sum]
    seconds: float
    trained: _containers.RepeatedCompositeFieldContainer[Audit.Trained]
    def __init__(self, number: _Optional[int] = ..., generation: _Optional[int] = ..., step: _Optional[int] = ..., node: _Optional[str] = ..., micro_batches: _Optional[_Iterable[_Union[Audit.MicroBatch, _Mapping]]] = ..., bucket: _Optional[int] = ..., pieces: _Optional[_Iterable[_Union[Audit.Piece, _Mapping]]] = ..., sums: _Optional[_Iterable[_Union[Audit.Sum, _Mapping]]] = ..., seconds: _Optional[float] = ..., trained: _Optional[_Iterable[_Union[Audit.Trained, _Mapping]]] = ...) -> None: ...

class Audited(_message.Message):
    __slots__ = ("number", "activations", "gradients", "addends", "losses", "problem", "withheld_by", "unreachable")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
    GRADIENTS_FIELD_NUMBER: _ClassVar[int]
    ADDENDS_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_BY_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    number: int
    activations: float
    gradients: float
    addends: float
    losses: float
    problem: str
    withheld_by: str
    unreachable: bool
    def __init__(self, number: _Optional[int] = ..., activations: _Optional[float] = ..., gradients: _Optional[float] = ..., addends: _Optional[float] = ..., losses: _Optional[float] = ..., problem: _Optional[str] = ..., withheld_by: _Optional[str] = ..., unreachable: _Optional[bool] = ...) -> None: ...

class StepFailed(_message.Message):
    __slots__ = ("generation", "step", "problem", "peer", "sentence")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    problem: StepProblem
    peer: str
    sentence: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., problem: _Optional[_Union[StepProblem, str]] = ..., peer: _Optional[str] = ..., sentence: _Optional[str] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("generation", "step", "learning_rate", "weight_decay", "clips", "outer", "evaluate", "snapshot", "pause", "status", "look_at")
    class Clip(_message.Message):
        __slots__ = ("island", "first_layer", "past_last_layer", "factor")
        ISLAND_FIELD_NUMBER: _ClassVar[int]
        FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
        PAST_LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
        FACTOR_FIELD_NUMBER: _ClassVar[int]
        island: int
        first_layer: int
        past_last_layer: int
        factor: float
        def __init__(self, island: _Optional[int] = ..., first_layer: _Optional[int] = ..., past_last_layer: _Optional[int] = ..., factor: _Optional[float] = ...) -> None: ...
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    CLIPS_FIELD_NUMBER: _ClassVar[int]
    OUTER_FIELD_NUMBER: _ClassVar[int]
    EVALUATE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    LOOK_AT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    learning_rate: float
    weight_decay: float
    clips: _containers.RepeatedCompositeFieldContainer[Commit.Clip]
    outer: OuterStep
    evaluate: bool
    snapshot: bool
    pause: bool
    status: RunStatus
    look_at: _containers.RepeatedCompositeFieldContainer[OuterStep]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., learning_rate: _Optional[float] = ..., weight_decay: _Optional[float] = ..., clips: _Optional[_Iterable[_Union[Commit.Clip, _Mapping]]] = ..., outer: _Optional[_Union[OuterStep, _Mapping]] = ..., evaluate: _Optional[bool] = ..., snapshot: _Optional[bool] = ..., pause: _Optional[bool] = ..., status: _Optional[_Union[RunStatus, _Mapping]] = ..., look_at: _Optional[_Iterable[_Union[OuterStep, _Mapping]]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("generation", "step", "reason")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    reason: str
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Evaluated(_message.Message):
    __slots__ = ("generation", "step", "losses")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    losses: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., losses: _Optional[_Iterable[float]] = ...) -> None: ...

class Applied(_message.Message):
    __slots__ = ("generation", "step", "state_digest", "states")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    state_digest: bytes
    states: _containers.RepeatedCompositeFieldContainer[BucketState]
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., state_digest: _Optional[bytes] = ..., states: _Optional[_Iterable[_Union[BucketState, _Mapping]]] = ...) -> None: ...

class WriteTexts(_message.Message):
    __slots__ = ("step", "prompts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    prompts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., prompts: _Optional[_Iterable[str]] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("step", "texts", "problem")
    class Text(_message.Message):
        __slots__ = ("text", "whole")
        TEXT_FIELD_NUMBER: _ClassVar[int]
        WHOLE_FIELD_NUMBER: _ClassVar[int]
        text: str
        whole: bool
        def __init__(self, text: _Optional[str] = ..., whole: _Optional[bool] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    step: int
    texts: _containers.RepeatedCompositeFieldContainer[Texts.Text]
    problem: str
    def __init__(self, step: _Optional[int] = ..., texts: _Optional[_Iterable[_Union[Texts.Text, _Mapping]]] = ..., problem: _Optional[str] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("completed", "reason", "stopped")
    COMPLETED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    completed: bool
    reason: str
    stopped: bool
    def __init__(self, completed: _Optional[bool] = ..., reason: _Optional[str] = ..., stopped: _Optional[bool] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after", "follow", "story_format")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    STORY_FORMAT_FIELD_NUMBER: _ClassVar[int]
    after: int
    follow: bool
    story_format: int
    def __init__(self, after: _Optional[int] = ..., follow: _Optional[bool] = ..., story_format: _Optional[int] = ...) -> None: ...

class EventRecord(_message.Message):
    __slots__ = ("sequence", "event_json", "story")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENT_JSON_FIELD_NUMBER: _ClassVar[int]
    STORY_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    event_json: str
    story: str
    def __init__(self, sequence: _Optional[int] = ..., event_json: _Optional[str] = ..., story: _Optional[str] = ...) -> None: ...

class PlanNowRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PlanNowReply(_message.Message):
    __slots__ = ("changed", "generation", "reason", "run")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    generation: int
    reason: str
    run: str
    def __init__(self, changed: _Optional[bool] = ..., generation: _Optional[int] = ..., reason: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("protocol_version", "invitation", "secret", "name", "public_key", "roles", "dry")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    DRY_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    invitation: str
    secret: bytes
    name: str
    public_key: bytes
    roles: _containers.RepeatedScalarFieldContainer[str]
    dry: bool
    def __init__(self, protocol_version: _Optional[int] = ..., invitation: _Optional[str] = ..., secret: _Optional[bytes] = ..., name: _Optional[str] = ..., public_key: _Optional[bytes] = ..., roles: _Optional[_Iterable[str]] = ..., dry: _Optional[bool] = ...) -> None: ...

class EnrolReply(_message.Message):
    __slots__ = ("role", "run", "training", "prepared", "data_confirmed")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    TRAINING_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    DATA_CONFIRMED_FIELD_NUMBER: _ClassVar[int]
    role: str
    run: str
    training: _plan_pb2.Run
    prepared: Prepared
    data_confirmed: bool
    def __init__(self, role: _Optional[str] = ..., run: _Optional[str] = ..., training: _Optional[_Union[_plan_pb2.Run, _Mapping]] = ..., prepared: _Optional[_Union[Prepared, _Mapping]] = ..., data_confirmed: _Optional[bool] = ...) -> None: ...

class InviteRequest(_message.Message):
    __slots__ = ("name", "role", "seconds", "uses", "believed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    BELIEVED_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    seconds: float
    uses: int
    believed: bool
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., seconds: _Optional[float] = ..., uses: _Optional[int] = ..., believed: _Optional[bool] = ...) -> None: ...

class InviteReply(_message.Message):
    __slots__ = ("id", "invitation", "expires", "line", "leads_to", "page", "run")
    ID_FIELD_NUMBER: _ClassVar[int]
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_FIELD_NUMBER: _ClassVar[int]
    LINE_FIELD_NUMBER: _ClassVar[int]
    LEADS_TO_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    id: str
    invitation: str
    expires: float
    line: str
    leads_to: str
    page: str
    run: str
    def __init__(self, id: _Optional[str] = ..., invitation: _Optional[str] = ..., expires: _Optional[float] = ..., line: _Optional[str] = ..., leads_to: _Optional[str] = ..., page: _Optional[str] = ..., run: _Optional[str] = ...) -> None: ...

class RevokeRequest(_message.Message):
    __slots__ = ("what",)
    WHAT_FIELD_NUMBER: _ClassVar[int]
    what: str
    def __init__(self, what: _Optional[str] = ...) -> None: ...

class Done(_message.Message):
    __slots__ = ("sentence", "step", "run")
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    sentence: str
    step: int
    run: str
    def __init__(self, sentence: _Optional[str] = ..., step: _Optional[int] = ..., run: _Optional[str] = ...) -> None: ...

class ExpelRequest(_message.Message):
    __slots__ = ("node", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class ForgiveRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class SteerRequest(_message.Message):
    __slots__ = ("wish", "key", "value", "step", "only_say")
    class Wish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        PAUSE: _ClassVar[SteerRequest.Wish]
        CONTINUE: _ClassVar[SteerRequest.Wish]
        STOP: _ClassVar[SteerRequest.Wish]
        STOP_NOW: _ClassVar[SteerRequest.Wish]
        SET: _ClassVar[SteerRequest.Wish]
        SAVE: _ClassVar[SteerRequest.Wish]
        ROLLBACK: _ClassVar[SteerRequest.Wish]
        FROM_WEIGHTS: _ClassVar[SteerRequest.Wish]
        FROM_START: _ClassVar[SteerRequest.Wish]
    PAUSE: SteerRequest.Wish
    CONTINUE: SteerRequest.Wish
    STOP: SteerRequest.Wish
    STOP_NOW: SteerRequest.Wish
    SET: SteerRequest.Wish
    SAVE: SteerRequest.Wish
    ROLLBACK: SteerRequest.Wish
    FROM_WEIGHTS: SteerRequest.Wish
    FROM_START: SteerRequest.Wish
    WISH_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ONLY_SAY_FIELD_NUMBER: _ClassVar[int]
    wish: SteerRequest.Wish
    key: str
    value: str
    step: int
    only_say: bool
    def __init__(self, wish: _Optional[_Union[SteerRequest.Wish, str]] = ..., key: _Optional[str] = ..., value: _Optional[str] = ..., step: _Optional[int] = ..., only_say: _Optional[bool] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("path", "upload", "offset", "data", "last")
    PATH_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    path: str
    upload: bytes
    offset: int
    data: bytes
    last: bool
    def __init__(self, path: _Optional[str] = ..., upload: _Optional[bytes] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., last: _Optional[bool] = ...) -> None: ...

class PutReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class LookReply(_message.Message):
    __slots__ = ("entries",)
    class Entry(_message.Message):
        __slots__ = ("path", "size_bytes", "is_folder")
        PATH_FIELD_NUMBER: _ClassVar[int]
        SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
        IS_FOLDER_FIELD_NUMBER: _ClassVar[int]
        path: str
        size_bytes: int
        is_folder: bool
        def __init__(self, path: _Optional[str] = ..., size_bytes: _Optional[int] = ..., is_folder: _Optional[bool] = ...) -> None: ...
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[LookReply.Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[LookReply.Entry, _Mapping]]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("path", "offset", "length")
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    path: str
    offset: int
    length: int
    def __init__(self, path: _Optional[str] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class GetReply(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
