"""The progress of a population: its members' values, and which members copied which."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rlstack.programs.config.env_config import Option
from rlstack.programs.study.population import Hyperparameters, Population, draw, fitted
from rlstack.programs.study.space import Range, Values
from rlstack.programs.study.trials import reading_json
from rlstack.storage import files

FILE = "lineage.json"


@dataclasses.dataclass
class Lineage:
    """The state of a population. Its file is written after all checkpoints that it names."""

    values: list[Hyperparameters]
    """The current hyperparameters of each member."""
    selections: int = 0
    """Number of selections so far."""
    copies: list[Copy] = dataclasses.field(default_factory=list)
    """The copies of all selections so far."""
    scores: list[float] = dataclasses.field(default_factory=list)
    """Score of each member in the last selection; NaN before the first one."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """Name of the checkpoint from which each member continues; "" to start anew. Used in the
    topology fused only."""
    iterations: int = 0
    """Number of iterations since the last selection. Used in the topology fused only."""
    returns: list[float] = dataclasses.field(default_factory=list)
    """Sum of each member's episode returns since the last selection. Used in fused only."""
    episodes: list[int] = dataclasses.field(default_factory=list)
    """Number of each member's episodes in that sum. Used in fused only."""
    copied: bool = True
    """Whether the members' checkpoints contain the copies of the last selection. False if the
    command was killed before they did. Used in all topologies except fused."""

    @classmethod
    def new(cls, population: Population) -> Lineage:
        """Returns the lineage of a population that has not begun."""
        size = population.size
        return cls(
            population.first_values(),
            scores=[math.nan] * size,
            checkpoints=[""] * size,
            returns=[0.0] * size,
            episodes=[0] * size,
        )

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
        """Writes the file that `read` reads."""
        tree = dataclasses.asdict(self) | {"copies": [copy._asdict() for copy in self.copies]}
        files.write(directory / FILE, json.dumps(tree, indent=1) + "\n")


def read_lineage(directory: Path, population: Population) -> Lineage:
    """Returns the lineage of a population from its directory; a new one if there is no file.

    Raises:
      RunDirError: the lineage's file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return Lineage.new(population)
    with reading_json(path, "a population", "rlstack train PRESET --population 8") as tree:
        return Lineage(**{**tree, "copies": [Copy(**copy) for copy in tree["copies"]]})


_FACTORS = (0.8, 1.2)


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


def select(
    population: Population,
    selection: int,
    scores: Sequence[float],
    frames: Sequence[int],
    values: Sequence[Hyperparameters],
    among: Sequence[int],
) -> list[Copy]:
    """Returns the copies that a selection makes: bad members copy good ones.

    Args:
      population: the population, whose config has the rule of selection.
      selection: the number of the selection, from 1.
      scores: mean recent episode return of each member; -inf for a member that failed.
      frames: environment steps of each member so far.
      values: hyperparameters of each member.
      among: the numbers of the members that take part.
    """
    rng = population.rng(selection)
    ordered = sorted(among, key=lambda i: (scores[i], i))
    count = max(1, int(len(ordered) * population.pbt.fraction))
    if len(ordered) < 2:
        return []
    best = ordered[-count:]
    copies = []
    for member in ordered[:count]:
        source = best[int(rng.integers(len(best)))]
        after = _changed(population, values[source], rng)
        if scores[source] > scores[member]:
            copies.append(
                Copy(
                    selection,
                    frames[member],
                    member,
                    source,
                    scores[member],
                    scores[source],
                    values[member],
                    after,
                )
            )
    return copies


def _changed(
    population: Population, values: Mapping[str, Option], rng: np.random.Generator
) -> Hyperparameters:
    """Returns values near the given ones or drawn anew, within their ranges."""
    return {
        name: _one(space, values[name], population.pbt.resample, rng)
        for name, space in population.vary.items()
    }


def _one(space: Values, value: Option, resample: float, rng: np.random.Generator) -> Option:
    if rng.random() < resample:
        return draw(space, rng)
    factor = _FACTORS[int(rng.integers(len(_FACTORS)))]
    if not isinstance(space, Range):  # choices have no neighbours
        return value
    number = float(value) * factor
    if space.whole and round(number) == value:  # a small integer would never change
        number = float(value) + (1 if factor > 1 else -1)
    return fitted(space, number)
