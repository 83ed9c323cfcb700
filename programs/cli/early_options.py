"""Refuses options that do not exist, or get no such value, before JAX is imported.

The options depend on the agent's config, whose module imports JAX; that takes longer than all else.
So this module reads the fields of the config in the source, without importing it. It has the
parser's words, and leaves to the parser what the sources do not tell: agents and presets of the
user's own, presets of several agents, configs that may be missing, and what configs check.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

import rlstack
from rlstack.checks import hints_of_class, kinds_of
from rlstack.programs.cli.options import UsageError, parse, whole_number
from rlstack.programs.config import options as dotted
from rlstack.programs.config.experiment import Experiment
from rlstack.references import Sources

_ROOT = Path(rlstack.__file__).parent
_PRESETS = Sources("rlstack.programs.config.presets")
_AGENTS = "rlstack.agents."
_KINDS: dict[str, Any] = {"int": int, "float": float, "bool": bool, "str": str, "tuple": tuple}
_CONVERTERS: dict[Any, Any] = {
    bool: ("False", "True").index,
    int: whole_number,
    float: float,
}
_OF_COMPONENT = re.compile(r"--agent\.[\w-]+-optimizer\..*")  # see `component_options`


def check(prog: str, preset: str, args: Sequence[str], options: type[Any]) -> None:
    """Checks the options of a command that takes a preset, as far as the sources tell.

    Args:
      prog: the command with its preset, for errors.
      preset: the name of the preset, which may be unknown.
      args: the words after it.
      options: the dataclass of all options of the command; one field is the experiment.

    Raises:
      UsageError: no experiment with this agent has the option, or it takes no such value.
    """
    found = _configs_of(preset) if args else set()
    agent = _stand_in(*found.pop()) if len(found) == 1 else None
    if agent is None:
        return
    hints = dict(_entries(options, agent, "--"))
    given = list(_given(args))
    for option, _ in given:
        name = option.replace("_", "-")
        around = {name[: dot.start()] for dot in re.finditer(r"\.", name)}
        if name in hints or around & set(hints) or _OF_COMPONENT.fullmatch(name):
            continue
        near = dotted.nearest(option, list(hints))
        if near and _is_open(hints[near]):  # the parser knows the entries that the preset has
            return
        raise UsageError(f"{dotted.unknown(option, list(hints))} ({prog} --help)")
    for option, words in given:
        hint = hints.get(option.replace("_", "-"))
        if not _takes(hint, words):
            one: Any = Annotated[hint, tyro.conf.arg(name=option.removeprefix("--"))]
            parse(dataclasses.make_dataclass("One", [("value", one)]), prog, [option, *words])


def _given(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Returns each option with the words behind it."""
    given: list[tuple[str, list[str]]] = []
    for arg in args:
        name, equals, value = arg.partition("=")
        if arg.startswith("--"):
            given.append((name, [value] if equals else []))
        elif given:
            given[-1][1].append(arg)
    return given


def _entries(kind: Any, agent: type[Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the names of all options of a config and their types."""
    for field, hint in hints_of_class(kind).items():
        name = prefix + field.replace("_", "-")
        if hint is Experiment:
            yield from _entries(hint, agent, prefix)
        elif name == "--agent" or dataclasses.is_dataclass(hint):
            yield from _entries(agent if name == "--agent" else hint, agent, f"{name}.")
        else:
            yield name, hint


def _is_open(hint: Any) -> bool:
    """Returns whether it depends on the preset which options there are in place of this one."""
    return any(
        kind is Any or typing.get_origin(kind) is dict or dataclasses.is_dataclass(kind)
        for kind in kinds_of(hint)
    )


def _takes(hint: Any, words: Sequence[str]) -> bool:
    """Returns whether an option may take these words; True for types that are not simple."""
    if typing.get_origin(hint) is Literal:
        return len(words) == 1 and words[0] in map(str, typing.get_args(hint))
    kinds = [kind for kind in kinds_of(hint) if kind is not type(None)]
    if len(kinds) < len(kinds_of(hint)) and list(words) == ["None"]:
        return True
    kind = kinds[0] if len(kinds) == 1 else None
    if typing.get_origin(kind) is tuple and typing.get_args(kind)[1:] == (...,):
        kind = typing.get_args(kind)[0]
    elif len(words) != 1:
        return kind not in _CONVERTERS
    try:
        for word in words:
            _CONVERTERS.get(kind, str)(word)
    except ValueError:
        return False
    return True


def _configs_of(preset: str) -> set[tuple[str, str]]:
    """Returns module and name of each agent's config of which a preset may be made.

    They are those that its function names, also by way of others in its module; if it names none,
    those of the presets that it names.
    """
    function = preset.replace("-", "_")
    if not re.fullmatch(r"[a-z]\w*", function):
        return set()
    defined = rf"^def {function}\("
    modules = [m for m, text in _PRESETS.texts().items() if re.search(defined, text, re.MULTILINE)]
    if not modules:
        return set()
    found, texts = set(), set()
    top = _top(modules[0])
    left, seen = [function], {function}
    while left:
        node = top[left.pop()]
        inside: list[ast.AST] = [node]
        if isinstance(node, ast.FunctionDef):  # without the types of its arguments
            inside = [*node.body, *node.args.defaults]
        for part in (part for statement in inside for part in ast.walk(statement)):
            if isinstance(part, ast.Constant) and isinstance(part.value, str):
                texts.add(part.value)
            if not isinstance(part, ast.Name) or part.id not in top or part.id in seen:
                continue
            seen.add(part.id)
            named = top[part.id]
            if not isinstance(named, ast.ImportFrom):
                left.append(part.id)
            elif str(named.module).startswith(_AGENTS):
                found.add((str(named.module), part.id))
    return found or set().union(*map(_configs_of, texts - {preset}))


@functools.cache
def _top(module: str) -> Mapping[str, ast.stmt]:
    """Returns the statements of a module of rlstack that define or import its names."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found: dict[str, ast.stmt] = {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names if alias.asname in (None, alias.name)]
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        found |= dict.fromkeys(names, node)
    return found


@functools.cache
def _stand_in(module: str, name: str) -> type[Any] | None:
    """Returns a dataclass with the fields of a config in a module that is not imported.

    The types are those that the source tells, and Any for others. None if the fields are unknown.
    """
    node = _top(module).get(name) if module.startswith("rlstack.") else None
    if isinstance(node, ast.ImportFrom):
        return _stand_in(str(node.module), name)
    if not isinstance(node, ast.ClassDef):
        return None
    bases = [_stand_in(module, ast.unparse(base)) for base in node.bases]
    fields: list[Any] = [
        (entry.target.id, _hint(module, entry.annotation), dataclasses.field(default=None))
        for entry in node.body
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)
    ]
    known = tuple(base for base in bases if base is not None)
    return (
        dataclasses.make_dataclass(name, fields, bases=known) if len(known) == len(bases) else None
    )


def _hint(module: str, node: ast.expr) -> Any:
    """Returns the type that an annotation in a module names; Any if it is not known."""
    if isinstance(node, ast.BinOp):
        return _hint(module, node.left) | _hint(module, node.right)
    if isinstance(node, ast.Subscript):
        outer = ast.unparse(node.value)
        if outer == "Literal":
            return Literal[ast.literal_eval(node.slice)]
        return _KINDS.get(outer, Any)
    if isinstance(node, ast.Constant):
        return None if node.value is None else Any
    if not isinstance(node, ast.Name):
        return Any
    named = _top(module).get(node.id)
    if isinstance(named, ast.Assign):
        return _hint(module, named.value)
    return _KINDS.get(node.id) or _stand_in(module, node.id) or Any
