"""Presets of the agents with a policy and critics that learn off-policy.

They are SAC, TD3 and DDPG, then agents built on these: CrossQ, TQC, REDQ, DroQ, SimBaV2, D4PG, and
FastTD3 (Seo et al. 2025, arXiv:2505.22642).

The constants of Pendulum were tuned here. SAC, TD3 and DDPG make one update per frame, with
learning rates that fall to 0. Agents built on them have small networks, with the learning rates of
``pendulum-sac`` where the text says no other.

Those of SAC and TD3 on HalfCheetah suit a few processor cores: half of the batch size and updates
of the authors' programs, with learning rates and target rates that are larger. SAC: 256 items, an
update for each frame, rates of 3e-4 and 0.005 (https://arxiv.org/abs/1812.05905, table 1). TD3: the
same (https://github.com/sfujim/TD3/blob/master/main.py), and 25,000 random frames at the start;
5,000 here.

Those of CrossQ and SimBaV2 on Hopper and HalfCheetah are the constants of the papers, with four
environments, half of the frames and of the replay, and one update a frame (SimBaV2: two in the
paper). They need an accelerator, or hours.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstack.agents.categorical_sac import CategoricalSACConfig
from rlstack.agents.crossq import CrossQConfig
from rlstack.agents.d4pg import D4PGConfig
from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.fast_td3 import FastTD3Config
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.agents.tqc import TQCConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import CriticConfig, NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import falling, like, preset, transitions


@preset
def pendulum_sac(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a policy that learns how random to be."""
    return Experiment(
        preset=name,
        agent=SACConfig(discount=0.98, random_frames=1_000, optimizer=falling(2e-3, 19_000)),
        env=EnvConfig("Pendulum-v1", num_envs=4),
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=transitions(128, max_size=20_000, min_size=1_000, updates_per_frame=1.0),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=20_000,
    )


@preset
def pendulum_td3(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a deterministic policy and two critics."""
    agent = TD3Config(
        discount=0.98,
        random_frames=1_000,
        optimizer=falling(2e-3, 19_000),
        policy_optimizer=falling(2e-3, 9_500),  # it makes half as many steps
    )
    return like("pendulum-sac", name, agent=agent)


@preset
def pendulum_ddpg(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a deterministic policy and one critic."""
    agent = DDPGConfig(discount=0.98, random_frames=1_000, optimizer=falling(2e-3, 19_000))
    return like("pendulum-sac", name, agent=agent)


@preset
def halfcheetah_sac(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy: an update every second frame, with a larger learning rate."""
    return Experiment(
        preset=name,
        agent=SACConfig(target_rate=0.01, optimizer=OptimizerConfig(learning_rate=1e-3)),
        env=EnvConfig("HalfCheetah-v4", num_envs=4),
        network=NetworkConfig(hidden_sizes=(256, 256), activation="relu"),
        replay=transitions(128, max_size=300_000, min_size=5_000, updates_per_frame=0.5),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=300_000,
        checkpoint_replay=False,
    )


@preset
def halfcheetah_td3(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy, by a deterministic policy: an update every second frame."""
    agent = TD3Config(target_rate=0.01, optimizer=OptimizerConfig(learning_rate=1e-3))
    return like("halfcheetah-sac", name, agent=agent)


@preset
def cartpole_sac(name: str) -> Experiment:
    """CartPole-v1 off-policy: discrete actions, and 8-step targets as in cartpole-dqn.

    The temperature is fixed. A single action changes the return so little here that a policy with
    an entropy of even 0.1 stops learning at half the return.
    """
    agent = SACConfig(
        target_rate=0.01,
        temperature=0.02,
        learn_temperature=False,
        max_grad_norm=1.0,
        random_frames=1_000,
        optimizer=falling(1e-3, 24_750),
    )
    evaluator = EvaluatorConfig(episodes=100, num_envs=20)
    return like("cartpole-dqn", name, agent=agent, evaluator=evaluator)


# Returns stay within the atoms of the critics, from -5 to 5.
_SCALED = NormalisationConfig(observations=True, rewards="return", return_limit=5.0)


@preset
def pendulum_crossq(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by critics with batch norm and without target networks."""
    optimizer = dataclasses.replace(falling(2e-3, 9_000), eps=1e-8, arguments={"b1": 0.5})
    network = NetworkConfig(
        hidden_sizes=(64, 64),
        activation="relu",
        norm="batch_renorm",
        norm_place="outer",
        batch_norm_decay=0.99,
        renorm_after=5_000,
        critic=CriticConfig(hidden_sizes=(128, 128)),
    )
    policy_optimizer = dataclasses.replace(optimizer, anneal_steps=3_000)  # a third of the steps
    agent = CrossQConfig(
        discount=0.98,
        random_frames=1_000,
        optimizer=policy_optimizer,
        critics_optimizer=optimizer,
    )
    return like("pendulum-sac", name, agent=agent, network=network, frames=10_000)


@preset
def pendulum_tqc(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by quantiles of values without the largest ones."""
    agent = TQCConfig(
        discount=0.98, num_critics=2, random_frames=1_000, optimizer=falling(2e-3, 19_000)
    )
    network = NetworkConfig(hidden_sizes=(64, 64), activation="relu", num_atoms=25)
    return like("pendulum-sac", name, agent=agent, network=network)


@preset
def pendulum_simba(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a network on the hypersphere and distributions of returns."""
    optimizer = dataclasses.replace(falling(2e-3, 19_000), eps=1e-8)
    agent = CategoricalSACConfig(
        discount=0.98,
        temperature=0.01,
        random_frames=1_000,
        min_value=-5.0,
        max_value=5.0,
        optimizer=optimizer,
    )
    network = NetworkConfig(
        torso="sphere", hidden_sizes=(32,), num_atoms=51, critic=CriticConfig(hidden_sizes=(64,))
    )
    return like("pendulum-sac", name, agent=agent, network=network, normalisation=_SCALED)


@preset
def pendulum_redq(name: str) -> Experiment:
    """Pendulum-v1 in few frames: 20 updates a frame of ten critics, of which targets take two."""
    return _many_updates(name, SACConfig(num_critics=10, target_subset=2), CriticConfig())


@preset
def pendulum_droq(name: str) -> Experiment:
    """Pendulum-v1 in few frames: 20 updates a frame of two critics with dropout and layer norm."""
    critic = CriticConfig(norm="layer", dropout=0.01)
    return _many_updates(name, SACConfig(dropout_in_targets=True), critic)


def _many_updates(name: str, agent: SACConfig, critic: CriticConfig) -> Experiment:
    """Returns SAC with 20 updates of the critics for each frame, and one of the policy."""
    agent = dataclasses.replace(
        agent,
        discount=0.98,
        random_frames=500,
        policy_value="mean",
        policy_period=20,
        policy_optimizer=OptimizerConfig(learning_rate=3e-3, eps=1e-8),
    )
    base = like("pendulum-sac", name, agent=agent)
    return dataclasses.replace(
        base,
        network=dataclasses.replace(base.network, critic=critic),
        replay=transitions(64, max_size=20_000, min_size=500, updates_per_frame=20.0),
        frames=3_000,
    )


@preset
def mountain_car_continuous_rlpd(name: str) -> Experiment:
    """MountainCarContinuous-v0, rewarded at the goal only: --replay.demonstrations DIR.

    SAC as in RLPD: half of each batch is demonstrations, and the critics have layer norm. There are
    two critics and one update a frame, where RLPD has ten and 20. Without demonstrations SAC does
    not find the goal.
    """
    base = like("pendulum-sac", name)
    return dataclasses.replace(
        base,
        agent=SACConfig(discount=0.99, random_frames=1_000, optimizer=falling(1e-3, 29_000)),
        env=EnvConfig("MountainCarContinuous-v0", num_envs=4),
        network=dataclasses.replace(base.network, critic=CriticConfig(norm="layer")),
        normalisation=NormalisationConfig(reward_scale=0.1),
        replay=transitions(64, max_size=30_000, min_size=1_000, updates_per_frame=1.0),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=30_000,
    )


@preset
def pendulum_d4pg(name: str) -> Experiment:
    """Pendulum-v1 off-policy, by a deterministic policy and a distribution of returns."""
    agent = D4PGConfig(
        discount=0.98,
        random_frames=1_000,
        min_value=-40.0,  # rewards are 0.1 of the game's, which are at least -16.3
        max_value=0.0,
        optimizer=falling(2e-3, 19_000),
    )
    base = like("pendulum-sac", name, agent=agent)
    return dataclasses.replace(
        base,
        network=dataclasses.replace(base.network, num_atoms=51),
        normalisation=NormalisationConfig(reward_scale=0.1),
    )


def _mujoco(name: str, env: str, **fields: Any) -> Experiment:
    return Experiment(
        preset=name,
        env=EnvConfig(env, num_envs=4),
        replay=transitions(256, max_size=500_000, min_size=5_000, updates_per_frame=1.0),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=500_000,
        checkpoint_replay=False,
        **fields,
    )


def _crossq(name: str, env: str) -> Experiment:
    """Returns CrossQ with the constants of its paper, https://arxiv.org/abs/1902.05605."""
    network = NetworkConfig(
        hidden_sizes=(256, 256),
        activation="relu",
        norm="batch_renorm",
        norm_place="outer",
        batch_norm_decay=0.99,
        renorm_after=100_000,
        critic=CriticConfig(hidden_sizes=(2048, 2048)),
    )
    return _mujoco(name, env, agent=CrossQConfig(), network=network)


@preset
def hopper_crossq(name: str) -> Experiment:
    """Hopper-v4 off-policy, by wide critics with batch norm and without target networks."""
    return _crossq(name, "Hopper-v4")


@preset
def halfcheetah_crossq(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy, by wide critics with batch norm and without target networks."""
    return _crossq(name, "HalfCheetah-v4")


def _simba(name: str, env: str) -> Experiment:
    """Returns SimBaV2 with the constants of its paper, https://arxiv.org/abs/2502.15280."""
    optimizer = OptimizerConfig(
        learning_rate=1e-4, final_learning_rate=5e-5, anneal_steps=500_000, eps=1e-8
    )
    agent = CategoricalSACConfig(
        discount=0.995,
        temperature=0.01,
        target_entropy_scale=0.5,
        min_value=-5.0,
        max_value=5.0,
        optimizer=optimizer,
    )
    network = NetworkConfig(
        torso="sphere",
        hidden_sizes=(128,),
        num_atoms=101,
        critic=CriticConfig(hidden_sizes=(512, 512)),
    )
    return _mujoco(name, env, agent=agent, network=network, normalisation=_SCALED)


@preset
def hopper_simba(name: str) -> Experiment:
    """Hopper-v4 off-policy, by a network on the hypersphere and distributions of returns."""
    return _simba(name, "Hopper-v4")


@preset
def halfcheetah_simba(name: str) -> Experiment:
    """HalfCheetah-v4 off-policy, by a network on the hypersphere and distributions of returns."""
    return _simba(name, "HalfCheetah-v4")


@preset
def pendulum_fasttd3(name: str) -> Experiment:
    """Pendulum-v1 by FastTD3 with 64 environments; batches and networks are small, for CPUs."""
    num_envs, batch_size = 64, 512
    agent = FastTD3Config(
        discount=0.98,
        target_rate=0.05,
        min_value=-40.0,  # rewards are 0.1 of the game's, which are at least -16.3
        max_value=0.0,
        optimizer=OptimizerConfig("adamw", learning_rate=1e-3, eps=1e-8, weight_decay=0.1),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("Pendulum-v1", num_envs=num_envs),
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu", num_atoms=51),
        normalisation=NormalisationConfig(observations=True, reward_scale=0.1),
        replay=transitions(
            batch_size, max_size=100_000, min_size=2_000, updates_per_frame=2 / num_envs
        ),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=100_000,
    )


@preset
def brax_halfcheetah_fasttd3(name: str) -> Experiment:
    """Brax's half cheetah by FastTD3 with 1,024 environments, in one compiled program, for a GPU.

    The constants are those of the authors' program for the cheetah of MuJoCo Playground
    (``CheetahRunArgs`` in fast_td3/hyperparams.py of https://github.com/younggyoseo/FastTD3), whose
    rewards are between 0 and 1. Rewards here are near 10 a step of a good gait, so they are divided
    by 10. Deviations: a million steps in replay instead of ten.
    """
    num_envs, batch_size = 1_024, 32_768
    agent = FastTD3Config(
        discount=0.97,
        least_noise_scale=0.1,
        target_noise=0.1,
        min_value=-500.0,
        max_value=500.0,
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig(
            "brax/halfcheetah", num_envs=num_envs, type="jax", options={"backend": "spring"}
        ),
        topology="fused",
        network=NetworkConfig(
            hidden_sizes=(512, 256, 128),
            activation="relu",
            num_atoms=101,
            critic=CriticConfig(hidden_sizes=(1024, 512, 256)),
        ),
        normalisation=NormalisationConfig(observations=True, reward_scale=0.1),
        replay=transitions(
            batch_size,
            max_size=1_000_000,
            min_size=11 * num_envs,
            updates_per_frame=2 / num_envs,
            num_steps=3,
        ),
        evaluator=EvaluatorConfig(episodes=32, num_envs=32),
        frames=50_000_000,
        checkpoint_period=10_000_000,
        checkpoint_replay=False,
    )
