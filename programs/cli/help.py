"""The help of `rlstack train PRESET`: the options that matter first, and those of one group.

An experiment has some 250 options, which `--help-all` prints in groups. Most runs change few of
them, so `--help` explains those and names the groups. Its texts are those in the source of the
configs, as the parser's own help has them.
"""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import textwrap
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rlstack.checks import hints_of, is_config
from rlstack.imports import field_docs
from rlstack.programs.cli.options import UsageError
from rlstack.programs.config import options
from rlstack.programs.config.options import Entry
from rlstack.references import name_of, nearest

_FIRST = (
    "frames",
    "seed",
    "topology",
    "run-dir",
    "seeds",
    "env.num-envs",
    "agent.optimizer.learning-rate",
    "agent.discount",
    "replay.batch-size",
    "evaluator.period",
    "loggers",
    "dry-run",
)
_GENERAL = "general"  # the group of the options without a dot
_ABOUT_GENERAL = "What runs, for how long, and what it writes."
_COMPONENT = re.compile(r"agent\.[\w-]+-optimizer")
_FLAGS = ("-h", "--help", "--help-all")


class Option(NamedTuple):
    """An option with its help."""

    name: str  # without its dashes
    choices: tuple[str, ...]  # its values, if it has few
    text: str
    default: str


class Group(NamedTuple):
    """The options of one config, such as ``agent.optimizer``."""

    name: str
    text: str
    options: tuple[Option, ...]


def asked(args: Sequence[str]) -> bool:
    """Returns whether the arguments ask for help."""
    return any(arg in _FLAGS for arg in args)


def show(
    prog: str,
    description: str,
    args: Sequence[str],
    print_all: Callable[[], object],
    default: Any,
) -> None:
    """Prints the help that the arguments ask for.

    Args:
      prog: the command with its preset.
      description: description of the preset.
      args: the arguments, with ``--help``, ``--help GROUP`` or ``--help-all`` among them.
      print_all: prints the parser's own help, which has all options.
      default: the dataclass of all options; see `groups_of`.

    Raises:
      UsageError: there is no such group.
    """
    if "--help-all" in args:
        print_all()
        return
    groups = groups_of(default)
    at = next(i for i, arg in enumerate(args) if arg in _FLAGS)
    following = args[at + 1 : at + 2]
    if not following or following[0].startswith("-"):
        own = [entry.name for entry in _own(default)]
        print(_short(prog, description, groups, dict.fromkeys([*_FIRST, *own])))
        return
    name = following[0].replace("_", "-")
    found = [group for group in groups if f"{group.name}.".startswith(f"{name}.")]
    if not found:
        hint = nearest(name, [group.name for group in groups])
        raise UsageError(f"there is no group of options {name!r}{hint}")
    print("\n\n".join(map(_described, found)))


def groups_of(default: Any) -> list[Group]:
    """Returns all options by groups.

    Args:
      default: the dataclass of the options of a command. Its first field is the experiment, whose
        options have no prefix.
    """
    experiment = getattr(default, next(iter(hints_of(default))))
    groups: dict[str, list[Option]] = {_GENERAL: []}
    for entry in (*_own(default), *options.entries(experiment), *_own(default, inner=True)):
        group = entry.name.rpartition(".")[0] or _GENERAL
        groups.setdefault(group, []).append(_option(entry))
    return [Group(g, _about(g, default, experiment), tuple(o)) for g, o in groups.items()]


def _own(default: Any, inner: bool = False) -> Iterator[Entry]:
    """Yields the options of a command itself, or of configs among them."""
    for field, hint in list(hints_of(default).items())[1:]:
        value, name = getattr(default, field), field.replace("_", "-")
        if inner and is_config(value):
            yield from options.entries(value, f"{name}.")
        elif not (inner or is_config(value)):
            yield Entry(name, value, hint, default, field)


def _option(entry: Entry) -> Option:
    is_choice = typing.get_origin(entry.hint) is typing.Literal
    choices = tuple(map(str, typing.get_args(entry.hint))) if is_choice else ()
    text = "" if isinstance(entry.config, dict) else _text_of(entry.config, entry.field)
    return Option(entry.name, choices, text, " ".join(_words(entry.value)))


def _words(value: Any) -> Iterator[str]:
    """Yields the words of a value on the command line."""
    if isinstance(value, tuple | list):
        for one in value:
            yield from _words(one)
    elif not isinstance(value, dict):
        yield shlex.quote(name_of(value) if callable(value) else str(value))


def _about(group: str, default: Any, experiment: Any) -> str:
    if group == _GENERAL:
        return _ABOUT_GENERAL
    if _COMPONENT.fullmatch(group):
        return "As agent.optimizer, for this component alone."
    *way, field = options.path(group)
    root = experiment if hasattr(experiment, (*way, field)[0]) else default
    parent = options.value_of(root, ".".join(way)) if way else root
    config = options.value_of(root, group)
    hint = options.hints_of_parser(parent)[field] if is_config(parent) else None
    if is_config(config) and hint is not type(config):  # one of several configs, or an entry
        return _paragraph(inspect.getdoc(type(config)) or "")
    return _text_of(parent, field) or _paragraph(inspect.getdoc(type(config)) or "")


def _paragraph(text: str) -> str:
    return " ".join(text.partition("\n\n")[0].split())


def _text_of(config: Any, field: str) -> str:
    kind: Any = type(config)
    return field_docs.texts(kind)[field]


def overview(default: Any) -> str:
    """Returns the options that most runs change, without the values of a preset.

    Args:
      default: the dataclass of all options, of any preset; see `groups_of`.
    """
    every = {option.name: option for group in groups_of(default) for option in group.options}
    names = dict.fromkeys([*_FIRST, *(entry.name for entry in _own(default))])
    rows = [
        (f"--{name}", f"{_sentence(every[name].text)} {_choices(every[name])}")
        for name in names
        if name in every
    ]
    return f"options that most runs change; each preset has values of its own:\n{_table(rows)}"


def _short(prog: str, description: str, groups: Sequence[Group], names: Iterable[str]) -> str:
    every = {option.name: option for group in groups for option in group.options}
    first = [
        (_head(every[name]), f"{_sentence(every[name].text)} {_choices(every[name])}")
        for name in names
        if name in every
    ]
    others = [(group.name, _sentence(group.text)) for group in groups]
    return "\n".join(
        [
            f"usage: {prog} [options]\n",
            *([f"{description}\n"] if description else []),
            "The options that most runs change, with the values of this preset:\n",
            _table(first),
            "\nAll options, by group: --help GROUP explains those of a group, --help-all all.\n",
            _table(others),
        ]
    )


def _described(group: Group) -> str:
    rows = [(_head(option), f"{option.text} {_choices(option)}") for option in group.options]
    return f"{group.name}: {group.text}\n\n{_table(rows)}"


def _head(option: Option) -> str:
    return f"--{option.name} {option.default}".rstrip()


def _choices(option: Option) -> str:
    """Returns a sentence with the values of an option that has few."""
    return f"Values: {', '.join(option.choices)}." if option.choices else ""


def _sentence(text: str) -> str:
    """Returns the first sentence of a text."""
    return re.split(r"(?<=\.) ", text, maxsplit=1)[0]


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """Returns names and texts in two columns, as wide as the terminal."""
    wide = min(44, max(len(name) for name, _ in rows)) + 4
    lines = []
    for name, text in rows:
        filled = textwrap.wrap(text, max(30, shutil.get_terminal_size().columns - wide)) or [""]
        head = f"  {name}"
        if len(head) + 2 > wide:
            lines.append(head)
            head = ""
        lines.append(f"{head:{wide}}{filled[0]}".rstrip())
        lines += [f"{'':{wide}}{line}" for line in filled[1:]]
    return "\n".join(lines)
