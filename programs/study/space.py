"""The values that a sweep may try for an option."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.study.trials import with_option

_FORMS = (
    "LOW HIGH, with log, int or step STEP behind it where wanted, or values to choose from, such "
    "as 1e-5 1e-2 log, or mlp nature"
)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two others, which belong to the range."""

    low: float
    high: float
    log: bool = False  # whether each factor of ten gets as many values
    whole: bool = False  # whether values are integers
    step: float = 0.0  # between two values, from `low` on; 0 for any number, or any integer

    def __post_init__(self) -> None:
        ends = (self.low, self.high)
        if not (all(map(math.isfinite, ends)) and self.low < self.high):
            raise ValueError(f"must be two numbers, the lower one first; got {_words(*ends)}")
        if self.log and self.low <= 0:
            raise ValueError(f"must be positive with log; got {_words(*ends)}")
        if self.step < 0 or (self.log and self.step):
            raise ValueError(f"a step must be positive, and without log; got {self.step:g}")
        if self.whole and not all(number == int(number) for number in (*ends, self.step)):
            raise ValueError(f"must be whole numbers; got {_words(*ends, self.step)}")


@dataclasses.dataclass(frozen=True)
class Choices:
    """Some values, without an order."""

    values: tuple[Option, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2 or len(set(map(repr, self.values))) < len(self.values):
            raise ValueError(
                f"must be two or more different values; got {_words(*self.values) or 'none'}"
            )


Values = Range | Choices


def from_words(
    name: str, words: Sequence[Option], base: Experiment, flag: str = "--space"
) -> Values:
    """Returns the values that the words behind ``--space NAME`` describe.

    Two numbers are a range. Other values are choices; the word ``choice`` before them makes two
    numbers choices too. A range of an option whose present value is an integer has integers only.

    Args:
      name: the name of the option.
      words: the words after the name.
      base: the experiment that has the option.
      flag: another name of ``--space``.

    Raises:
      ValueError: the words describe no values, or the option does not take them.
    """
    try:
        values = _parsed(words)
    except ValueError as error:
        raise ValueError(f"{flag} {name}: {error}. Give {_FORMS}.") from None
    if isinstance(values, Range) and not values.whole and _takes_integers(name, values, base):
        try:
            values = dataclasses.replace(values, whole=True)
        except ValueError as error:
            raise ValueError(f"{flag} {name}: {error}.") from None
    check(name, values, base, flag)
    return values


def check(name: str, values: Values, base: Experiment, flag: str = "--space") -> None:
    """Raises a ValueError if the experiment has no such option, or it does not take the values."""
    ends = (values.low, values.high) if isinstance(values, Range) else values.values
    for value in ends:
        whole = isinstance(values, Range) and values.whole
        with_option(base, name, int(value) if whole else value, flag)


def to_tree(values: Values) -> dict[str, Any]:
    """Returns values as JSON has them."""
    return dataclasses.asdict(values)


def from_tree(tree: Mapping[str, Any]) -> Values:
    """Returns the values that `to_tree` described."""
    return Choices(tuple(tree["values"])) if "values" in tree else Range(**tree)


def _parsed(words: Sequence[Option]) -> Values:
    if list(words[:1]) == ["choice"]:
        return Choices(tuple(words[1:]))
    low, high, *rest = words if len(words) >= 2 else (*words, "", "")
    if not (_is_number(low) and _is_number(high)) or (rest and _is_number(rest[0])):
        return Choices(tuple(words))
    given: dict[str, Any] = {}
    while rest:
        word = rest.pop(0)
        if word in ("log", "int"):
            given["log" if word == "log" else "whole"] = True
        elif word == "step" and rest and _is_number(rest[0]):
            given["step"] = float(rest.pop(0))
        else:
            raise ValueError(f"{word!r} is not known")
    return Range(float(low), float(high), **given)


def _is_number(word: Option) -> bool:
    return isinstance(word, int | float) and not isinstance(word, bool)


def _takes_integers(name: str, values: Range, base: Experiment) -> bool:
    """Whether the option's value in the base experiment is an integer."""
    config: Any = base
    for field in name.replace("-", "_").split("."):
        config = config.get(field) if isinstance(config, dict) else getattr(config, field, None)
    return isinstance(config, int) and not isinstance(config, bool)


def _words(*values: Option) -> str:
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
