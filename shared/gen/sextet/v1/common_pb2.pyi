from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
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

class Profiling(_message.Message):
    __slots__ = ("prefix",)
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    prefix: str
    def __init__(self, prefix: _Optional[str] = ...) -> None: ...

class OperatorTime(_message.Message):
    __slots__ = ("name", "seconds", "calls")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    name: str
    seconds: float
    calls: int
    def __init__(self, name: _Optional[str] = ..., seconds: _Optional[float] = ..., calls: _Optional[int] = ...) -> None: ...

class RankProfile(_message.Message):
    __slots__ = ("rank", "path", "seconds", "communication_share", "compute_share", "memory_peak_gib", "top", "fault")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMMUNICATION_SHARE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SHARE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_GIB_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    rank: int
    path: str
    seconds: float
    communication_share: float
    compute_share: float
    memory_peak_gib: float
    top: _containers.RepeatedCompositeFieldContainer[OperatorTime]
    fault: str
    def __init__(self, rank: _Optional[int] = ..., path: _Optional[str] = ..., seconds: _Optional[float] = ..., communication_share: _Optional[float] = ..., compute_share: _Optional[float] = ..., memory_peak_gib: _Optional[float] = ..., top: _Optional[_Iterable[_Union[OperatorTime, _Mapping]]] = ..., fault: _Optional[str] = ...) -> None: ...
