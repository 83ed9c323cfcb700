"""The header of a message: its grammar, and its schema.

The grammar, in the order of the tree:

- ``N`` None, ``B`` bool, ``I`` int, ``F`` float, ``S`` str, ``Y`` bytes: no more fields;
- ``A`` array, ``G`` numpy scalar: the code of the dtype and the rank, one byte each; a uint64 per
  axis;
- ``L`` list, ``T`` tuple: count, children;
- ``D`` dict: count, then the key and child of each entry;
- ``C`` NamedTuple: name, count, children.

A count is a uint32; a key or name is a count of bytes and those bytes in UTF-8. All integers are
little-endian.
"""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

MAGIC = b"RLC\x01"  # the last byte is the version of the format
ALIGNMENT = 64
MAX_DEPTH = 64
MAX_HEADER = 1 << 20  # bytes; enough for tens of thousands of leaves
FIXED, _COUNT, _DIM = struct.Struct("<4sI"), struct.Struct("<I"), struct.Struct("<Q")
# Limits of the memory that untrusted messages can take.
_KEPT_SCHEMAS, _KEPT_HEADER, _KEPT_TOKENS = 256, 1 << 14, 4096
_MAX_ARRAY = 1 << 48  # bytes, with axes of size 0 counted as 1

# A dtype's position is its code in messages, so only append to this list.
_NAMES = """
    bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64
    complex128 bfloat16 int2 int4 uint2 uint4 float4_e2m1fn float8_e3m4 float8_e4m3
    float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu
"""


def _dtype(name: str) -> np.dtype | None:
    """Returns the dtype; None if the installed packages lack it."""
    scalar_type = getattr(np, name + "_" * (name == "bool"), getattr(ml_dtypes, name, None))
    return None if scalar_type is None else np.dtype(scalar_type)


DTYPES = [_dtype(name) for name in _NAMES.split()]
CODES = {dtype: code for code, dtype in enumerate(DTYPES) if dtype is not None}

_TOKENS: dict[tuple[bytes, np.dtype, tuple[int, ...]], bytes] = {}


@functools.lru_cache(_KEPT_TOKENS)
def text_token(text: str) -> bytes:
    """Returns the token of a key or name."""
    encoded = text.encode()
    return _COUNT.pack(len(encoded)) + encoded


@functools.lru_cache(_KEPT_TOKENS)
def sized_token(kind: bytes, count: int) -> bytes:
    """Returns the token of a container's kind and count."""
    return kind + _COUNT.pack(count)


def array_token(kind: bytes, array: np.ndarray) -> bytes | None:
    """Returns the token of an array; None if its dtype or byte order cannot be sent as it is."""
    key = (kind, array.dtype, array.shape)
    token = _TOKENS.get(key)
    if token is None:
        if array.dtype not in CODES or not array.dtype.isnative:
            return None
        dims = b"".join(map(_DIM.pack, array.shape))
        token = kind + bytes([CODES[array.dtype], array.ndim]) + dims
        if len(_TOKENS) >= _KEPT_TOKENS:
            _TOKENS.clear()
        _TOKENS[key] = token
    return token


class Schema(NamedTuple):
    """The structure of a message, computed from its header."""

    prefix: bytes  # the message up to the scalars
    root: Any  # a tree of SCALAR, ARRAY, None and Node
    scalars: struct.Struct
    texts: tuple[tuple[int, bool], ...]  # index of the scalar with the length; whether it is a str
    arrays: tuple[tuple[int, np.dtype, tuple[int, ...]], ...]  # offset, dtype, shape
    numpy_scalars: tuple[int, ...]  # indices of the arrays that are numpy scalars
    gaps: tuple[bytes, ...]  # padding before each array
    end: int  # offset of the texts


class Node(NamedTuple):
    """A container."""

    kind: bytes
    names: tuple[str, ...] | str | None  # the keys of a dict, the name of a NamedTuple
    children: list[Any]


SCALAR, ARRAY = "scalar", "array"
_SCHEMAS: dict[bytes, Schema] = {}


def schema_of(header: bytes) -> Schema:
    """Returns the schema of a header.

    Raises:
      ValueError: the header is malformed or too long.
    """
    schema = _SCHEMAS.get(header)
    if schema is not None:
        return schema
    if len(header) > MAX_HEADER:
        raise ValueError(
            f"codec: a header must have at most {MAX_HEADER} bytes; got {len(header)}. Send trees "
            "of fewer leaves."
        )
    try:
        schema = _Parser(header).schema()
    except (struct.error, IndexError):
        raise ValueError("codec.decode: the header ends too early.") from None
    if len(header) <= _KEPT_HEADER:
        if len(_SCHEMAS) >= _KEPT_SCHEMAS:
            _SCHEMAS.clear()
        _SCHEMAS[header] = schema
    return schema


class _Parser:
    """Reads a header and checks its grammar."""

    def __init__(self, header: bytes) -> None:
        self._header, self._at = header, 0
        self._formats: list[str] = []
        self._texts: list[tuple[int, bool]] = []
        self._arrays: list[tuple[np.dtype, tuple[int, ...]]] = []
        self._numpy_scalars: list[int] = []

    def schema(self) -> Schema:
        root = self._node(MAX_DEPTH)
        if self._at != len(self._header):
            raise ValueError("codec.decode: the header continues after its tree.")
        scalars = struct.Struct("<" + "".join(self._formats))
        prefix = FIXED.pack(MAGIC, len(self._header)) + self._header
        end, gaps, arrays = len(prefix) + scalars.size, [], []
        for dtype, shape in self._arrays:
            gap = -end % ALIGNMENT
            arrays.append((end + gap, dtype, shape))
            gaps.append(bytes(gap))
            end += gap + math.prod(shape) * dtype.itemsize
        return Schema(
            prefix,
            root,
            scalars,
            tuple(self._texts),
            tuple(arrays),
            tuple(self._numpy_scalars),
            tuple(gaps),
            end,
        )

    def _node(self, depth: int) -> Any:
        kind = self._bytes(1)
        if kind == b"N":
            return None
        if kind in _FORMATS:
            if kind in (b"S", b"Y"):
                self._texts.append((len(self._formats), kind == b"S"))
            self._formats.append(_FORMATS[kind])
            return SCALAR
        if kind in (b"A", b"G"):
            if kind == b"G":
                self._numpy_scalars.append(len(self._arrays))
            self._arrays.append(self._array())
            return ARRAY
        if kind not in (b"L", b"T", b"D", b"C"):
            raise ValueError(f"codec.decode: unknown kind of node {kind!r}.")
        if depth == 0:
            raise ValueError(f"codec.decode: must be nested at most {MAX_DEPTH} deep.")
        if kind == b"D":
            pairs = [(self._text(), self._node(depth - 1)) for _ in range(self._count())]
            names = tuple(key for key, _ in pairs)
            if len(set(names)) != len(names):
                raise ValueError("codec.decode: a dict has a key twice.")
            return Node(kind, names, [child for _, child in pairs])
        name = self._text() if kind == b"C" else None
        return Node(kind, name, [self._node(depth - 1) for _ in range(self._count())])

    def _array(self) -> tuple[np.dtype, tuple[int, ...]]:
        code, rank = self._bytes(2)
        dtype = DTYPES[code] if code < len(DTYPES) else None
        shape = tuple(_DIM.unpack(self._bytes(8))[0] for _ in range(rank))
        if dtype is None or rank > 32:
            raise ValueError(f"codec.decode: unknown dtype code {code} or rank {rank}.")
        if math.prod(size or 1 for size in shape) * dtype.itemsize > _MAX_ARRAY:
            raise ValueError(
                f"codec.decode: arrays must have less than 2^48 bytes; got shape {shape}."
            )
        return dtype, shape

    def _count(self) -> int:
        return _COUNT.unpack(self._bytes(4))[0]

    def _text(self) -> str:
        return self._bytes(self._count()).decode()

    def _bytes(self, count: int) -> bytes:
        found = self._header[self._at : self._at + count]
        self._at += count
        if len(found) != count:
            raise IndexError
        return found


_FORMATS = {b"B": "?", b"I": "q", b"F": "d", b"S": "Q", b"Y": "Q"}
