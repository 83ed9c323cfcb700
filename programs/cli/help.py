"""The help of `rlstack train PRESET`: the options that matter first, and those of one group.

An experiment has some 250 options, which `--help-all` prints in groups. Most runs change few of
them, so `--help` explains those and names the groups.
"""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rlstack.programs.cli.options import UsageError, printed_help
from rlstack.references import nearest

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
_TITLE = re.compile(r" (?:(?P<group>[\w.-]+) )?options")
_DEFAULT = re.compile(r" ?\(default: (?P<value>.*)\)$")


class Option(NamedTuple):
    """An option, as the parser describes it."""

    name: str  # without its dashes
    values: str  # what may follow it
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
    own: Sequence[str] = (),
) -> None:
    """Prints the help that the arguments ask for.

    Args:
      prog: the command with its preset.
      description: description of the preset.
      args: the arguments, with ``--help``, ``--help GROUP`` or ``--help-all`` among them.
      print_all: prints the parser's own help, which has all options.
      own: names of options of this command, which are among those that are explained.

    Raises:
      UsageError: there is no such group.
    """
    if "--help-all" in args:
        print_all()
        return
    groups = parse(printed_help(print_all))
    at = next(i for i, arg in enumerate(args) if arg in _FLAGS)
    following = args[at + 1 : at + 2]
    if not following or following[0].startswith("-"):
        names = [name.replace("_", "-") for name in own]
        print(_short(prog, description, groups, dict.fromkeys([*_FIRST, *names])))
        return
    name = following[0].replace("_", "-")
    found = [group for group in groups if f"{group.name}.".startswith(f"{name}.")]
    if not found:
        hint = nearest(name, {group.name: group for group in groups})
        raise UsageError(f"there is no group of options {name!r}{hint}")
    print("\n\n".join(map(_described, found)))


def parse(text: str) -> list[Group]:
    """Returns the groups of options in the parser's help, as it is without a terminal."""
    groups: list[tuple[str, list[str]]] = []
    for line in map(str.rstrip, text.splitlines()):
        if title := _TITLE.fullmatch(line):
            groups.append((title["group"] or _GENERAL, []))
        elif groups:
            groups[-1][1].append(line[2:])
    return [_group(name, lines[1:]) for name, lines in groups]  # without the rule below the title


def _group(name: str, lines: Sequence[str]) -> Group:
    rule = next((i for i, line in enumerate(lines) if line.startswith("---")), -1)
    about = " ".join(lines[: max(rule, 0)]).partition("  ")[0]
    heads: list[list[str]] = []
    texts: list[list[str]] = []
    for line in filter(None, lines[rule + 1 :]):
        if line.startswith("-"):
            heads.append([line])
            texts.append([])
        else:
            (texts if line.startswith(" ") else heads)[-1].append(line.strip())
    options = [_option(" ".join(h), " ".join(t)) for h, t in zip(heads, texts, strict=True)]
    if _COMPONENT.fullmatch(name):
        about = "As agent.optimizer, for this component alone."
    return Group(
        name, about or _ABOUT_GENERAL, tuple(option for option in options if option.name != "help")
    )


def _option(head: str, text: str) -> Option:
    name, _, values = head.removeprefix("-h, ").partition(" ")
    found = _DEFAULT.search(text)
    default = found["value"] if found else ""
    return Option(name.removeprefix("--"), values, _DEFAULT.sub("", text), default)


def _short(prog: str, description: str, groups: Sequence[Group], names: Iterable[str]) -> str:
    options = {option.name: option for group in groups for option in group.options}
    first = [
        (_head(options[name]), f"{_sentence(options[name].text)} {_choices(options[name])}")
        for name in names
        if name in options
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
    values = option.values
    one_list = values.startswith("{") and values.find("}") == len(values) - 1
    if not one_list or values == "{True,False}":
        return ""
    return f"Values: {values[1:-1].replace(',', ', ')}."


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
