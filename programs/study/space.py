"""The values that a study may try for an option: a `Range` of numbers, or a tuple of choices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlstack.programs.config import options
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment

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

    @property
    def ends(self) -> tuple[Option, Option]:
        """The lowest and the highest number."""
        return (int(self.low), int(self.high)) if self.whole else (self.low, self.high)

    def fitted(self, number: float) -> float | int:
        """Returns the value of the range that is nearest to a number."""
        step = self.step or (1.0 if self.whole else 0.0)
        if step:
            steps = round((number - self.low) / step)
            number = self.low + step * min(max(steps, 0), int((self.high - self.low) / step))
        number = min(max(number, self.low), self.high)
        return round(number) if self.whole else number


Values = Range | tuple[Option, ...]


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
    if isinstance(values, Range) and type(options.value_of(base, name)) is int:
        try:
            values = dataclasses.replace(values, whole=True)
        except ValueError as error:
            raise ValueError(f"{flag} {name}: {error}.") from None
    check(name, values, base, flag)
    return values


def check(name: str, values: Values, base: Experiment, flag: str = "--space") -> None:
    """Raises a ValueError if the experiment has no such option, or it does not take the values."""
    for value in values.ends if isinstance(values, Range) else values:
        options.replaced(base, name, value, flag)


def require_distinct(name: str, values: Sequence[Any], text: Callable[[Any], str]) -> None:
    """Raises a ValueError unless there are one or more values, of which all texts differ."""
    if not values or len(set(map(repr, values))) < len(values):
        raise ValueError(
            f"Study: {name} must be one or more different values; got "
            f"{' '.join(map(str, values)) or 'none'}."
        )
    seen: dict[str, Any] = {}
    for value in values:
        if (found := text(value)) in seen:
            raise ValueError(
                f"Study: {name} must have different names, because each run has a directory of "
                f"this name; {seen[found]!r} and {value!r} are both {found}."
            )
        seen[found] = value


def to_tree(values: Values) -> Any:
    """Returns values in their JSON form: a list of choices, or the fields of a range."""
    return dataclasses.asdict(values) if isinstance(values, Range) else list(values)


def from_tree(tree: Any) -> Values:
    """Returns values from their JSON form: a list, the fields of a range, or an older form."""
    if isinstance(tree, dict):
        return tuple(tree["values"]) if "values" in tree else Range(**tree)
    return tuple(tree)


def draw(values: Values, rng: np.random.Generator) -> Option:
    """Returns a value of a range or one of the choices, each with the same probability."""
    if not isinstance(values, Range):
        return values[int(rng.integers(len(values)))]
    if values.log:
        return values.fitted(float(np.exp(rng.uniform(np.log(values.low), np.log(values.high)))))
    return values.fitted(float(rng.uniform(values.low, values.high)))


def shown(value: Option) -> str:
    """Returns a value as tables show it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _parsed(words: Sequence[Option]) -> Values:
    low, high, *rest = words if len(words) >= 2 else (*words, "", "")
    if not (_is_number(low) and _is_number(high)) or (rest and _is_number(rest[0])):
        choices = tuple(words[1:] if list(words[:1]) == ["choice"] else words)
        if len(choices) < 2 or len(set(map(repr, choices))) < len(choices):
            got = _words(*choices) or "none"
            raise ValueError(f"must be two or more different values; got {got}")
        return choices
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


def _words(*values: Option) -> str:
    return " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
