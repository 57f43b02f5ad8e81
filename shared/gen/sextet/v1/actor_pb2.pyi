from shared.gen.sextet.v1 import batch_pb2 as _batch_pb2
from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from shared.gen.sextet.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ActorServiceComputeLogprobsRequest(_message.Message):
    __slots__ = ("operation", "inputs", "profile")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    profile: _common_pb2.Profiling
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ..., profile: _Optional[_Union[_common_pb2.Profiling, _Mapping]] = ...) -> None: ...

class ActorServiceComputeLogprobsResponse(_message.Message):
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

class ComputeAdvantagesRequest(_message.Message):
    __slots__ = ("operation", "inputs")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ...) -> None: ...

class ComputeAdvantagesResponse(_message.Message):
    __slots__ = ("block", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    block: _batch_pb2.BlockRef
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, block: _Optional[_Union[_batch_pb2.BlockRef, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ActorServiceUpdateRequest(_message.Message):
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

class ActorServiceUpdateResponse(_message.Message):
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

class HoldRowsRequest(_message.Message):
    __slots__ = ("operation", "inputs")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ...) -> None: ...

class HoldRowsResponse(_message.Message):
    __slots__ = ("block", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    block: _batch_pb2.BlockRef
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, block: _Optional[_Union[_batch_pb2.BlockRef, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class PublishWeightsRequest(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ...) -> None: ...

class PublishWeightsResponse(_message.Message):
    __slots__ = ("weights",)
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    weights: _weights_pb2.WeightsRef
    def __init__(self, weights: _Optional[_Union[_weights_pb2.WeightsRef, _Mapping]] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("operation", "directory")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    directory: str
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., directory: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("directory",)
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    directory: str
    def __init__(self, directory: _Optional[str] = ...) -> None: ...
