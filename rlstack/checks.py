"""Checks of configs, with error messages of one form, and the errors that several packages raise.

Worker processes of environments import this module, so it must not import JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import traceback
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class _DocWithFields:
    """A docstring that the texts below the fields follow, when it is read."""

    def __init__(self, own: str):
        self._own = own

    def __get__(self, _: object, owner: type) -> str:
        if "__match_args__" not in vars(owner):  # `dataclass` reads the docstring, then sets this
            return self._own
        reader = importlib.import_module("rlstack.imports.field_docs")  # read when it is needed
        text: str = reader.docstring(owner, self._own)
        return text


class Checked:
    """Base of frozen dataclasses that check the types and ranges of their fields.

    A number of numpy is accepted for a number, a list for a tuple, and a function for its name. The
    elements of tuples are not checked. ``help`` of such a class explains its fields.
    """

    def __init_subclass__(cls) -> None:
        """Adds the fields to the docstring."""
        if own := vars(cls).get("__doc__"):
            cls.__doc__ = _DocWithFields(own)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Checks the types, also those in inner configs; a subclass calls it before its own checks.

        Raises:
          WrongKindError: a value is of a wrong type.
        """
        if mistake := _mistake_in(self, ""):
            raise WrongKindError(f"{type(self).__name__}: {mistake}.")

    def require(self, field: str, holds: bool, rule: str) -> None:
        """Raises a ValueError that names the field, its rule and its value, unless ``holds``."""
        if not holds:
            raise ValueError(
                f"{type(self).__name__}: {field} must be {rule}; got {getattr(self, field)!r}."
            )

    def require_at_least(self, least: float, *fields: str) -> None:
        """Raises the same error for the first field that is less than ``least`` or NaN."""
        for field in fields:
            self.require(field, getattr(self, field) >= least, f"at least {least:g}")

    def require_finite(self, *fields: str) -> None:
        """Raises the same error for the first field that is NaN or infinite."""
        for field in fields:
            self.require(field, abs(getattr(self, field)) < math.inf, "finite")


def are_distinct(indices: Sequence[int]) -> bool:
    """Returns whether the numbers are distinct and at least 0, as indices of devices are."""
    return len(set(indices)) == len(indices) and min(indices, default=0) >= 0


class EnvError(ValueError):
    """An environment breaks the rules of its interface, so restarting it does not help."""


class ReportedError(RuntimeError):
    """An error that already names its place; commands print the message and add nothing."""


class EnvCrash(ReportedError):  # noqa: N818 (it crashed; the message has the error)
    """An environment raised an exception or does not answer; the message names the environment."""


class WrongKindError(TypeError, ValueError):
    """An object that the user gave, or an action of the environment, is of the wrong kind.

    It is a TypeError as in Python, and a ValueError like the other mistakes in a config, which
    commands report in one line.
    """


class ActionKindError(WrongKindError):
    """An environment's action is of a kind that an agent cannot take."""


class ExitError(ReportedError):
    """A function that a run calls raised SystemExit, or another error that is no `Exception`."""


@contextlib.contextmanager
def no_exits(*allowed: type[BaseException]) -> Iterator[None]:
    """Turns raised objects that are no `Exception`, except Ctrl-C, into an `ExitError`.

    Such an exception passes through every ``except Exception``. A SystemExit would then end a
    process without a word, and with status 0.

    Args:
      *allowed: kinds that stay as they are.

    Raises:
      ExitError: names what was raised, and the line of code.
    """
    kept: tuple[type[BaseException], ...] = (Exception, KeyboardInterrupt, *allowed)
    try:
        yield
    except kept:
        raise
    except BaseException as error:
        raise ExitError(
            f"{type(error).__name__}: {error} (in {place_of(error)}). What a run calls must "
            "return or raise an error; it must not end the process."
        ) from error


def place_of(source: BaseException | traceback.StackSummary, users: bool = False) -> str:
    """Returns "FILE:LINE: CODE" of the deepest line of the user, else of the deepest; "" of none.

    Args:
      source: an error, whose causes count too, or the lines of a stack. Lines of rlstack, of the
        standard library and of installed packages are not the user's.
      users: whether to consider only the user's lines.
    """
    lines = [] if isinstance(source, BaseException) else list(source)
    while isinstance(source, BaseException):
        lines += traceback.extract_tb(source.__traceback__)
        source = source.__cause__  # type: ignore[assignment]
    own = [x for x in lines if not any(part in f"{x.filename} {x.name}" for part in _OF_OTHERS)]
    last = own[-1:] if users else (own or lines)[-1:]
    return "".join(f"{x.filename}:{x.lineno}{': ' if x.line else ''}{x.line}" for x in last)


_OF_OTHERS = (
    *("site-packages", "dist-packages", "<frozen ", "<string> __", "<cattrs "),  # generated code
    *(file.rpartition("/")[0] + "/" for file in (traceback.__file__, __file__)),
)


def _mistake_in(config: Any, path: str) -> str:
    """Returns a message about the first value of a wrong type; "" if all have the right types."""
    every = hints_of(config).items()
    return _first(_mistake(hint, getattr(config, name), path + name) for name, hint in every)


def _mistake(hint: Any, value: Any, name: str) -> str:
    if not fits(hint, value):
        advice = f". Write {value.__name__}()" if isinstance(value, type) else ""
        return f"{name} must be {described(hint)}; got {value!r:.80}{advice}"
    if is_config(value):
        return _mistake_in(value, f"{name}.")
    if isinstance(value, Mapping) and (inner := typing.get_args(hint)):
        return _first(_mistake(inner[-1], one, f"{name}.{key}") for key, one in value.items())
    return ""


def _first(mistakes: Iterable[str]) -> str:
    return next(filter(None, mistakes), "")


def is_config(value: object) -> bool:
    """Returns whether a value is an instance of a dataclass, and not the class itself."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def hints_of(config: Any) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass, by name."""
    kind: Any = type(config)
    return hints_of_class(kind)


@functools.cache
def hints_of_class(kind: Any) -> dict[str, Any]:
    """Returns the types of the fields of a class of dataclasses, by name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def kinds_of(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, and any other type alone."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if union else (hint,)


def fits(hint: Any, value: object) -> bool:
    """Returns whether a field of this type may have this value."""
    return any(_fits(kind, value) for kind in kinds_of(hint))


def _fits(kind: Any, value: object) -> bool:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, Sequence) and not isinstance(value, str)
    if origin is dict:
        return isinstance(value, Mapping)
    if kind is str:
        return isinstance(value, str) or (callable(value) and not dataclasses.is_dataclass(value))
    if kind in (bool, types.NoneType):
        return isinstance(value, kind)
    if kind is int:
        return hasattr(value, "__index__") and not isinstance(value, bool)
    if kind is float:
        return hasattr(value, "__float__") and not isinstance(value, bool)
    return is_config(value) if dataclasses.is_dataclass(kind) else True


def described(hint: Any) -> str:
    """Describes the allowed values of a field of this type, for messages."""
    return " or ".join(map(_described, kinds_of(hint)))


def _described(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is typing.Literal:
        names = ", ".join(map(str, typing.get_args(kind)))
        return f"one of {names}" if len(typing.get_args(kind)) > 1 else names
    words = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        tuple: "a tuple",
        dict: "a dict",
        types.NoneType: "None",
    }
    return words.get(origin) or f"a {getattr(origin, '__name__', origin)}"
