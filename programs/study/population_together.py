"""A population in one compiled program: selections between calls of the loops of all members.

A selection copies params and learner states along the axis of the members and gives the loop other
numbers, so nothing is compiled again. It happens after a fixed number of iterations. Environments
and replays stay those of each member. Calls may end anywhere without a difference, so a population
that is resumed learns bit for bit what it learns without a break.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.env_config import Option
from rlstack.programs.run.train import Opened
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.programs.study import pbt, together
from rlstack.programs.study.loops import Group
from rlstack.programs.study.pbt import Lineage
from rlstack.programs.study.population import Population
from rlstack.storage import checkpoint

_NEVER = 10**12  # frames; checkpoints are written for all members at once, after a selection


def opened(population: Population, index: int, lineage: Lineage, directory: RunDir) -> Opened:
    """Returns a member's run, which continues from its checkpoint.

    Args:
      population: the population.
      index: number of the member.
      lineage: holds the values and the checkpoint of the member.
      directory: the member's run directory, claimed by this command.
    """
    directory.write_config(to_json(population.experiment(index, lineage.values[index])))
    name = lineage.checkpoints[index]
    start_from = directory.checkpoints / name if name else None
    for path in checkpoint.paths(directory.checkpoints):
        if path == start_from:
            break
        shutil.rmtree(path)  # the command was killed before the other members had theirs
    experiment = population.experiment(index, lineage.values[index])
    return Opened(dataclasses.replace(experiment, checkpoint_period=_NEVER), directory, start_from)


def train(
    population: Population,
    lineage: Lineage,
    root: Path,
    runs: Sequence[Opened],
    display: ProgressDisplay,
) -> list[Result | Exception]:
    """Trains all members to their ends.

    Args:
      population: the population; JAX must be able to trace its varied options.
      lineage: the state from which training continues; updated in place.
      root: the directory of the population.
      runs: the runs of all members, from `opened`.
      display: shows the joint progress of all members.

    Returns:
      The result of each member, or the error that ended it.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; everything is saved.
    """
    with together.begun(runs, _by_name(lineage), display) as (group, kept):
        members = _Members(population, lineage, root, runs, group, kept)
        with StopSignals(display.write_line, has_progress=lambda: group.called) as signals:
            with display.phase("compiling the loops"):
                members.call()
            while members.go_on and signals.received is None:
                members.call()
            for one in kept:
                if one.active:
                    one.session.end()
            members.save()
            if signals.received is not None:
                raise Interrupted(signals.received)
        return [one.outcome() for one in kept]


class _Members:
    """The members in training."""

    def __init__(
        self,
        population: Population,
        lineage: Lineage,
        root: Path,
        runs: Sequence[Opened],
        group: Group,
        kept: Sequence[together.VmappedRun],
    ) -> None:
        self._population, self._lineage, self._root = population, lineage, root
        self._runs, self._group, self._kept = runs, group, kept
        self._period = max(1, -(-population.period // group.frames))  # iterations per selection
        self._saved_at = self._frames

    @property
    def go_on(self) -> bool:
        """Whether any member still trains."""
        return any(one.active for one in self._kept)

    @property
    def _frames(self) -> int:
        return max(one.member.env_frames for one in self._kept)

    def call(self) -> None:
        """Makes a call, and a selection if it is due."""
        lineage = self._lineage
        called = self._group.call(
            self._kept,
            self._period - lineage.iterations,
            np.asarray(lineage.returns, np.float32),
        )
        lineage.iterations += called.iterations
        lineage.returns = called.returns.tolist()
        lineage.episodes = (np.asarray(lineage.episodes) + called.episodes).tolist()
        if lineage.iterations >= self._period and self.go_on:
            self._select()
            if self._frames - self._saved_at >= self._population.base.checkpoint_period:
                for one in self._kept:
                    if one.active:
                        one.session.save()
                self.save()
                self._saved_at = self._frames

    def _select(self) -> None:
        lineage, kept = self._lineage, self._kept
        among = [i for i, one in enumerate(kept) if one.active or one.diverged]
        scores = [self._score(i) for i in range(len(kept))]
        copies = pbt.select(
            self._population,
            lineage.selections + 1,
            scores,
            [one.member.env_frames for one in kept],
            lineage.values,
            among,
        )
        for i in among:
            logs = {"population/score": scores[i], **_numbers(lineage.values[i])}
            kept[i].session.periodic.log({k: v for k, v in logs.items() if math.isfinite(v)})
        lineage.take(copies, scores)
        sources = list(range(len(kept)))
        for copy in copies:
            sources[copy.member] = copy.source
            experiment = self._population.experiment(copy.member, copy.after)
            self._runs[copy.member].directory.write_config(to_json(experiment))
        if copies:
            self._group.copy(sources, _by_name(lineage))
        for copy in copies:
            kept[copy.member].retry()

    def _score(self, index: int) -> float:
        """Returns the mean of the episode returns since the last selection.

        Without an episode it is the score before; -inf for none, and for a run that diverged.
        """
        lineage = self._lineage
        if self._kept[index].diverged:
            return -math.inf
        if lineage.episodes[index]:
            return lineage.returns[index] / lineage.episodes[index]
        before = lineage.scores[index]
        return before if math.isfinite(before) else -math.inf

    def save(self) -> None:
        """Writes the lineage, once all members are saved."""
        found = [checkpoint.latest(run.directory.checkpoints) for run in self._runs]
        self._lineage.checkpoints = [path.name if path else "" for path in found]
        self._lineage.write(self._root)


def _by_name(lineage: Lineage) -> dict[str, list[Option]]:
    return {name: [values[name] for values in lineage.values] for name in lineage.values[0]}


def _numbers(values: dict[str, Option]) -> dict[str, float]:
    return {f"population/{k}": float(v) for k, v in values.items() if isinstance(v, int | float)}
