from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class StateRequest(_message.Message):
    __slots__ = ("generation", "step", "bucket", "offset")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    generation: int
    step: int
    bucket: int
    offset: int
    def __init__(self, generation: _Optional[int] = ..., step: _Optional[int] = ..., bucket: _Optional[int] = ..., offset: _Optional[int] = ...) -> None: ...
