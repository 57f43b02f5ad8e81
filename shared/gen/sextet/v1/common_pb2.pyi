from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OperationId(_message.Message):
    __slots__ = ("run", "step", "name", "part")
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    run: str
    step: int
    name: str
    part: str
    def __init__(self, run: _Optional[str] = ..., step: _Optional[int] = ..., name: _Optional[str] = ..., part: _Optional[str] = ...) -> None: ...

class Operation(_message.Message):
    __slots__ = ("id", "epoch")
    ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    id: OperationId
    epoch: int
    def __init__(self, id: _Optional[_Union[OperationId, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class RowKey(_message.Message):
    __slots__ = ("uid", "sample")
    UID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    uid: str
    sample: int
    def __init__(self, uid: _Optional[str] = ..., sample: _Optional[int] = ...) -> None: ...
