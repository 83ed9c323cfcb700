"""Presets of Rainbow, which is C51 with every refinement of Q-learning."""

from __future__ import annotations

from agents.c51 import C51Config
from programs.experiment import EnvConfig, Experiment
from programs.presets.registry import atari, preset, uniform_transitions
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.replay import ReplayConfig


@preset
def cartpole_rainbow(name: str) -> Experiment:
    """CartPole-v1 with all of Rainbow: noise on weights explores when epsilon has gone."""
    return Experiment(
        preset=name,
        agent=C51Config(
            min_value=0.0,  # each step pays 1, so returns discounted by 0.99 lie in [0, 100]
            max_value=100.0,
            target_rate=0.005,
            epsilon_frames=16_000,  # noise alone never leaves what one seed of three begins with
            epsilon_end=0.0,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=15_000),
        ),
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=NetworkConfig(
            hidden_sizes=(128, 128),
            activation="relu",
            duelling=True,
            noisy_sigma=0.1,  # the paper's 0.5 is slower here
        ),
        replay=uniform_transitions(
            sampler="prioritized",
            priority_exponent=0.5,
            importance_anneal_samples=32 * 60_000,
        ),
        frames=60_000,
    )


@preset
def breakout_rainbow(name: str) -> Experiment:
    """Breakout on pixels with the constants of Hessel et al. (2018), table 1."""
    frames = 50_000_000  # 200 million frames of the game, four to a step
    return Experiment(
        preset=name,
        agent=C51Config(
            target_period=8_000,  # 32,000 frames of the game, an update every four steps
            epsilon_start=0.0,
            epsilon_end=0.0,
            optimizer=OptimizerConfig(learning_rate=6.25e-5, eps=1.5e-4),
        ),
        env=atari("Breakout-v5", num_envs=8),
        network=NetworkConfig(torso="nature", hidden_sizes=(512,), duelling=True, noisy_sigma=0.5),
        replay=ReplayConfig(
            sampler="prioritized",
            batch_size=32,
            unroll_length=3,
            starts="not_last",
            max_size=1_000_000,  # 7 GB: of its four stacked frames a step holds the newest
            frame_stack=4,
            min_size=20_000,
            samples_per_insert=8.0,  # one update every four steps, as in the paper
            priority_exponent=0.5,
            importance_anneal_samples=8 * frames,
        ),
        frames=frames,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,
    )
