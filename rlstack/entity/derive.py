"""Spaces and features from dataclasses and enums, so that a game states them once.

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
    choices(Move)[index]  # what an actor's choice means
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

_Put = Callable[[Any, list], None]  # appends a value's features to a list


def entity_type(cls: type, capacity: int = 1) -> EntityType:
    """Returns the entity type of which ``cls``, a dataclass, holds one entity's features.

    Raises:
      TypeError: ``cls`` is no dataclass, or a field is of a kind that has no features.
    """
    return EntityType(feature_names(cls), capacity)


def feature_names(cls: type) -> tuple[str, ...]:
    """Returns the names of the features of a dataclass, for ``ObsSpace.global_features`` too.

    A number or bool is one feature, ``field``; an enum one for each member, ``field=MEMBER``; a
    nested dataclass ``field.inner``; a tuple of fixed length ``field.0``, ``field.1``.

    Raises:
      TypeError: ``cls`` is no dataclass, or a field is of a kind that has no features.
    """
    return _plan_of(cls)[0]


def features(cls: type, instances: Sequence[Any]) -> np.ndarray:
    """Returns the features of instances of ``cls``, float32 ``[len(instances), features]``.

    Raises:
      TypeError: a field holds something else than it declares.
      ValueError: a tuple is of another length.
    """
    names, put = _plan_of(cls)
    rows: list[Any] = []
    for instance in instances:
        put(instance, rows)
    array = np.array(rows)
    if not rows or array.dtype.kind in "fiub":
        return array.astype(np.float32).reshape(len(instances), len(names))
    at = next(i for i, value in enumerate(rows) if not _is_number(value))
    raise TypeError(
        f"features: {cls.__name__}.{names[at % len(names)]}: must be a number; got {rows[at]!r} "
        f"in instance {at // len(names)}. Convert it first."
    )


def choices(of: Any) -> tuple[Any, ...]:
    """Returns what can be chosen, in order.

    Args:
      of: an enum: its members. A tuple of enums: tuples, the last part varying fastest. A dataclass
        whose fields are enums: instances, the last field varying fastest.

    Raises:
      TypeError: something else.
    """
    return _choices_of(of)


def categorical(of: Any, capacity: int = 1) -> Categorical:
    """Returns the action space of ``choices(of)``, labelled by the members' names."""
    return Categorical(_labels(of), capacity)


def global_categorical(of: Any) -> GlobalCategorical:
    """Returns the global action space of ``choices(of)``, labelled by the members' names."""
    return GlobalCategorical(_labels(of))


@functools.cache
def _plan_of(cls: type) -> tuple[tuple[str, ...], _Put]:
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise TypeError(f"feature_names: must be given a dataclass; got {cls!r}. Decorate it.")
    names, put = _dataclass(cls, "", ())
    return tuple(names), put


def _dataclass(cls: type, prefix: str, within: tuple[type, ...]) -> tuple[list[str], _Put]:
    if cls in within:
        raise TypeError(f"feature_names: {cls.__name__}: must not contain itself; got {prefix}.")
    hints = typing.get_type_hints(cls)
    names: list[str] = []
    parts: list[tuple[str, _Put]] = []
    for field in dataclasses.fields(cls):
        more, put = _field(hints[field.name], f"{prefix}{field.name}", (*within, cls))
        names += more
        parts.append((field.name, put))

    def put_all(value: Any, row: list) -> None:
        for name, put in parts:
            put(getattr(value, name), row)

    return names, put_all


def _field(kind: Any, name: str, within: tuple[type, ...]) -> tuple[list[str], _Put]:
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


def _tuple(items: tuple[Any, ...], name: str, within: tuple[type, ...]) -> tuple[list[str], _Put]:
    names: list[str] = []
    puts: list[_Put] = []
    for i, item in enumerate(items):
        more, put = _field(item, f"{name}.{i}", within)
        names += more
        puts.append(put)

    def put_items(value: Any, row: list) -> None:
        if len(value) != len(puts):
            raise ValueError(
                f"features: {within[0].__name__}.{name}: must have {len(puts)} parts; got {value}."
            )
        for item, put in zip(value, puts, strict=True):
            put(item, row)

    return names, put_items


def _one_hot(kind: type[enum.Enum], name: str) -> _Put:
    members = list(kind)
    rows = {member: [float(member is other) for other in members] for member in members}

    def put(value: Any, row: list) -> None:
        if type(value) is not kind:
            raise TypeError(
                f"features: {name}: must be a member of {kind.__name__}; got {value!r}."
            )
        row += rows[value]

    return put


@functools.cache
def _choices_of(of: Any) -> tuple[Any, ...]:
    parts = _parts(of)
    if isinstance(of, type) and issubclass(of, enum.Enum):
        return tuple(of)
    combined = itertools.product(*parts)
    if isinstance(of, tuple):
        return tuple(combined)
    names = [field.name for field in dataclasses.fields(of)]
    return tuple(of(**dict(zip(names, values, strict=True))) for values in combined)


def _labels(of: Any) -> tuple[str, ...]:
    combined = itertools.product(*_parts(of))
    return tuple(" ".join(member.name for member in members) for members in combined)


def _parts(of: Any) -> list[type[enum.Enum]]:
    """Returns the enums that a choice is made of."""
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)
