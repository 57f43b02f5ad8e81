from shared.gen.sextet.v1 import batch_pb2 as _batch_pb2
from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ScoreItem(_message.Message):
    __slots__ = ("row", "data_source", "prompt_json", "response", "ground_truth", "extra_info_json")
    ROW_FIELD_NUMBER: _ClassVar[int]
    DATA_SOURCE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_JSON_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    GROUND_TRUTH_FIELD_NUMBER: _ClassVar[int]
    EXTRA_INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    row: _common_pb2.RowKey
    data_source: str
    prompt_json: str
    response: str
    ground_truth: str
    extra_info_json: str
    def __init__(self, row: _Optional[_Union[_common_pb2.RowKey, _Mapping]] = ..., data_source: _Optional[str] = ..., prompt_json: _Optional[str] = ..., response: _Optional[str] = ..., ground_truth: _Optional[str] = ..., extra_info_json: _Optional[str] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("run", "items")
    RUN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    run: str
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, run: _Optional[str] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("score", "error", "parts")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SCORE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    score: float
    error: str
    parts: _containers.ScalarMap[str, float]
    def __init__(self, score: _Optional[float] = ..., error: _Optional[str] = ..., parts: _Optional[_Mapping[str, float]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ScoreBatchRequest(_message.Message):
    __slots__ = ("operation", "inputs")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    inputs: _batch_pb2.BatchRef
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., inputs: _Optional[_Union[_batch_pb2.BatchRef, _Mapping]] = ...) -> None: ...

class ScoreBatchResponse(_message.Message):
    __slots__ = ("block", "metrics", "scores")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    block: _batch_pb2.BlockRef
    metrics: _containers.ScalarMap[str, float]
    scores: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, block: _Optional[_Union[_batch_pb2.BlockRef, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., scores: _Optional[_Iterable[float]] = ...) -> None: ...
