"""Agents learn: each reaches a stated return within a stated number of frames, on fixed seeds.

Quick versions always run; tests marked slow check the returns that README and presets state.
"""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPO, PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets import preset
from rlstack.programs.config.presets.registry import falling, on_policy_replay
from rlstack.programs.run.run_session import drive
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.replay import ReplayConfig
from rlstack.storage.loggers import InMemoryLogger

SEEDS = (1, 2, 3)
# Three-step transitions, for Q-learning on toy environments.
PRIORITIZED = ReplayConfig(
    sampler="prioritized",
    batch_size=32,
    unroll_length=3,
    starts="not_last",
    max_size=10_000,
    min_size=500,
    samples_per_insert=8.0,
)


def train(experiment):
    """Trains; returns the program, which the caller closes."""
    program = SingleProcessRun(experiment)
    periodic = PeriodicActions(
        experiment, InMemoryLogger(), evaluate=lambda _: None, checkpoint=lambda _: None
    )
    try:
        drive(program, periodic, lambda: False)
    except BaseException:
        program.close()
        raise
    assert program.env_frames < experiment.frames * 1.01 + 1000
    return program


def learned_return(experiment):
    """Trains; returns the mean greedy return."""
    program = train(experiment)
    try:
        return program.evaluate().returns.mean()
    finally:
        program.close()


def median_return(experiment):
    """Returns the median of three seeds: what one seed learns depends on the CPU's rounding."""
    return np.median([learned_return(dataclasses.replace(experiment, seed=s)) for s in SEEDS])


def toy(name, agent, *, frames, num_envs=16, unroll_length=16, seed=1, options=None, **rest):
    return Experiment(
        preset="toy",
        agent=agent,
        env=EnvConfig(f"tests.envs.toy:{name}", num_envs=num_envs, options=options or {}),
        replay=rest.pop("replay", on_policy_replay(num_envs, unroll_length)),
        evaluator=EvaluatorConfig(episodes=64, num_envs=16),
        frames=frames,
        seed=seed,
        **rest,
    )


FAST_PPO = PPOConfig(entropy_cost=0.003, optimizer=OptimizerConfig(learning_rate=2e-3))


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_catch():
    # With 25,000 frames, seeds 2 to 4 reach 1 with either version of JAX, and seed 1 with one.
    assert learned_return(toy("Catch", FAST_PPO, frames=40_000)) > 0.9


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("env_type", ["thread", "process"])
def test_ppo_learns_a_point_mass_from_asynchronous_batches(env_type):
    # The order of rows is random, so no two runs are equal: the task must be one that every run
    # learns. Eight runs of this one reached between -2.4 and -3.5; see the task below.
    agent = dataclasses.replace(FAST_PPO, discount=0.9)
    experiment = toy("PointMass", agent, frames=40_000)
    env = dataclasses.replace(experiment.env, type=env_type, wait_num=8, num_workers=2)
    assert learned_return(dataclasses.replace(experiment, env=env)) > -6


@pytest.mark.slow
@pytest.mark.chosen
def test_dqn_learns_catch():
    experiment = toy(
        "Catch",
        DQNConfig(
            target_period=100,
            epsilon_frames=5_000,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        ),
        frames=15_000,
        num_envs=8,
        replay=PRIORITIZED,
    )
    assert learned_return(experiment) > 0.9


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_to_obey_a_mask_in_dict_observations():
    assert learned_return(toy("MaskedDict", FAST_PPO, frames=20_000)) > 0.9 * 8


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_several_numbers_at_once():
    assert median_return(toy("MultiDiscrete", FAST_PPO, frames=40_000)) > 0.9 * 5


@pytest.mark.slow
@pytest.mark.chosen
def test_ppo_learns_a_continuous_point_mass():
    experiment = toy("PointMass", dataclasses.replace(FAST_PPO, discount=0.9), frames=40_000)
    # A random policy stays about 0.8 from the origin: -16 in 20 steps; the optimum is about -4.
    assert learned_return(experiment) > -6


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("core", "solved"), [("lstm", True), ("gru", True), ("none", False)])
def test_memory_needs_a_recurrent_core(core, solved):
    # With a fixed rate some runs forget the cue again: 30,000 frames are 1,872 optimizer steps.
    agent = dataclasses.replace(FAST_PPO, optimizer=falling(2e-3, 1_872))
    experiment = toy(
        "MemoryCue",
        agent,
        frames=30_000,
        options={"delay": 4},
        network=NetworkConfig(core=core, hidden_sizes=(32,), core_size=32),
    )
    found = median_return(experiment)
    if solved:
        assert found > 0.95
    else:
        # Chance scores 0; 64 episodes of +-1 have a standard error of 0.125.
        assert abs(found) < 0.4


class ForgetsTruncation(PPO):
    """A PPO with a well-known bug: it treats a time limit as a termination."""

    def prepare(self, params, learner_state, batch):
        timestep = batch.trajectory.timestep
        discount = jax.numpy.where(timestep.last(), 0.0, timestep.discount)
        trajectory = batch.trajectory._replace(timestep=timestep._replace(discount=discount))
        return super().prepare(params, learner_state, batch._replace(trajectory=trajectory))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("agent_class", [PPO, ForgetsTruncation])
def test_values_bootstrap_through_a_time_limit(agent_class, monkeypatch):
    """Each reward is 1 and no observation shows the time, so the value is 1 / (1 - discount) = 10.

    If the time limit of 10 steps were a termination, values would be those of ended episodes.
    """
    from rlstack.agents import AGENTS

    entry = AGENTS[PPOConfig]._replace(agent=agent_class)
    monkeypatch.setitem(AGENTS, PPOConfig, entry)
    experiment = toy(
        "TruncatingChain",
        PPOConfig(
            discount=0.9,
            entropy_cost=0.0,
            max_grad_norm=0.0,
            optimizer=OptimizerConfig(learning_rate=1e-2, anneal_steps=1800),
        ),
        frames=30_000,
        options={"length": 10},
    )
    program = train(experiment)
    try:
        values = program.player.inferencer.inference(None, program.env.reset()).agent_output.value
    finally:
        program.close()
    if agent_class is PPO:
        np.testing.assert_allclose(values, 10.0, atol=0.1)
    else:
        assert values.max() < 8.0


def returns_of_seeds(name, **changes):
    found = [
        learned_return(dataclasses.replace(preset(name), seed=seed, **changes)) for seed in SEEDS
    ]
    print(f"{name}: {found}")
    return found


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(600)
def test_ppo_solves_cartpole_within_150k_frames():
    found = returns_of_seeds("cartpole-ppo")
    assert preset("cartpole-ppo").frames <= 150_000
    assert min(found) >= 475


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dqn_solves_cartpole_within_100k_frames():
    found = returns_of_seeds("cartpole-dqn")
    assert preset("cartpole-dqn").frames <= 100_000
    assert min(found) >= 475


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_solves_acrobot_within_500k_frames():
    found = returns_of_seeds("acrobot-ppo")
    assert preset("acrobot-ppo").frames <= 500_000
    assert min(found) >= -95


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ppo_solves_pendulum_within_300k_frames():
    found = returns_of_seeds("pendulum-ppo")
    assert preset("pendulum-ppo").frames <= 300_000
    assert min(found) >= -250
