"""Presets of FastTD3 (Seo et al. 2025, arXiv:2505.22642)."""

from __future__ import annotations

from rlstack.agents.fast_td3 import FastTD3Config
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import CriticConfig, NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import preset, transitions


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
