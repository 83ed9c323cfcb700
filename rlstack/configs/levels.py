"""The options of curricula: which levels the learner chooses for resets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlstack.checks import Checked
from rlstack.references import Hook


@dataclasses.dataclass(frozen=True)
class LevelsConfig(Checked):
    """How levels are chosen; docs/levels.md has the sources."""

    kind: Literal["uniform", "plr", "robust_plr", "rule"] = "uniform"
    """uniform: all env.levels alike (domain randomisation). plr: levels with high scores more often
    (prioritised level replay). robust_plr: as plr, and only replayed levels are learned from.
    rule: by a function of your own."""
    score_function: Literal["MaxMC", "pvl"] = "MaxMC"
    """MaxMC: the level's highest return so far minus the values. pvl: the positive value loss."""
    max_size: int = 4000
    """Number of levels with scores that are kept; with rule, all levels must fit."""
    replay_prob: float = 0.8
    """Probability that an episode plays a level of the buffer, and not a new one."""
    staleness_coeff: float = 0.3
    """Share of the probability that goes to levels by how long ago they were played."""
    temperature: float = 0.3
    """Exponent of ranks is 1 / temperature: the lower, the more often the best ranks are played."""
    minimum_fill_ratio: float = 0.5
    """Share of the buffer that must be filled before levels are replayed."""
    rule: Hook = ""
    """The rule, as "module:callable" of a function (table) -> weights with jax.numpy, see
    `rlstack.math.levels.LevelTable`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "max_size")
        for name in ("replay_prob", "staleness_coeff", "minimum_fill_ratio"):
            self.require(name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
        self.require("temperature", self.temperature > 0, "positive")
        self.require("rule", (self.kind == "rule") == bool(self.rule), "given with kind rule only")

    def check(self, number: int, excluded: Mapping[str, object]) -> None:
        """Checks what an experiment excludes.

        Args:
          number: its env.levels.
          excluded: fields that must be empty if the learner chooses levels, with their values.

        Raises:
          ValueError: such a field is not empty, or there are no levels to choose.
        """
        if not number and self != LevelsConfig():
            raise ValueError(
                "Experiment: env.levels must be positive with options of levels; got 0. Add "
                "--env.levels N for the levels 0 to N - 1."
            )
        for field, value in excluded.items():
            if number and value:
                raise ValueError(
                    f"Experiment: env.levels must be 0 with {field}; got {number} and {value!r}."
                )
