"""``--env.options NAME VALUE ...`` and the like, where the preset has names and values of its own.

The parser of the command line makes one option of each entry that a preset has, such as
``--env.options.delay``, and then accepts no list of names and values. This module takes such lists
from the arguments and joins them with the preset's entries.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlstack.programs.config import options
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
        value = options.value_of(experiment, args[at].removeprefix("--"))
        if args[at].startswith("--") and isinstance(value, dict) and value:
            end = at + 1
            while end < len(args) and not args[end].startswith("--"):
                end += 1
            experiment = _joined(experiment, args[at], args[at + 1 : end])
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
        vary[name] = [options.parsed(word) for word in values]
        at = end
    return vary, left


def _joined(experiment: Experiment, option: str, words: Sequence[str]) -> Experiment:
    """Returns the experiment with the names and values added to an option that is a dict."""
    if len(words) % 2 or not words:
        raise ValueError(
            f"{option}: must be names and values, such as length 4; got {' '.join(words)!r}."
        )
    name = option.removeprefix("--")
    found: dict[str, Option] = dict(options.value_of(experiment, name))
    for key, word in zip(words[::2], words[1::2], strict=True):
        if word == "None":
            found.pop(key, None)
        else:
            value = options.parsed(word)
            # The parser expects values of the type that the preset has.
            real = type(found.get(key)) is float and type(value) is int
            found[key] = float(value) if real else value
    return options.replaced(experiment, name, found, "")
