"""`rlstack train`: one run, several, or a population; new or resumed."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import tyro

from rlstack import EvaluatorConfig
from rlstack.checks import is_config
from rlstack.programs.cli import env_options, experiment_options
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.session import run_config
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir, fetched
from rlstack.programs.study.study import PbtConfig, Study, is_study
from rlstack.references import Hook, name_of


@dataclasses.dataclass(frozen=True)
class _TrainOptions(experiment_options.StudyOptions):
    population: int = 0
    """Train this many members at once. The worst copy the best, and change the options that
    `--vary NAME LOW HIGH [log]` names, within these bounds; see --pbt."""
    pbt: PbtConfig = PbtConfig()
    auto_resume: bool = False
    """Whether to continue the run in --run-dir if there is one, as a job does that a scheduler
    starts again. `--auto-resume` alone means True."""
    profile: str = ""
    """Updates to measure, such as 20..30: prints where each node spends its time and what limits
    the speed, and writes traces for Perfetto and TensorBoard to profile/ in the run directory."""
    dry_run: bool = False
    """Check everything and print the config, the nodes, the memory of the replay and the files of
    the run; train and write nothing. `--dry-run` alone means True."""


@dataclasses.dataclass(frozen=True)
class _ResumeOptions:
    """Continue a run from its newest checkpoint, or a study: several runs or a population.

    The other options stay as they are, because they have an effect on what is learned.
    """

    resume: Path
    """The directory of the run or of the study."""
    frames: int | None = None
    """A new budget in environment steps, counted from the start of the first run. By default the
    budget stays."""
    updates: int | None = None
    """A new budget in updates of the learner, counted likewise. 0 is no limit."""
    hours: float | None = None
    """A new budget in hours of training, counted likewise. 0 is no limit."""
    jobs: int = 1
    """Number of runs of a study at the same time, each in a process of its own."""
    stop: StopConfig = StopConfig()
    evaluator: EvaluatorConfig = EvaluatorConfig()
    loggers: tuple[Hook, ...] = Experiment.loggers
    """All loggers of the run from here on."""
    log_period: int = Experiment.log_period
    """Environment steps between two lines of logs."""
    checkpoint_period: int = Experiment.checkpoint_period
    """Environment steps between two checkpoints."""
    checkpoints_kept: int = Experiment.checkpoints_kept
    """Number of checkpoints that are kept, the newest."""


_USAGE = """\
usage: rlstack train PRESET [options]
       rlstack train CONFIG.json [options]
       rlstack train PRESET --vary NAME VALUE ... [--seeds N] [options]   a grid, as of sweep
       rlstack train PRESET --population N --vary NAME LOW HIGH [log] [options]
       rlstack train --resume RUN_DIR [--frames N] [--updates N] [--hours N] [--jobs N] [options]

`rlstack train PRESET --help` explains the options, with the values of the preset.
"""
_KEPT = [name for name in run_config.CHANGEABLE if name not in run_config.BUDGETS]
_SHORT_OPTIONS = {"--launch": "--program.launch", "--ray-address": "--program.ray.address"}


def main(args: list[str], modules: tuple[str, ...] = ()) -> int:
    """Runs ``rlstack train``; returns the exit code.

    Args:
      args: the arguments of the command.
      modules: the user's modules that the experiment needs.

    Raises:
      UsageError: an argument is wrong.
      Exception: whatever ends the training.
    """
    if not args or args[0] in ("-h", "--help"):
        print(experiment_options.overview(_USAGE, _TrainOptions))
        return 0
    if args[0].startswith("-"):
        if not any(arg.startswith("--res") for arg in args):
            raise UsageError(
                "a preset must come first, such as cartpole-ppo, or --resume RUN_DIR; got "
                f"{args[0]}"
            )
        return _resume(args)
    name, *rest = args
    vary, rest = env_options.take_vary(rest)
    chosen = read("train", name, rest, modules, vary)
    if chosen is None:
        return 0
    if chosen.dry_run:
        from rlstack.programs.run import plan  # needs the nodes
        from rlstack.programs.session.profile import chosen_updates

        chosen_updates(chosen.profile, chosen.experiment)

        print(plan.plan(chosen.experiment, chosen.run_dir, _at_once(chosen)), end="")
        return 0
    if not (chosen.seeds or vary or chosen.population):
        return _train(chosen)
    from rlstack.programs.study import train as studies

    chosen.tell_seeds()
    jobs = 1 if chosen.jobs is None else chosen.jobs
    studies.run(_study(chosen, vary), chosen.run_dir, jobs=jobs)
    return 0


def read(
    command: str,
    name: str,
    args: Sequence[str],
    modules: tuple[str, ...],
    vary: Collection[str] = (),
) -> _TrainOptions | None:
    """Returns the options of a run; None if the arguments asked for help, which was printed.

    Args:
      command: the command of rlstack, for errors.
      name: name of the preset, or path of the config file.
      args: the words after the name, without ``--vary``.
      modules: the user's modules that the experiment needs.
      vary: the options of ``--vary``.

    Raises:
      UsageError: an argument is wrong.
      ValueError: there is no such preset or file, or an option does not take its value.
    """
    more, rest = _take_loggers(args)
    chosen = experiment_options.read(command, name, rest, modules, _TrainOptions, _SHORT_OPTIONS)
    if chosen is not None and more:
        loggers = tuple(dict.fromkeys((*chosen.experiment.loggers, *more)))  # each once
        print(
            "rlstack train: --logger, which adds loggers, is an earlier option; --loggers names "
            f"all of them: --loggers {' '.join(map(name_of, loggers))}",
            file=sys.stderr,
        )
        experiment = dataclasses.replace(chosen.experiment, loggers=loggers)
        chosen = dataclasses.replace(chosen, experiment=experiment)
    if chosen is not None:
        _check_combination(chosen, rest, vary)
    return chosen


def _train(chosen: _TrainOptions) -> int:
    """Trains one run, or this host's part of it."""
    experiment, run_dir = chosen.experiment, chosen.run_dir
    if (code := _followed(experiment, run_dir)) is not None:
        return code
    from rlstack.programs.run import train

    if chosen.auto_resume and run_dir is not None:
        directory = RunDir.at(run_dir)
        directory.fetch()
        if directory.config.is_file():
            return _print_result(train.resume(run_dir, again=experiment.program))
    return _print_result(train.run(experiment, run_dir, profile=chosen.profile))


def _followed(experiment: Experiment, run_dir: Path | None) -> int | None:
    """Runs this host's part of a program that another host leads; None if none leads it."""
    if experiment.program.launch != "hosts":
        return None
    if run_dir is None:
        raise UsageError("--launch hosts needs --run-dir, a directory that all hosts see")
    from rlstack.programs.program.launch import hosts

    found, directory = hosts.of_program(experiment.program), RunDir.at(run_dir)
    hosts.check_shared(directory)
    return None if found.leads else hosts.follow(directory.path, found)


def full_name(option: str) -> str:
    """Returns the full name of an option of the command, without a value behind "="."""
    name = option.partition("=")[0].replace("_", "-")
    return _SHORT_OPTIONS.get(name, name)


def _take_loggers(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the words behind each ``--logger`` of earlier versions, and the other words."""
    found, rest, taking = [], [], False
    for arg in args:
        name, equals, value = arg.partition("=")
        if arg.startswith("--"):
            taking = name == "--logger"
            if taking and equals:
                found.append(value)
        if not (taking or arg.startswith("--logger=")):
            rest.append(arg)
        elif not arg.startswith("--"):
            found.append(arg)
    return found, rest


def _resume_options(args: Sequence[str], before: _ResumeOptions) -> _ResumeOptions:
    try:
        config = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
        return parse(_ResumeOptions, "rlstack train", args, default=before, config=config)
    except UsageError as error:
        name = re.match(r"there is no option (--[\w.-]+) \(", str(error))
        if name is None:  # a wrong value, or a misspelt option
            raise
        raise UsageError(f"{name[1]} must stay as it is; {run_config.how_to_change()}") from error


def _check_combination(chosen: _TrainOptions, args: Sequence[str], vary: Collection[str]) -> None:
    """Checks the options that concern one run, several runs or a population only."""
    several = bool(chosen.seeds or vary or chosen.population)
    differ = bool(vary or chosen.population)
    given = {arg.partition("=")[0] for arg in args}
    if "--seeds" in given and not chosen.all_seeds:
        raise UsageError("--seeds must be followed by one or more seeds, such as 1 2 3")
    if "--population" in given and chosen.population < 2:
        raise UsageError(f"--population must be at least 2; got {chosen.population}")
    if chosen.seeds and chosen.population:
        raise UsageError("--population takes one seed, --seed: leave out --seeds")
    if chosen.seeds and "--seed" in given:
        raise UsageError("--seeds has the seeds of all runs: leave out --seed")
    if chosen.dry_run and differ:
        raise UsageError("--dry-run shows equal runs: leave out --vary and --population")
    if chosen.profile and several:
        raise UsageError(
            "--profile measures a single run: leave out --seeds, --vary and --population"
        )
    if chosen.pbt != PbtConfig() and not chosen.population:
        raise UsageError("--pbt needs --population: it says how members copy each other")
    if several and chosen.experiment.program.launch == "hosts":
        raise UsageError("--launch hosts runs one program: leave out --seeds, --vary, --population")
    if chosen.auto_resume and (several or chosen.run_dir is None):
        raise UsageError("--auto-resume needs --run-dir, and a single run")
    if chosen.jobs not in (None, 1) and not several:
        raise UsageError("--jobs needs --seeds or --vary: a single run is one job")


def _at_once(chosen: _TrainOptions) -> int:
    """Returns how many of the runs of several seeds train at the same time."""
    from rlstack.programs.study.executors import may_share_a_program

    seeds = chosen.all_seeds or (chosen.experiment.seed,)
    together = may_share_a_program(Study(chosen.experiment, seeds))
    return len(seeds) if together else min(chosen.jobs or 1, len(seeds))


def _study(chosen: _TrainOptions, vary: Mapping[str, Sequence[Option]]) -> Study:
    """Returns several runs or a population; `vary` has the words behind each ``--vary NAME``."""
    base = chosen.experiment
    if not chosen.population:
        values = {name: tuple(words) for name, words in vary.items()}
        return Study(base, chosen.all_seeds or (base.seed,), values)
    from rlstack.programs.study import space

    spaces = {name: space.from_words(name, words, base, "--vary") for name, words in vary.items()}
    seeds = tuple(range(base.seed, base.seed + chosen.population))
    return Study(base, seeds, spaces, chosen.pbt)


def _resume(args: Sequence[str]) -> int:
    pairs = [arg.partition("=") for arg in args]
    path = next(
        (
            Path(value or following)
            for (name, _, value), following in zip(pairs, [*args[1:], ""], strict=True)
            if name == "--resume"
        ),
        Path(),
    )
    path = fetched(path)
    before = _ResumeOptions(path)
    if RunDir(path).config.is_file() and not is_study(path):
        experiment = run_config.read_config(RunDir(path), several=True)
        if (code := _followed(experiment, path)) is not None:
            return code
        kept = {name: getattr(experiment, name) for name in _KEPT}
        before = dataclasses.replace(before, **kept)
    chosen = _resume_options(args, before)
    budgets = {name: getattr(chosen, name) for name in run_config.BUDGETS}
    given = {name: value for name, value in budgets.items() if value is not None}
    changes = _changes(before, chosen)
    if not is_study(path):
        RunDir.open(path)
        from rlstack.programs.run import train

        return _print_result(train.resume(path, **budgets, changes=changes))
    if changes:
        raise UsageError(
            f"{', '.join(changes)} must stay in a study, whose runs have the same options; it may "
            "have new budgets. Each of its runs may be resumed alone, by its own directory"
        )
    from rlstack.programs.study import train as studies

    studies.resume(path, given, jobs=chosen.jobs)
    return 0


def _changes(before: _ResumeOptions, now: _ResumeOptions) -> dict[str, Any]:
    """Returns the options that differ, by their names."""
    found: dict[str, Any] = {}
    for name in _KEPT:
        old, new = getattr(before, name), getattr(now, name)
        if is_config(new):
            every = {f.name: getattr(new, f.name) for f in dataclasses.fields(new)}
            found |= {f"{name}.{k}": v for k, v in every.items() if v != getattr(old, k)}
        elif old != new:
            found[name] = new
    return found


def _print_result(result: Result) -> int:
    print(
        f"evaluation return {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f} over "
        f"{result.eval_episodes} episodes, after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s; ended by {result.ended_by}"
    )
    for name, mean in result.eval_return_by_opponent.items():
        print(f"  {mean:.2f} against {name}")
    for name, policy in result.policies.items():
        print(f"  {name}: {policy['eval_return_mean']:.2f}")
    return 0


def option_names() -> list[str]:
    """Returns the options of the command that are not those of an experiment."""
    fields = [field.name for field in dataclasses.fields(_TrainOptions)[1:] if field.name != "pbt"]
    fields += [f"pbt.{field.name}" for field in dataclasses.fields(PbtConfig)]
    own = [f"--{name.replace('_', '-')}" for name in fields]
    others = ["--resume", "--vary", "--module", "--help", "--help-all", *_SHORT_OPTIONS]
    return [*own, *others]
