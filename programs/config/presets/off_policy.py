"""Presets of the agents with a policy and critics that learn off-policy: SAC, TD3 and DDPG.

The constants of Pendulum were tuned here: one update per frame, learning rates that fall to 0.
Those of HalfCheetah suit a few processor cores: half of the batch size and updates of the authors'
programs, with learning rates and target rates that are larger. SAC: 256 items, an update for each
frame, rates of 3e-4 and 0.005 (https://arxiv.org/abs/1812.05905, table 1). TD3: the same
(https://github.com/sfujim/TD3/blob/master/main.py), and 25,000 random frames at the start; 5,000
here.
"""

from __future__ import annotations

from rlstack.agents.ddpg import DDPGConfig
from rlstack.agents.sac import SACConfig
from rlstack.agents.td3 import TD3Config
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
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
