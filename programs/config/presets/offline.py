"""Presets that learn from recorded data, given by --data or --replay.demonstrations.

With --data a run makes 200,000 updates, where the publications make a million. With
`--offline-updates N` it acts after N updates, and --frames are those of acting. Presets of
behaviour cloning are last.
"""

from __future__ import annotations

from typing import Any

from rlstack.agents.awac import AWACConfig
from rlstack.agents.bc import BCConfig
from rlstack.agents.cql import CQLConfig, DiscreteCQLConfig
from rlstack.agents.gail import GAILConfig
from rlstack.agents.iql import IQLConfig
from rlstack.agents.sqil import SQILConfig
from rlstack.agents.td3_bc import TD3BCConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import RaggedTransformerConfig, RelativePositionsConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import falling, like, preset, transitions

_UPDATES = 200_000


def _mujoco(
    name: str, agent: Any, batch_size: int = 256, num_layers: int = 2, **fields: Any
) -> Experiment:
    """Returns an experiment on the MuJoCo task that the name begins with."""
    task = {"hopper": "Hopper-v4", "halfcheetah": "HalfCheetah-v4"}[name.partition("-")[0]]
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig(task, num_envs=4),
        network=NetworkConfig(hidden_sizes=(256,) * num_layers, activation="relu"),
        replay=transitions(batch_size, max_size=300_000, min_size=1_000, updates_per_frame=1.0),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=_UPDATES * batch_size,
        log_period=1_000 * batch_size,
        checkpoint_period=50_000 * batch_size,
        **fields,
    )


def _iql(name: str, reward_scale: float) -> Experiment:
    """Returns IQL with the constants of its authors.

    https://github.com/ikostrikov/implicit_q_learning/blob/master/configs/mujoco_config.py. The
    authors divide rewards by a thousandth of the range of the dataset's returns.
    """
    slower = OptimizerConfig(schedule="cosine", anneal_steps=_UPDATES)
    scale = NormalisationConfig(reward_scale=reward_scale)
    return _mujoco(name, IQLConfig(policy_optimizer=slower), normalisation=scale)


def _td3_bc(name: str) -> Experiment:
    """Returns TD3+BC with the constants of its authors, which are few.

    https://github.com/sfujim/TD3_BC/blob/main/main.py
    """
    return _mujoco(name, TD3BCConfig(), normalisation=NormalisationConfig(observations=True))


def _cql(name: str) -> Experiment:
    """Returns CQL with the constants of its authors, without the Lagrange multiplier.

    https://github.com/aviralkumar2907/CQL/blob/master/d4rl/examples/cql_mujoco_new.py
    """
    return _mujoco(name, CQLConfig(), num_layers=3)


def _awac(name: str) -> Experiment:
    """Returns AWAC with the constants of its authors.

    https://github.com/rail-berkeley/rlkit/blob/master/examples/awac/mujoco/awac1.py. The policy has
    as many layers as the critics; the authors' has four.
    """
    decayed = OptimizerConfig(name="adamw", weight_decay=1e-4)
    return _mujoco(name, AWACConfig(policy_optimizer=decayed), batch_size=1024)


@preset
def hopper_iql(name: str) -> Experiment:
    """Hopper-v4 from recorded data by IQL: --data DIR."""
    return _iql(name, reward_scale=0.3)


@preset
def halfcheetah_iql(name: str) -> Experiment:
    """HalfCheetah-v4 from recorded data by IQL: --data DIR."""
    return _iql(name, reward_scale=0.1)


@preset
def hopper_td3_bc(name: str) -> Experiment:
    """Hopper-v4 from recorded data by TD3+BC: --data DIR."""
    return _td3_bc(name)


@preset
def halfcheetah_td3_bc(name: str) -> Experiment:
    """HalfCheetah-v4 from recorded data by TD3+BC: --data DIR."""
    return _td3_bc(name)


@preset
def hopper_cql(name: str) -> Experiment:
    """Hopper-v4 from recorded data by CQL: --data DIR."""
    return _cql(name)


@preset
def halfcheetah_cql(name: str) -> Experiment:
    """HalfCheetah-v4 from recorded data by CQL: --data DIR."""
    return _cql(name)


@preset
def hopper_awac(name: str) -> Experiment:
    """Hopper-v4 from recorded data by AWAC: --data DIR."""
    return _awac(name)


@preset
def halfcheetah_awac(name: str) -> Experiment:
    """HalfCheetah-v4 from recorded data by AWAC: --data DIR."""
    return _awac(name)


@preset
def pendulum_iql(name: str) -> Experiment:
    """Pendulum-v1 from recorded data by IQL: --data DIR."""
    return like(
        "pendulum-sac",
        name,
        agent=IQLConfig(discount=0.98, optimizer=OptimizerConfig(learning_rate=1e-3)),
        normalisation=NormalisationConfig(reward_scale=0.1),
        replay=transitions(128, max_size=20_000, min_size=1_000, updates_per_frame=1.0),
        frames=8_000 * 128,
    )


@preset
def cartpole_cql(name: str) -> Experiment:
    """CartPole-v1 from recorded data by CQL of discrete actions: --data DIR."""
    return Experiment(
        preset=name,
        agent=DiscreteCQLConfig(target_rate=0.005, optimizer=OptimizerConfig(learning_rate=1e-3)),
        env=EnvConfig("CartPole-v1", num_envs=8),
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu"),
        replay=transitions(128, max_size=50_000, min_size=1_000, updates_per_frame=0.25),
        evaluator=EvaluatorConfig(episodes=100, num_envs=20),
        frames=20_000 * 128,
        log_period=1_000 * 128,
    )


def _pendulum(name: str, agent: Any) -> Experiment:
    """Returns pendulum-sac with half of each batch from the demonstrations."""
    replay = transitions(64, max_size=20_000, min_size=1_000, updates_per_frame=1.0)
    return like("pendulum-sac", name, agent=agent, replay=replay)


@preset
def pendulum_gail(name: str) -> Experiment:
    """Pendulum-v1 by imitation, with a discriminator: --replay.demonstrations DIR."""
    return _pendulum(
        name, GAILConfig(discount=0.98, random_frames=1_000, optimizer=falling(2e-3, 19_000))
    )


@preset
def pendulum_sqil(name: str) -> Experiment:
    """Pendulum-v1 by imitation, with rewards of 0 and 1: --replay.demonstrations DIR.

    The temperature is fixed, as in soft Q-learning; a learned one did not imitate.
    """
    agent = SQILConfig(
        discount=0.98,
        random_frames=1_000,
        temperature=0.1,
        learn_temperature=False,
        optimizer=falling(2e-3, 19_000),
    )
    return _pendulum(name, agent)


def single_steps(batch_size: int) -> ReplayConfig:
    """Returns batches of single transitions, each once an epoch."""
    return ReplayConfig(
        sampler="uniform",
        batch_size=batch_size,
        unroll_length=1,
        starts="not_last",
        max_size=10**9,  # has no effect: a dataset has a fixed size
    )


@preset
def bc(name: str) -> Experiment:
    """Behaviour cloning of any dataset, in the environment it was recorded in: --data DIR."""
    return Experiment(
        preset=name,
        agent=BCConfig(),
        env=EnvConfig(""),  # the environment of the dataset
        replay=single_steps(256),
        frames=1_000_000,
        log_period=20_000,
        checkpoint_period=500_000,
    )


@preset
def cartpole_bc(name: str) -> Experiment:
    """CartPole-v1 from recorded play: 50 epochs of 20,000 frames: --data DIR."""
    frames, batch_size = 1_000_000, 256
    return Experiment(
        preset=name,
        agent=BCConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=frames // batch_size)
        ),
        env=EnvConfig("CartPole-v1"),
        replay=single_steps(batch_size),
        frames=frames,
        log_period=20_000,
        checkpoint_period=500_000,
    )


@preset
def entity_floor_is_lava_bc(name: str) -> Experiment:
    """FloorIsLava from recorded play, with relative positions: 10 epochs of 4,000: --data DIR."""
    frames, batch_size = 40_000, 128
    relative = RelativePositionsConfig(kind="grid", extent=(1, 1), per_type_values=True)
    return Experiment(
        preset=name,
        agent=BCConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2, anneal_steps=frames // batch_size)
        ),
        env=EnvConfig("rlstack.entity.games:FloorIsLava"),
        network=NetworkConfig(
            entities=RaggedTransformerConfig(d_model=16, relative_positions=relative)
        ),
        normalisation=NormalisationConfig(observations=True, observation_clip=5.0),
        replay=single_steps(batch_size),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=frames,
        log_period=4_000,
    )
