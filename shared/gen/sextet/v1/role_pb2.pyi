from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ConfigureRequest(_message.Message):
    __slots__ = ("operation", "config_json", "checkpoint")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    config_json: str
    checkpoint: str
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., config_json: _Optional[str] = ..., checkpoint: _Optional[str] = ...) -> None: ...

class ConfigureResponse(_message.Message):
    __slots__ = ("version", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    version: int
    facts: _containers.ScalarMap[str, str]
    def __init__(self, version: _Optional[int] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("role", "replica", "incarnation", "run", "epoch", "version", "running", "last_applied", "held_bytes", "fault")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LAST_APPLIED_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    role: str
    replica: str
    incarnation: str
    run: str
    epoch: int
    version: int
    running: _containers.RepeatedCompositeFieldContainer[_common_pb2.OperationId]
    last_applied: _common_pb2.OperationId
    held_bytes: int
    fault: str
    def __init__(self, role: _Optional[str] = ..., replica: _Optional[str] = ..., incarnation: _Optional[str] = ..., run: _Optional[str] = ..., epoch: _Optional[int] = ..., version: _Optional[int] = ..., running: _Optional[_Iterable[_Union[_common_pb2.OperationId, _Mapping]]] = ..., last_applied: _Optional[_Union[_common_pb2.OperationId, _Mapping]] = ..., held_bytes: _Optional[int] = ..., fault: _Optional[str] = ...) -> None: ...

class StageCheckpointRequest(_message.Message):
    __slots__ = ("operation",)
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ...) -> None: ...

class StageCheckpointResponse(_message.Message):
    __slots__ = ("version", "seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    seconds: float
    def __init__(self, version: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("operation", "directory", "version")
    OPERATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    operation: _common_pb2.Operation
    directory: str
    version: int
    def __init__(self, operation: _Optional[_Union[_common_pb2.Operation, _Mapping]] = ..., directory: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("digest", "bytes", "version")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    digest: str
    bytes: int
    version: int
    def __init__(self, digest: _Optional[str] = ..., bytes: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class ReleaseStepRequest(_message.Message):
    __slots__ = ("run", "epoch", "step", "saved_step")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SAVED_STEP_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    step: int
    saved_step: int
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ..., step: _Optional[int] = ..., saved_step: _Optional[int] = ...) -> None: ...

class ReleaseStepResponse(_message.Message):
    __slots__ = ("bytes",)
    BYTES_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    def __init__(self, bytes: _Optional[int] = ...) -> None: ...

class ReleaseRunRequest(_message.Message):
    __slots__ = ("run", "epoch")
    RUN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    run: str
    epoch: int
    def __init__(self, run: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
