"""Pytrees of arrays as bytes, and back without copying the arrays.

A message is ``magic | header length | header | scalars | arrays | texts``. The header holds the
structure only: containers, keys, dtypes and shapes. The values follow: Python scalars packed in one
block, each array at a multiple of 64 bytes from the start of the message, strings and bytes last.
So messages of one structure share one header, and its `Schema` (offsets, the format of the scalars,
the tree to build) is computed once and cached.

Nothing is unpickled and no class is imported by name. A NamedTuple is decoded as its own class if
the reader knows this class (`register`, or ``decode(..., like=)``), otherwise as a plain tuple.
Malformed bytes raise `ValueError`; their length limits the memory that the reader allocates for
them.

Supported: None, bool, int of 64 bits, float, str, bytes; dict with str keys, list, tuple,
NamedTuple; arrays and scalars of all JAX dtypes, which are decoded as read-only numpy arrays and
scalars.
"""

from __future__ import annotations

import collections.abc
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rlstack import types
from rlstack.rpc.header import (
    ARRAY,
    CODES,
    FIXED,
    MAGIC,
    MAX_DEPTH,
    MAX_HEADER,
    SCALAR,
    Schema,
    array_token,
    schema_of,
    sized_token,
    text_token,
)
from rlstack.types import PyTree

_INT64 = 1 << 63

_CLASSES: dict[str, type] = {}


def register(*classes: Any) -> None:
    """Adds NamedTuples to the classes that `decode` knows; it knows those of `rlstack.types`.

    Raises:
      TypeError: a class is not a NamedTuple.
    """
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, tuple) and hasattr(cls, "_fields")):
            raise TypeError(f"codec.register: classes must be NamedTuples; got {cls!r}.")
        _CLASSES[_class_name(cls)] = cls


def register_records(tree: PyTree) -> None:
    """Registers the classes of all NamedTuples in a tree."""
    if isinstance(tree, collections.abc.Mapping):
        tree = tuple(tree.values())
    if isinstance(tree, tuple | list):
        if hasattr(tree, "_fields"):
            register(type(tree))
        for child in tree:
            register_records(child)


def encode(tree: PyTree) -> bytes:
    """Returns a message; arrays are copied into it once.

    Raises:
      ValueError: the tree holds an unsupported value (the message says where), is nested
        deeper than `MAX_DEPTH`, or has too many leaves.
    """
    out = _Out([], [], [], [])
    try:
        _write(tree, out, MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"codec.encode: at {_where(tree) or 'the root'}: {error}") from None
    header = b"".join(out.tokens)
    schema = schema_of(header)
    parts = [schema.prefix, schema.scalars.pack(*out.scalars)]
    for gap, array in zip(schema.gaps, out.arrays, strict=True):
        parts += (gap, array)
    parts += out.texts
    return b"".join(parts)


def share(tree: PyTree) -> PyTree:
    """Returns what decoding the message of a tree would give, without a message or a copy.

    Arrays become read-only views of the same memory. Containers are new, so changes of a dict or a
    list on one side are not seen on the other. NamedTuples keep their classes.

    Raises:
      ValueError: the tree cannot be encoded, see `encode`.
    """
    try:
        return _share(tree, MAX_DEPTH)
    except ValueError as error:
        raise ValueError(f"codec.encode: at {_where(tree) or 'the root'}: {error}") from None


def decode(data: bytes | bytearray | memoryview, like: PyTree = None) -> PyTree:
    """Reads a message.

    Args:
      data: a message of `encode`. The arrays are views into it and keep it alive.
      like: an example (arrays or ``jax.ShapeDtypeStruct``s as leaves). The result has its
          NamedTuples, and the message must have its structure, dtypes and ranks. Sizes of axes may
          differ.

    Raises:
      ValueError: the bytes are not a complete, well-formed message, or do not fit `like`.
    """
    if type(data) is not bytes:
        data = memoryview(data).toreadonly().cast("B")
    if len(data) < FIXED.size:
        raise ValueError(f"codec.decode: a message must have at least 8 bytes; got {len(data)}.")
    magic, header_size = FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ValueError(f"codec.decode: a message must begin with {MAGIC!r}; got {magic!r}.")
    start = FIXED.size + header_size
    if header_size > MAX_HEADER or start > len(data):
        raise ValueError(
            f"codec.decode: truncated: a header of {header_size} bytes in {len(data)} bytes."
        )
    header = bytes(data[FIXED.size : start])
    schema = schema_of(header)
    if schema.end > len(data):
        raise ValueError(f"codec.decode: truncated: {schema.end} bytes expected; got {len(data)}.")
    scalars = list(schema.scalars.unpack_from(data, start))
    _read_texts(schema, scalars, data)
    arrays: list[Any] = [np.ndarray(shape, dtype, data, at) for at, dtype, shape in schema.arrays]
    for index in schema.numpy_scalars:
        arrays[index] = arrays[index][()]
    tree = _build(schema.root, iter(scalars), iter(arrays))
    return tree if like is None else conform(tree, like)


def conform(tree: PyTree, like: PyTree, where: str = "the root") -> PyTree:
    """Returns `tree` with the NamedTuples of `like`.

    Raises:
      ValueError: structure, a dtype or a rank differ; the message says where.
    """
    rule, got = _misfit(tree, like)
    if rule:
        raise ValueError(f"codec.conform: at {where}: {rule}; got {got}.")
    if isinstance(like, collections.abc.Mapping):
        return {key: conform(tree[key], like[key], f"{where}/{key}") for key in tree}
    if not isinstance(like, tuple | list):
        return tree
    names = getattr(like, "_fields", range(len(like)))
    values = [
        conform(value, example, f"{where}/{name}")
        for name, value, example in zip(names, tree, like, strict=True)
    ]
    if hasattr(like, "_make"):
        return like._make(values)
    return tuple(values) if isinstance(like, tuple) else values


def _misfit(tree: PyTree, like: PyTree) -> tuple[str, Any]:
    """Returns the rule that `tree` breaks at its root, and the value; or ``("", None)``."""
    kind = type(tree).__name__
    if isinstance(like, collections.abc.Mapping):
        if not isinstance(tree, dict) or tree.keys() != like.keys():
            return f"keys must be {list(like)}", list(tree) if isinstance(tree, dict) else kind
    elif isinstance(like, tuple | list):
        if not isinstance(tree, list if isinstance(like, list) else tuple):
            return f"must be a {type(like).__name__}", kind
        if len(tree) != len(like):
            return f"must have {len(like)} entries", len(tree)
    elif hasattr(like, "dtype") and hasattr(like, "shape"):
        rule = f"must be {like.dtype} of rank {len(like.shape)}"
        if not hasattr(tree, "dtype"):
            return rule, kind
        if tree.dtype != like.dtype or len(tree.shape) != len(like.shape):
            return rule, f"{tree.dtype} of shape {tree.shape}"
    elif type(tree) is not type(like):
        return f"must be {type(like).__name__}", kind
    return "", None


_CONTAINERS = {dict, list, tuple}


class _Out(NamedTuple):
    """The parts of a message, each in the order of the leaves."""

    tokens: list[bytes]  # the header
    scalars: list[bool | int | float]  # including the lengths of the texts
    arrays: list[Any]  # buffers
    texts: list[bytes]


def _write(x: Any, out: _Out, depth: int) -> None:
    """Writes a tree of at most `depth` levels of containers."""
    kind = type(x)
    if kind is np.ndarray:
        _write_array(x, out)
    elif kind in _CONTAINERS:
        _write_container(x, out, depth)
    elif x is None:
        out.tokens.append(b"N")
    elif kind is bool:
        out.tokens.append(b"B")
        out.scalars.append(x)
    elif isinstance(x, np.generic):
        _write_array(np.asarray(x), out, b"G")
    elif isinstance(x, float):
        out.tokens.append(b"F")
        out.scalars.append(x)
    elif isinstance(x, int):
        if not -_INT64 <= x < _INT64:
            raise ValueError(f"an int must fit in 64 bits; got {x}. Send it as a str.")
        out.tokens.append(b"I")
        out.scalars.append(x)
    elif isinstance(x, str | bytes | bytearray):
        text = x.encode() if isinstance(x, str) else bytes(x)
        out.tokens.append(b"S" if isinstance(x, str) else b"Y")
        out.scalars.append(len(text))
        out.texts.append(text)
    elif isinstance(x, tuple | list | collections.abc.Mapping):
        _write_container(x, out, depth)
    elif hasattr(x, "__array__") and hasattr(x, "dtype"):
        if x.dtype not in CODES and not isinstance(x, np.ndarray):
            raise ValueError(
                f"arrays of dtype {x.dtype} cannot be sent. For PRNG keys use jax.random.key_data."
            )
        _write_array(np.asarray(x), out)
    else:
        raise ValueError(f"objects of {kind.__module__}.{kind.__qualname__} cannot be sent.")


def _write_container(x: Any, out: _Out, depth: int) -> None:
    if depth == 0:
        raise ValueError(f"trees must be nested at most {MAX_DEPTH} deep.")
    if isinstance(x, collections.abc.Mapping):
        out.tokens.append(sized_token(b"D", len(x)))
        for key, value in x.items():
            if not isinstance(key, str):
                raise ValueError(f"keys must be str; got {key!r}.")
            out.tokens.append(text_token(key))
            _write(value, out, depth - 1)
        return
    if isinstance(x, list):
        out.tokens.append(sized_token(b"L", len(x)))
    elif hasattr(x, "_fields"):
        cls: Any = type(x)
        out.tokens.append(b"C" + text_token(_class_name(cls)) + sized_token(b"", len(x)))
    else:
        out.tokens.append(sized_token(b"T", len(x)))
    for value in x:
        _write(value, out, depth - 1)


def _write_array(x: np.ndarray, out: _Out, kind: bytes = b"A") -> None:
    token = array_token(kind, x)
    if token is None:
        x = x.astype(x.dtype.newbyteorder("="))
        token = array_token(kind, x)
    if token is None:
        raise ValueError(f"arrays of dtype {x.dtype} cannot be sent.")
    if not x.flags.c_contiguous:
        x = np.ascontiguousarray(x)
    # The buffer protocol does not support the dtypes of ml_dtypes.
    out.arrays.append(x.reshape(-1).view(np.uint8) if x.dtype.kind in "VE" else x)
    out.tokens.append(token)


def _share(x: Any, depth: int) -> Any:
    """Shares a tree of at most `depth` levels of containers; `_write` has the same cases."""
    kind = type(x)
    if kind is np.ndarray:
        return _view(x)
    if x is None or kind is bool or kind is float or kind is str or kind is bytes:
        return x
    if kind is int and -_INT64 <= x < _INT64:
        return x
    if isinstance(x, tuple | list | collections.abc.Mapping):
        if depth == 0:
            raise ValueError(f"trees must be nested at most {MAX_DEPTH} deep.")
        if isinstance(x, collections.abc.Mapping):
            for key in x:
                if not isinstance(key, str):
                    raise ValueError(f"keys must be str; got {key!r}.")
            return {key: _share(value, depth - 1) for key, value in x.items()}
        values = [_share(value, depth - 1) for value in x]
        if isinstance(x, list):
            return values
        return kind._make(values) if hasattr(x, "_fields") else tuple(values)
    if isinstance(x, np.generic) and x.dtype in CODES:
        return x
    # What is rare is sent as a message would be: it is converted, or refused with a reason.
    out = _Out([], [], [], [])
    _write(x, out, depth)
    return _view(np.asarray(x)) if out.arrays else decode(encode(x))


def _view(x: np.ndarray) -> np.ndarray:
    """Returns a read-only view of an array that can be sent."""
    if x.dtype not in CODES or not x.dtype.isnative:
        _write_array(x, _Out([], [], [], []))  # raises unless only the order of bytes is foreign
        x = x.astype(x.dtype.newbyteorder("="))
    view = x.view(np.ndarray)
    view.flags.writeable = False
    return view


@functools.lru_cache(1024)
def _class_name(cls: Any) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _where(tree: PyTree, path: str = "") -> str:
    """Returns the path of the first child that cannot be written."""
    if len(path) > 1000 or not isinstance(tree, tuple | list | collections.abc.Mapping):
        return path
    for key, child in getattr(tree, "items", lambda: enumerate(tree))():
        try:
            _write(child, _Out([], [], [], []), MAX_DEPTH)
        except ValueError:
            return _where(child, f"{path}/{key}")
    return path


def _read_texts(schema: Schema, scalars: list[Any], data: bytes | memoryview) -> None:
    """Replaces the lengths of the texts by the texts."""
    at = schema.end
    for index, is_str in schema.texts:
        end = at + scalars[index]
        if end > len(data):
            raise ValueError(f"codec.decode: truncated: {end} bytes expected; got {len(data)}.")
        text = bytes(data[at:end])
        scalars[index] = text.decode() if is_str else text
        at = end
    if at != len(data):
        raise ValueError(f"codec.decode: {len(data) - at} bytes after the end.")


def _build(node: Any, scalars: Iterator[Any], arrays: Iterator[np.ndarray]) -> PyTree:
    if node is SCALAR:
        return next(scalars)
    if node is ARRAY:
        return next(arrays)
    if node is None:
        return None
    kind, names, children = node
    values = [_build(child, scalars, arrays) for child in children]
    if kind == b"D":
        return dict(zip(names, values, strict=True))
    if kind == b"L":
        return values
    cls: Any = _CLASSES.get(names)
    if cls is None:
        return tuple(values)
    expected = len(cls._fields)
    if expected != len(values):
        raise ValueError(f"codec.decode: {names} must have {expected} fields; got {len(values)}.")
    return cls._make(values)


register(types.TimeStep, types.Transition, types.Batch, types.LearnerOutput)
