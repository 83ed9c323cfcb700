"""Presets of C51, and of Rainbow, which is C51 with every refinement of Q-learning."""

from __future__ import annotations

import dataclasses

from rlstack.agents.c51 import C51Config
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets.registry import falling, find, like, preset


@preset
def cartpole_c51(name: str) -> Experiment:
    """CartPole-v1 with distributions of returns; otherwise the constants of cartpole-dqn."""
    agent = C51Config(
        min_value=0.0,  # each reward is 1, so returns discounted by 0.99 lie in [0, 100]
        max_value=100.0,
        double=False,
        target_rate=0.005,
        epsilon_frames=16_000,
        epsilon_end=0.04,
        optimizer=falling(1e-3, 25_000),
    )
    return like("cartpole-dqn", name, agent=agent)


@preset
def cartpole_rainbow(name: str) -> Experiment:
    """CartPole-v1 with all of Rainbow: noise on weights explores after epsilon has fallen to 0."""
    base = find("cartpole-dqn")
    return like(
        "cartpole-dqn",
        name,
        agent=C51Config(
            min_value=0.0,
            max_value=100.0,
            target_rate=0.005,
            epsilon_frames=16_000,  # with noise alone, one of three seeds learns nothing
            epsilon_end=0.0,
            optimizer=falling(1e-3, 15_000),
        ),
        network=dataclasses.replace(
            base.network,
            duelling=True,
            noisy_sigma=0.1,  # the paper's 0.5 is slower here
        ),
        replay=dataclasses.replace(
            base.replay,
            sampler="prioritized",
            priority_exponent=0.5,
            importance_anneal_samples=32 * 60_000,
        ),
        frames=60_000,
    )


@preset
def breakout_rainbow(name: str) -> Experiment:
    """Breakout on pixels with the constants of Hessel et al. (2018), table 1.

    https://arxiv.org/abs/1710.02298, and its authors' colleagues' program:
    https://github.com/google/dopamine/blob/master/dopamine/agents/rainbow/configs/rainbow_aaai.gin
    A step is four frames of the game. Deviation: gradients are clipped to a norm of 10, as in Wang
    et al. (2016) for duelling networks.
    """
    base = find("breakout-dqn")
    frames = 50_000_000  # 200 million frames of the game, four per step
    return like(
        "breakout-dqn",
        name,
        agent=C51Config(
            # 32,000 frames of the game: an update every four steps, a step is four frames.
            target_period=2_000,
            epsilon_start=0.0,
            epsilon_end=0.0,
            optimizer=OptimizerConfig(learning_rate=6.25e-5, eps=1.5e-4),
        ),
        network=dataclasses.replace(base.network, noisy_sigma=0.5),
        replay=dataclasses.replace(
            base.replay,
            max_size=1_000_000,  # 7 GB
            importance_anneal_samples=8 * frames,
        ),
        frames=frames,
    )
