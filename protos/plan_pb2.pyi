from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Schedule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COSINE: _ClassVar[Schedule]
    CONSTANT: _ClassVar[Schedule]
    LINEAR: _ClassVar[Schedule]
    WARMUP_STABLE_DECAY: _ClassVar[Schedule]

class Optimizer(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ADAMW: _ClassVar[Optimizer]
    MUON: _ClassVar[Optimizer]

class Precision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRECISION_UNSPECIFIED: _ClassVar[Precision]
    FP32: _ClassVar[Precision]
    BF16: _ClassVar[Precision]
    FP64: _ClassVar[Precision]
COSINE: Schedule
CONSTANT: Schedule
LINEAR: Schedule
WARMUP_STABLE_DECAY: Schedule
ADAMW: Optimizer
MUON: Optimizer
PRECISION_UNSPECIFIED: Precision
FP32: Precision
BF16: Precision
FP64: Precision

class Run(_message.Message):
    __slots__ = ("name", "id", "seed", "model", "data", "train", "network", "lease_seconds", "checkpoint", "trust")
    class Model(_message.Message):
        __slots__ = ("family", "config_json", "module", "pretrained", "weights", "adapter")
        FAMILY_FIELD_NUMBER: _ClassVar[int]
        CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
        MODULE_FIELD_NUMBER: _ClassVar[int]
        PRETRAINED_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_FIELD_NUMBER: _ClassVar[int]
        ADAPTER_FIELD_NUMBER: _ClassVar[int]
        family: str
        config_json: str
        module: str
        pretrained: str
        weights: str
        adapter: Run.Adapter
        def __init__(self, family: _Optional[str] = ..., config_json: _Optional[str] = ..., module: _Optional[str] = ..., pretrained: _Optional[str] = ..., weights: _Optional[str] = ..., adapter: _Optional[_Union[Run.Adapter, _Mapping]] = ...) -> None: ...
    class Adapter(_message.Message):
        __slots__ = ("rank", "alpha", "targets", "pretrained", "rs", "train_also", "dropout", "dora")
        RANK_FIELD_NUMBER: _ClassVar[int]
        ALPHA_FIELD_NUMBER: _ClassVar[int]
        TARGETS_FIELD_NUMBER: _ClassVar[int]
        PRETRAINED_FIELD_NUMBER: _ClassVar[int]
        RS_FIELD_NUMBER: _ClassVar[int]
        TRAIN_ALSO_FIELD_NUMBER: _ClassVar[int]
        DROPOUT_FIELD_NUMBER: _ClassVar[int]
        DORA_FIELD_NUMBER: _ClassVar[int]
        rank: int
        alpha: float
        targets: _containers.RepeatedScalarFieldContainer[str]
        pretrained: str
        rs: bool
        train_also: _containers.RepeatedScalarFieldContainer[str]
        dropout: float
        dora: bool
        def __init__(self, rank: _Optional[int] = ..., alpha: _Optional[float] = ..., targets: _Optional[_Iterable[str]] = ..., pretrained: _Optional[str] = ..., rs: _Optional[bool] = ..., train_also: _Optional[_Iterable[str]] = ..., dropout: _Optional[float] = ..., dora: _Optional[bool] = ...) -> None: ...
    class Data(_message.Message):
        __slots__ = ("source", "tokenizer", "sequence_length", "text_field", "evaluation_fraction", "isolate_documents", "split", "limit", "template", "held_out", "held_out_split", "sources", "chapter_bytes")
        class Source(_message.Message):
            __slots__ = ("source", "weight", "text_field", "template", "split", "limit")
            SOURCE_FIELD_NUMBER: _ClassVar[int]
            WEIGHT_FIELD_NUMBER: _ClassVar[int]
            TEXT_FIELD_FIELD_NUMBER: _ClassVar[int]
            TEMPLATE_FIELD_NUMBER: _ClassVar[int]
            SPLIT_FIELD_NUMBER: _ClassVar[int]
            LIMIT_FIELD_NUMBER: _ClassVar[int]
            source: str
            weight: float
            text_field: str
            template: str
            split: str
            limit: int
            def __init__(self, source: _Optional[str] = ..., weight: _Optional[float] = ..., text_field: _Optional[str] = ..., template: _Optional[str] = ..., split: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...
        SOURCE_FIELD_NUMBER: _ClassVar[int]
        TOKENIZER_FIELD_NUMBER: _ClassVar[int]
        SEQUENCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
        TEXT_FIELD_FIELD_NUMBER: _ClassVar[int]
        EVALUATION_FRACTION_FIELD_NUMBER: _ClassVar[int]
        ISOLATE_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
        SPLIT_FIELD_NUMBER: _ClassVar[int]
        LIMIT_FIELD_NUMBER: _ClassVar[int]
        TEMPLATE_FIELD_NUMBER: _ClassVar[int]
        HELD_OUT_FIELD_NUMBER: _ClassVar[int]
        HELD_OUT_SPLIT_FIELD_NUMBER: _ClassVar[int]
        SOURCES_FIELD_NUMBER: _ClassVar[int]
        CHAPTER_BYTES_FIELD_NUMBER: _ClassVar[int]
        source: str
        tokenizer: str
        sequence_length: int
        text_field: str
        evaluation_fraction: float
        isolate_documents: bool
        split: str
        limit: int
        template: str
        held_out: str
        held_out_split: str
        sources: _containers.RepeatedCompositeFieldContainer[Run.Data.Source]
        chapter_bytes: int
        def __init__(self, source: _Optional[str] = ..., tokenizer: _Optional[str] = ..., sequence_length: _Optional[int] = ..., text_field: _Optional[str] = ..., evaluation_fraction: _Optional[float] = ..., isolate_documents: _Optional[bool] = ..., split: _Optional[str] = ..., limit: _Optional[int] = ..., template: _Optional[str] = ..., held_out: _Optional[str] = ..., held_out_split: _Optional[str] = ..., sources: _Optional[_Iterable[_Union[Run.Data.Source, _Mapping]]] = ..., chapter_bytes: _Optional[int] = ...) -> None: ...
    class Train(_message.Message):
        __slots__ = ("steps", "global_batch", "micro_batch", "learning_rate", "warmup_steps", "final_learning_rate_fraction", "weight_decay", "beta1", "beta2", "epsilon", "clip_norm", "precision", "evaluate_every", "evaluation_samples", "schedule", "decay_steps", "outer_rate", "outer_momentum", "compile", "loss_per_token", "optimizer")
        STEPS_FIELD_NUMBER: _ClassVar[int]
        GLOBAL_BATCH_FIELD_NUMBER: _ClassVar[int]
        MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
        LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
        WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
        FINAL_LEARNING_RATE_FRACTION_FIELD_NUMBER: _ClassVar[int]
        WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
        BETA1_FIELD_NUMBER: _ClassVar[int]
        BETA2_FIELD_NUMBER: _ClassVar[int]
        EPSILON_FIELD_NUMBER: _ClassVar[int]
        CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
        PRECISION_FIELD_NUMBER: _ClassVar[int]
        EVALUATE_EVERY_FIELD_NUMBER: _ClassVar[int]
        EVALUATION_SAMPLES_FIELD_NUMBER: _ClassVar[int]
        SCHEDULE_FIELD_NUMBER: _ClassVar[int]
        DECAY_STEPS_FIELD_NUMBER: _ClassVar[int]
        OUTER_RATE_FIELD_NUMBER: _ClassVar[int]
        OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
        COMPILE_FIELD_NUMBER: _ClassVar[int]
        LOSS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
        OPTIMIZER_FIELD_NUMBER: _ClassVar[int]
        steps: int
        global_batch: int
        micro_batch: int
        learning_rate: float
        warmup_steps: int
        final_learning_rate_fraction: float
        weight_decay: float
        beta1: float
        beta2: float
        epsilon: float
        clip_norm: float
        precision: Precision
        evaluate_every: int
        evaluation_samples: int
        schedule: Schedule
        decay_steps: int
        outer_rate: float
        outer_momentum: float
        compile: bool
        loss_per_token: bool
        optimizer: Optimizer
        def __init__(self, steps: _Optional[int] = ..., global_batch: _Optional[int] = ..., micro_batch: _Optional[int] = ..., learning_rate: _Optional[float] = ..., warmup_steps: _Optional[int] = ..., final_learning_rate_fraction: _Optional[float] = ..., weight_decay: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., epsilon: _Optional[float] = ..., clip_norm: _Optional[float] = ..., precision: _Optional[_Union[Precision, str]] = ..., evaluate_every: _Optional[int] = ..., evaluation_samples: _Optional[int] = ..., schedule: _Optional[_Union[Schedule, str]] = ..., decay_steps: _Optional[int] = ..., outer_rate: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., compile: _Optional[bool] = ..., loss_per_token: _Optional[bool] = ..., optimizer: _Optional[_Union[Optimizer, str]] = ...) -> None: ...
    class Network(_message.Message):
        __slots__ = ("activations", "gradients", "reduction", "exchange")
        ACTIVATIONS_FIELD_NUMBER: _ClassVar[int]
        GRADIENTS_FIELD_NUMBER: _ClassVar[int]
        REDUCTION_FIELD_NUMBER: _ClassVar[int]
        EXCHANGE_FIELD_NUMBER: _ClassVar[int]
        activations: str
        gradients: str
        reduction: str
        exchange: str
        def __init__(self, activations: _Optional[str] = ..., gradients: _Optional[str] = ..., reduction: _Optional[str] = ..., exchange: _Optional[str] = ...) -> None: ...
    class Checkpoint(_message.Message):
        __slots__ = ("uri", "weights")
        URI_FIELD_NUMBER: _ClassVar[int]
        WEIGHTS_FIELD_NUMBER: _ClassVar[int]
        uri: str
        weights: bool
        def __init__(self, uri: _Optional[str] = ..., weights: _Optional[bool] = ...) -> None: ...
    class Trust(_message.Message):
        __slots__ = ("mode", "audit_rate")
        class Mode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = ()
            TRUSTED: _ClassVar[Run.Trust.Mode]
            OPEN: _ClassVar[Run.Trust.Mode]
        TRUSTED: Run.Trust.Mode
        OPEN: Run.Trust.Mode
        MODE_FIELD_NUMBER: _ClassVar[int]
        AUDIT_RATE_FIELD_NUMBER: _ClassVar[int]
        mode: Run.Trust.Mode
        audit_rate: float
        def __init__(self, mode: _Optional[_Union[Run.Trust.Mode, str]] = ..., audit_rate: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    TRAIN_FIELD_NUMBER: _ClassVar[int]
    NETWORK_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    TRUST_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    seed: int
    model: Run.Model
    data: Run.Data
    train: Run.Train
    network: Run.Network
    lease_seconds: float
    checkpoint: Run.Checkpoint
    trust: Run.Trust
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ..., seed: _Optional[int] = ..., model: _Optional[_Union[Run.Model, _Mapping]] = ..., data: _Optional[_Union[Run.Data, _Mapping]] = ..., train: _Optional[_Union[Run.Train, _Mapping]] = ..., network: _Optional[_Union[Run.Network, _Mapping]] = ..., lease_seconds: _Optional[float] = ..., checkpoint: _Optional[_Union[Run.Checkpoint, _Mapping]] = ..., trust: _Optional[_Union[Run.Trust, _Mapping]] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("name", "forward_flops", "parameter_bytes", "activation_bytes", "kept_bytes", "working_bytes", "frozen_bytes", "backward_flops", "orthogonal_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FORWARD_FLOPS_FIELD_NUMBER: _ClassVar[int]
    PARAMETER_BYTES_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKING_BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_FLOPS_FIELD_NUMBER: _ClassVar[int]
    ORTHOGONAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    forward_flops: float
    parameter_bytes: int
    activation_bytes: int
    kept_bytes: int
    working_bytes: int
    frozen_bytes: int
    backward_flops: float
    orthogonal_bytes: int
    def __init__(self, name: _Optional[str] = ..., forward_flops: _Optional[float] = ..., parameter_bytes: _Optional[int] = ..., activation_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., working_bytes: _Optional[int] = ..., frozen_bytes: _Optional[int] = ..., backward_flops: _Optional[float] = ..., orthogonal_bytes: _Optional[int] = ...) -> None: ...

class Rounds(_message.Message):
    __slots__ = ("since", "steps", "count", "before", "restarts")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    since: int
    steps: int
    count: int
    before: int
    restarts: bool
    def __init__(self, since: _Optional[int] = ..., steps: _Optional[int] = ..., count: _Optional[int] = ..., before: _Optional[int] = ..., restarts: _Optional[bool] = ...) -> None: ...
