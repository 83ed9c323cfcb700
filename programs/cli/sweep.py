"""`rlstack sweep`: a grid of values, or a search of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from rlstack.programs.cli import env_options, experiment_options
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment, ProgramConfig
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.study.trials import RunSet, is_set

_SEARCH_TASKS = 4  # tasks of a Slurm array for a search, unless --jobs sets another number
_OF_SEARCHES = ("trials", "prune", "storage")  # options that a grid does not read
_USAGE = """\
usage: rlstack sweep PRESET --vary NAME VALUE ... [--seeds N] [options]   a grid: all combinations
       rlstack sweep PRESET --search optuna --space NAME LOW HIGH [log] [options]   a search
       rlstack sweep --resume SWEEP_DIR [--trials N] [--jobs N]

`rlstack sweep PRESET --help` explains the options.
"""
Launch = Literal["local", "ray", "slurm"]


@dataclasses.dataclass(frozen=True)
class _SweepOptions:
    experiment: Annotated[Experiment, tyro.conf.arg(name="")]
    run_dir: Path | None = None
    """The directory of the sweep, new or empty. By default a new directory under runs/."""
    seeds: tuple[int, ...] = ()
    """Train all values with each of these seeds. A single number N means the seeds 1 to N.
    By default the seed of the preset."""
    search: Literal["grid", "optuna"] = "grid"
    """grid: train each combination of the values of `--vary NAME VALUE ...`, which may be repeated.
    optuna: search the values of `--space NAME LOW HIGH` (log, int or step STEP behind it) or
    `--space NAME VALUE ...`, which may be repeated (extra sweep)."""
    trials: int = 50
    """With --search optuna: number of trials. Each trains one choice of values with all seeds."""
    prune: bool = True
    """With --search optuna: whether a trial ends early if an evaluation is worse than the median of
    other trials. Evaluates ten times in a run unless --evaluator.period says otherwise."""
    storage: str = ""
    """With --search optuna: URL of a database that several machines share, such as
    postgresql://USER@HOST/NAME. By default SQLite in the directory of the sweep."""
    jobs: int | None = None
    """Number of runs of a grid, or of trials, at the same time. By default 1; with --launch slurm
    all runs of a grid, and 4 tasks of a search."""
    launch: Launch = "local"
    """local: train on this machine. ray: train on the hosts of a Ray cluster, which must all see
    the directory of the sweep; see --program.ray. slurm: train nothing, and print the script of a
    Slurm array."""
    submit: bool = False
    """With --launch slurm: also give the script to sbatch. `--submit` alone means True."""


@dataclasses.dataclass(frozen=True)
class _ResumeOptions:
    """Go on with a sweep."""

    resume: Path
    """The directory of the sweep."""
    trials: int | None = None
    """A new number of trials of a search. By default the number stays."""
    jobs: int = 1
    """Number of runs of a grid, or of trials, at the same time."""
    launch: Literal["local", "ray"] = "local"
    """local: train on this machine. ray: train on the hosts of a Ray cluster."""
    ray_address: str = ""
    """With --launch ray: host:port of the head of the cluster. By default $RAY_ADDRESS; if that is
    not set, a local Ray."""
    task: str = ""
    """K/N: of a grid, train only each N-th run, from run K on. The tasks of a Slurm array do so."""


def main(args: list[str], modules: tuple[str, ...] = ()) -> int:
    """Runs the command; returns the exit code."""
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    if args[0].startswith("-"):
        if not any(arg.startswith("--res") for arg in args):
            raise UsageError(
                "a preset must come first, such as cartpole-ppo, or --resume SWEEP_DIR; got "
                f"{args[0]}"
            )
        _resume(parse(_ResumeOptions, "rlstack sweep", args))
        return 0
    name, *rest = args
    vary, rest = env_options.take_vary(rest)
    space, rest = env_options.take_vary(rest, "--space")
    chosen = experiment_options.read("sweep", name, rest, modules, _SweepOptions, {})
    if chosen is not None:
        _check(chosen, rest, vary, space)
        _search(chosen, space) if chosen.search == "optuna" else _grid(chosen, vary)
    return 0


def _check(
    chosen: _SweepOptions,
    args: Sequence[str],
    vary: Mapping[str, list[Option]],
    space: Mapping[str, list[Option]],
) -> None:
    if chosen.search == "grid" and space:
        raise UsageError("--space needs --search optuna; a grid has --vary NAME VALUE ...")
    if chosen.search == "optuna" and (vary or not space):
        raise UsageError("--search optuna needs --space NAME LOW HIGH, and takes no --vary")
    if chosen.search == "grid" and not (vary or chosen.seeds):
        raise UsageError(
            "a sweep needs --vary NAME VALUE ..., --seeds N, or --search optuna and --space"
        )
    given = {arg.partition("=")[0] for arg in args}
    for name in _OF_SEARCHES:
        is_given = f"--{name}" in given or getattr(chosen, name) != getattr(_SweepOptions, name)
        if chosen.search == "grid" and is_given:
            raise UsageError(f"--{name} needs --search optuna; a grid trains all its values")
    if chosen.jobs is not None and chosen.jobs < 1:
        raise UsageError(f"--jobs must be at least 1; got {chosen.jobs}")
    if chosen.submit and chosen.launch != "slurm":
        raise UsageError("--submit needs --launch slurm")


def _seeds(chosen: _SweepOptions) -> tuple[int, ...]:
    if len(chosen.seeds) == 1 and chosen.seeds[0] > 0:
        return tuple(range(1, chosen.seeds[0] + 1))
    return chosen.seeds or (chosen.experiment.seed,)


def _grid(chosen: _SweepOptions, vary: Mapping[str, list[Option]]) -> None:
    from rlstack.programs.study import study

    values = {name: tuple(found) for name, found in vary.items()}
    run_set = RunSet(chosen.experiment, _seeds(chosen), values)
    if chosen.launch != "slurm":
        with _launching(chosen.launch, chosen.experiment.program) as launch:
            study.run(run_set, chosen.run_dir, jobs=chosen.jobs or 1, **launch)
        return
    root, tasks = study.create(run_set, chosen.run_dir), len(run_set.members())
    _array(root, tasks, divided=True, at_once=chosen.jobs or 0, submits=chosen.submit)


def _search(chosen: _SweepOptions, space: Mapping[str, list[Option]]) -> None:
    from rlstack.programs.study import search
    from rlstack.programs.study.space import from_words
    from rlstack.programs.study.sweep import Sweep

    base = chosen.experiment
    sweep = Sweep(
        base=base,
        values={name: from_words(name, words, base) for name, words in space.items()},
        seeds=_seeds(chosen),
        trials=chosen.trials,
        prunes=chosen.prune,
        storage=chosen.storage,
    )
    if chosen.launch != "slurm":
        with _launching(chosen.launch, base.program) as launch:
            search.run(sweep, chosen.run_dir, jobs=chosen.jobs or 1, **launch)
        return
    root = search.create(sweep, chosen.run_dir)
    tasks = min(chosen.jobs or _SEARCH_TASKS, sweep.trials)
    _array(root, tasks, divided=False, at_once=0, submits=chosen.submit)


def _array(root: Path, tasks: int, *, divided: bool, at_once: int, submits: bool) -> None:
    from rlstack.programs.study import slurm

    print(slurm.write(root, tasks, divided=divided, at_once=at_once), end="")
    print(slurm.submit(root) if submits else f"# sbatch {root / slurm.FILE} submits it.")


@contextlib.contextmanager
def _launching(launch: Launch, cfg: ProgramConfig) -> Iterator[dict[str, Any]]:
    """Yields the argument that says where processes start; none for this machine."""
    if launch == "ray":
        from rlstack.programs.study import ray_hosts

        with ray_hosts.launching(cfg) as started:
            yield {"launch": started}
    else:
        yield {}


def _resume(chosen: _ResumeOptions) -> None:
    cfg = ProgramConfig(ray=RayConfig(address=chosen.ray_address))
    with _launching(chosen.launch, cfg) as launch:
        _go_on(chosen, launch)


def _go_on(chosen: _ResumeOptions, launch: Mapping[str, Any]) -> None:
    if is_set(chosen.resume):
        from rlstack.programs.study import study

        if chosen.trials is not None:
            raise UsageError("--trials is for searches; this sweep is a grid")
        part = study.Part(*_part(chosen.task)) if chosen.task else study.ALL
        study.resume(chosen.resume, jobs=chosen.jobs, part=part, **launch)
        return
    from rlstack.programs.study import search

    if chosen.task:
        raise UsageError("--task is for grids; commands that resume a search share its trials")
    search.resume(chosen.resume, chosen.trials, jobs=chosen.jobs, **launch)


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise UsageError(f"--task must be K/N, such as 1/4; got {text}")
    return int(number), int(count)
