from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StateRequest(_message.Message):
    __slots__ = ("generation", "step", "bucket", "offset", "from_snapshot", "shared", "frozen", "end")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    FROM_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    bucket: int
    offset: int
    from_snapshot: bool
    shared: bool
    frozen: bool
    end: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ..., from_snapshot: _Optional[bool] = ..., shared: _Optional[bool] = ..., frozen: _Optional[bool] = ..., end: _Optional[int] = ...) -> None: ...

class KeptRequest(_message.Message):
    __slots__ = ("generation", "step", "kind", "index", "part")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    kind: int
    index: int
    part: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., kind: _Optional[int] = ..., index: _Optional[int] = ..., part: _Optional[int] = ...) -> None: ...

class StandbyRequest(_message.Message):
    __slots__ = ("buckets", "shared")
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedScalarFieldContainer[int]
    shared: bool
    def __init__(self, buckets: _Optional[_Iterable[int]] = ..., shared: _Optional[bool] = ...) -> None: ...
