"""The commands, each after the dataclass of its options, which tyro parses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from programs.cli import component_options, env_options
from programs.cli.options import UsageError, parse
from programs.env_config import Option
from programs.experiment import Experiment, use_modules
from programs.presets import PRESETS, describe, preset
from programs.run import evaluation, record, report, train
from programs.run.launch import ProgramError
from programs.sets.members import RunSet, finished, is_set
from programs.tracking import open_files
from programs.tracking.result import Result
from programs.tracking.signals import Interrupted
from rlstack.acting.evaluator import Evaluation, by_opponent
from rlstack.checks import EnvCrash
from rlstack.references import nearest


def main(command: str, args: list[str]) -> int:
    """Runs a command; returns the exit code."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "report": _report,
        "record": _record,
        "play": _play,
        "list": _list,
        "rerun": _rerun,
    }
    if command not in commands:
        return _fail(f"rlstack: there is no command {command!r}{nearest(command, commands)}")
    try:
        modules, args = _take_modules(args)
        use_modules(modules)
        return _train(args, modules) if command == "train" else commands[command](args)
    except Interrupted as stop:
        _fail(f"rlstack {command}: {stop}")
        return stop.exit_code
    except UsageError as error:
        _fail(f"rlstack {command}: {error}")
        return 2
    except FloatingPointError:  # JAX_DEBUG_NANS: the traceback shows the operation
        raise
    except Exception as error:
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        text = _describe(error)
        advice = "" if isinstance(error, ProgramError) else open_files.advice(text)
        return _fail(f"rlstack {command}: {text} {advice}".rstrip())


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
    if isinstance(error, ValueError | OSError | ArithmeticError | ProgramError | EnvCrash):
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


_ROOT = Path(__file__).resolve().parents[2]
_STACK = tuple(f"{_ROOT / name}{os.sep}" for name in ("rlstack", "agents", "programs"))
_INSTALLED = ("site-packages", "dist-packages", os.path.dirname(os.__file__) + os.sep)


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
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
    jobs: int = 1
    """With --seeds or --vary: number of runs at the same time, each in a process of its own. 1
    trains in this process."""


@dataclasses.dataclass(frozen=True)
class _ResumeOptions:
    """Continue a run from its newest checkpoint, or a set of runs."""

    resume: Path
    """The directory of the run or of the set of runs."""
    frames: int | None = None
    """A new budget in environment steps, counted from the start of the first run. By default the
    budget stays."""
    updates: int | None = None
    """A new budget in updates of the learner, counted likewise. 0 is no limit."""
    hours: float | None = None
    """A new budget in hours of training, counted likewise. 0 is no limit."""
    jobs: int = 1
    """Number of runs of a set at the same time, each in a process of its own."""


_SHORT_OPTIONS = {"--launch": "--program.launch", "--ray-address": "--program.ray.address"}


def _train(args: list[str], modules: tuple[str, ...] = ()) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: rlstack train PRESET [options] | --resume RUN_DIR\n\npresets:")
        return _list([])
    if args[0].startswith("-"):
        if not any(arg.startswith("--res") for arg in args):
            raise UsageError(
                "a preset must come first, such as cartpole-ppo, or --resume RUN_DIR; got "
                f"{args[0]}"
            )
        return _resume(parse(_ResumeOptions, "rlstack train", args))
    name, *rest = args
    vary, rest = env_options.take_vary(rest)
    base = dataclasses.replace(preset(name), modules=modules)
    rest, experiment = env_options.join(_expand_short_options(rest), base)
    if "-h" in rest or "--help" in rest:
        experiment = component_options.fill_all(experiment)
    rest, of_components = component_options.split(rest, experiment)
    chosen = _parse_train(name, rest, _TrainOptions(experiment))
    if of_components:
        # They change a copy of the agent's optimizer, so they are read after its own options.
        experiment = component_options.fill(chosen.experiment, of_components)
        rest, experiment = env_options.join(of_components, experiment)
        chosen = _parse_train(name, rest, dataclasses.replace(chosen, experiment=experiment))
    if not (chosen.seeds or vary):
        if chosen.jobs != 1:
            raise UsageError("--jobs needs --seeds or --vary: a single run is one job")
        return _print_result(train.run(chosen.experiment, chosen.run_dir))
    from programs.sets import train as sets

    values = {option: tuple(found) for option, found in vary.items()}
    seeds = chosen.seeds or (chosen.experiment.seed,)
    sets.run(RunSet(chosen.experiment, seeds, values), chosen.run_dir, jobs=chosen.jobs)
    return 0


def _resume(chosen: _ResumeOptions) -> int:
    budgets = {name: getattr(chosen, name) for name in ("frames", "updates", "hours")}
    if not is_set(chosen.resume):
        return _print_result(train.resume(chosen.resume, **budgets))
    from programs.sets import train as sets

    given = {name: value for name, value in budgets.items() if value is not None}
    sets.resume(chosen.resume, given, jobs=chosen.jobs)
    return 0


def _parse_train(name: str, args: Sequence[str], default: _TrainOptions) -> _TrainOptions:
    return parse(
        _TrainOptions,
        f"rlstack train {name}",
        args,
        description=describe(name),
        default=default,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def _expand_short_options(args: list[str]) -> list[str]:
    split = [arg.partition("=") for arg in args]
    return [_SHORT_OPTIONS.get(option, option) + equals + value for option, equals, value in split]


def _print_result(result: Result) -> int:
    print(
        f"greedy return {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f} over "
        f"{result.eval_episodes} episodes, after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s; ended by {result.ended_by}"
    )
    for name, mean in result.eval_return_by_opponent.items():
        print(f"  {mean:.2f} against {name}")
    return 0


@dataclasses.dataclass(frozen=True)
class _EvalOptions:
    """Evaluate the newest params of a run, or its best ones, with the greedy policy; print the
    result as JSON.

    `--vary NAME VALUE ...`, which may be repeated, evaluates each combination of these options of
    the environment, and prints a line of JSON for each.
    """

    run_dir: tyro.conf.Positional[Path]
    """The directory of the run."""
    episodes: int | None = None
    """Number of whole episodes. By default as many as at the end of training."""
    seed: int | None = None
    """Seed of the environments. By default the seed of the run."""
    against: tuple[Path, ...] = ()
    """Opponents in a game of several agents: directories of runs, or of single checkpoints. By
    default the opponents of the run's own evaluation."""
    params: Literal["last", "best"] = "last"
    """Which params: the last ones, or those with the best return in an evaluation of the run."""
    by_index: bool | None = None
    """Whether episode i is the same for all params and runs. By default as in training."""


def _eval(args: list[str]) -> int:
    vary, args = env_options.take_vary(args)
    chosen = parse(_EvalOptions, "rlstack eval", args, config=(tyro.conf.FlagConversionOff,))
    settings = (chosen.episodes, chosen.seed, chosen.against, chosen.params, chosen.by_index)
    if not vary:
        print(json.dumps(_evaluated(evaluation.evaluate(chosen.run_dir, *settings))))
    for options, found in evaluation.matrix(chosen.run_dir, vary, *settings) if vary else ():
        print(json.dumps({"options": options, **_evaluated(found)}), flush=True)
    return 0


def _evaluated(found: Evaluation) -> dict[str, object]:
    summary: dict[str, object] = {
        "eval_return_mean": float(found.returns.mean()),
        "eval_return_std": float(found.returns.std()),
        "eval_episodes": len(found.returns),
    }
    if found.opponents:
        summary["eval_return_by_opponent"] = by_opponent(found)
    return summary


@dataclasses.dataclass(frozen=True)
class _ReportOptions:
    """Write a table of finished runs in Markdown, and their learning curves as pictures."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs, or of sets of runs. Runs of one preset with different seeds share a
    row."""
    out: Path = Path("results.md")
    """The Markdown file. The pictures go to the folder of the same name without suffix."""


def _report(args: list[str]) -> int:
    chosen = parse(_ReportOptions, "rlstack report", args)
    command = f"rlstack report RUN_DIR ... --out {chosen.out}"
    groups = report.by_preset([path for path in chosen.run_dirs if not is_set(path)])
    for path in filter(is_set, chosen.run_dirs):
        for name, found in finished(path).items():
            groups.setdefault(name, []).extend(found)
    report.write_groups(groups, chosen.out, command)
    print(f"{chosen.out}: {', '.join(sorted(groups))}")
    return 0


@dataclasses.dataclass(frozen=True)
class _RecordOptions:
    """Play whole episodes with the newest params of a run and write them to a dataset."""

    run_dir: tyro.conf.Positional[Path]
    """The directory of the run."""
    out: Path | None = None
    """The directory of the dataset, new or empty. By default RUN_DIR/dataset."""
    frames: int = 20_000
    """Minimum number of environment steps. Episodes that were started are finished."""
    policy: Literal["greedy", "explore"] = "greedy"
    """greedy takes the best action; explore explores as at the end of training."""
    seed: int | None = None
    """Seed of environments and exploration. By default the seed of the run."""


def _record(args: list[str]) -> int:
    chosen = parse(_RecordOptions, "rlstack record", args)
    path, header = record.record(
        chosen.run_dir, chosen.out, frames=chosen.frames, policy=chosen.policy, seed=chosen.seed
    )
    found = {
        "dataset": str(path),
        "frames": header.frames,
        "episodes": header.episodes,
        "return_mean": header.return_mean,
        "return_std": header.return_std,
    }
    print(json.dumps(found))
    return 0


@dataclasses.dataclass(frozen=True)
class _PlayOptions:
    """Play an entity environment by hand, in the terminal."""

    env: tyro.conf.Positional[str]
    """A game of rlstack.entity.games, such as mine-sweeper, or "module:callable"."""
    checkpoint: Path | None = None
    """The directory of a run. Shows the value and the action probabilities of its agent, and plays
    with the environment options of the run."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Options of the game, as names and values. They override those of the run."""
    agent: bool = False
    """Let the Enter key play the agent's choice. Needs --checkpoint."""
    seed: int = 0
    """Seed of the game."""
    params: Literal["last", "best"] = "last"
    """Which params of the run: the last ones, or those with the best return in an evaluation."""


def _play(args: list[str]) -> int:
    from programs.run import play

    chosen = parse(_PlayOptions, "rlstack play", args)
    try:
        play.play(
            chosen.env,
            checkpoint=chosen.checkpoint,
            options=chosen.options,
            agent=chosen.agent,
            seed=chosen.seed,
            params=chosen.params,
        )
    except KeyboardInterrupt as stop:
        print()
        raise Interrupted(signal.SIGINT, saved=False) from stop
    return 0


@dataclasses.dataclass(frozen=True)
class _ListOptions:
    """List the presets, each with a description."""


def _list(args: list[str]) -> int:
    parse(_ListOptions, "rlstack list", args)
    for name in PRESETS:
        print(f"  {name:18} {describe(name)}")
    return 0


@dataclasses.dataclass(frozen=True)
class _RerunOptions:
    """Repeat an update that gave NaN, from its saved inputs, and print its logs.

    With JAX_DEBUG_NANS=True in the environment it stops at the operation that gives the first NaN.
    """

    dump_dir: tyro.conf.Positional[Path]
    """The directory dump-N in the run directory."""


def _rerun(args: list[str]) -> int:
    chosen = parse(_RerunOptions, "rlstack rerun", args)
    for name, value in sorted(train.rerun(chosen.dump_dir).items()):
        print(f"{name:16} {value}")
    return 0
