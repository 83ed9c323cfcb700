"""The experiments of the benchmark: presets, and small changes of them."""

from __future__ import annotations

import dataclasses

import numpy as np
from dm_env import specs

from rlstack.agents.ppo import PPOConfig
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.programs.config.presets.registry import on_policy_replay
from rlstack.programs.config.program_config import Topology
from rlstack.types import EnvSpec

_MANY = 4096  # environments of compiled programs
_UNROLL = 128  # steps
_ACTORS: dict[Topology, int] = {"single_process": 1, "heavy_env": 2, "light_env": 4}


def experiment_of(name: str) -> Experiment:
    """Returns a preset, or one of these: gymnax-cartpole-sac, catch-ppo and pong-gpu-impala."""
    if name == "catch-ppo":  # which needs no package
        env = EnvConfig("rlstack.jax_envs.toy:Catch", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-ppo"), preset=name, env=env, topology="fused")
    if name == "gymnax-cartpole-sac":
        env = EnvConfig("CartPole-v1", num_envs=8, type="jax")
        return dataclasses.replace(preset("cartpole-sac"), preset=name, env=env, topology="fused")
    if name == "pong-gpu-impala":  # the agent of pong-impala, in the layout of pong-gpu-ppo
        layout, impala = preset("pong-gpu-ppo"), preset("pong-impala")
        num_envs, unroll_length = layout.replay.batch_size, impala.replay.unroll_length
        return dataclasses.replace(
            layout,
            preset=name,
            agent=impala.agent,
            network=impala.network,
            replay=on_policy_replay(num_envs, unroll_length),
        )
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


def in_topology(
    experiment: Experiment,
    topology: Topology,
    share: float = 1.0,
    actors: int = 0,
    workers: int = 0,
) -> Experiment:
    """Returns an experiment of heavy_env in another topology, with as many environments in all.

    Args:
      experiment: with actors in threads that act on an accelerator.
      topology: in light_env a service acts for all actors.
      share: of the environments of an actor, which acts on those that are ready first.
      actors: their number, which divides that of the environments; 0 for a usual one.
      workers: threads of each actor's pool; 0 for as many as there are cores.
    """
    actors = actors or _ACTORS[topology]
    num_envs = experiment.env.num_envs * experiment.num_actors // actors
    wait_num = round(share * num_envs) if share < 1 else 0
    return dataclasses.replace(
        experiment,
        env=dataclasses.replace(
            experiment.env, num_envs=num_envs, wait_num=wait_num, num_workers=workers
        ),
        topology=topology,
        program=dataclasses.replace(experiment.program, num_actors=actors),
    )


def spec_of(experiment: Experiment) -> EnvSpec:
    """Returns the spec of the environment; for Atari games on pixels it needs no EnvPool."""
    if experiment.env.name not in ("Pong-v5", "Breakout-v5"):
        return environment_spec(experiment)
    frames = specs.BoundedArray((4, 84, 84), np.uint8, 0, 255)
    return EnvSpec(frames, specs.DiscreteArray(6))
