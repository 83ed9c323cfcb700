"""Builds the policy and the schedule of a `PolicyConfig`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlstack.configs.exploration import PolicyConfig
from rlstack.exploration.policies import (
    EpsilonGreedy,
    GaussianNoise,
    Policy,
    Sample,
    Softmax,
    UniformNoise,
)
from rlstack.exploration.schedules import Exponential, Linear, MultiPhaseLinear, Schedule
from rlstack.exploration.warm_up import WarmUp

_POLICIES: dict[str, Callable[..., Any]] = {
    "epsilon_greedy": EpsilonGreedy,
    "softmax": Softmax,
    "gaussian_noise": GaussianNoise,
    "uniform_noise": UniformNoise,
}


def make_policy(cfg: PolicyConfig, num_envs: int) -> Policy:
    """Makes the policy.

    Args:
      cfg: describes it.
      num_envs: number of environments of the experiment, which share the steps.

    Raises:
      ValueError: a value is out of range.
    """
    policy: Policy = Sample()
    if cfg.kind in _POLICIES:
        parameter = cfg.start if cfg.schedule == "constant" else _schedule(cfg, num_envs)
        policy = _POLICIES[cfg.kind](parameter)
    return WarmUp(policy, cfg.warm_up, num_envs) if cfg.warm_up else policy


def _schedule(cfg: PolicyConfig, num_envs: int) -> Schedule:
    scale = num_envs if cfg.over == "env_steps" else 1
    if cfg.schedule == "linear":
        return Linear(cfg.start, cfg.end, cfg.steps, cfg.over, cfg.begin, scale)
    if cfg.schedule == "exponential":
        return Exponential(cfg.start, cfg.end, cfg.half_life, cfg.over, scale)
    if cfg.schedule == "multi_phase":
        return MultiPhaseLinear(cfg.points, cfg.over, scale)
    raise AssertionError(cfg.schedule)
