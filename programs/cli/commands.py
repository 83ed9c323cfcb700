"""The commands and their options, read by tyro from dataclasses."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from programs.experiment import Experiment, Option
from programs.presets import PRESETS, describe, preset
from programs.run import record, report, train
from programs.run.launch import ProgramError
from programs.tracking.result import Result
from programs.tracking.signals import Interrupted
from rlstack.acting.evaluator import by_opponent
from rlstack.references import nearest


@dataclasses.dataclass(frozen=True)
class _Train:
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run_dir: Path | None = None
    """Where everything is filed; a fresh folder under runs/ by default."""


@dataclasses.dataclass(frozen=True)
class _Resume:
    """Goes on with a run from its newest checkpoint."""

    resume: Path
    """The run directory."""
    frames: int | None = None
    """A new budget, counted from the run's very start."""


@dataclasses.dataclass(frozen=True)
class _Eval:
    """Judges the newest params of a run with the greedy policy."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""
    episodes: int | None = None
    """Whole episodes to play; as many as at the end of training by default."""
    seed: int | None = None
    """Of the evaluation's environments; the run's own by default."""
    against: tuple[Path, ...] = ()
    """Runs, or checkpoints of runs, that play the other places of games of several agents."""


@dataclasses.dataclass(frozen=True)
class _Report:
    """Writes a table of finished runs, and their learning curves beside it."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories; those of one preset are its seeds."""
    out: Path = Path("results.md")
    """The Markdown file; curves go into a folder of its stem's name."""


@dataclasses.dataclass(frozen=True)
class _Record:
    """Plays the newest params of a run and writes whole episodes to a dataset."""

    run_dir: tyro.conf.Positional[Path]
    """The run directory."""
    out: Path | None = None
    """The dataset's directory, new or empty; RUN_DIR/dataset by default."""
    frames: int = 20_000
    """Environment steps to record at least; episodes that have begun are played to their ends."""
    policy: Literal["greedy", "explore"] = "greedy"
    """The best action, or exploration as at the end of training."""
    seed: int | None = None
    """Of environments and exploration; the run's own by default."""


@dataclasses.dataclass(frozen=True)
class _Play:
    """Plays an entity environment by hand, in the terminal."""

    env: tyro.conf.Positional[str]
    """A game of rlstack.entity.games, such as mine-sweeper, or "module:callable"."""
    checkpoint: Path | None = None
    """A run directory: what its agent thinks is shown beside."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Of the game, as names and values; those of the run are taken over."""
    agent: bool = False
    """Enter plays the agent's choice."""
    seed: int = 0
    """Of the game."""


@dataclasses.dataclass(frozen=True)
class _Rerun:
    """Makes an update that gave NaN again, from its dump, and prints its logs."""

    dump_dir: tyro.conf.Positional[Path]
    """The dump- folder that the run left."""


def main(command: str, args: list[str]) -> int:
    """Runs a command; returns the exit code."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "record": _record,
        "play": _play,
        "list": _list,
        "report": _report_runs,
        "rerun": _rerun,
    }
    if command not in commands:
        return _fail(f"rlstack: there is no command {command!r}{nearest(command, commands)}")
    try:
        return commands[command](args)
    except Interrupted as stop:
        _fail(f"rlstack {command}: {stop}")
        return stop.exit_code
    except FloatingPointError:  # JAX_DEBUG_NANS was asked for the place, which the traceback tells
        raise
    except (ValueError, OSError, ArithmeticError, ProgramError) as error:
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        return _fail(f"rlstack {command}: {error}")


def _train(args: list[str]) -> int:
    if not args or args[0] in ("-h", "--help"):
        print("usage: rlstack train PRESET [options] | --resume RUN_DIR\n\npresets:")
        return _list([])
    if args[0].startswith("-"):
        resumed = tyro.cli(_Resume, prog="rlstack train", args=args)
        return _report(train.resume(resumed.resume, frames=resumed.frames))
    name, *rest = _in_full(args)
    chosen = tyro.cli(
        _Train,
        prog=f"rlstack train {name}",
        description=describe(name),
        default=_Train(preset(name)),
        args=rest,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
    return _report(train.run(chosen.experiment, chosen.run_dir))


_SHORT = {"--launch": "--program.launch", "--ray-address": "--program.ray.address"}


def _in_full(args: list[str]) -> list[str]:
    """Writes out the options that have a short form."""
    split = [arg.partition("=") for arg in args]
    return [_SHORT.get(option, option) + is_equal + value for option, is_equal, value in split]


def _report(result: Result) -> int:
    print(
        f"greedy return {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f} over "
        f"{result.eval_episodes} episodes, after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s"
    )
    for name, mean in result.eval_return_by_opponent.items():
        print(f"  {mean:.2f} against {name}")
    return 0


def _eval(args: list[str]) -> int:
    chosen = tyro.cli(_Eval, prog="rlstack eval", args=args)
    evaluation = train.evaluate(chosen.run_dir, chosen.episodes, chosen.seed, chosen.against)
    found: dict[str, Any] = {
        "eval_return_mean": float(evaluation.returns.mean()),
        "eval_return_std": float(evaluation.returns.std()),
        "eval_episodes": len(evaluation.returns),
    }
    if evaluation.opponents:
        found["eval_return_by_opponent"] = by_opponent(evaluation)
    print(json.dumps(found))
    return 0


def _report_runs(args: list[str]) -> int:
    chosen = tyro.cli(_Report, prog="rlstack report", args=args)
    command = f"rlstack report RUN_DIR ... --out {chosen.out}"
    presets = report.write(chosen.run_dirs, chosen.out, command)
    print(f"{chosen.out}: {', '.join(presets)}")
    return 0


def _record(args: list[str]) -> int:
    chosen = tyro.cli(_Record, prog="rlstack record", args=args)
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


def _play(args: list[str]) -> int:
    from programs.run import play

    chosen = tyro.cli(_Play, prog="rlstack play", args=args)
    try:
        play.play(
            chosen.env,
            checkpoint=chosen.checkpoint,
            options=chosen.options,
            agent=chosen.agent,
            seed=chosen.seed,
        )
    except KeyboardInterrupt as stop:
        print()
        raise Interrupted(signal.SIGINT, saved=False) from stop
    return 0


def _list(args: list[str]) -> int:
    if args:
        return _fail(f"rlstack list: it takes no arguments; got {' '.join(args)}.")
    for name in PRESETS:
        print(f"  {name:18} {describe(name)}")
    return 0


def _rerun(args: list[str]) -> int:
    chosen = tyro.cli(_Rerun, prog="rlstack rerun", args=args)
    for name, value in sorted(train.rerun(chosen.dump_dir).items()):
        print(f"{name:16} {value}")
    return 0


def _fail(message: str) -> int:
    print(message, file=sys.stderr)
    return 1
