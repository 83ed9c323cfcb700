"""The games in JAX play as those in Python from the same states."""

from collections import deque

import jax
import numpy as np
import pytest

from rlstack.entity import as_dm_env, jax_games
from rlstack.entity.games.count import Count
from rlstack.entity.games.multi_snake import BODY, MultiSnake
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.programs.config.presets import preset
from rlstack.types import StepType
from tests.agent_cases import assert_close


def _begin(env, cells):
    """Puts a game in Python into a state of MultiSnake in JAX, and returns its first step."""
    game, size = env.game, env.game._size
    state = jax.tree.map(np.asarray, cells)

    def at(cell):
        return (int(cell % size), int(cell // size))

    first = env.reset()
    game._snakes = [
        deque(map(at, row[:n])) for row, n in zip(state.snakes, state.lengths, strict=True)
    ]
    game._food = [at(cell) for cell in state.food]
    game._cells = {cell: BODY for snake in game._snakes for cell in snake}
    game._cells |= {cell: colour for colour, cell in enumerate(game._food)}
    assert first.observation["count"].keys() == env.observation_spec()["count"].keys()
    return env.codec.encode(game._observe([0.0], over=False))[0]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "options",
    [
        {"board_size": 4, "num_snakes": 1, "max_snake_length": 4},
        {"board_size": 5, "num_snakes": 3, "max_snake_length": 2, "num_steps": 12},
    ],
)
def test_snakes_move_eat_and_die_as_in_python(options):
    twin, env = jax_games.MultiSnake(**options), as_dm_env(MultiSnake(**options))
    assert twin.observation_spec() == env.observation_spec()
    assert twin.action_spec() == env.action_spec()
    reset, step = jax.jit(twin.reset), jax.jit(twin.step)
    rng = np.random.default_rng(1)
    grown, full = 0, 0
    for episode in range(60):
        state, observation = reset(jax.random.PRNGKey(episode))
        assert len(set(np.asarray(state.snakes[:, 0])) | set(np.asarray(state.food))) == 2 * len(
            state.food
        )
        assert_close(observation, _begin(env, state))
        over = False
        while not over:
            # Of two random moves the one that is nearer to the food, so that snakes also grow.
            action = {"move": _moves(rng, state, options["board_size"])}
            key = jax.random.PRNGKey(rng.integers(2**31))
            # Where food reappears is drawn; the game in Python gets the same cells.
            outcome = step(key, state, action)
            food = np.asarray(outcome.state.food)
            env.game._drawn = food[food != np.asarray(state.food)].tolist()[::-1]
            timestep = env.step(action)
            assert not env.game._drawn
            assert_close(outcome.observation, timestep.observation)
            np.testing.assert_allclose(outcome.reward, timestep.reward, rtol=1e-6)
            over = bool(outcome.terminated)
            assert over == timestep.last() and not outcome.truncated
            state, grown = outcome.state, grown + float(outcome.reward > 0)
        full += bool((state.lengths >= options["max_snake_length"]).all())
    assert grown > 30 and full > 0


def _moves(rng, state, size):
    heads = np.asarray(state.snakes)[np.arange(len(state.food)), np.asarray(state.lengths) - 1]
    food = np.asarray(state.food)
    dx, dy = food % size - heads % size, food // size - heads // size
    towards = np.where(dx != 0, np.where(dx > 0, 3, 2), np.where(dy > 0, 0, 1))
    return np.where(rng.random(len(food)) < 0.85, towards, rng.integers(0, 4, len(food))).astype(
        np.int32
    )


@pytest.mark.parametrize("masked_choices", [1, 3, 10])
def test_beans_are_counted_as_in_python(masked_choices):
    twin, env = jax_games.Count(masked_choices), as_dm_env(Count(masked_choices))
    assert twin.observation_spec() == env.observation_spec()
    reset, step = jax.jit(twin.reset), jax.jit(twin.step)
    seen = set()
    for seed in range(80):
        state, observation = reset(jax.random.PRNGKey(seed))
        env.reset()
        env.game._beans, env.game._legal = int(state.beans), np.asarray(state.legal).tolist()
        assert env.game._legal[env.game._beans] and not any(env.game._legal[masked_choices:])
        padded, env._context = env.codec.encode(env.game._observe(0.0, done=False))
        assert_close(observation, padded)
        legal = np.flatnonzero(np.asarray(state.legal))
        action = {"count": legal[[seed % len(legal)]].astype(np.int32)}
        outcome, timestep = step(jax.random.PRNGKey(0), state, action), env.step(action)
        assert_close(outcome.observation, timestep.observation)
        assert outcome.reward == timestep.reward and timestep.last() and outcome.terminated
        seen.add(int(state.beans))
    assert seen == set(range(masked_choices))


def test_draws_of_count_have_the_published_chances():
    env = BatchedEnv(jax_games.Count(5))
    _, timestep = jax.jit(env.reset)(env.keys(np.arange(4000)))
    assert set(np.asarray(timestep.step_type)) == {StepType.FIRST}
    legal = np.asarray(timestep.observation["action_mask"]["count"])
    # A random policy returns 0.457: the mean of 1 / (number of legal answers).
    assert abs((1 / legal.sum(axis=1)).mean() - 0.457) < 0.02


@pytest.mark.parametrize("name", ["jax-entity-count-ppo", "jax-entity-multi-snake-ppo"])
def test_presets_differ_from_those_of_the_games_in_python_by_the_environment(name):
    experiment, other = preset(name), preset(name.removeprefix("jax-"))
    assert experiment.topology == "fused"
    assert (experiment.agent, experiment.replay) == (other.agent, other.replay)
    assert experiment.env.options == other.env.options
