"""Where presets are kept by name, and what several of them share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from programs.experiment import EnvConfig, Experiment
from rlstack.references import nearest
from rlstack.replay import ReplayConfig

PRESETS: dict[str, Callable[[], Experiment]] = {}
_DESCRIPTIONS: dict[str, str] = {}


def preset(function: Callable[[str], Experiment]) -> Callable[[str], Experiment]:
    """Registers an experiment under its function's name, with the docstring's first line."""
    name = function.__name__.replace("_", "-")
    PRESETS[name] = lambda: function(name)
    _DESCRIPTIONS[name] = (function.__doc__ or "").splitlines()[0]
    return function


def find(name: str) -> Experiment:
    """Returns a preset by name.

    Raises:
      ValueError: there is none of that name; suggests the nearest.
    """
    if name not in PRESETS:
        raise ValueError(f"preset: there is no {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]()


def describe(name: str) -> str:
    """Returns a preset's one-line description; "" for an unknown name."""
    return _DESCRIPTIONS.get(name, "")


def on_policy(num_envs: int, unroll_length: int) -> ReplayConfig:
    """Returns a queue of whole unrolls: each of every environment, once."""
    return ReplayConfig(
        sampler="fifo",
        batch_size=num_envs,
        unroll_length=unroll_length,
        max_size=2 * num_envs,
    )


def atari(name: str, num_envs: int) -> EnvConfig:
    """Returns an Atari game as DQN's paper and its successors train on it, and whole to judge."""
    return EnvConfig(
        name,
        num_envs=num_envs,
        options={"episodic_life": True, "reward_clip": True},
        eval_options={"episodic_life": False, "reward_clip": False},
    )


def uniform_transitions(**changes: Any) -> ReplayConfig:
    """Returns the replay of Q-learning on classic control: 8-step transitions, drawn alike."""
    cfg = ReplayConfig(
        sampler="uniform",
        batch_size=128,
        unroll_length=8,
        starts="not_last",
        max_size=100_000,
        min_size=1_000,
        samples_per_insert=32.0,
    )
    return dataclasses.replace(cfg, **changes)
