"""`rlstack sweep`: a grid of values, or a search of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlstack.programs.cli import env_options, experiment_options
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.program_config import RayConfig
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import space
from rlstack.programs.study.study import SearchConfig, Study

_SEARCH_TASKS = 4  # tasks of a Slurm array for a search, unless --jobs sets another number
_OF_SEARCHES = ("trials", "prune", "storage")  # options that a grid does not read
_USAGE = """\
usage: rlstack sweep PRESET --vary NAME VALUE ... [--seeds N] [options]   a grid, as of train
       rlstack sweep PRESET --search optuna --space NAME LOW HIGH [log] [options]   a search
       rlstack sweep --resume SWEEP_DIR [--trials N] [--jobs N]

`rlstack sweep PRESET --help` explains the options.
"""
Launch = Literal["local", "ray", "slurm"]


@dataclasses.dataclass(frozen=True)
class _SweepOptions(experiment_options.StudyOptions):
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
        print(experiment_options.overview(_USAGE, _SweepOptions))
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
    searched, rest = env_options.take_vary(rest, "--space")
    chosen = experiment_options.read("sweep", name, rest, modules, _SweepOptions, {})
    if chosen is not None:
        _check(chosen, rest, vary, searched)
        study = _study(chosen, vary, searched)
        chosen.tell_seeds()
        _train(study, chosen)
    return 0


def _check(
    chosen: _SweepOptions,
    args: Sequence[str],
    vary: Mapping[str, list[Option]],
    searched: Mapping[str, list[Option]],
) -> None:
    if chosen.search == "grid" and searched:
        raise UsageError("--space needs --search optuna; a grid has --vary NAME VALUE ...")
    if chosen.search == "optuna" and (vary or not searched):
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
    _check_shared(chosen.launch, chosen.run_dir)


def _study(
    chosen: _SweepOptions,
    vary: Mapping[str, Sequence[Option]],
    searched: Mapping[str, Sequence[Option]],
) -> Study:
    base, seeds = chosen.experiment, (chosen.all_seeds or (chosen.experiment.seed,))
    if chosen.search == "grid":
        return Study(base, seeds, {name: tuple(found) for name, found in vary.items()})
    values = {name: space.from_words(name, words, base) for name, words in searched.items()}
    return Study(base, seeds, values, SearchConfig(chosen.trials, chosen.prune, chosen.storage))


def _check_shared(launch: Launch, run_dir: Path | None) -> None:
    if launch != "local" and run_dir is not None and RunDir.at(run_dir).is_stored:
        raise UsageError(
            f"--launch {launch} needs a --run-dir on a file system that all hosts see; got "
            f"{RunDir.at(run_dir).name}. With a store, each run of a grid can train on all hosts: "
            "rlstack train PRESET --vary NAME VALUE ... --topology distributed --launch ray"
        )


def _train(study: Study, chosen: _SweepOptions) -> None:
    from rlstack.programs.study import train

    if chosen.launch != "slurm":
        with launching(chosen.launch, study.base.program) as launch:
            train.run(study, chosen.run_dir, jobs=chosen.jobs or 1, **launch)
        return
    from rlstack.programs.study import hosts

    root = train.create(study, chosen.run_dir)
    if study.is_grid:
        tasks, at_once = len(study.trials()), chosen.jobs or 0
    else:
        tasks, at_once = min(chosen.jobs or _SEARCH_TASKS, chosen.trials), 0
    print(hosts.write_array(root, tasks, divided=study.is_grid, at_once=at_once), end="")
    file = root / hosts.SLURM_FILE
    print(hosts.submit_array(root) if chosen.submit else f"# sbatch {file} submits it.")


@contextlib.contextmanager
def launching(launch: Launch, cfg: ProgramConfig) -> Iterator[dict[str, Any]]:
    """Yields the argument of `train.run` that says where processes start; none for this machine."""
    if launch == "ray":
        from rlstack.programs.study import hosts

        with hosts.launching(cfg) as started:
            yield {"launch": started}
    else:
        yield {}


def _resume(chosen: _ResumeOptions) -> None:
    part = _part(chosen.task) if chosen.task else (1, 1)
    _check_shared(chosen.launch, chosen.resume)
    from rlstack.programs.study import train

    cfg = ProgramConfig(ray=RayConfig(address=chosen.ray_address))
    settings: dict[str, Any] = {"trials": chosen.trials, "jobs": chosen.jobs, "part": part}
    with launching(chosen.launch, cfg) as launch:
        train.resume(chosen.resume, **settings, **launch)


def _part(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal()):
        raise UsageError(f"--task must be K/N, such as 1/4; got {text}")
    return int(number), int(count)
