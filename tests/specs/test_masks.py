"""Steps whose action mask marks no action as legal are counted, in pools and in compiled loops."""

import logging

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlstack.agents.fixed import Random, RandomConfig
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.exploration import Greedy
from rlstack.fused.acting import Actors
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.programs.config.experiment import EnvConfig
from rlstack.specs.masks import without_choice
from rlstack.types import EnvSpec, StepType, TimeStep
from tests.fused.test_fused_run import ppo, run
from tests.jax_envs.toy import MaskedDict
from tests.programs.running import series

UNEVEN = specs.BoundedArray((2,), np.int32, [3, 0], [4, 0])
FIRST, MID, LAST = map(int, StepType)
pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("numbers", [np, jnp])
@pytest.mark.parametrize(
    ("action", "masks", "expected"),
    [
        (specs.DiscreteArray(3), ["010", "000", "000"], [False, True, False]),
        (specs.BoundedArray((), np.int32, 0, 1), ["11", "00", "00"], [False, True, False]),
        # Two choices of two values each, then one of two values and one of one.
        (specs.BoundedArray((2,), np.int32, 0, 1), ["0011", "1001", "0011"], [True, False, False]),
        (UNEVEN, ["010", "001", "101"], [True, True, False]),
    ],
)  # fmt: skip
def test_rows_without_a_legal_action_are_found_but_not_where_an_episode_ends(
    numbers, action, masks, expected
):
    masks = numbers.array([[int(x) for x in row] for row in masks], np.int8)
    mask = specs.BoundedArray(masks.shape[1:], np.int8, 0, 1)
    find = without_choice(EnvSpec({"action_mask": mask}, action))
    step = TimeStep(numbers.array([FIRST, MID, LAST]), None, None, {"action_mask": masks})
    np.testing.assert_array_equal(find(step), expected)
    named = without_choice(EnvSpec({"action_mask": {"a": mask}}, {"a": action}))
    step = step._replace(observation={"action_mask": {"a": masks}})
    np.testing.assert_array_equal(named(step), expected)


def test_masks_may_have_an_axis_of_choices():
    mask = specs.BoundedArray((2, 3), np.int8, 0, 1)
    spec = EnvSpec({"action_mask": mask}, specs.BoundedArray((2,), np.int32, 0, 2))
    masks = np.array([[[1, 0, 0], [0, 0, 1]], [[1, 1, 1], [0, 0, 0]]], np.int8)
    step = TimeStep(np.array([FIRST, MID]), None, None, {"action_mask": masks})
    np.testing.assert_array_equal(without_choice(spec)(step), [False, True])


def test_there_is_nothing_to_find_without_a_mask_of_the_action():
    mask, action = specs.BoundedArray((3,), np.int8, 0, 1), specs.DiscreteArray(3)
    for spec in (
        EnvSpec(mask, action),
        EnvSpec({"seen": mask}, action),
        EnvSpec({"action_mask": mask}, specs.DiscreteArray(4)),
        EnvSpec({"action_mask": mask}, specs.Array((3,), np.float32)),
        EnvSpec({"action_mask": mask}, {"a": action}),
    ):
        assert without_choice(spec) is None


class Blank(gymnasium.Env):
    """An episode has 5 actions; the masks of times 0 and 3, and of its end, are zeros."""

    def __init__(self):
        self.observation_space = spaces.Dict({"action_mask": spaces.Box(0, 1, (2,), np.int8)})
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._seen(), {}

    def step(self, action):
        self._time += 1
        return self._seen(), 0.0, self._time == 5, False, {}

    def _seen(self):
        return {"action_mask": np.full(2, self._time not in (0, 3, 5), np.int8)}


def stepped(builder, kind, steps):
    """Steps two environments, and returns what their pool counts."""
    actions = np.zeros(2, int)
    if kind == "async":
        with AsyncEnv(builder, 2, 2, "thread") as pool:
            pool.async_reset()
            for _ in range(steps):
                pool.send(pool.recv()[0], actions)
            pool.recv()
            return pool.stats()
    with SyncEnv(builder, 2, kind) as pool:
        pool.reset()
        for _ in range(steps):
            pool.step(actions)
        return pool.stats()


@pytest.mark.parametrize("kind", ["for_loop", "thread", "async"])
def test_pools_count_them_and_warn_once(kind, caplog):
    class Mine(Blank):
        pass

    Mine.__name__ = f"Blank_{kind}"  # each kind of environment is warned of once in a process
    with caplog.at_level(logging.WARNING):
        for _ in range(2):  # the last step is that of time 1 in the second episode
            assert stepped(Mine, kind, 7)["masks_without_choice"] == 2 * 3
    said = [record.getMessage() for record in caplog.records]
    (said,) = [text for text in said if "marks no action" in text]
    assert said.startswith(f"Env 0 (Blank_{kind}), step 0: the action mask marks no action")


def test_pools_without_masks_have_no_such_counter():
    with SyncEnv("CartPole-v1", 1, "for_loop") as pool:
        pool.reset()
        assert "masks_without_choice" not in pool.stats()


class BlankMasks(MaskedDict):
    """The mask is zeros at times 0, 3 and 8, the end."""

    def _show(self, state):
        shown = super()._show(state)
        blank = (state.time == 0) | (state.time == 3) | (state.time == 8)
        return {**shown, "action_mask": jnp.where(blank, 0, shown["action_mask"]).astype(jnp.int8)}


def test_acting_in_a_compiled_loop_counts_them():
    env = BatchedEnv(BlankMasks())
    arguments = env.spec.observation, env.spec.action, lambda *_: None, Greedy
    actors = Actors(Random(RandomConfig(), *arguments), env, 2)

    @jax.jit
    def tally_of(steps):
        def step(_, carry):
            return actors.step((), jnp.int32(0), *carry)[:2]

        acting = actors.start(env.keys([0, 1]), jax.random.PRNGKey(0))
        return jax.lax.fori_loop(0, steps, step, (acting, actors.tally()))[1]

    tally = tally_of(11)  # an episode of 8 actions, LAST, and the first two of the next one
    np.testing.assert_array_equal(tally.no_choice, [3, 3])
    np.testing.assert_array_equal(actors.total(tally).no_choice, [3, 3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology", [pytest.param("fused", marks=pytest.mark.chosen), "single_process"]
)
def test_runs_log_their_number_and_warn_once(topology, tmp_path, caplog):
    env = EnvConfig("tests.specs.test_masks:BlankMasks", 4, "jax")
    experiment = ppo(topology, env=env, updates=3, frames=10**6)
    with caplog.at_level(logging.WARNING):
        run(experiment, tmp_path / "run")
    logged = series(tmp_path / "run", "env/masks_without_choice")
    # 4 environments make 3 x 16 steps: 5 episodes of 9 steps and 3 of the next one. A pool has
    # seen the steps after the last one that was acted on, at time 3 of the sixth episode.
    seen = 4 * (5 * 2 + 1) + (4 if topology == "single_process" else 0)
    assert logged[-1] == seen
    said = [r.getMessage() for r in caplog.records if "BlankMasks" in r.message]
    assert len(said) == 1 and said[0].startswith("Env 0 (tests.specs.test_masks:BlankMasks), ")
