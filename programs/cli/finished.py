"""The commands on runs that exist, each after the dataclass of its options, which tyro parses."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

from rlstack.programs.cli import env_options
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.env_config import Option
from rlstack.programs.session.run_dir import RunDir, fetched
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.tools.report import By, Pictures

if TYPE_CHECKING:
    from rlstack.acting.evaluator import Evaluation


@dataclasses.dataclass(frozen=True)
class _EvalOptions:
    """Evaluate the newest params of a run, or its best ones, with the greedy policy; print the
    result as JSON.

    `--vary NAME VALUE ...`, which may be repeated, evaluates each combination of these options of
    the environment, and prints a line of JSON for each. The name may have `env.options.` before it.
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
    tournament: int = 0
    """For a run of self-play: play this many games between each two of the policy's versions, and
    print win rates and Elo ratings with 95% intervals."""


def evaluate(args: list[str]) -> int:
    """Runs `rlstack eval`; returns the exit code, as all of these functions do."""
    varied, args = env_options.take_vary(args)
    vary = {name.removeprefix("env.options."): values for name, values in varied.items()}
    chosen = parse(_EvalOptions, "rlstack eval", args, config=(tyro.conf.FlagConversionOff,))
    RunDir.open(chosen.run_dir)  # before JAX is imported
    if chosen.tournament:
        from rlstack.programs.tools import tournament

        played = tournament.tournament(chosen.run_dir, chosen.tournament, seed=chosen.seed)
        print(json.dumps(played.summary()))
        return 0
    from rlstack.programs.run import evaluation

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
    from rlstack.acting.evaluator import by_opponent, by_policy

    if found.policies:
        means = {name: float(values.mean()) for name, values in by_policy(found).items()}
        summary["eval_return_by_policy"] = means
    if found.opponents:
        summary["eval_return_by_opponent"] = by_opponent(found)
    return summary


@dataclasses.dataclass(frozen=True)
class _DiffOptions:
    """Show which options of two runs differ, and their results side by side."""

    left: tyro.conf.Positional[Path]
    """The directory of a run."""
    right: tyro.conf.Positional[Path]
    """The directory of another run."""


def diff(args: list[str]) -> int:
    """Runs `rlstack diff`."""
    chosen = parse(_DiffOptions, "rlstack diff", args)
    from rlstack.programs.run import compare

    found = compare.compare(chosen.left, chosen.right)
    rows = [compare.Row("", RunDir(chosen.left).name, RunDir(chosen.right).name)]
    rows += found.config or [compare.Row("the configs are equal", "", "")]
    rows += [compare.Row("", "", ""), *found.results]
    shown = [tuple("-" if cell is None else str(cell) for cell in row) for row in rows]
    widths = [max(len(row[column]) for row in shown) for column in range(2)]
    for name, left, right in shown:
        print(f"{name:{widths[0]}}  {left:{widths[1]}}  {right}".rstrip())
    return 0


@dataclasses.dataclass(frozen=True)
class _ReportOptions:
    """Write a table of finished runs with statistics over seeds and tasks, in Markdown with
    pictures, as an HTML page, as CSV, or in LaTeX."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Directories of runs or of studies, or folders of these. Runs of one preset with
    different seeds share a row."""
    out: Path | None = None
    """The Markdown file. The pictures go to the folder of the same name without suffix. By default
    results.md, if no other file is asked for."""
    html: Path | None = None
    """An HTML page with interactive plots. It needs no other file and no network."""
    csv: Path | None = None
    """A file with a line for each statistic."""
    latex: Path | None = None
    """A file with the statistics as tables in LaTeX."""
    paper: bool = False
    """Write the table, the curves and the text of the protocol for a paper, in LaTeX and Markdown:
    paper.tex and paper.md in the folder of the pictures, which is named like the file."""
    pictures: Pictures = "png"
    """Format of the pictures of --out; png and svg need the extra [report]."""
    compare: bool = False
    """Give the probability that one method is better than another, for each pair."""
    by: By | None = None
    """What the statistics compare: runs of one preset and values, of one agent, or of one
    directory. By default directory with --compare, otherwise preset."""
    normalise: tuple[str, ...] = ()
    """How returns become scores that can be averaged over tasks: atari (0 is random play, 1 a
    human), mujoco (0 is a random policy, 1 an expert), two numbers MIN MAX for all tasks, or a
    JSON file {"TASK": [MIN, MAX]}. By default nothing is averaged over tasks."""


def report(args: list[str]) -> int:
    """Runs `rlstack report`."""
    chosen = parse(_ReportOptions, "rlstack report", args)
    from rlstack.programs.study import study
    from rlstack.programs.tools.report import normalisation, paper
    from rlstack.programs.tools.report import report as reports
    from rlstack.programs.tools.report.runs import Unfinished

    if not chosen.run_dirs:
        raise UsageError("directories of runs must be given, such as runs (rlstack report --help)")
    named = reports.named([fetched(path) for path in chosen.run_dirs])
    unfinished = [Unfinished(name, *one) for name, path in named for one in study.unfinished(path)]
    made = reports.make(
        [(name, study.find(path)) for name, path in named],
        by=chosen.by or ("directory" if chosen.compare else "preset"),
        normalisation=normalisation.from_words(chosen.normalise),
        compare=chosen.compare,
        unfinished=unfinished,
    )
    command = "rlstack report RUN_DIR ..."
    out = chosen.out
    if out is None and not (chosen.html or chosen.csv or chosen.latex):
        out = Path("results.md")
    if out is not None:
        reports.write_markdown(made, out, f"{command} --out {_shown(out)}", chosen.pictures)
    if chosen.html is not None:
        reports.write_page(made, chosen.html, f"{command} --html {_shown(chosen.html)}")
    if chosen.csv is not None:
        reports.write_csv(made, chosen.csv)
    if chosen.latex is not None:
        reports.write_latex(made, chosen.latex)
    first = next(filter(None, (out, chosen.html, chosen.csv, chosen.latex)))
    papers = paper.write(made, first.with_suffix("")) if chosen.paper else []
    for path in filter(None, (out, chosen.html, chosen.csv, chosen.latex, *papers)):
        print(f"{path}: {', '.join(method.name for method in made.statistics.methods)}")
    if text := reports.summary(made):
        print(text)
    return 0


def _shown(path: Path) -> str:
    """Returns a path as a page shows it, which may be read on another machine."""
    return path.name if path.is_absolute() else str(path)


@dataclasses.dataclass(frozen=True)
class _RecordOptions:
    """Play whole episodes with the newest params of a run and write them to a dataset.

    With --sets, write four: random, medium, medium-replay and expert.
    """

    run_dir: tyro.conf.Positional[Path]
    """The directory of the run."""
    out: Path | None = None
    """The directory of the dataset, new or empty. By default RUN_DIR/dataset. See --format."""
    frames: int = 20_000
    """Minimum number of environment steps. Episodes that were started are finished."""
    policy: Literal["greedy", "explore"] = "greedy"
    """greedy takes the best action; explore explores as at the end of training."""
    seed: int | None = None
    """Seed of environments and exploration. By default the seed of the run."""
    sets: bool = False
    """Write random, medium, medium-replay and expert sets of all checkpoints of the run, each with
    --frames, to --out, by default RUN_DIR/datasets. `--sets` alone means True."""
    format: Literal["rlstack", "minari"] = "rlstack"
    """minari writes datasets of Minari instead. --out is then a name such as hopper/mine-v0, or
    with --sets its first part."""


def record(args: list[str]) -> int:
    """Runs `rlstack record`."""
    chosen = parse(_RecordOptions, "rlstack record", args)
    RunDir.open(chosen.run_dir)
    from rlstack.programs.run import record as recording

    names: list[str] = []
    with contextlib.ExitStack() as stack:
        out = chosen.out
        if chosen.format == "minari":
            if chosen.out is None:
                raise UsageError("--format minari needs a name: --out hopper/mine-v0")
            first = str(chosen.out)
            sets = [f"{first}/{name}-v0" for name in recording.SETS]
            names = sets if chosen.sets else [first]
            recording.check_minari(names)  # before anything is played
            out = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "made"
        common: Any = {"frames": chosen.frames, "seed": chosen.seed}
        if chosen.sets:
            if chosen.policy != "greedy":
                raise UsageError("--sets chooses the policy of each set: leave out --policy")
            every = recording.record_sets(chosen.run_dir, out, tell=_tell_on_stderr, **common)
            made = list(every.values())
        else:
            made = [recording.record(chosen.run_dir, out, policy=chosen.policy, **common)]
        if chosen.format == "minari":
            made = recording.to_minari(made, names)
    for path, header in made:
        found = {
            "dataset": str(path),
            "frames": header.frames,
            "episodes": header.episodes,
            "return_mean": header.return_mean,
            "return_std": header.return_std,
        }
        print(json.dumps(found))
    return 0


def _tell_on_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class _PlayOptions:
    """Play an entity environment by hand, in the terminal. With --seat, play in one seat of a game
    against the policies of a run."""

    env: tyro.conf.Positional[str]
    """A game of rlstack.entity.games, such as mine-sweeper, or "module:callable". With --seat, the
    directory of a run, or of a checkpoint; ":NAME" after it lets this one of its policies play all
    other seats."""
    seat: str = ""
    """Your seat, by name or number. The policies of the run play the others."""
    checkpoint: Path | None = None
    """The directory of a run. Shows the value and the action probabilities of its agent, and plays
    with the environment options of the run."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Options of the game, as names and values. They override those of the run."""
    agent: bool = False
    """Let the Enter key play the agent's choice. Needs --checkpoint or --seat."""
    seed: int | None = None
    """Seed of the game. By default 0, and with --seat the seed of the run."""
    params: Literal["last", "best"] = "last"
    """Which params of the run: the last ones, or those with the best return in an evaluation."""
    policy: Literal["greedy", "explore"] = "greedy"
    """How policies play the other seats: greedy takes the best action; explore explores as at the
    end of training."""


def play(args: list[str]) -> int:
    """Runs `rlstack play`."""
    chosen = parse(_PlayOptions, "rlstack play", args)
    if not chosen.seat and (Path(chosen.env) / "config.json").is_file():
        raise UsageError(
            f"{chosen.env} is a run: --seat must say which seat of its game is yours; an entity "
            "environment of one agent is played by rlstack play GAME --checkpoint RUN_DIR"
        )
    if chosen.seat and (chosen.checkpoint or chosen.options):
        raise UsageError(
            "--seat cannot be combined with --checkpoint or --options: the run has its environment"
        )
    try:
        (_play_seat if chosen.seat else _play_env)(chosen)
    except KeyboardInterrupt as stop:
        print()
        raise Interrupted(signal.SIGINT, saved=False) from stop
    return 0


def _play_env(chosen: _PlayOptions) -> None:
    from rlstack.programs.tools import play as playing

    playing.play(
        chosen.env,
        checkpoint=chosen.checkpoint,
        options=chosen.options,
        agent=chosen.agent,
        seed=chosen.seed or 0,
        params=chosen.params,
    )


def _play_seat(chosen: _PlayOptions) -> None:
    from rlstack.programs.tools.seats import play as playing

    playing.play(
        chosen.env,
        chosen.seat,
        params=chosen.params,
        greedy=chosen.policy == "greedy",
        agent=chosen.agent,
        seed=chosen.seed,
    )


@dataclasses.dataclass(frozen=True)
class _WatchOptions:
    """Show how the agent of a run plays, with its probabilities and its value: in the terminal, or
    as a video. In games of several seats, runs play against one another."""

    run_dirs: tyro.conf.Positional[tuple[str, ...]]
    """The directory of the run. In a game of several seats there may be more, or directories of
    checkpoints: they play against one another, and change seats from episode to episode. ":NAME"
    after one lets this one of its policies play all seats for it."""
    video: Path | None = None
    """The video to write, .mp4, .webm or .gif. By default the terminal shows the run."""
    window: bool = False
    """Show the run in a window. Escape closes it."""
    episodes: int | None = None
    """Number of episodes. By default 1, or one for each of several runs."""
    results_only: bool = False
    """Show no steps, only the results. For runs of games of several seats."""
    params: Literal["last", "best"] = "last"
    """Which params: the last ones, or those with the best return in an evaluation of the run."""
    policy: Literal["greedy", "explore"] = "greedy"
    """greedy takes the best action; explore explores as at the end of training."""
    seed: int | None = None
    """Seed of the environment and of random actions. By default the seed of the run."""
    max_steps: int = 2000
    """Longest episode, in steps; a longer one is cut."""
    fps: float | None = None
    """Steps in a second. By default what the environment says, or 10."""


def watch(args: list[str]) -> int:
    """Runs `rlstack watch`."""
    from rlstack.programs.pictures import watch as watching
    from rlstack.programs.tools.seats import watch as watching_seats

    chosen = parse(_WatchOptions, "rlstack watch", args)
    if not chosen.run_dirs:
        raise UsageError("the directory of a run must be given (rlstack watch --help)")
    for option, value in (("episodes", chosen.episodes), ("max-steps", chosen.max_steps)):
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1; got {value}")
    if chosen.window and (chosen.video or chosen.results_only):
        raise UsageError("--window cannot be combined with --video or --results-only")
    settings: dict[str, Any] = {
        "video": chosen.video,
        "window": chosen.window,
        "params": chosen.params,
        "greedy": chosen.policy == "greedy",
        "seed": chosen.seed,
        "max_steps": chosen.max_steps,
        "fps": chosen.fps,
    }
    if watching_seats.is_game_of_seats(chosen.run_dirs):
        played = watching_seats.watch(
            chosen.run_dirs,
            shows=not chosen.results_only,
            episodes=chosen.episodes,
            tell=functools.partial(print, flush=True),
            **settings,
        )
        lines, frames = played.summary(), played.frames
    elif chosen.results_only:
        raise UsageError("--results-only needs a game of several seats; rlstack eval has results")
    else:
        found = watching.watch(chosen.run_dirs[0], episodes=chosen.episodes or 1, **settings)
        pairs = zip(found.returns, found.lengths, strict=True)
        lines = [f"return {total:.6g} after {length} steps" for total, length in pairs]
        frames = found.frames
    print("\n".join(lines), end="\n" if lines else "")
    if chosen.video is not None:
        print(f"{chosen.video}: {frames} steps")
    return 0


@dataclasses.dataclass(frozen=True)
class _ExportOptions:
    """Write the greedy policy of a run to a file that needs no rlstack, and a description of it
    (FILE.json) beside it."""

    run_dir: tyro.conf.Positional[Path]
    """The directory of the run."""
    format: Literal["npz", "stablehlo", "onnx"]
    """npz: the params by name, for numpy. stablehlo: a function (observation[, state]) ->
    action[, state] for jax.export.deserialize. onnx: a model for ONNX runtimes (extra [onnx]). The
    last two contain the normalisation of observations."""
    out: Path | None = None
    """The file. By default RUN_DIR/policy.FORMAT."""
    params: Literal["last", "best"] = "last"
    """Which params: the last ones, or those with the best return in an evaluation of the run."""


def export(args: list[str]) -> int:
    """Runs `rlstack export`."""
    chosen = parse(_ExportOptions, "rlstack export", args)
    RunDir.open(chosen.run_dir)
    from rlstack.programs.tools import export as exporting

    found = exporting.export(chosen.run_dir, chosen.format, chosen.out, params=chosen.params)
    print(f"{found.path}: {found.path.stat().st_size:,} bytes; {found.description} describes it")
    if found.batch is not None:
        print(f"It takes batches of {found.batch} only, because the network needs to know the size")
    return 0


@dataclasses.dataclass(frozen=True)
class _RerunOptions:
    """Repeat an update that gave NaN, from its saved inputs, and print its logs.

    With JAX_DEBUG_NANS=True in the environment it stops at the operation that gives the first NaN.
    """

    dump_dir: tyro.conf.Positional[Path]
    """The directory dump-N in the run directory."""


def rerun(args: list[str]) -> int:
    """Runs `rlstack rerun`."""
    chosen = parse(_RerunOptions, "rlstack rerun", args)
    from rlstack.programs.run import train

    for name, value in sorted(train.rerun(chosen.dump_dir).items()):
        print(f"{name:16} {value}")
    return 0
