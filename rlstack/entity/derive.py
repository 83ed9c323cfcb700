"""Spaces and features derived from dataclasses and enums, so that a game declares them once.

::

    @dataclasses.dataclass
    class Robot:
        position: tuple[float, float]
        heading: Heading  # an enum
        charged: bool

    entity_type(Robot, capacity=2).features
    # ("position.0", "position.1", "heading=NORTH", "heading=EAST", ..., "charged")
    features(Robot, robots)  # float32 [len(robots), 2 + members of Heading + 1]
    categorical(Move, capacity=2)  # Move is an enum, a dataclass of enums or a tuple of enums
    choices(Move)[index]  # the choice of an actor as a member, instance or tuple
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlstack.entity.spaces import Categorical, EntityType, GlobalCategorical

Choosable = type | tuple[type[enum.Enum], ...]
"""An enum, a dataclass with enum fields, or a tuple of enums."""

_Append = Callable[[Any, list[object]], None]  # appends the features of a value to a list


def entity_type(cls: type, capacity: int = 1) -> EntityType:
    """Returns an entity type with the fields of a dataclass as features.

    Raises:
      TypeError: ``cls`` is not a dataclass, or a field is of a kind that has no features.
    """
    return EntityType(feature_names(cls), capacity)


def feature_names(cls: type) -> tuple[str, ...]:
    """Returns the names of the features of a dataclass, also usable as global features.

    A number or bool is one feature, ``field``; an enum has one for each member, ``field=MEMBER``;
    a nested dataclass has ``field.inner``; a tuple of fixed length has ``field.0``, ``field.1``.

    Raises:
      TypeError: ``cls`` is not a dataclass, or a field is of a kind that has no features.
    """
    return _features_of(cls)[0]


def features(cls: type, instances: Sequence[object]) -> np.ndarray:
    """Returns the features of instances of ``cls``, float32 ``[len(instances), features]``.

    Raises:
      TypeError: a field holds a value of another type than it declares.
      ValueError: a tuple has another length than it declares.
    """
    names, append = _features_of(cls)
    rows: list[object] = []
    for instance in instances:
        append(instance, rows)
    array = np.array(rows)
    if not rows or array.dtype.kind in "fiub":
        return array.astype(np.float32).reshape(len(instances), len(names))
    at = next(i for i, value in enumerate(rows) if not _is_number(value))
    raise TypeError(
        f"features: {cls.__name__}.{names[at % len(names)]}: must be a number; got {rows[at]!r} "
        f"in instance {at // len(names)}. Convert it first."
    )


def choices(of: Choosable) -> tuple[Any, ...]:
    """Returns the choices that a type describes, in order.

    Args:
      of: an enum (the choices are its members), a tuple of enums (the choices are tuples; the last
          part varies fastest), or a dataclass with enum fields (the choices are instances; the last
          field varies fastest).

    Raises:
      TypeError: ``of`` is none of these.
    """
    return _choices_of(of)


def categorical(of: Choosable, capacity: int = 1) -> Categorical:
    """Returns the categorical action of ``choices(of)``, labelled with the members' names."""
    return Categorical(_labels(of), capacity)


def global_categorical(of: Choosable) -> GlobalCategorical:
    """Returns the global action of ``choices(of)``, labelled with the members' names."""
    return GlobalCategorical(_labels(of))


@functools.cache
def _features_of(cls: type) -> tuple[tuple[str, ...], _Append]:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"feature_names: must be given a dataclass; got {cls!r}. Decorate it.")
    names, append = _dataclass(cls, "", ())
    return tuple(names), append


def _dataclass(cls: type, prefix: str, within: tuple[type, ...]) -> tuple[list[str], _Append]:
    if cls in within:
        raise TypeError(f"feature_names: {cls.__name__}: must not contain itself; got {prefix}.")
    hints = typing.get_type_hints(cls)
    names: list[str] = []
    parts: list[tuple[str, _Append]] = []
    for field in dataclasses.fields(cls):
        more, append = _field(hints[field.name], f"{prefix}{field.name}", (*within, cls))
        names += more
        parts.append((field.name, append))

    def append_fields(value: object, row: list[object]) -> None:
        for name, append in parts:
            append(getattr(value, name), row)

    return names, append_fields


def _field(kind: object, name: str, within: tuple[type, ...]) -> tuple[list[str], _Append]:
    if typing.get_origin(kind) is tuple:
        items = typing.get_args(kind)
        if Ellipsis not in items:
            return _tuple(items, name, within)
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not issubclass(kind, enum.Flag):
            return [f"{name}={member.name}" for member in kind], _one_hot(kind, name)
    elif isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, f"{name}.", within)
    elif isinstance(kind, type) and issubclass(kind, int | float | np.number | np.bool_):
        return [name], lambda value, row: row.append(value)
    raise TypeError(
        f"feature_names: {within[0].__name__}.{name}: must be a number, a bool, an enum, a "
        f"dataclass or a tuple of fixed length of these; got {kind}. Leave it out of the dataclass."
    )


def _tuple(
    items: tuple[object, ...], name: str, within: tuple[type, ...]
) -> tuple[list[str], _Append]:
    names: list[str] = []
    appends: list[_Append] = []
    for i, item in enumerate(items):
        more, append = _field(item, f"{name}.{i}", within)
        names += more
        appends.append(append)

    def append_items(value: Sequence[object], row: list[object]) -> None:
        if len(value) != len(appends):
            raise ValueError(
                f"features: {within[0].__name__}.{name}: must have {len(appends)} parts; "
                f"got {value}."
            )
        for item, append in zip(value, appends, strict=True):
            append(item, row)

    return names, append_items


def _one_hot(kind: type[enum.Enum], name: str) -> _Append:
    members = list(kind)
    rows = {member: [float(member is other) for other in members] for member in members}

    def append(value: Any, row: list[object]) -> None:
        if type(value) is not kind:
            raise TypeError(
                f"features: {name}: must be a member of {kind.__name__}; got {value!r}."
            )
        row += rows[value]

    return append


@functools.cache
def _choices_of(of: Choosable) -> tuple[Any, ...]:
    parts = _parts(of)
    if isinstance(of, type) and issubclass(of, enum.Enum):
        return tuple(of)
    combined = itertools.product(*parts)
    if isinstance(of, tuple):
        return tuple(combined)
    names = [field.name for field in dataclasses.fields(of)]  # type: ignore[arg-type]
    return tuple(of(**dict(zip(names, values, strict=True))) for values in combined)


def _labels(of: Choosable) -> tuple[str, ...]:
    combined = itertools.product(*_parts(of))
    return tuple(" ".join(member.name for member in members) for members in combined)


def _parts(of: Choosable) -> list[type[enum.Enum]]:
    """Returns the enums that a choice consists of."""
    parts: list[Any] = [of]
    if isinstance(of, tuple):
        parts = list(of)
    elif isinstance(of, type) and dataclasses.is_dataclass(of):
        hints = typing.get_type_hints(of)
        parts = [hints[field.name] for field in dataclasses.fields(of)]
    if not parts or not all(isinstance(p, type) and issubclass(p, enum.Enum) for p in parts):
        raise TypeError(
            "categorical: must be given an enum, a tuple of enums or a dataclass of enums; "
            f"got {of!r}. Make each part an enum."
        )
    return parts


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)
