"""Presets of agents that learn a model: Gumbel MuZero, AlphaZero, TD-MPC2 and DreamerV3.

Constants were tuned here, but those of ``halfcheetah-tdmpc2`` are the authors', of
https://github.com/nicklashansen/tdmpc2/blob/main/tdmpc2/config.yaml, and so are those of
``halfcheetah-dreamer`` and ``breakout-dreamer``, of
https://github.com/danijar/dreamerv3/blob/main/dreamerv3/configs.yaml (``dmc_proprio`` and
``atari100k``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstack.agents.alphazero import AlphaZeroConfig
from rlstack.agents.dreamer import DreamerConfig
from rlstack.agents.muzero import MuZeroConfig
from rlstack.agents.td_mpc2 import TDMPC2Config
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.exploration import PolicyConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.configs.world_model import WorldModelConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import falling, preset, transitions


def _sequences(
    agent: MuZeroConfig, batch_size: int, max_size: int, min_size: int, updates_per_frame: float
) -> ReplayConfig:
    """Returns prioritized replay of items with all targets."""
    return ReplayConfig(
        sampler="prioritized",
        batch_size=batch_size,
        unroll_length=agent.num_unroll + agent.n_step,
        starts="not_last",
        max_size=max_size,
        min_size=min_size,
        samples_per_insert=batch_size * updates_per_frame,
    )


@preset
def cartpole_muzero(name: str) -> Experiment:
    """CartPole-v1 by Gumbel MuZero, with 16 simulations of each search."""
    frames, updates_per_frame = 60_000, 1 / 8
    agent = MuZeroConfig(
        discount=0.99,
        num_simulations=16,
        n_step=20,
        max_value=100.0,
        value_cost=0.5,
        optimizer=falling(1e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("CartPole-v1", num_envs=16),
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu", norm="layer"),
        replay=_sequences(agent, 128, 60_000, 1_000, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=20, num_envs=20),
        frames=frames,
    )


@preset
def catch_muzero(name: str) -> Experiment:
    """Catch by Gumbel MuZero, in one compiled program."""
    frames, updates_per_frame = 40_000, 1 / 16
    agent = MuZeroConfig(
        discount=0.99,
        num_simulations=12,
        n_step=5,
        max_value=2.0,
        optimizer=falling(2e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("rlstack.jax_envs.toy:Catch", num_envs=32, type="jax"),
        topology="fused",
        network=NetworkConfig(hidden_sizes=(64, 64), activation="relu", norm="layer", num_atoms=21),
        replay=_sequences(agent, 128, 40_000, 1_000, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=200, num_envs=50),
        frames=frames,
    )


@preset
def pendulum_muzero(name: str) -> Experiment:
    """Pendulum-v1 by Gumbel MuZero with drawn actions, in one compiled program."""
    frames, updates_per_frame = 100_000, 1 / 8
    agent = MuZeroConfig(
        discount=0.97,
        num_simulations=16,
        num_drawn=16,
        n_step=5,
        max_value=500.0,
        value_cost=0.5,
        optimizer=falling(1e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("Pendulum-v1", num_envs=16, type="jax"),
        topology="fused",
        network=NetworkConfig(hidden_sizes=(128, 128), activation="relu", norm="layer"),
        replay=_sequences(agent, 128, 60_000, 1_000, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=40, num_envs=20),
        frames=frames,
    )


@preset
def minatar_breakout_muzero(name: str) -> Experiment:
    """Breakout of MinAtar by Gumbel MuZero, in one compiled program."""
    frames, updates_per_frame = 100_000, 1 / 16
    agent = MuZeroConfig(
        max_value=100.0,
        optimizer=falling(1e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("Breakout-MinAtar", num_envs=64, type="jax"),
        topology="fused",
        network=NetworkConfig(
            torso="minatar", hidden_sizes=(128, 128), activation="relu", norm="layer"
        ),
        # The game is deterministic: the search's own noise soon repeats one game.
        policy=PolicyConfig("softmax", "linear", start=2.0, end=1.0, steps=60_000),
        # Smaller than the run: the returns of older policies make noisy targets.
        replay=_sequences(agent, 256, 25_000, 5_000, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=100, num_envs=100),
        frames=frames,
        log_period=10_000,
        checkpoint_replay=False,
    )


def _alphazero(
    name: str, game: str, simulations: int, n_step: int, network: NetworkConfig, frames: int
) -> Experiment:
    """Returns AlphaZero on a game of 64 boards, whose seats all play with the newest params.

    Half of the frames are waits. A fifth of the moves is random: else the seats soon play the same
    few games, and learn no defence against others.
    """
    updates_per_frame, model = 1 / 64, f"rlstack.jax_envs.board_games:{game}"
    agent = AlphaZeroConfig(
        model=model,
        num_simulations=simulations,
        n_step=n_step,
        optimizer=falling(2e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        policy=PolicyConfig("epsilon_greedy", start=0.2),
        env=EnvConfig(model, num_envs=128, type="jax"),
        topology="fused",
        network=network,
        replay=transitions(
            512,
            max_size=frames // 4,
            min_size=4_000,
            updates_per_frame=updates_per_frame,
            num_steps=n_step,
        ),
        evaluator=EvaluatorConfig(episodes=20, num_envs=20),
        frames=frames,
        checkpoint_replay=False,
    )


@preset
def tictactoe_alphazero(name: str) -> Experiment:
    """TicTacToe by AlphaZero with its true model, in one compiled program."""
    network = NetworkConfig(hidden_sizes=(128, 128), activation="relu")
    return _alphazero(name, "TicTacToe", 32, 9, network, frames=300_000)


@preset
def connect_four_alphazero(name: str) -> Experiment:
    """Connect Four by AlphaZero with its true model, in one compiled program."""
    network = NetworkConfig(hidden_sizes=(128, 128), activation="relu", shared=True)
    return _alphazero(name, "ConnectFour", 32, 8, network, frames=1_000_000)


_SMALL = TDMPC2Config(  # a quarter of the authors' sequences, and larger rates for small networks
    num_samples=128,
    num_elites=16,
    num_policy_trajectories=8,
    iterations=4,
    optimizer=OptimizerConfig(learning_rate=1e-3, eps=1e-8),
    encoder_optimizer=OptimizerConfig(learning_rate=3e-4, eps=1e-8),
)
_POLICY = OptimizerConfig(learning_rate=3e-4, eps=1e-5)  # the authors' optimizer of the policy


def _tdmpc2(
    name: str,
    agent: TDMPC2Config,
    env: EnvConfig,
    width: int,
    batch_size: int,
    max_size: int,
    min_size: int,
    **fields: Any,
) -> Experiment:
    """Returns TD-MPC2 with an update for each frame; all parts have layers of ``width`` units."""
    return Experiment(
        preset=name,
        agent=agent,
        env=env,
        network=NetworkConfig(
            hidden_sizes=(width, width), activation="mish", norm="layer", num_atoms=101
        ),
        replay=transitions(
            batch_size, max_size, min_size, updates_per_frame=1.0, num_steps=agent.horizon
        ),
        **fields,
    )


@preset
def pendulum_tdmpc2(name: str) -> Experiment:
    """Pendulum-v1 by planning in a small latent model."""
    return _tdmpc2(
        name,
        dataclasses.replace(_SMALL, discount=0.975, max_value=2_000.0, random_frames=1_000),
        EnvConfig("Pendulum-v1", num_envs=4),
        width=64,
        batch_size=128,
        max_size=20_000,
        min_size=1_000,
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=10_000,
    )


@preset
def halfcheetah_tdmpc2(name: str) -> Experiment:
    """HalfCheetah-v4 by planning in a latent model of the authors' sizes; for an accelerator."""
    return _tdmpc2(
        name,
        TDMPC2Config(
            discount=0.995,
            encoder_optimizer=OptimizerConfig(learning_rate=9e-5, eps=1e-8),
            policy_optimizer=_POLICY,
        ),
        EnvConfig("HalfCheetah-v4", num_envs=4),
        width=512,
        batch_size=256,
        max_size=300_000,
        min_size=5_000,
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=100_000,
        checkpoint_replay=False,
    )


@preset
def cheetah_run_tdmpc2(name: str) -> Experiment:
    """DMC's cheetah run by planning in a small latent model; an action lasts for two frames."""
    return _tdmpc2(
        name,
        dataclasses.replace(
            _SMALL,
            discount=0.99,
            num_critics=2,
            max_value=200.0,
            random_frames=2_500,
            policy_optimizer=_POLICY,
        ),
        EnvConfig("CheetahRun-v1", num_envs=4, options={"frame_skip": 2, "max_episode_steps": 500}),
        width=128,
        batch_size=128,
        max_size=50_000,
        min_size=2_500,
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=50_000,
        checkpoint_replay=False,
    )


_SILU = NetworkConfig(activation="silu", norm="rms", num_atoms=255)


def _episodes(
    batch_size: int, unroll_length: int, max_size: int, min_size: int, updates_per_frame: float
) -> ReplayConfig:
    """Returns replay of sequences, of which the newest one is in each batch."""
    return ReplayConfig(
        sampler="uniform",
        batch_size=batch_size,
        unroll_length=unroll_length,
        max_size=max_size,
        min_size=min_size,
        samples_per_insert=batch_size * updates_per_frame,
        newest_share=1 / batch_size,
    )


def _laprop(learning_rate: float, steps: int) -> OptimizerConfig:
    """Returns the authors' optimizer with a learning rate that falls to 0."""
    return OptimizerConfig("laprop", learning_rate, steps, warmup_steps=100, arguments={"agc": 0.3})


@preset
def cartpole_dreamer(name: str) -> Experiment:
    """CartPole-v1 by DreamerV3, with a small model."""
    frames, updates_per_frame = 10_000, 1 / 4
    agent = DreamerConfig(
        model=WorldModelConfig("tiny", recurrent=128, hidden=64, units=64),
        max_value=1_000.0,
        optimizer=_laprop(1e-3, int(frames * updates_per_frame)),
    )
    return Experiment(
        preset=name,
        agent=agent,
        env=EnvConfig("CartPole-v1", num_envs=4),
        network=dataclasses.replace(_SILU, num_atoms=63),
        replay=_episodes(8, 32, frames, 500, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=20, num_envs=20),
        frames=frames,
    )


@preset
def catch_dreamer(name: str) -> Experiment:
    """Catch on pixels by DreamerV3, with a small model, in one compiled program."""
    frames, updates_per_frame = 8_000, 1 / 2
    agent = DreamerConfig(
        model=WorldModelConfig("tiny"),
        max_value=10.0,
        optimizer=_laprop(1e-3, int(frames * updates_per_frame)),
    )
    env = EnvConfig("rlstack.jax_envs.toy:Catch", num_envs=4, type="jax", options={"pixels": True})
    return Experiment(
        preset=name,
        agent=agent,
        env=env,
        topology="fused",
        network=dataclasses.replace(_SILU, num_atoms=41),
        replay=_episodes(8, 20, frames, 500, updates_per_frame),
        evaluator=EvaluatorConfig(episodes=200, num_envs=50),
        frames=frames,
    )


@preset
def halfcheetah_dreamer(name: str) -> Experiment:
    """HalfCheetah-v4 by DreamerV3 with the authors' constants for vectors; for an accelerator."""
    return Experiment(
        preset=name,
        agent=DreamerConfig(model=WorldModelConfig("1m")),
        env=EnvConfig("HalfCheetah-v4", num_envs=16),
        network=_SILU,
        replay=_episodes(16, 64, 1_000_000, 1_024, updates_per_frame=1.0),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=1_100_000,
        checkpoint_replay=False,
    )


@preset
def breakout_dreamer(name: str) -> Experiment:
    """Breakout on pixels in 110,000 steps by DreamerV3, with the authors' constants; for a GPU."""
    env = EnvConfig(
        "Breakout-v5",
        num_envs=1,
        options={"img_height": 64, "img_width": 64, "stack_num": 1, "gray_scale": False},
    )
    return Experiment(
        preset=name,
        agent=DreamerConfig(model=WorldModelConfig("200m")),
        env=env,
        network=dataclasses.replace(_SILU, dtype="bfloat16"),
        replay=_episodes(16, 64, 110_000, 1_024, updates_per_frame=1 / 4),
        evaluator=EvaluatorConfig(episodes=10, num_envs=10),
        frames=110_000,
        checkpoint_replay=False,
    )
