from shared.gen.sextet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ElementType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ELEMENT_TYPE_UNSPECIFIED: _ClassVar[ElementType]
    ELEMENT_TYPE_INT32: _ClassVar[ElementType]
    ELEMENT_TYPE_FLOAT32: _ClassVar[ElementType]
    ELEMENT_TYPE_UINT8: _ClassVar[ElementType]
    ELEMENT_TYPE_UTF8: _ClassVar[ElementType]
ELEMENT_TYPE_UNSPECIFIED: ElementType
ELEMENT_TYPE_INT32: ElementType
ELEMENT_TYPE_FLOAT32: ElementType
ELEMENT_TYPE_UINT8: ElementType
ELEMENT_TYPE_UTF8: ElementType

class Column(_message.Message):
    __slots__ = ("name", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: ElementType
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[_Union[ElementType, str]] = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("endpoint", "block", "columns", "rows", "tokens", "bytes", "digest")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    endpoint: str
    block: str
    columns: _containers.RepeatedCompositeFieldContainer[Column]
    rows: _containers.RepeatedCompositeFieldContainer[_common_pb2.RowKey]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    digest: str
    def __init__(self, endpoint: _Optional[str] = ..., block: _Optional[str] = ..., columns: _Optional[_Iterable[_Union[Column, _Mapping]]] = ..., rows: _Optional[_Iterable[_Union[_common_pb2.RowKey, _Mapping]]] = ..., tokens: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class BatchRef(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("block", "columns", "rows")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    block: str
    columns: _containers.RepeatedScalarFieldContainer[str]
    rows: _containers.RepeatedCompositeFieldContainer[_common_pb2.RowKey]
    def __init__(self, block: _Optional[str] = ..., columns: _Optional[_Iterable[str]] = ..., rows: _Optional[_Iterable[_Union[_common_pb2.RowKey, _Mapping]]] = ...) -> None: ...

class ColumnHeader(_message.Message):
    __slots__ = ("column", "lengths")
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    column: Column
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, column: _Optional[_Union[Column, _Mapping]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadHeader(_message.Message):
    __slots__ = ("rows", "columns", "bytes", "digest")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[_common_pb2.RowKey]
    columns: _containers.RepeatedCompositeFieldContainer[ColumnHeader]
    bytes: int
    digest: str
    def __init__(self, rows: _Optional[_Iterable[_Union[_common_pb2.RowKey, _Mapping]]] = ..., columns: _Optional[_Iterable[_Union[ColumnHeader, _Mapping]]] = ..., bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("header", "chunk", "checksum")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    header: ReadHeader
    chunk: bytes
    checksum: int
    def __init__(self, header: _Optional[_Union[ReadHeader, _Mapping]] = ..., chunk: _Optional[bytes] = ..., checksum: _Optional[int] = ...) -> None: ...
