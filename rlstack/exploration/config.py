"""The config of the policies and schedules in this package."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rlstack.checks import Checked
from rlstack.exploration.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Policy,
    Sample,
    Softmax,
    UniformNoise,
)
from rlstack.exploration.schedules import (
    Exponential,
    Linear,
    MultiPhaseLinear,
    Over,
    Schedule,
)
from rlstack.exploration.warm_up import WarmUp

Kind = Literal["agent", "sample", "epsilon_greedy", "softmax", "gaussian_noise", "uniform_noise"]
Shape = Literal["constant", "linear", "multi_phase", "exponential"]

_POLICIES = {
    "epsilon_greedy": EpsilonGreedy,
    "softmax": Softmax,
    "gaussian_noise": GaussianNoise,
    "uniform_noise": UniformNoise,
}


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
        if self.kind in _POLICIES:
            self.make(num_envs=1)
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
        for value in values:
            _POLICIES[self.kind](value)

    @property
    def is_of_agent(self) -> bool:
        """Whether actions are drawn from the agent's own distribution, or as its options say."""
        return self.kind == "agent" or (self.kind == "sample" and not self.warm_up)

    @property
    def counts(self) -> bool:
        """Whether actions depend on the progress of the environments."""
        return self.schedule != "constant" or self.warm_up > 0

    def make(self, num_envs: int) -> Policy:
        """Makes the policy.

        Args:
          num_envs: number of environments of the experiment, which share the steps.

        Raises:
          ValueError: a value is out of range.
        """
        policy: Policy = Sample()
        if self.kind in _POLICIES:
            parameter = self.start if self.schedule == "constant" else self._schedule(num_envs)
            policy = _POLICIES[self.kind](parameter)
        return WarmUp(policy, self.warm_up, num_envs) if self.warm_up else policy

    def _schedule(self, num_envs: int) -> Schedule:
        scale = num_envs if self.over == "env_steps" else 1
        if self.schedule == "linear":
            return Linear(self.start, self.end, self.steps, self.over, self.begin, scale)
        if self.schedule == "exponential":
            return Exponential(self.start, self.end, self.half_life, self.over, scale)
        if self.schedule == "multi_phase":
            return MultiPhaseLinear(self.points, self.over, scale)
        raise AssertionError(self.schedule)
