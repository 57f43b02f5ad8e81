from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TensorInfo(_message.Message):
    __slots__ = ("name", "dtype", "shape", "bytes", "digest", "alias_of")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    ALIAS_OF_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    digest: str
    alias_of: str
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ..., alias_of: _Optional[str] = ...) -> None: ...

class WeightsRef(_message.Message):
    __slots__ = ("run", "version", "endpoints", "digest", "bytes", "channel", "offers")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    digest: str
    bytes: int
    channel: str
    offers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., endpoints: _Optional[_Iterable[str]] = ..., digest: _Optional[str] = ..., bytes: _Optional[int] = ..., channel: _Optional[str] = ..., offers: _Optional[_Iterable[str]] = ...) -> None: ...

class WeightsGathering(_message.Message):
    __slots__ = ("id", "members")
    ID_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    id: str
    members: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, id: _Optional[str] = ..., members: _Optional[_Iterable[str]] = ...) -> None: ...

class DeviceMemory(_message.Message):
    __slots__ = ("device", "handle", "storage_bytes", "storage_offset", "counter", "counter_offset", "event", "event_required")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    COUNTER_FIELD_NUMBER: _ClassVar[int]
    COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_FIELD_NUMBER: _ClassVar[int]
    EVENT_REQUIRED_FIELD_NUMBER: _ClassVar[int]
    device: int
    handle: bytes
    storage_bytes: int
    storage_offset: int
    counter: bytes
    counter_offset: int
    event: bytes
    event_required: bool
    def __init__(self, device: _Optional[int] = ..., handle: _Optional[bytes] = ..., storage_bytes: _Optional[int] = ..., storage_offset: _Optional[int] = ..., counter: _Optional[bytes] = ..., counter_offset: _Optional[int] = ..., event: _Optional[bytes] = ..., event_required: _Optional[bool] = ...) -> None: ...

class WeightPiece(_message.Message):
    __slots__ = ("tensor", "start", "size", "local", "offset", "sums", "at")
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    tensor: str
    start: _containers.RepeatedScalarFieldContainer[int]
    size: _containers.RepeatedScalarFieldContainer[int]
    local: str
    offset: _containers.RepeatedScalarFieldContainer[int]
    sums: _containers.RepeatedScalarFieldContainer[int]
    at: int
    def __init__(self, tensor: _Optional[str] = ..., start: _Optional[_Iterable[int]] = ..., size: _Optional[_Iterable[int]] = ..., local: _Optional[str] = ..., offset: _Optional[_Iterable[int]] = ..., sums: _Optional[_Iterable[int]] = ..., at: _Optional[int] = ...) -> None: ...

class WeightRank(_message.Message):
    __slots__ = ("host", "device", "pieces", "memory", "sees", "keeps")
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PIECES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    SEES_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    host: str
    device: str
    pieces: _containers.RepeatedCompositeFieldContainer[WeightPiece]
    memory: DeviceMemory
    sees: _containers.RepeatedScalarFieldContainer[str]
    keeps: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, host: _Optional[str] = ..., device: _Optional[str] = ..., pieces: _Optional[_Iterable[_Union[WeightPiece, _Mapping]]] = ..., memory: _Optional[_Union[DeviceMemory, _Mapping]] = ..., sees: _Optional[_Iterable[str]] = ..., keeps: _Optional[_Iterable[str]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("run", "version", "gathering", "member", "channels", "ranks", "holds", "has")
    class HasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GATHERING_FIELD_NUMBER: _ClassVar[int]
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    HAS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    gathering: WeightsGathering
    member: str
    channels: _containers.RepeatedScalarFieldContainer[str]
    ranks: _containers.RepeatedCompositeFieldContainer[WeightRank]
    holds: str
    has: _containers.ScalarMap[str, str]
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., gathering: _Optional[_Union[WeightsGathering, _Mapping]] = ..., member: _Optional[str] = ..., channels: _Optional[_Iterable[str]] = ..., ranks: _Optional[_Iterable[_Union[WeightRank, _Mapping]]] = ..., holds: _Optional[str] = ..., has: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("channel", "group", "store", "ranks", "senders", "first_rank", "manifest", "bucket_bytes", "seconds", "names")
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    SENDERS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BUCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    channel: str
    group: str
    store: str
    ranks: _containers.RepeatedCompositeFieldContainer[WeightRank]
    senders: int
    first_rank: int
    manifest: WeightsManifest
    bucket_bytes: int
    seconds: float
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, channel: _Optional[str] = ..., group: _Optional[str] = ..., store: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[WeightRank, _Mapping]]] = ..., senders: _Optional[int] = ..., first_rank: _Optional[int] = ..., manifest: _Optional[_Union[WeightsManifest, _Mapping]] = ..., bucket_bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class MakerCommand(_message.Message):
    __slots__ = ("run", "version", "send", "tensor", "ranks")
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    TENSOR_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    send: JoinResponse
    tensor: str
    ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., send: _Optional[_Union[JoinResponse, _Mapping]] = ..., tensor: _Optional[str] = ..., ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("run", "version", "has")
    class HasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAS_FIELD_NUMBER: _ClassVar[int]
    run: str
    version: int
    has: _containers.ScalarMap[str, str]
    def __init__(self, run: _Optional[str] = ..., version: _Optional[int] = ..., has: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WeightsManifest(_message.Message):
    __slots__ = ("version", "tensors", "digest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    version: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorInfo]
    digest: str
    def __init__(self, version: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorInfo, _Mapping]]] = ..., digest: _Optional[str] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("manifest", "chunk", "checksum")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    manifest: WeightsManifest
    chunk: bytes
    checksum: int
    def __init__(self, manifest: _Optional[_Union[WeightsManifest, _Mapping]] = ..., chunk: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
