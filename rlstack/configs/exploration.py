"""The options of the policies that choose actions in training."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

from rlstack.checks import Checked

Over = Literal["env_steps", "episodes"]
Kind = Literal["agent", "sample", "epsilon_greedy", "softmax", "gaussian_noise", "uniform_noise"]
Shape = Literal["constant", "linear", "multi_phase", "exponential"]

# The parameter of each kind: its name, its check, and the rule in words.
PARAMETERS: dict[str, tuple[str, Callable[[float], bool], str]] = {
    "epsilon_greedy": ("epsilon", lambda x: 0 <= x <= 1, "in [0, 1]"),
    "softmax": ("temperature", lambda x: x > 0, "positive"),
    "gaussian_noise": ("scale", lambda x: x >= 0, "at least 0"),
    "uniform_noise": ("scale", lambda x: x >= 0, "at least 0"),
}


def check_schedule(schedule: Any, shape: Shape) -> None:
    """Checks the fields of a `PolicyConfig`, or of the schedule that it describes.

    Raises:
      ValueError: a field of this shape is out of range.
    """
    if shape == "linear":
        schedule.require("steps", schedule.steps > 0, "positive")
        schedule.require_at_least(0, "begin")
    elif shape == "exponential":
        schedule.require("half_life", schedule.half_life > 0, "positive")
    elif shape == "multi_phase":
        schedule.require("points", len(schedule.points) > 0, "one or more")
        grow = all(a < b for (a, _), (b, _) in itertools.pairwise(schedule.points))
        schedule.require("points", grow, "of steps that increase, without duplicates")


@dataclasses.dataclass(frozen=True)
class PolicyConfig(Checked):
    """How actions are chosen in training. In evaluation, evaluator.epsilon does."""

    kind: Kind = "agent"
    """agent: as the agent's own options say. sample: draws from the agent's distribution.
    epsilon_greedy, softmax: for discrete actions or values. gaussian_noise, uniform_noise: added to
    continuous actions. The last four have a parameter, which the other options describe: epsilon,
    the temperature, or the scale of the noise in units of the agent's action."""
    schedule: Shape = "constant"
    """How the parameter changes. constant: stays at start. linear: moves to end within steps.
    exponential: halves its distance from end every half_life. multi_phase: linear through
    points."""
    start: float = 1.0
    """The first value of the parameter."""
    end: float = 0.05
    """The last value of the parameter (linear), or the one that it approaches (exponential)."""
    begin: int = 0
    """When a linear change begins, in units of over."""
    steps: int = 10_000
    """Length of a linear change, in units of over."""
    half_life: float = 10_000.0
    """Half-life of an exponential change, in units of over."""
    points: tuple[tuple[int, float], ...] = ()
    """When and value of each point of multi_phase, such as 0 1.0 5000 0.2 20000 0.02; when is in
    units of over and increases."""
    over: Over = "env_steps"
    """The unit of progress: env_steps of all environments together, or episodes, of each
    environment by itself."""
    warm_up: int = 0
    """Number of environment steps, of all environments together, with random actions first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "warm_up")
        if self.kind == "agent":
            self.require("warm_up", not self.warm_up, "0 for agent, which has options of its own")
        if self.kind in PARAMETERS:
            check_schedule(self, self.schedule)
            self._check_values()
        elif self.schedule != "constant":
            self.require("schedule", False, f"constant for {self.kind}, which has no parameter")

    def _check_values(self) -> None:
        """Checks that the policy takes all values of the schedule."""
        values = [self.start]
        if self.schedule == "multi_phase":
            values = [value for _, value in self.points]
        elif self.schedule == "linear":
            values += [self.end]
        elif self.schedule == "exponential":
            # The parameter never reaches `end`, so a temperature may have the end 0.
            values += [self.end or math.ulp(0.0)]
        name, fits, rule = PARAMETERS[self.kind]
        for value in values:
            if not fits(value):
                raise ValueError(
                    f"PolicyConfig: {name} must be {rule} for {self.kind}; got {value}."
                )

    @property
    def is_of_agent(self) -> bool:
        """Whether actions come from the agent's own distribution or the agent's own options."""
        return self.kind == "agent" or (self.kind == "sample" and not self.warm_up)

    @property
    def counts(self) -> bool:
        """Whether the choice of actions depends on the progress of the environments."""
        return self.schedule != "constant" or self.warm_up > 0
