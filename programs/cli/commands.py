"""The commands, each after the dataclass of its options, which tyro parses."""

from __future__ import annotations

import dataclasses
import os
import select
import sys
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TextIO

import tyro

import rlstack
from rlstack.checks import EnvCrash, ExitError, no_exits
from rlstack.programs.cli import completion, env_options, experiment_options, finished, serve, sweep
from rlstack.programs.cli.options import HelpPrinted, UsageError, parse
from rlstack.programs.env_config import Option
from rlstack.programs.experiment import Experiment, Topology, use_modules
from rlstack.programs.populations.population import PbtConfig, Population, is_population
from rlstack.programs.presets import PRESETS, describe, preset
from rlstack.programs.run import train
from rlstack.programs.run.launch import ProgramError
from rlstack.programs.sets.members import FailedRunsError, RunSet, is_set
from rlstack.programs.sweeps import space
from rlstack.programs.tracking import open_files
from rlstack.programs.tracking.display import lasting
from rlstack.programs.tracking.result import Result
from rlstack.programs.tracking.signals import Interrupted
from rlstack.references import nearest


def main(command: str, args: list[str]) -> int:
    """Runs a command; returns the exit code."""
    commands = _commands()
    if command not in commands:
        return _fail(f"rlstack: there is no command {command!r}{nearest(command, commands)}")
    try:
        with no_exits(HelpPrinted):
            modules, args = _take_modules(args)
            use_modules(modules)
            if command in ("train", "sweep"):
                code = (_train if command == "train" else sweep.main)(args, modules)
            else:
                code = commands[command](args)
        print(end="", flush=True)
        return code
    except Interrupted as stop:
        _fail(f"rlstack {command}: {stop}")
        return stop.exit_code
    except UsageError as error:
        _fail(f"rlstack {command}: {error}")
        return 2
    except FloatingPointError:  # JAX_DEBUG_NANS: the traceback shows the operation
        raise
    except Exception as error:
        # As with `| head`. Another pipe, such as one of an environment, may break too.
        if isinstance(error, BrokenPipeError) and _is_unread(sys.stdout):
            # Python would fail again when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        text = _describe(error)
        advice = "" if isinstance(error, ProgramError) else open_files.advice(text)
        return _fail(f"rlstack {command}: {text} {advice}".rstrip())


def _commands() -> dict[str, Callable[[list[str]], int]]:
    return {
        "train": _train,
        "sweep": sweep.main,
        "eval": finished.evaluate,
        "diff": finished.diff,
        "report": finished.report,
        "record": finished.record,
        "play": finished.play,
        "watch": finished.watch,
        "serve": serve.main,
        "export": finished.export,
        "presets": _presets,
        "list": _presets,  # the name of earlier versions
        "rerun": finished.rerun,
        "completion": _completion,
    }


def _take_modules(args: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Returns the modules that ``--module`` names, and the other arguments."""
    modules, rest = [], []
    left = iter(args)
    for arg in left:
        name, _, value = arg.partition("=")
        if name != "--module":
            rest.append(arg)
            continue
        value = value or next(left, "")
        if not value or value.startswith("-"):
            raise UsageError("--module must be followed by the name of a module")
        modules.append(value)
    return tuple(modules), rest


def _describe(error: Exception) -> str:
    """Returns an error as text; with its kind and place if the stack does not raise it itself."""
    if isinstance(error, _OWN):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, TypeError) and frames[-1].filename.startswith(_STACK):
        return str(error)
    cause: BaseException | None = error.__cause__
    while cause is not None:
        frames += traceback.extract_tb(cause.__traceback__)
        cause = cause.__cause__
    # The place that its author knows: the deepest one outside of installed packages. The stack may
    # be one of these itself.
    stack = [frame for frame in frames if frame.filename.startswith(_STACK)]
    others = [frame for frame in frames if frame not in stack]
    users = [f for f in others if not any(part in f.filename for part in _INSTALLED)]
    place = (users or stack or frames)[-1]
    text = " ".join(str(error).split())
    return (
        f"{type(error).__name__} at {place.filename}:{place.lineno}: {text} "
        "(RLSTACK_TRACEBACK=1 shows the traceback)"
    )


_OWN = (ValueError, OSError, ArithmeticError, ProgramError, EnvCrash, ExitError, FailedRunsError)
_STACK = os.path.dirname(os.path.abspath(rlstack.__file__)) + os.sep
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__) + os.sep)


def _is_unread(stream: TextIO) -> bool:
    """Returns whether a stream is a pipe that nobody reads any more."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
    except (OSError, ValueError):  # it is no file
        return False
    return bool(poll.poll(0))  # it reports only errors, because no other events are registered


def _fail(message: str) -> int:
    print(message, file=lasting())
    return 1


@dataclasses.dataclass(frozen=True)
class _TrainOptions:
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run_dir: Path | None = None
    """The run directory, new or empty, for config, logs, checkpoints and result. By default a new
    directory under runs/. With --seeds or --vary it has one directory for each run."""
    seeds: tuple[int, ...] = ()
    """Train one run with each of these seeds, and report on all. The topology fused trains them in
    one program; others one after the other, or with --jobs. `--vary NAME VALUE ...`, which may be
    repeated, trains runs with each of these values of an option, such as agent.discount."""
    population: int = 0
    """Train a population of so many members, which copy better ones and change the options that
    `--vary NAME LOW HIGH [log]` names, within these bounds; see --pbt."""
    pbt: PbtConfig = PbtConfig()
    logger: tuple[str, ...] = ()
    """More loggers, besides those of --loggers: `--logger wandb mlflow`."""
    jobs: int = 1
    """With --seeds, --vary or --population: number of runs at the same time, each in a process of
    its own. 1 trains in this process."""
    profile: str = ""
    """Updates to measure, such as 20..30: prints where each node spends its time and what limits
    the speed, and writes traces for Perfetto and TensorBoard to profile/ in the run directory."""
    dry_run: bool = False
    """Check everything and print the config, the nodes, the memory of the replay and the files of
    the run; train and write nothing. `--dry-run` alone means True."""


@dataclasses.dataclass(frozen=True)
class _ResumeOptions:
    """Continue a run from its newest checkpoint, or a set of runs or a population."""

    resume: Path
    """The directory of the run, of the set of runs or of the population."""
    frames: int | None = None
    """A new budget in environment steps, counted from the start of the first run. By default the
    budget stays."""
    updates: int | None = None
    """A new budget in updates of the learner, counted likewise. 0 is no limit."""
    hours: float | None = None
    """A new budget in hours of training, counted likewise. 0 is no limit."""
    jobs: int = 1
    """Number of runs of a set, or members, at the same time, each in a process of its own."""


_SHORT_OPTIONS = {"--launch": "--program.launch", "--ray-address": "--program.ray.address"}


def _train(args: list[str], modules: tuple[str, ...] = ()) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: rlstack train PRESET [options] | CONFIG.json [options] | --resume RUN_DIR")
        print("\npresets:")
        return _presets([])
    if args[0].startswith("-"):
        if not any(arg.startswith("--res") for arg in args):
            raise UsageError(
                "a preset must come first, such as cartpole-ppo, or --resume RUN_DIR; got "
                f"{args[0]}"
            )
        return _resume(_resume_options(args))
    name, *rest = args
    vary, rest = env_options.take_vary(rest)
    chosen = experiment_options.read("train", name, rest, modules, _TrainOptions, _SHORT_OPTIONS)
    if chosen is None:
        return 0
    loggers = dict.fromkeys((*chosen.experiment.loggers, *chosen.logger))  # each once
    experiment = dataclasses.replace(chosen.experiment, loggers=tuple(loggers))
    chosen = dataclasses.replace(chosen, experiment=experiment)
    _check_combination(chosen, rest, vary)
    if chosen.dry_run:
        train.chosen_updates(chosen.profile, chosen.experiment)
        from rlstack.programs.run import (
            plan,  # needs the nodes, which a run imports in their processes
        )

        print(plan.plan(chosen.experiment, chosen.run_dir), end="")
        return 0
    if chosen.population:
        return _train_population(chosen, vary)
    if not (chosen.seeds or vary):
        return _print_result(train.run(chosen.experiment, chosen.run_dir, profile=chosen.profile))
    from rlstack.programs.sets import train as sets

    values = {option: tuple(found) for option, found in vary.items()}
    seeds = chosen.seeds or (chosen.experiment.seed,)
    sets.run(RunSet(chosen.experiment, seeds, values), chosen.run_dir, jobs=chosen.jobs)
    return 0


def _resume_options(args: Sequence[str]) -> _ResumeOptions:
    try:
        return parse(_ResumeOptions, "rlstack train", args)
    except UsageError as error:
        if "no option" not in str(error):
            raise
        raise UsageError(
            f"{error}. A run that is resumed keeps its options, except for its budgets; rlstack "
            "train RUN_DIR/config.json trains a new run with other ones"
        ) from error


def _check_combination(chosen: _TrainOptions, args: Sequence[str], vary: Collection[str]) -> None:
    """Checks the options that concern one run, several runs or a population only."""
    several = bool(chosen.seeds or vary or chosen.population)
    given = {arg.partition("=")[0] for arg in args}
    if "--seeds" in given and not chosen.seeds:
        raise UsageError("--seeds must be followed by one or more seeds, such as 1 2 3")
    if "--population" in given and chosen.population < 2:
        raise UsageError(f"--population must be at least 2; got {chosen.population}")
    if chosen.seeds and chosen.population:
        raise UsageError("--population takes one seed, --seed: leave out --seeds")
    if chosen.seeds and "--seed" in given:
        raise UsageError("--seeds has the seeds of all runs: leave out --seed")
    for name, value in (
        ("--dry-run shows", chosen.dry_run),
        ("--profile measures", chosen.profile),
    ):
        if value and several:
            raise UsageError(f"{name} a single run: leave out --seeds, --vary and --population")
    if chosen.pbt != PbtConfig() and not chosen.population:
        raise UsageError("--pbt needs --population: it says how members copy each other")
    if chosen.jobs != 1 and not several:
        raise UsageError("--jobs needs --seeds or --vary: a single run is one job")


def _train_population(chosen: _TrainOptions, vary: Mapping[str, Sequence[Option]]) -> int:
    """Trains a population; `vary` has the words behind each ``--vary NAME``."""
    base = chosen.experiment
    spaces = {name: space.from_words(name, words, base, "--vary") for name, words in vary.items()}
    made = Population(base, chosen.population, spaces, chosen.pbt)
    from rlstack.programs.populations import train as populations

    populations.run(made, chosen.run_dir, jobs=chosen.jobs)
    return 0


def _resume(chosen: _ResumeOptions) -> int:
    budgets = {name: getattr(chosen, name) for name in ("frames", "updates", "hours")}
    given = {name: value for name, value in budgets.items() if value is not None}
    if is_population(chosen.resume):
        from rlstack.programs.populations import train as populations

        populations.resume(chosen.resume, given, jobs=chosen.jobs)
        return 0
    if not is_set(chosen.resume):
        return _print_result(train.resume(chosen.resume, **budgets))
    from rlstack.programs.sets import train as sets

    sets.resume(chosen.resume, given, jobs=chosen.jobs)
    return 0


def _print_result(result: Result) -> int:
    print(
        f"greedy return {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f} over "
        f"{result.eval_episodes} episodes, after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s; ended by {result.ended_by}"
    )
    for name, mean in result.eval_return_by_opponent.items():
        print(f"  {mean:.2f} against {name}")
    for name, policy in result.policies.items():
        print(f"  {name}: {policy['eval_return_mean']:.2f}")
    return 0


@dataclasses.dataclass(frozen=True)
class _PresetsOptions:
    """List the presets, each with a description. Options leave out those that do not match."""

    agent: str = ""
    """A part of the agent's name, such as ppo."""
    env: str = ""
    """A part of the environment's name, such as pong."""
    topology: Topology | None = None
    """fused: presets of environments written in JAX; the other topologies train all presets, these
    included."""
    max_frames: int | None = None
    """The largest budget, in environment steps."""


def _presets(args: list[str]) -> int:
    chosen = parse(_PresetsOptions, "rlstack presets", args)
    shown = [name for name in PRESETS if _matches(preset(name), chosen)]
    if not shown:
        raise UsageError("no preset matches. Without options all are listed")
    width = max(map(len, shown))
    for name in shown:
        print(f"  {name:{width}} {describe(name)}")
    return 0


def _matches(experiment: Experiment, chosen: _PresetsOptions) -> bool:
    agent = type(experiment.agent).__name__.removesuffix("Config")
    return (
        chosen.agent.lower() in agent.lower()
        and chosen.env.lower() in experiment.env.name.lower()
        and (chosen.topology != "fused" or experiment.env.type == "jax")
        and (chosen.max_frames is None or experiment.frames <= chosen.max_frames)
    )


def _completion(args: list[str]) -> int:
    fields = [field.name for field in dataclasses.fields(_TrainOptions)[1:] if field.name != "pbt"]
    fields += [f"pbt.{field.name}" for field in dataclasses.fields(PbtConfig)]
    own = [f"--{name.replace('_', '-')}" for name in fields]
    others = ["--resume", "--vary", "--module", "--help", "--help-all", *_SHORT_OPTIONS]
    return completion.main(args, [*_commands(), "top", "dashboard", "doctor"], [*own, *others])
