from shared.gen.sextet.v1 import batch_pb2 as _batch_pb2
from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from shared.gen.sextet.v1 import weights_pb2 as _weights_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PromptRow(_message.Message):
    __slots__ = ("uid", "index", "samples", "step")
    UID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    uid: str
    index: int
    samples: _containers.RepeatedScalarFieldContainer[int]
    step: int
    def __init__(self, uid: _Optional[str] = ..., index: _Optional[int] = ..., samples: _Optional[_Iterable[int]] = ..., step: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("operation", "prompts", "greedy", "validation", "earlier", "budget", "since")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_FIELD_NUMBER: _ClassVar[int]
    EARLIER_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    prompts: _containers.RepeatedCompositeFieldContainer[PromptRow]
    greedy: bool
    validation: bool
    earlier: _batch_pb2.BatchRef
    budget: int
    since: int
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptRow, _Mapping]]] = ..., greedy: _Optional[bool] = ..., validation: _Optional[bool] = ..., earlier: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ..., budget: _Optional[int] = ..., since: _Optional[int] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("block", "metrics", "oldest", "cut")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OLDEST_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    block: _batch_pb2.BlockRef
    metrics: _containers.ScalarMap[str, float]
    oldest: _containers.RepeatedScalarFieldContainer[int]
    cut: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, block: _Optional[_Union[_batch_pb2.BlockRef, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., oldest: _Optional[_Iterable[int]] = ..., cut: _Optional[_Iterable[int]] = ...) -> None: ...

class PrepareWeightsRequest(_message.Message):
    __slots__ = ("operation", "weights", "gathering")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GATHERING_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    weights: _weights_pb2.WeightsRef
    gathering: _weights_pb2.WeightsGathering
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., weights: _Optional[_Union[_weights_pb2.WeightsRef, _Mapping]] = ..., gathering: _Optional[_Union[_weights_pb2.WeightsGathering, _Mapping]] = ...) -> None: ...

class PrepareWeightsResponse(_message.Message):
    __slots__ = ("version", "digest", "seconds", "received_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    digest: str
    seconds: float
    received_bytes: int
    def __init__(self, version: _Optional[int] = ..., digest: _Optional[str] = ..., seconds: _Optional[float] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class CommitWeightsRequest(_message.Message):
    __slots__ = ("operation", "version", "digest")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    version: int
    digest: str
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., version: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class CommitWeightsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: int
    def __init__(self, version: _Optional[int] = ...) -> None: ...
