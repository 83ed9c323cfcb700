"""``--env.options NAME VALUE ...`` and the like, where the preset has names and values of its own.

The parser of the command line makes one option of each entry that a preset has, such as
``--env.options.delay``, and then accepts no list of names and values. This module takes such lists
from the arguments and joins them with the preset's entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment


def join(args: Sequence[str], experiment: Experiment) -> tuple[list[str], Experiment]:
    """Returns the other arguments, and the preset with the options that the arguments give.

    Args:
      args: the words of the command line after the preset's name.
      experiment: the preset. Options of fields for which the preset has no entries stay in the
        other arguments.

    Raises:
      ValueError: a name has no value.
    """
    left: list[str] = []
    at = 0
    while at < len(args):
        path = args[at].removeprefix("--").replace("-", "_").split(".")
        if args[at].startswith("--") and _has_entries(experiment, path):
            end = at + 1
            while end < len(args) and not args[end].startswith("--"):
                end += 1
            experiment = _joined(experiment, path, args[at], args[at + 1 : end])
            at = end
        else:
            left.append(args[at])
            at += 1
    return left, experiment


def take_vary(
    args: Sequence[str], flag: str = "--vary"
) -> tuple[dict[str, list[Option]], list[str]]:
    """Returns the values of each option that ``--vary NAME VALUE ...`` names, and the other words.

    Args:
      args: the words of the command line.
      flag: the flag to look for.

    Raises:
      ValueError: a ``--vary`` has no name, no values, or a name that was given before.
    """
    vary: dict[str, list[Option]] = {}
    left: list[str] = []
    at = 0
    while at < len(args):
        if args[at] != flag:
            left.append(args[at])
            at += 1
            continue
        end = at + 1
        while end < len(args) and not args[end].startswith("--"):
            end += 1
        name, *values = args[at + 1 : end] or [""]
        if not values or name in vary:
            raise ValueError(
                f"{flag}: must be the name of an option and all its values, such as agent.discount "
                f"0.9 0.99, and each option once; got {' '.join(args[at + 1 : end])!r}."
            )
        vary[name] = [_value(word) for word in values]
        at = end
    return vary, left


def _has_entries(config: Any, path: Sequence[str]) -> bool:
    for name in path:
        config = getattr(config, name, None) if dataclasses.is_dataclass(config) else None
    return isinstance(config, dict) and bool(config)


def _joined(config: Any, path: Sequence[str], option: str, words: Sequence[str]) -> Any:
    """Returns a config with the names and values added to the dict at the end of the path."""
    field, *rest = path
    if rest:
        changed = _joined(getattr(config, field), rest, option, words)
        return dataclasses.replace(config, **{field: changed})
    if len(words) % 2 or not words:
        raise ValueError(
            f"{option}: must be names and values, such as length 4; got {' '.join(words)!r}."
        )
    options: dict[str, Option] = dict(getattr(config, field))
    for name, word in zip(words[::2], words[1::2], strict=True):
        if word == "None":
            options.pop(name, None)
        else:
            value = _value(word)
            # The parser expects values of the type that the preset has.
            real = type(options.get(name)) is float and type(value) is int
            options[name] = float(value) if real else value
    return dataclasses.replace(config, **{field: options})


def _value(word: str) -> Option:
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word
