"""The experiments of the benchmark: presets, and small changes of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from dm_env import specs

from programs.env_config import EnvConfig
from programs.experiment import Experiment
from programs.presets import preset
from rlstack.types import EnvSpec


def experiment_of(name: str) -> Experiment:
    """Returns a preset, or one of these: breakout-ppo, gymnax-cartpole-sac and catch-ppo."""
    if name == "catch-ppo":  # which needs no package
        env = EnvConfig("rlstack.jax_envs.toy:Catch", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-ppo"), preset=name, env=env, topology="fused")
    if name == "breakout-ppo":
        pong = preset("pong-ppo")
        env = dataclasses.replace(pong.env, name="Breakout-v5")
        return dataclasses.replace(pong, preset=name, env=env)
    if name == "gymnax-cartpole-sac":
        env = EnvConfig("CartPole-v1", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-sac"), preset=name, env=env, topology="fused")
    return preset(name)


def is_atari(experiment: Experiment) -> bool:
    """Whether the environment is a game of Atari on pixels."""
    return experiment.env.name in ("Pong-v5", "Breakout-v5")


def atari_spec() -> EnvSpec:
    """Returns the spec of Atari games in EnvPool, for parts that need no environment."""
    frames = specs.BoundedArray((4, 84, 84), np.uint8, 0, 255)
    return EnvSpec(frames, specs.DiscreteArray(6))
