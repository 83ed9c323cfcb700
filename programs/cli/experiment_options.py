"""The options of the commands that take a preset, or a config file, and change it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from rlstack.programs.cli import early_options, env_options, help
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.experiment import Experiment, agents_of
from rlstack.programs.config.presets import PRESETS, describe, preset
from rlstack.programs.session.run_dir import fetched

T = TypeVar("T")  # a dataclass; its first field is the experiment
_FLAGS = ("--auto-resume", "--dry-run", "--submit")  # without a value they mean True
_MOST_SEEDS = 1000  # that a single number means; a larger one is a seed


@dataclasses.dataclass(frozen=True)
class StudyOptions:
    """The options that `rlstack train` and `rlstack sweep` share, with one meaning in both."""

    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run_dir: Path | None = None
    """The directory, new or empty, for config, logs, checkpoints and result. By default a new
    directory under runs/. Several runs have one directory each in it."""
    seeds: tuple[int, ...] = ()
    """Train one run with each seed, and report on all: `--seeds 5` with the seeds 1 to 5, `--seeds
    3 8` with 3 and 8. `--vary NAME VALUE ...`, which may be repeated, trains each combination of
    these values of options, such as agent.discount. The topology fused trains such runs in one
    program; others one after the other, or with --jobs."""
    jobs: int | None = None
    """Number of runs, or of trials of a search, at the same time, each in a process of its own. By
    default 1, in this process; with --launch slurm all runs of a grid, and 4 tasks of a search."""

    @property
    def all_seeds(self) -> tuple[int, ...]:
        """The seeds that --seeds means; () without it.

        Raises:
          UsageError: a single number is no number of seeds.
        """
        return all_seeds(self.seeds)

    def tell_seeds(self) -> None:
        """Prints what a single number behind --seeds means, because it may be read otherwise."""
        if len(self.seeds) == 1 and self.seeds != (1,):
            (number,) = self.seeds
            print(
                f"--seeds {number}: seeds 1 to {number}; --seed {number} is seed {number} alone",
                file=sys.stderr,
            )


def all_seeds(seeds: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the seeds that the words behind --seeds mean; see `StudyOptions.all_seeds`.

    Raises:
      UsageError: a single number is no number of seeds.
    """
    if len(seeds) != 1:
        return seeds
    (number,) = seeds
    if not 1 <= number <= _MOST_SEEDS:
        raise UsageError(
            f"--seeds with a single number must be how many seeds there are, 1 to "
            f"{_MOST_SEEDS}; got {number}. --seed {number} trains seed {number} alone"
        )
    return tuple(range(1, number + 1))


def overview(usage: str, options: type[Any]) -> str:
    """Returns the help of a command without a preset: usage, options, and then the presets.

    Args:
      usage: how the command is called.
      options: the dataclass of its options.
    """
    default = options(preset("cartpole-ppo"))
    width = max(map(len, PRESETS))
    lines = [usage, help.overview(default), "\npresets:"]
    return "\n".join([*lines, *(f"  {name:{width}} {describe(name)}" for name in PRESETS)])


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
    prog, words = f"rlstack {command} {name}", _expanded(args, short)
    if not (modules or help.asked(words)):
        early_options.check(prog, name, words, options)
    base = _base(name, modules)
    from rlstack.programs.cli import component_options  # with JAX, after the name is known

    about = describe(name)

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
    rest, experiment = env_options.join(words, base)
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
    path = fetched(Path(name).parent) / Path(name).name
    if not path.is_file():
        raise ValueError(f"there is no file {name}. RUN_DIR/config.json is that of a run.")
    experiment = from_json(path.read_bytes(), name)
    return dataclasses.replace(experiment, modules=(*experiment.modules, *modules))


def _expanded(args: Sequence[str], short: Mapping[str, str]) -> list[str]:
    expanded = []
    for arg, following in zip(args, [*args[1:], "--"], strict=False):
        option, equals, value = arg.partition("=")
        expanded.append(short.get(option, option) + equals + value)
        if arg.replace("_", "-") in _FLAGS and following.startswith("-"):
            expanded.append("True")
    return expanded
