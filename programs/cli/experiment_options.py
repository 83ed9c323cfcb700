"""The options of a command that takes a preset, or a config file, and changes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from rlstack.programs.cli import component_options, env_options, help
from rlstack.programs.cli.options import parse
from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.experiment import Experiment, agents_of
from rlstack.programs.config.presets import describe, preset

T = TypeVar("T")  # a dataclass; its first field is the experiment
_FLAGS = ("--dry-run", "--submit")  # without a value they mean True


def read(
    command: str,
    name: str,
    args: Sequence[str],
    modules: tuple[str, ...],
    options: type[T],
    short: Mapping[str, str],
) -> T | None:
    """Returns the options; None if the arguments asked for help, which was printed.

    Args:
      command: the command of rlstack, such as "train".
      name: name of the preset, or path of the config file.
      args: the words after the name.
      modules: the user's modules that the experiment needs.
      options: the dataclass of all options.
      short: the short names of options, each with the full name.

    Raises:
      UsageError: an argument is wrong.
      ValueError: there is no such preset or file, or an option does not take its value.
    """
    base = _base(name, modules)
    prog, about = f"rlstack {command} {name}", describe(name)

    def parsed(args: Sequence[str], default: T) -> T:
        with agents_of(getattr(default, dataclasses.fields(made)[0].name)):
            return parse(
                options,
                prog,
                args,
                description=about,
                default=default,
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )

    made: Any = options  # its first argument is the experiment
    rest, experiment = env_options.join(_expanded(args, short), base)
    if help.asked(rest):
        default = made(component_options.fill_all(experiment))
        with agents_of(getattr(default, dataclasses.fields(made)[0].name)):
            help.show(prog, about, rest, lambda: parsed(["--help"], default), default)
        return None
    rest, of_components = component_options.split(rest, experiment)
    chosen: Any = parsed(rest, made(experiment))
    if of_components:
        # They change a copy of the agent's optimizer, so they are read after its own options.
        experiment = component_options.fill(chosen.experiment, of_components)
        rest, experiment = env_options.join(of_components, experiment)
        chosen = parsed(rest, dataclasses.replace(chosen, experiment=experiment))
    return chosen


def _base(name: str, modules: tuple[str, ...]) -> Experiment:
    """Returns the experiment that the options change: a preset, or that of a config file."""
    if Path(name).is_dir():
        raise ValueError(
            f"{name} is a directory; a preset or a config file must come first. --resume {name} "
            f"continues a run, and {Path(name) / 'config.json'} trains its experiment anew."
        )
    if not name.endswith(".json"):
        return dataclasses.replace(preset(name), modules=modules)
    experiment = from_json(Path(name).read_bytes(), name)
    return dataclasses.replace(experiment, modules=(*experiment.modules, *modules))


def _expanded(args: Sequence[str], short: Mapping[str, str]) -> list[str]:
    expanded = []
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        option, equals, value = arg.partition("=")
        expanded.append(short.get(option, option) + equals + value)
        if arg.replace("_", "-") in _FLAGS and following.startswith("-"):
            expanded.append("True")
    return expanded
