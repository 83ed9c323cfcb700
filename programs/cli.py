"""The commands and their options, read by tyro from dataclasses."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

from programs import train
from programs.experiment import Experiment
from programs.presets import PRESETS, describe, preset
from programs.session import Interrupted, ProgramError, Result
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
        "list": _list,
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
    name, *rest = args
    chosen = tyro.cli(
        _Train,
        prog=f"rlstack train {name}",
        description=describe(name),
        default=_Train(preset(name)),
        args=rest,
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )
    return _report(train.run(chosen.experiment, chosen.run_dir))


def _report(result: Result) -> int:
    print(
        f"greedy return {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f} over "
        f"{result.eval_episodes} episodes, after {result.env_frames:,} frames in "
        f"{result.wall_seconds:.1f} s"
    )
    return 0


def _eval(args: list[str]) -> int:
    chosen = tyro.cli(_Eval, prog="rlstack eval", args=args)
    evaluation = train.evaluate(chosen.run_dir, chosen.episodes, chosen.seed)
    found = {
        "eval_return_mean": float(evaluation.returns.mean()),
        "eval_return_std": float(evaluation.returns.std()),
        "eval_episodes": len(evaluation.returns),
    }
    print(json.dumps(found))
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
