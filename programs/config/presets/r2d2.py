"""Presets of R2D2, Kapturowski et al. (2019), https://openreview.net/forum?id=r1lyTjAqYX.

Two published programs have other constants than the paper, for runs with fewer frames and actors:

- Acme: https://github.com/google-deepmind/acme/blob/master/acme/agents/jax/r2d2/config.py
- SEED RL: https://github.com/google-research/seed_rl/blob/master/agents/r2d2/learner.py and
  https://github.com/google-research/seed_rl/blob/master/atari/r2d2_main.py

The loss is a sum over the transitions of a sequence, so the largest gradient norm and Adam's eps
are, too. Those of the small tasks were tuned for a mean, and are multiplied by the transitions.
"""

from __future__ import annotations

from typing import Any

from rlstack.agents.r2d2 import R2D2Config
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import preset


def _sequences(**changes: Any) -> ReplayConfig:
    """Returns prioritized replay with the paper's exponent of priorities.

    The paper's text finds no use in importance weights; the exponent 0.6 is that of the programs
    published after it (Acme, SEED RL). 0 turns them off.
    """
    return ReplayConfig(
        sampler="prioritized",
        priority_exponent=0.9,
        importance_exponent=0.6,
        importance_exponent_final=0.6,
        **changes,
    )


@preset
def memory_cartpole_r2d2(name: str) -> Experiment:
    """CartPole without velocities, which needs memory: short sequences, tuned here."""
    learned = 20  # transitions of a sequence after the burn-in
    return Experiment(
        preset=name,
        agent=R2D2Config(
            discount=0.99,
            burn_in=10,
            target_rate=0.01,
            max_grad_norm=40.0 * learned,
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=18_000, eps=1e-5 * learned),
        ),
        env=EnvConfig("rlstack.envs.partial:cartpole_without_velocities", num_envs=8),
        network=NetworkConfig(hidden_sizes=(64,), activation="relu", core="lstm", core_size=64),
        replay=_sequences(
            batch_size=32,
            unroll_length=10 + learned,
            period=10,
            max_size=30_000,  # all steps: a policy that balances still needs samples of falling
            min_size=200,
            samples_per_insert=20.0,
        ),
        evaluator=EvaluatorConfig(episodes=50, num_envs=50),
        frames=300_000,
    )


@preset
def memorycue_r2d2(name: str) -> Experiment:
    """A cue to be remembered over four steps; learned in seconds."""
    learned = 12  # transitions of a sequence after the burn-in
    return Experiment(
        preset=name,
        agent=R2D2Config(
            discount=0.99,
            burn_in=4,
            target_period=50,
            max_grad_norm=40.0 * learned,
            optimizer=OptimizerConfig(learning_rate=2e-3, eps=1e-5 * learned),
        ),
        env=EnvConfig("rlstack.envs.toy:MemoryCue", num_envs=8, options={"delay": 4}),
        network=NetworkConfig(hidden_sizes=(32,), activation="relu", core="lstm", core_size=32),
        replay=_sequences(
            batch_size=32,
            unroll_length=4 + learned,
            period=6,
            max_size=2_000,
            min_size=50,
            samples_per_insert=16.0,
        ),
        evaluator=EvaluatorConfig(episodes=64, num_envs=16),
        frames=30_000,
    )


@preset
def pong_r2d2(name: str) -> Experiment:
    """Pong on pixels, with the paper's constants, and those of its programs for shorter runs.

    The paper has 256 actors, an update for about 3,300 steps and a target that is copied every
    2,500 updates. With the 10 million steps here this would be 3,000 updates and one copy. So each
    sequence is drawn 4 times (Acme), which gives 15,593 updates, with a learning rate of 4.8e-4 and
    a copy every 400 updates (SEED RL). Further deviations: 32 environments, 5,000 sequences in
    replay instead of 100,000, and a start after 500 of them.
    """
    return Experiment(
        preset=name,
        agent=R2D2Config(
            target_period=400,
            optimizer=OptimizerConfig(learning_rate=4.8e-4, eps=1e-3),
        ),
        env=EnvConfig("Pong-v5", num_envs=32, options={"episodic_life": False}),
        network=NetworkConfig(
            torso="nature", hidden_sizes=(512,), duelling=True, core="lstm", core_size=512
        ),
        replay=_sequences(
            batch_size=64,
            unroll_length=120,
            period=40,
            max_size=5_000,  # 200,000 steps of 7 KB and a recurrent state of 4 KB each
            frame_stack=4,
            min_size=500,
            samples_per_insert=4.0,  # an update for 640 steps
        ),
        frames=10_000_000,
        log_period=20_000,
        checkpoint_period=1_000_000,
        checkpoint_replay=False,
    )
