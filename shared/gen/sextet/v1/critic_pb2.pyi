from shared.gen.sextet.v1 import batch_pb2 as _batch_pb2
from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ComputeValuesRequest(_message.Message):
    __slots__ = ("operation", "inputs", "profile")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    profile: _common_pb2.Profiling
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ..., profile: _Optional[_Union[_common_pb2.Profiling, _Mapping]] = ...) -> None: ...

class ComputeValuesResponse(_message.Message):
    __slots__ = ("block", "metrics", "profile")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    block: _batch_pb2.BlockRef
    metrics: _containers.ScalarMap[str, float]
    profile: _containers.RepeatedCompositeFieldContainer[_common_pb2.RankProfile]
    def __init__(self, block: _Optional[_Union[_batch_pb2.BlockRef, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., profile: _Optional[_Iterable[_Union[_common_pb2.RankProfile, _Mapping]]] = ...) -> None: ...

class CriticServiceUpdateRequest(_message.Message):
    __slots__ = ("operation", "inputs", "base_version", "profile")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    base_version: int
    profile: _common_pb2.Profiling
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ..., base_version: _Optional[int] = ..., profile: _Optional[_Union[_common_pb2.Profiling, _Mapping]] = ...) -> None: ...

class CriticServiceUpdateResponse(_message.Message):
    __slots__ = ("version", "metrics", "profile")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    version: int
    metrics: _containers.ScalarMap[str, float]
    profile: _containers.RepeatedCompositeFieldContainer[_common_pb2.RankProfile]
    def __init__(self, version: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., profile: _Optional[_Iterable[_Union[_common_pb2.RankProfile, _Mapping]]] = ...) -> None: ...
