"""The Inferencer: its table of agent states, and the params that act at each step."""

import jax
import numpy as np
import pytest

from rlstack.acting.inferencer import Inferencer
from rlstack.configs.acting import InferencerConfig
from rlstack.exploration import RunCounts
from rlstack.types import TimeStep
from tests.agent_cases import FIRST, LAST, MID, CountingAgent, assert_close, case, random_timesteps

KEY = jax.random.PRNGKey(5)


class Source:
    """Returns the params set by the test."""

    def __init__(self, version=0, params=0):
        self.published = (version, params)
        self.asked = []

    def get_params(self, newer_than=-1):
        self.asked.append(newer_than)
        return self.published if self.published[0] > newer_than else None


def steps(step_type):
    step_type = np.array(step_type, np.int32)
    zeros = np.zeros(len(step_type), np.float32)
    return TimeStep(step_type, zeros, zeros + 1, zeros)


def make(num_envs=4, sync_interval=1, source=None):
    source = source or Source()
    return Inferencer(
        InferencerConfig(sync_interval), CountingAgent(), source, num_envs, KEY
    ), source


def act(inferencer, ids, step_type):
    return inferencer.inference(None if ids is None else np.array(ids), steps(step_type))


def test_rows_go_by_id_and_start_afresh_at_first():
    inferencer, _ = make()
    assert act(inferencer, None, [FIRST] * 4).agent_output["action"].tolist() == [1, 1, 1, 1]
    answer = act(inferencer, [2, 0], [MID, MID])
    assert answer.agent_output["action"].tolist() == [2, 2]
    assert answer.agent_state["count"].tolist() == [1, 1]  # the state before the step
    answer = act(inferencer, [3, 2], [MID, FIRST])
    assert answer.agent_output["action"].tolist() == [2, 1]
    assert answer.agent_state["count"].tolist() == [1, 0]  # after the reset
    assert act(inferencer, None, [MID] * 4).agent_state["count"].tolist() == [2, 1, 1, 2]
    # All ids in another order are not treated as "all in order".
    answer = act(inferencer, [3, 1, 0, 2], [MID, FIRST, MID, MID])
    assert answer.agent_output["action"].tolist() == [4, 1, 4, 3]
    assert act(inferencer, [0, 1, 2, 3], [MID] * 4).agent_state["count"].tolist() == [4, 1, 3, 4]


@pytest.mark.parametrize("name", ["ppo-lstm", "dqn"])
def test_parts_of_a_batch_give_what_the_whole_gives(name):
    c = case(name)
    source = Source(params=c.params)
    whole, parts = (Inferencer(InferencerConfig(), c.greedy, source, 4, KEY) for _ in range(2))
    for t, step_type in enumerate([[FIRST] * 4, [MID] * 4, [MID, FIRST, MID, MID]]):
        timestep = random_timesteps(c.setting.obs_spec, step_type, seed=t)
        together = whole.inference(None, timestep)
        for ids in ([3, 1], [0, 2]):
            ids = np.array(ids)
            part = parts.inference(ids, jax.tree.map(lambda x, i=ids: x[i], timestep))
            expected = jax.tree.map(lambda x, i=ids: x[i], together)
            assert_close(part.agent_state, expected.agent_state)
            if name != "dqn":  # DQN's output has only the greedy action
                assert_close(part.agent_output, expected.agent_output)
            np.testing.assert_array_equal(part.agent_output.action, expected.agent_output.action)


@pytest.mark.parametrize(
    "name", ["dqn", pytest.param("ppo-lstm", marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_with_a_key_for_each_actor_each_acts_as_if_alone(name):
    """Batches have all rows of one actor, of some in any order, with padding, and of all."""
    c, keys = case(name), jax.random.split(KEY, 3)
    source = Source(params=c.params)
    shared = Inferencer(InferencerConfig(), c.agent, source, 6, keys)
    own = [
        Inferencer(InferencerConfig(), c.agent, source, 2, key, np.arange(2) + 2 * actor)
        for actor, key in enumerate(keys)
    ]
    for t, actors in enumerate([(0, 1, 2), (2,), (0, 1), (2, 1), (0, 3), (0, 1, 2)]):
        rows = np.array([2 * actor + i for actor in actors for i in (0, 1)])  # actor 3 is padding
        kinds = [FIRST if t == 0 or (t + row) % 4 == 0 else MID for row in rows]
        timestep = random_timesteps(c.setting.obs_spec, kinds, seed=t)
        answer = shared.inference(rows, timestep)
        for place, actor in enumerate(actors):
            if actor < 3:
                part = slice(2 * place, 2 * place + 2)
                its, found = jax.tree.map(lambda x, part=part: x[part], (timestep, answer))
                expected = own[actor].inference(None, its)
                assert_close(found, expected)
                np.testing.assert_array_equal(
                    found.agent_output.action, expected.agent_output.action
                )
    keys = np.stack([inferencer.save()["rng_key"] for inferencer in own])
    np.testing.assert_array_equal(shared.save()["rng_key"], keys)


@pytest.mark.parametrize(
    "rows",
    [None, pytest.param(np.array([2, 0, 4], np.int32), marks=[pytest.mark.slow])],
    ids=["all", "some"],
)
def test_an_accelerator_gets_a_batch_in_one_array_and_images_in_bytes_and_returns_one(rows):
    """A CPU gets the arrays as they are, which is faster there; the answers are the same."""
    c = case("dqn-image")
    plain, packing = (
        Inferencer(InferencerConfig(), c.agent, Source(params=c.params), 4, KEY) for _ in range(2)
    )
    packing._packs = True  # as on an accelerator
    size = 4 if rows is None else len(rows)
    timestep = random_timesteps(c.setting.obs_spec, [FIRST, *[MID] * (size - 1)])
    expected = plain.inference(rows, timestep)
    assert_close(packing.inference(rows, timestep), expected, 0, 0)
    # Of each environment: step type, reward, discount and perhaps its number; and 36 x 36 bytes.
    words = ("uint32", (size * (3 if rows is None else 4),))
    function, (layout, batch) = packing._call(rows, timestep)
    assert [(x.dtype.name, x.shape) for x in batch] == [words, ("uint8", (size, 36, 36, 1))]
    moved, known = jax.device_put(batch), (packing._rng_key, packing._params, packing._table)
    with jax.transfer_guard("disallow"):  # nothing else moves
        *_, answer = function(*known, layout, moved)
    assert [x.dtype.name for x in answer] == ["uint32"]
    types = [x.aval for x in function.trace(*known, layout, batch).jaxpr.jaxpr.invars]
    assert [(x.dtype.name, x.shape) for x in types[-2:]] == [words, ("uint8", (size, 36, 36, 1))]


@pytest.mark.parametrize("rows", [None, np.array([2, 0, 1, 4], np.int32)], ids=["all", "some"])
@pytest.mark.parametrize("name", ["ppo-lstm", "dqn"])
def test_acting_can_be_compiled_before_there_are_params(name, rows, compilations):
    c = case(name)
    num_envs, function = (4, "act") if rows is None else (6, "act_rows")
    early, late = (
        Inferencer(InferencerConfig(), c.greedy, Source(params=c.params), num_envs, KEY)
        for _ in range(2)
    )
    timestep = random_timesteps(c.setting.obs_spec, [FIRST] * 4)
    with compilations() as compiled:
        early.compile(jax.tree.map(np.zeros_like, timestep))
        answer = early.inference(rows, timestep)
    assert compiled.count(f"jit({function})") == 1  # and not again by the first batch
    assert_close(answer, late.inference(rows, timestep), atol=0, rtol=0)


def test_newer_params_are_swapped_in_between_calls_by_interval():
    inferencer, source = make(num_envs=2, sync_interval=3)
    versions, actions = [], []
    for call in range(7):
        source.published = (call, 100 * call)
        answer = act(inferencer, None, [FIRST] * 2)
        versions.append(answer.params_version.tolist())
        actions.append(answer.agent_output["action"][0] - 1)
    assert versions == [[v] * 2 for v in (0, 0, 0, 3, 3, 3, 6)]
    assert actions == [0, 0, 0, 300, 300, 300, 600]
    assert source.asked == [-1, 0, 3]  # it asks only for newer versions


def test_versions_handed_out_are_not_changed_later():
    inferencer, source = make(num_envs=2)
    first = act(inferencer, [1], [FIRST])
    source.published = (7, 0)
    second = act(inferencer, [1], [MID])
    assert first.params_version.tolist() == [0] and second.params_version.tolist() == [7]
    assert second.params_version.dtype == np.int32
    assert all(isinstance(x, np.ndarray) for x in jax.tree.leaves(second))


def test_saved_and_loaded_it_acts_as_if_nothing_happened():
    c = case("ppo-lstm")
    source = Source(params=c.params)
    one, other = (Inferencer(InferencerConfig(), c.agent, source, 4, key) for key in (KEY, c.key))
    timesteps = [random_timesteps(c.setting.obs_spec, [MID] * 4, seed=t) for t in range(4)]
    for timestep in timesteps[:2]:
        one.inference(None, timestep)
    other.load(jax.tree.map(np.asarray, one.save()))
    for timestep in timesteps[2:]:
        assert_close(one.inference(None, timestep), other.inference(None, timestep), 0, 0)


def test_loaded_it_follows_a_learner_that_went_back():
    inferencer, source = make(num_envs=1, sync_interval=2)
    saved = inferencer.save()
    source.published = (9, 900)
    assert act(inferencer, None, [FIRST]).params_version == [9]
    source.published = (4, 400)
    inferencer.load(saved)
    answer = act(inferencer, None, [FIRST])
    assert answer.params_version == [4] and answer.agent_output["action"] == [401]


@pytest.mark.parametrize("name", ["r2d2", "dqn"])
def test_environments_keep_their_number_in_the_whole_experiment(name):
    c, ids = case(name), np.array([4, 5, 12, 13])
    source = Source(params=c.params)
    lone = Inferencer(InferencerConfig(), c.agent, source, 4, KEY)
    inferencer = Inferencer(InferencerConfig(), c.agent, source, 4, KEY, ids)

    def numbers(inferencer, rows, step_type):
        timestep = random_timesteps(c.setting.obs_spec, step_type)
        state = inferencer.inference(rows, timestep).agent_state
        return getattr(state, "counts", state).env_ids.tolist()

    assert numbers(lone, None, [FIRST] * 4) == [0, 1, 2, 3]
    assert numbers(inferencer, None, [FIRST] * 4) == [4, 5, 12, 13]
    assert numbers(inferencer, np.array([2, 1]), [FIRST, MID]) == [12, 5]
    inferencer.reset(np.array([True, False, True, False]))
    assert numbers(inferencer, None, [MID, FIRST, MID, MID]) == [4, 5, 12, 13]
    # In a padded call, ids select rows; they are not environment numbers.
    assert numbers(inferencer, np.array([3, 0, 4, 4]), [MID] * 4)[:2] == [13, 4]


def test_the_key_moves_on_with_every_call():
    c = case("ppo-separate")
    inferencer = Inferencer(InferencerConfig(), c.agent, Source(params=c.params), 4, KEY)
    timestep = random_timesteps(c.setting.obs_spec, [MID] * 4)
    actions = {tuple(inferencer(None, timestep).agent_output.action) for _ in range(8)}
    assert len(actions) > 1


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="sync_interval must be at least 1; got 0"):
        InferencerConfig(0)


@pytest.mark.parametrize("name", ["r2d2", "dqn"])
def test_new_state_begins_with_the_counts_of_the_run_and_rows_that_are_reset_keep_theirs(name):
    c, run = case(name), [RunCounts(25, 3)]
    source = Source(params=c.params)
    inferencer = Inferencer(InferencerConfig(), c.agent, source, 3, KEY, run_counts=lambda: run[-1])

    def counted(step_type):  # before the step
        timestep = random_timesteps(c.setting.obs_spec, step_type)
        state = inferencer.inference(None, timestep).agent_state
        counts = getattr(state, "counts", state)
        return counts.env_steps.tolist(), counts.episodes.tolist(), counts.env_ids.tolist()

    assert counted([FIRST] * 3) == ([25, 25, 25], [3, 3, 3], [0, 1, 2])
    assert counted([MID, LAST, MID]) == ([26, 26, 26], [3, 3, 3], [0, 1, 2])
    inferencer.reset(np.array([False, True, True]))  # an actor that acted until now
    assert counted([MID, FIRST, FIRST]) == ([27, 26, 27], [3, 4, 3], [0, 1, 2])
    run.append(RunCounts(40, None))
    inferencer.reset(np.array([False, True, False]))  # one that was away, while the run went on
    assert counted([MID, FIRST, MID]) == ([28, 40, 28], [3, 4, 3], [0, 1, 2])
    fresh = Inferencer(InferencerConfig(), c.agent, source, 2, KEY, run_counts=run[-1])
    state = fresh.save()["table"]
    assert getattr(state, "counts", state).env_steps.tolist() == [40, 40]
