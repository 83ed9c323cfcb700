"""Levels that the learner chooses, in each topology; resuming; and what is refused."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlstack
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.levels import LevelsConfig
from rlstack.configs.network import NetworkConfig
from rlstack.jax_envs.maze import Maze
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.replay import ReplayConfig
from tests.envs.leveled import LEVELS
from tests.programs import running

pytestmark = pytest.mark.timeout(180)
_LATER = [pytest.mark.slow, pytest.mark.chosen]
QUEUE = ReplayConfig(sampler="fifo", batch_size=4, unroll_length=8, max_size=8)
TABLE = ReplayConfig(
    sampler="uniform", batch_size=16, unroll_length=1, starts="not_last", max_size=400, min_size=50,
    samples_per_insert=4.0,
)  # fmt: skip


def only_the_best(table):
    """Levels without an episode, until all have one; then the one with the highest return."""
    best = jnp.argmax(table.mean_return)
    new = table.episodes == 0
    return jnp.where(new.any(), new, jnp.arange(len(new)) == best)


def leveled(topology, kind="auto", agent=None, replay=QUEUE, **changes):
    """Level k of six pays k / 6 in each of two steps, whatever is done."""
    name = "tests.envs.test_levels:JaxNumbered" if kind == "jax" else "tests.envs.leveled:Numbered"
    return Experiment(
        **{
            "preset": "leveled",
            "agent": agent or PPOConfig(num_epochs=1, num_minibatches=1),
            "env": EnvConfig(name, num_envs=4, type=kind, levels=LEVELS),
            "levels": LevelsConfig(
                kind="rule", rule="tests.programs.hooks.test_levels:only_the_best"
            ),
            "network": NetworkConfig(hidden_sizes=(8,)),
            "replay": replay,
            "topology": topology,
            "frames": 1200,
            "log_period": 200,
            "evaluator": EvaluatorConfig(episodes=6, num_envs=3, by_index=True),
            "program": ProgramConfig(num_actors=1, launch="threads"),
            **changes,
        }
    )


@pytest.mark.parametrize(
    "topology, kind",
    [
        pytest.param("single_process", "for_loop", marks=_LATER),
        ("fused", "jax"),
        pytest.param("heavy_env", "process", marks=_LATER),
        pytest.param("light_env", "for_loop", marks=_LATER),
        pytest.param("distributed", "for_loop", marks=_LATER),
        pytest.param("distributed", "jax", marks=_LATER),
    ],
)
def test_the_learners_levels_arrive_at_resets(topology, kind, tmp_path):
    """Soon each episode is one of level 5, the best, and returns 1.67. Drawn alike it is 0.83."""
    experiment = leveled(topology, kind)
    with running.nothing_left():
        result = running.run(experiment, tmp_path / "run")
    returns = running.series(tmp_path / "run", "actor/episode_return")
    assert returns[-1] > 1.6  # in fused one line has all episodes, also the first ones
    assert result.eval_return_mean == pytest.approx(2 * 2.5 / 6)  # its six episodes are 0 to 5


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["fused", "single_process"])
@pytest.mark.parametrize("agent", ["ppo", "dqn"])
def test_a_resumed_run_equals_an_uninterrupted_one(topology, agent, tmp_path):
    """The buffer and its scores are in the checkpoint. One process restarts its environments."""
    parts = {} if agent == "ppo" else {"agent": DQNConfig(), "replay": TABLE}
    levels = LevelsConfig(kind="robust_plr", max_size=3, replay_prob=0.5)
    kind = "jax" if topology == "fused" else "auto"
    whole = leveled(topology, kind, levels=levels, frames=1000, checkpoint_period=500, **parts)
    half = dataclasses.replace(whole, frames=500)
    names = ["one"] if topology == "fused" else ["one", "other"]
    for name in names:
        running.run(half, tmp_path / name)
        train.resume(tmp_path / name, frames=1000, stream=io.StringIO())
    other = "other"
    if topology == "fused":
        running.run(whole, tmp_path / other)
    found = [running.params(tmp_path / name) for name in ("one", other)]
    assert running.same(*found)
    *_, level, _, replay = found[0]
    assert (level >= 0).sum() == len(level) == 3
    assert replay == 0.5


@pytest.mark.slow
@pytest.mark.chosen
def test_a_trained_policy_acts_without_levels(tmp_path):
    running.run(leveled("single_process"), tmp_path / "run")
    policy = rlstack.load(tmp_path / "run")
    assert policy.act(np.zeros((3, 1), np.float32)).shape == (3,)


@pytest.mark.slow
@pytest.mark.chosen
def test_levels_that_cannot_be_solved_are_not_kept(tmp_path):
    """Six of ten are drawn so."""
    experiment = preset("maze-plr")
    levels = dataclasses.replace(experiment.levels, max_size=200)
    running.run(dataclasses.replace(experiment, levels=levels, frames=150_000), tmp_path / "run")
    assert running.series(tmp_path / "run", "learner/levels_held")[-1] == 200
    *_, level, _, _ = running.params(tmp_path / "run")
    begin = Maze(**experiment.env.options).reset_with_index
    state, _ = jax.vmap(lambda index: begin(jax.random.PRNGKey(0), index))(level)
    around = state.goal[:, None] + np.array([[-1, 0], [1, 0], [0, -1], [0, 1]])
    open_ = ~np.asarray(state.walls)[np.arange(200)[:, None], around[..., 0], around[..., 1]]
    assert open_.any(1).mean() > 0.9


def test_a_config_keeps_its_levels():
    experiment = leveled("single_process")
    assert from_json(to_json(experiment)) == experiment
    assert experiment.evaluation_env.levels == 0


def test_what_does_not_fit_is_told_before_the_start():
    with pytest.raises(ValueError, match=r"env.levels must be positive.*--env.levels N"):
        dataclasses.replace(preset("cartpole-ppo"), levels=LevelsConfig(kind="plr"))
    with pytest.raises(ValueError, match=r"env.levels must be 0 with data"):
        leveled("single_process", data="somewhere")
    with pytest.raises(ValueError, match=r"env.levels must be 0 with network.critic_observation"):
        leveled("single_process", network=NetworkConfig(critic_observation="level"))
