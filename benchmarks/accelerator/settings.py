"""The experiments of the benchmark: presets, and small changes of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from dm_env import specs

from agents.ppo import PPOConfig
from programs.env_config import EnvConfig
from programs.experiment import Experiment
from programs.presets import preset
from programs.presets.registry import on_policy_replay
from programs.program_config import Topology
from rlstack.types import EnvSpec

MANY_ATARI = 96  # environments

_MANY = 4096  # environments of compiled programs
_UNROLL = 128  # steps
_ATARI_UNROLL = 64
_ATARI_MINIBATCH = 512  # steps
_ACTORS: dict[Topology, int] = {"single_process": 1, "heavy_env": 2, "light_env": 4}


def experiment_of(name: str) -> Experiment:
    """Returns a preset, or one of these: gymnax-cartpole-sac and catch-ppo."""
    if name == "catch-ppo":  # which needs no package
        env = EnvConfig("rlstack.jax_envs.toy:Catch", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-ppo"), preset=name, env=env, topology="fused")
    if name == "gymnax-cartpole-sac":
        env = EnvConfig("CartPole-v1", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-sac"), preset=name, env=env, topology="fused")
    return preset(name)


def for_many_cores(experiment: Experiment) -> Experiment:
    """Returns an on-policy experiment with constants that suit a device with many cores.

    The presets learn from few steps on few cores. Those of PPO on CartPole go over each step 20
    times, which takes most of the time. With the default constants of PPO, those of
    `benchmarks.fused`, it is 4 times, in minibatches of 131,072 steps.

    Args:
      experiment: of the topology fused.
    """
    agent, unroll = experiment.agent, experiment.replay.unroll_length
    if isinstance(agent, PPOConfig):
        agent, unroll = PPOConfig(), _UNROLL
    env = dataclasses.replace(experiment.env, num_envs=_MANY)
    return dataclasses.replace(
        experiment, agent=agent, env=env, replay=on_policy_replay(_MANY, unroll)
    )


def on_many_environments(
    experiment: Experiment, topology: Topology, share: float = 1.0
) -> Experiment:
    """Returns PPO on an Atari game with 96 environments, acting and learning on an accelerator.

    With 8 environments most cores of such a machine wait. Minibatches are larger than theirs, and
    the learning rate is larger by the square root of that.

    Args:
      experiment: PPO of a single process.
      topology: the actors of heavy_env act on the accelerator, each on its own environments. In
        light_env a service acts for all of them. Both run in threads.
      share: of the environments of an actor, which acts on those that are ready first.
    """
    agent, replay = experiment.agent, experiment.replay
    assert isinstance(agent, PPOConfig)
    before = replay.batch_size * replay.unroll_length // agent.num_minibatches
    steps = MANY_ATARI * _ATARI_UNROLL
    minibatches = steps // _ATARI_MINIBATCH
    optimizer = dataclasses.replace(
        agent.optimizer,
        learning_rate=agent.optimizer.learning_rate * math.sqrt(_ATARI_MINIBATCH / before),
        anneal_steps=experiment.frames // steps * agent.num_epochs * minibatches,
    )
    num_envs = MANY_ATARI // _ACTORS[topology]
    wait_num = round(share * num_envs) if share < 1 else 0
    env = dataclasses.replace(experiment.env, num_envs=num_envs, wait_num=wait_num)
    return dataclasses.replace(
        experiment,
        agent=dataclasses.replace(agent, optimizer=optimizer, num_minibatches=minibatches),
        env=env,
        replay=on_policy_replay(MANY_ATARI, _ATARI_UNROLL),
        topology=topology,
        program=dataclasses.replace(
            experiment.program, launch="threads", num_actors=_ACTORS[topology]
        ),
        inferencer=dataclasses.replace(experiment.inferencer, devices=(0,)),
    )


def is_atari(experiment: Experiment) -> bool:
    """Whether the environment is a game of Atari on pixels."""
    return experiment.env.name in ("Pong-v5", "Breakout-v5")


def atari_spec() -> EnvSpec:
    """Returns the spec of Atari games in EnvPool, for parts that need no environment."""
    frames = specs.BoundedArray((4, 84, 84), np.uint8, 0, 255)
    return EnvSpec(frames, specs.DiscreteArray(6))
