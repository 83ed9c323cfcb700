"""The scheduler of populations: the worst members copy better ones, and change what they copied.

Members of the topology fused are rows of one compiled program, where JAX can trace the varied
options. A selection then copies params and learner states along the axis of the members and gives
the loop other numbers, so nothing is compiled again. It happens after a fixed number of iterations.
Environments and replays stay those of each member. Calls may end anywhere without a difference, so
a population that is resumed learns bit for bit what it learns without a break.

Otherwise members are runs of their own, which all train to the frames of the next selection. A copy
is then a new checkpoint of the member, with the params and the learner state of its source, from
which it goes on with new values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstack.programs.config import options
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run import train as single
from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.stopping import is_complete
from rlstack.programs.study import executors, space, vmapped
from rlstack.programs.study.executors import Work
from rlstack.programs.study.space import Range, Values
from rlstack.programs.study.study import PbtConfig, Study, Trial, reading
from rlstack.storage import checkpoint, files, jsonl

FILE = "lineage.json"
_FACTORS = (0.8, 1.2)
_NEVER = 10**12  # frames; checkpoints are written for all members at once, after a selection
_RETURN = "actor/episode_return"
_LEARNED = ("['learner']['params']", "['learner']['learner_state']")

Hyperparameters = dict[str, Option]  # by the names of the options


class Copy(NamedTuple):
    """The copy of a source member's params and learner state to another member."""

    selection: int  # number of the selection, from 1
    frames: int  # environment steps of the member so far
    member: int
    source: int
    score: float  # score of the member
    source_score: float
    before: Hyperparameters
    after: Hyperparameters  # the source's hyperparameters, perturbed


@dataclasses.dataclass
class Lineage:
    """The state of a population. Its file is written after all checkpoints that it names."""

    values: list[Hyperparameters]  # the current ones of each member
    selections: int = 0  # so far
    copies: list[Copy] = dataclasses.field(default_factory=list)  # of all selections so far
    # Score of each member in the last selection; NaN before the first one.
    scores: list[float] = dataclasses.field(default_factory=list)
    # Name of the checkpoint from which each member continues; "" to start anew. This and the next
    # three are used by members in one program only.
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    iterations: int = 0  # since the last selection
    # Sum of each member's episode returns since the last selection, and number of the episodes.
    returns: list[float] = dataclasses.field(default_factory=list)
    episodes: list[int] = dataclasses.field(default_factory=list)
    # Whether the members' checkpoints contain the copies of the last selection. False if the
    # command was killed before they did. Used by members that are runs of their own only.
    copied: bool = True
    apart: bool = False  # whether members are runs of their own; a population stays as it began

    @classmethod
    def new(cls, study: Study) -> Lineage:
        """Returns the lineage of a population that has not begun."""
        size, rng = len(study.seeds), _rng(study, 0)
        if _rule(study).start == "given":
            of_base = {name: options.value_of(study.base, name) for name in study.values}
            values = [dict(of_base) for _ in study.seeds]
        else:
            values = [
                {name: space.draw(found, rng) for name, found in study.values.items()}
                for _ in study.seeds
            ]
        return cls(values, 0, [], [math.nan] * size, [""] * size, 0, [0.0] * size, [0] * size)

    def members(self, study: Study) -> list[Trial]:
        """Returns the members with their current values."""
        pairs = zip(self.values, study.seeds, strict=True)
        return [Trial(f"member-{i}", values, seed, i) for i, (values, seed) in enumerate(pairs)]

    def take(self, copies: list[Copy], scores: list[float]) -> None:
        """Records the copies and scores of a selection; restarts the counts since the last one."""
        self.selections += 1
        self.scores = scores
        self.copies += copies
        for copy in copies:
            self.values[copy.member] = copy.after
        self.iterations = 0
        self.returns, self.episodes = [0.0] * len(self.values), [0] * len(self.values)

    @property
    def newest(self) -> list[Copy]:
        """The copies of the last selection."""
        return [copy for copy in self.copies if copy.selection == self.selections]

    def write(self, directory: Path) -> None:
        """Writes the file that `read_lineage` reads."""
        tree = dataclasses.asdict(self) | {"copies": [copy._asdict() for copy in self.copies]}
        files.write(directory / FILE, json.dumps(tree, indent=1) + "\n")


def read_lineage(directory: Path, study: Study) -> Lineage:
    """Returns the lineage of a population from its directory; a new one if there is no file.

    Raises:
      RunDirError: the lineage's file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return Lineage.new(study)
    with reading(path):
        tree = files.read_json(path)
        return Lineage(**{**tree, "copies": [Copy(**copy) for copy in tree["copies"]]})


def with_period(study: Study) -> PbtConfig:
    """Returns the rule with its period in frames, which then stays whatever the next budget is."""
    rule = _rule(study)
    return dataclasses.replace(rule, period=rule.period or max(1, study.base.frames // 20))


def _rule(study: Study) -> PbtConfig:
    assert isinstance(study.scheduler, PbtConfig)
    return study.scheduler


def _rng(study: Study, selection: int) -> np.random.Generator:
    """Returns the random numbers of a selection, which counts from 1; 0 is the start."""
    return np.random.default_rng([study.base.seed, selection])


def select(
    study: Study,
    selection: int,
    scores: Sequence[float],
    frames: Sequence[int],
    values: Sequence[Hyperparameters],
    among: Sequence[int],
) -> list[Copy]:
    """Returns the copies that a selection makes: bad members copy good ones.

    Args:
      study: the population, which has the rule of selection.
      selection: the number of the selection, from 1.
      scores: mean recent episode return of each member; -inf for a member that failed.
      frames: environment steps of each member so far.
      values: hyperparameters of each member.
      among: the numbers of the members that take part.
    """
    rng = _rng(study, selection)
    ordered = sorted(among, key=lambda i: (scores[i], i))
    count = max(1, int(len(ordered) * _rule(study).fraction))
    if len(ordered) < 2:
        return []
    best, found = ordered[-count:], []
    for i in ordered[:count]:
        source = best[int(rng.integers(len(best)))]
        after = {
            name: _changed(found, values[source][name], _rule(study).resample, rng)
            for name, found in study.values.items()
        }
        if scores[source] > scores[i]:
            both = scores[i], scores[source]
            found.append(Copy(selection, frames[i], i, source, *both, values[i], after))
    return found


def _changed(values: Values, value: Option, resample: float, rng: np.random.Generator) -> Option:
    """Returns a value near the given one or drawn anew, within its range."""
    if rng.random() < resample:
        return space.draw(values, rng)
    factor = _FACTORS[int(rng.integers(len(_FACTORS)))]
    if not isinstance(values, Range):  # choices have no neighbours
        return value
    number = float(value) * factor
    if values.whole and round(number) == value:  # a small integer would never change
        number = float(value) + (1 if factor > 1 else -1)
    return values.fitted(number)


def train(work: Work, budgets: Mapping[str, Any]) -> list[Trial]:
    """Trains all members to their ends, and returns them.

    Args:
      work: the study, in a directory of which this command has the claim.
      budgets: the budgets that are new, by the name of the config field.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; everything is saved.
    """
    study, root = work.study, work.root
    lineage = read_lineage(root, study)
    members, ended = lineage.members(study), {}
    for member in members:
        directory = RunDir(root / member.name)
        if not directory.config.is_file():  # also if a command ended before it had made all
            with single.new_run(study.experiment(member.values, member.seed), directory.path):
                pass
        result = read_result(directory)
        if result is not None and is_complete(study.base, result, same_budget=not budgets):
            ended[member.name] = member.ended(result)
    if len(ended) == len(members):
        work.say(f"{root} has finished, and stays as it is. Give more --frames.")
        return list(ended.values())
    # Earlier versions did not write `apart`; members in one program have checkpoints here.
    apart = lineage.apart or (lineage.selections > 0 and not any(lineage.checkpoints))
    share = work.is_here and executors.may_share_a_program(study) and not apart
    if not share or not all(vmapped.can_trace(study.base, *v) for v in study.values.items()):
        return _train_apart(work, lineage, ended)
    with _opened(work, lineage) as runs, executors.display_of(work, runs) as display:
        make = functools.partial(_Members, work, lineage)
        outcomes = vmapped.train(runs, _by_name(lineage), display, make)
    return [m.ended(o) for m, o in zip(lineage.members(study), outcomes, strict=True)]


@contextlib.contextmanager
def _opened(work: Work, lineage: Lineage) -> Iterator[list[single.Opened]]:
    """Claims the directories of all members; yields their runs, from the lineage's checkpoints."""
    with contextlib.ExitStack() as stack:
        runs = []
        for member in lineage.members(work.study):
            directory = stack.enter_context(RunDir.open(work.root / member.name).claimed())
            experiment = work.study.experiment(member.values, member.seed)
            directory.write_config(to_json(experiment))
            name = lineage.checkpoints[member.number]
            start_from = directory.checkpoints / name if name else None
            found = checkpoint.paths(directory.checkpoints)  # the newest first
            if start_from is not None and start_from not in found:
                found = []  # in doubt nothing is removed
            for path in found:
                if path == start_from:
                    break
                shutil.rmtree(path)  # the command was killed before the other members had theirs
            # The lineage names the checkpoint before until all members have the next one.
            kept = max(2, experiment.checkpoints_kept)
            experiment = dataclasses.replace(
                experiment, checkpoint_period=_NEVER, checkpoints_kept=kept
            )
            runs.append(single.Opened(experiment, directory, start_from))
        yield runs


class _Members(vmapped.VmappedRuns):
    """The members in training in one program."""

    def __init__(self, work: Work, lineage: Lineage, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._study, self._root, self._lineage = work.study, work.root, lineage
        period = with_period(work.study).period
        self._period = max(1, -(-period // self.frames))  # iterations per selection
        self._saved_at: int | None = None  # frames; the members are restored before the first call

    @property
    def _most_frames(self) -> int:
        return max(run.env_frames for run in self.runs)

    def call(self, *_: Any) -> vmapped.PendingCall:
        """Makes a call, and a selection if it is due."""
        lineage = self._lineage
        if self._saved_at is None:
            self._saved_at = self._most_frames
        before = np.asarray(lineage.returns, np.float32)
        called = super().call(self._period - lineage.iterations, before)
        lineage.iterations += called.iterations
        lineage.returns = called.returns.tolist()
        lineage.episodes = (np.asarray(lineage.episodes) + called.episodes).tolist()
        if lineage.iterations >= self._period and any(run.active for run in self.runs):
            self._select()
            if self._most_frames - self._saved_at >= self._study.base.checkpoint_period:
                for run in self.runs:
                    if run.active:
                        run.session.save()
                self.save()
                self._saved_at = self._most_frames
        return called

    def _select(self) -> None:
        lineage, runs = self._lineage, self.runs
        among = [i for i, run in enumerate(runs) if run.active or run.diverged]
        scores = [self._score(i) for i in range(len(runs))]
        frames = [run.env_frames for run in runs]
        number = lineage.selections + 1
        copies = select(self._study, number, scores, frames, lineage.values, among)
        for i in among:
            numbers = {k: v for k, v in lineage.values[i].items() if not isinstance(v, str)}
            logs = {f"population/{k}": float(v) for k, v in {"score": scores[i], **numbers}.items()}
            runs[i].session.periodic.log({k: v for k, v in logs.items() if math.isfinite(v)})
        lineage.take(copies, scores)
        sources = list(range(len(runs)))
        for copy in copies:
            sources[copy.member] = copy.source
            experiment = self._study.experiment(copy.after, self._study.seeds[copy.member])
            runs[copy.member].directory.write_config(to_json(experiment))
        if copies:
            self.copy(sources, _by_name(lineage))
        for copy in copies:
            runs[copy.member].retry()

    def _score(self, index: int) -> float:
        """Returns the mean of the episode returns since the last selection.

        Without an episode it is the score before; -inf for none, and for a run that diverged.
        """
        lineage = self._lineage
        if self.runs[index].diverged:
            return -math.inf
        if lineage.episodes[index]:
            return lineage.returns[index] / lineage.episodes[index]
        return _known(lineage.scores[index])

    def save(self) -> None:
        """Writes the lineage, once all members are saved."""
        found = [checkpoint.latest(run.directory.checkpoints) for run in self.runs]
        self._lineage.checkpoints = [path.name if path else "" for path in found]
        self._lineage.write(self._root)


def _train_apart(work: Work, lineage: Lineage, ended: dict[str, Trial]) -> list[Trial]:
    """Trains members as runs of their own.

    Members that another budget or a stop rule has ended before the budget of frames take no part in
    later selections.
    """
    study, base = work.study, work.study.base
    period = with_period(study).period
    lineage.apart = True
    lineage.write(work.root)
    while True:
        if not lineage.copied:
            _copy(work, lineage)
        end = min((lineage.selections + 1) * period, base.frames)
        left = [m for m in lineage.members(study) if not _is_over(base, ended.get(m.name))]
        # Each command counts all frames, updates and hours of the member.
        budgets = {"frames": end, "updates": base.updates, "hours": base.hours}
        ended |= {trial.name: trial for trial in executors.train(work, left, budgets)}
        trials = [ended[member.name] for member in lineage.members(study)]
        among = [trial.number for trial in trials if not _is_over(base, trial)]
        if end >= base.frames or not among:
            return trials
        begin = lineage.selections * period
        scores = [
            -math.inf if trial.result is None else _score(work.root / trial.name, begin, before)
            for trial, before in zip(trials, lineage.scores, strict=True)
        ]
        frames = [trial.result.env_frames if trial.result else begin for trial in trials]
        copies = select(study, lineage.selections + 1, scores, frames, lineage.values, among)
        lineage.take(copies, scores)
        lineage.copied = False
        lineage.write(work.root)
        for copy in copies:
            names = trials[copy.member].name, trials[copy.source].name
            work.say(f"{names[0]} copies {names[1]} at frame {copy.frames:,}")


def _is_over(base: Experiment, trial: Trial | None) -> bool:
    """Whether a member has nothing left to train. A failed member is not over: it may copy."""
    result = trial.result if trial is not None else None
    return result is not None and is_complete(base, result, same_budget=True)


def _score(path: Path, begin: int, before: float) -> float:
    """Returns the mean of the logged episode returns after a frame.

    Without any it is the score before, or -inf if there is none.
    """
    metrics = RunDir(path).metrics
    lines = jsonl.read_logs(metrics) if metrics.is_file() else []
    found = [line[_RETURN] for line in lines if line["env_frames"] > begin and _RETURN in line]
    return _known(float(np.mean(found)) if found else before)


def _known(score: float) -> float:
    return score if math.isfinite(score) else -math.inf


def _copy(work: Work, lineage: Lineage) -> None:
    """Makes the copies of the last selection; repeating it changes nothing."""
    study = work.study
    members = lineage.members(study)
    for copy in lineage.newest:
        member, source = members[copy.member], RunDir(work.root / members[copy.source].name)
        with RunDir.open(work.root / member.name).claimed() as directory:
            mine = checkpoint.latest(directory.checkpoints)
            theirs = checkpoint.latest(source.checkpoints)
            # A member that failed before its first checkpoint starts again with the new values.
            if mine is not None and theirs is not None:
                checkpoint.copy_parts(mine, theirs, _LEARNED, directory.check_claim)
            done = max(1, lineage.selections * with_period(study).period)
            experiment = study.experiment(member.values, member.seed)
            directory.write_config(to_json(dataclasses.replace(experiment, frames=done)))
    lineage.copied = True
    lineage.write(work.root)


def _by_name(lineage: Lineage) -> dict[str, list[Option]]:
    return {name: [values[name] for values in lineage.values] for name in lineage.values[0]}
