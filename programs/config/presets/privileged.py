"""Presets of asymmetric actor-critics (Pinto et al. 2018, arXiv:1710.06542), on EnvPool's tasks.

The critic sees an entry of the observation that the policy does not.
"""

from __future__ import annotations

from typing import Any

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.network import CriticConfig, NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy, preset

_EVALUATOR = EvaluatorConfig(episodes=32, num_envs=32)


def _joystick(name: str, env: str, entropy_cost: float, clip_ratio: float) -> Experiment:
    """Returns PPO on a robot that walks as commanded, with the constants of MuJoCo Playground.

    https://github.com/google-deepmind/mujoco_playground/blob/main/mujoco_playground/config/locomotion_params.py.
    The policy sees noisy sensors (``state``) and the critic the true state (``privileged_state``,
    which has the sensors too). Deviations, for CPUs: 256 environments instead of 8,192, a tenth of
    the frames, 8 minibatches instead of 32, and a learning rate that falls to 0.
    """
    optimizer = OptimizerConfig(learning_rate=3e-4)
    return on_policy(
        name,
        PPOConfig(
            discount=0.97,
            entropy_cost=entropy_cost,
            clip_ratio=clip_ratio,
            num_epochs=4,
            num_minibatches=8,
            max_grad_norm=1.0,
            optimizer=optimizer,
        ),
        EnvConfig(env, num_envs=256),
        unroll_length=20,
        frames=20_000_000,
        network=NetworkConfig(
            hidden_sizes=(512, 256, 128),
            activation="silu",
            critic_observation="privileged_state",
            critic_input="state",
        ),
        normalisation=NormalisationConfig(observations=True),
        evaluator=_EVALUATOR,
    )


@preset
def go1_joystick_ppo(name: str) -> Experiment:
    """A Go1 that walks as commanded (MuJoCo Playground); the critic sees the true state."""
    return _joystick(name, "Go1JoystickFlatTerrain-v1", entropy_cost=1e-2, clip_ratio=0.3)


@preset
def g1_joystick_ppo(name: str) -> Experiment:
    """A G1 that walks as commanded (MuJoCo Playground); the critic sees the true state."""
    return _joystick(name, "G1JoystickFlatTerrain-v1", entropy_cost=5e-3, clip_ratio=0.2)


@preset
def cartpole_balance_ppo(name: str) -> Experiment:
    """dm_control's cartpole balance, whose velocities only the critic sees; the policy has a GRU.

    The constants are those of ``pendulum-ppo`` where they are not stated.
    """
    changes: dict[str, Any] = {"num_epochs": 10, "num_minibatches": 4, "entropy_cost": 0.0}
    return on_policy(
        name,
        PPOConfig(optimizer=OptimizerConfig(learning_rate=1e-3), **changes),
        EnvConfig("CartpoleBalance-v1", num_envs=16),
        unroll_length=128,
        frames=500_000,
        network=NetworkConfig(
            core="gru",
            critic_observation="velocity",
            critic=CriticConfig(core="none"),
            policy_log_std=-0.5,
        ),
        normalisation=NormalisationConfig(observations=True, rewards="return"),
        evaluator=_EVALUATOR,
    )
