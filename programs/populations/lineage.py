"""How far a population is: the values of its members, and which of them copied whom."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

from rlstack.programs.populations.population import Hyperparameters, Population
from rlstack.programs.populations.selection import Copy
from rlstack.programs.sets.members import reading_json
from rlstack.storage import files

FILE = "lineage.json"


@dataclasses.dataclass
class Lineage:
    """The state of a population; its file is written when all that it names is on disk."""

    values: list[Hyperparameters]
    """Of each member, now."""
    selections: int = 0
    """That have been made."""
    copies: list[Copy] = dataclasses.field(default_factory=list)
    """In all selections."""
    scores: list[float] = dataclasses.field(default_factory=list)
    """Of each member in the last selection; NaN before the first one."""
    checkpoints: list[str] = dataclasses.field(default_factory=list)
    """The name of the checkpoint of each member to go on from; "" for its start. In the topology
    fused only."""
    iterations: int = 0
    """Since the last selection, in the topology fused."""
    returns: list[float] = dataclasses.field(default_factory=list)
    """The sum of each member's episode returns since then, likewise."""
    episodes: list[int] = dataclasses.field(default_factory=list)
    """Their number."""
    copied: bool = True
    """Whether the copies of the last selection are in the members' checkpoints. False if the
    command was killed in between; elsewhere than in fused."""

    @classmethod
    def new(cls, population: Population) -> Lineage:
        """Returns that of a population that has not begun."""
        size = population.size
        return cls(
            population.first_values(),
            scores=[math.nan] * size,
            checkpoints=[""] * size,
            returns=[0.0] * size,
            episodes=[0] * size,
        )

    def take(self, copies: list[Copy], scores: list[float]) -> None:
        """Takes a selection."""
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


def read(directory: Path, population: Population) -> Lineage:
    """Returns the lineage of a directory, or that of a new population if it has none.

    Raises:
      RunDirError: its file is damaged.
    """
    path = directory / FILE
    if not path.is_file():
        return Lineage.new(population)
    with reading_json(path, "a population", "rlstack train PRESET --population 8") as tree:
        return Lineage(**{**tree, "copies": [Copy(**copy) for copy in tree["copies"]]})
