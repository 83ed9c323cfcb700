"""The compiled replay holds and releases the items that `InProcessReplay` does."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.fused.packed import PackedSteps
from rlstack.fused.ring import Ring
from rlstack.fused.sum_tree import SumTree, scaled
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.prioritized import importance_weights
from rlstack.types import StepType, TimeStep, Transition

NUM_ENVS = 3
WIDTH = 40  # more words than a packed part has


def step_of(number, step_type):
    """A step whose reward says which one it is."""
    reward = 10.0 * number + np.arange(NUM_ENVS)
    timestep = TimeStep(
        np.asarray(step_type, np.int32),
        reward.astype(np.float32),
        np.ones(NUM_ENVS, np.float32),
        np.zeros((NUM_ENVS, 1), np.float32),
    )
    state = {
        "memory": np.repeat(reward[:, None], WIDTH, 1).astype(np.float32),
        "small": (reward[:, None] + [0.25, 0.5]).astype(np.float32),
        "counts": np.full(NUM_ENVS, number, np.int32),
    }
    return Transition(timestep, (), state, np.zeros(NUM_ENVS, np.int32))


class _Agent:
    def read_once(self, state):
        return {"memory": True, "small": True, "counts": False}


class _Actors:
    num_envs = NUM_ENVS
    agent = _Agent()

    def tally(self):
        return None

    def step(self, *_):
        return None, None, jax.tree.map(jnp.asarray, step_of(0, [0, 0, 0]))


class _Learning:
    params = version = None


def make(cfg):
    ring = Ring(cfg, _Actors(), None, 1)
    _, state = ring.start(_Learning, None, jax.random.PRNGKey(0))
    return ring, state


def held(state, cfg, items):
    """The first steps and environments of the items in a compiled replay."""
    newest = (int(state.steps_added) - 1 - cfg.unroll_length) // cfg.step_period
    cells, envs = np.nonzero(np.asarray(state.valid))
    return {
        ((newest - (newest - cell) % items) * cfg.step_period, env)
        for cell, env in zip(cells.tolist(), envs.tolist(), strict=True)
    }


CONFIGS = {
    "transitions": ReplayConfig(
        sampler="uniform",
        batch_size=4,
        unroll_length=2,
        starts="not_last",
        max_size=20,
        min_size=5,
        samples_per_insert=1.5,
    ),
    "sequences": ReplayConfig(
        sampler="prioritized",
        batch_size=4,
        unroll_length=6,
        period=2,
        context=1,
        max_size=18,
        min_size=4,
        samples_per_insert=2.0,
        samples_per_insert_tolerance=6.0,
        importance_anneal_samples=20,
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_it_holds_and_releases_the_same_items(name):
    cfg = CONFIGS[name]
    rng = np.random.default_rng(3)
    other = InProcessReplay(cfg, NUM_ENVS, seed=0)
    ring, state = make(cfg)
    add, draw, gather = (jax.jit(f) for f in (ring.add, ring.draw, ring.gather))
    step_type = np.zeros(NUM_ENVS, np.int32)
    drawn = set()
    for number in range(60):
        step = step_of(number, step_type)
        other.add(None, step)
        state = add(state, step)
        ends = rng.random(NUM_ENVS) < 0.3
        step_type = np.where(step_type == StepType.LAST, 0, np.where(ends, 2, 1)).astype(np.int32)
        keys = other._table.sampler.key_at
        keys = keys[keys >= 0]
        wanted = {(k // NUM_ENVS * cfg.step_period, k % NUM_ENVS) for k in keys.tolist()}
        assert held(state, cfg, ring._items) == wanted
        assert int(state.held) == len(wanted)
        assert int(state.inserts) == int(other.stats()["inserts"])
        while other.can_sample():
            assert bool(ring.can_sample(state))
            other.sample()
            state, cells, _ = draw(state)
            items = gather(state, cells)
            reward = np.asarray(items.timestep.reward)  # [T+1, B]
            of_agent = jax.tree.map(np.asarray, items.agent_state)
            assert of_agent["memory"].shape == (1, 4, WIDTH)
            assert (of_agent["memory"][0] == reward[0][:, None]).all()
            np.testing.assert_array_equal(
                of_agent["small"][0] - reward[0][:, None], [[0.25, 0.5]] * 4
            )
            np.testing.assert_array_equal(of_agent["counts"], reward // 10)
            assert reward.shape == (cfg.unroll_length + 1, 4)
            assert (np.diff(reward, axis=0) == 10).all()
            starts = {(int(r // 10), int(r % 10)) for r in reward[0]}
            assert starts <= wanted
            drawn |= starts
        assert not bool(ring.can_sample(state))
    assert len(drawn) > 30
    assert int(state.drawn) == int(other.stats()["samples"]) > 60


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("count", [9, 41])
def test_a_replay_of_an_earlier_version_goes_on(name, count):
    cfg = CONFIGS[name]
    ring, whole = make(cfg)
    rows = ring._rows
    older = PackedSteps.zeros(rows, jax.eval_shape(lambda: step_of(0, [1] * NUM_ENVS)))
    add, gather = jax.jit(ring.add), jax.jit(ring.gather)
    for number in range(count):  # earlier versions stored the state at every step
        step = step_of(number, [1] * NUM_ENVS)
        whole = add(whole, step)
        older = older.with_row(number % rows, step)
    leaves = [*jax.tree.leaves(older), *jax.tree.leaves(whole._replace(steps=(), first_states=()))]
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step_of(0, [1] * 3))
    _, fresh = make(cfg)
    form = [(x.shape, x.dtype) for x in ring.older_leaves(fresh, spec)]
    assert form == [(x.shape, x.dtype) for x in leaves]
    read = ring.from_older(fresh, spec, leaves)
    assert jax.tree.structure(read) == jax.tree.structure(whole)
    for number in range(count, count + 12):
        cells = jnp.asarray(np.flatnonzero(np.asarray(whole.valid)))
        assert len(cells) >= NUM_ENVS
        for x, y in zip(*(jax.tree.leaves(gather(s, cells)) for s in (read, whole)), strict=True):
            np.testing.assert_array_equal(x, y)
        step = step_of(number, [1] * NUM_ENVS)
        read, whole = add(read, step), add(whole, step)


def test_uniform_draws_are_uniform():
    cfg = dataclasses.replace(CONFIGS["transitions"], batch_size=10)
    ring, state = make(cfg)
    for number in range(9):
        # The second environment has LAST in every other step, where no item starts.
        last = StepType.LAST if number % 2 else StepType.FIRST
        state = ring.add(state, step_of(number, [StepType.MID, last, StepType.MID]))
    valid = np.asarray(state.valid).ravel()
    draw = jax.jit(ring.draw)
    counts = np.zeros(len(valid))
    for _ in range(300):
        state, cells, _ = draw(state)
        np.add.at(counts, np.asarray(cells), 1)
    assert not counts[~valid].any()
    assert 0 < (~valid[:18]).sum() < 6 < valid.sum()
    wanted = counts.sum() / valid.sum()
    assert abs(counts[valid] - wanted).max() < 5 * np.sqrt(wanted)


def test_priorities_decide_what_is_drawn():
    cfg = CONFIGS["sequences"]
    ring, state = make(cfg)
    for number in range(20):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    cells = jnp.array([1, 4])
    state = ring.update_priorities(state, cells, jnp.array([3.0, 0.0]))
    masses = np.asarray(state.masses[0])
    assert masses[1] == pytest.approx(3.0**0.6)
    assert 0 < masses[4] < 1e-3
    draw = jax.jit(ring.draw)
    counts = np.zeros(len(masses))
    for _ in range(300):
        state, found, weights = draw(state)
        np.add.at(counts, np.asarray(found), 1)
    assert abs(counts / counts.sum() - masses / masses.sum()).max() < 0.03
    # The weights are those of the other buffers, with beta at its end.
    relative = masses[np.asarray(found)] * np.asarray(state.valid).sum() / masses.sum()
    wanted = importance_weights(cfg, relative, drawn=20)
    np.testing.assert_allclose(weights, wanted, rtol=1e-4)
    # New items get the largest priority so far.
    for number in range(20, 23):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    assert float(state.masses[0].max()) == pytest.approx(3.0**0.6)


def test_the_largest_priority_is_remembered_though_later_ones_are_smaller():
    ring, state = make(CONFIGS["sequences"])
    for number in range(20):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    for priorities in ([5.0, 1.0], [2.0, 0.5], [0.1, 3.0]):
        state = ring.update_priorities(state, jnp.array([1, 4]), jnp.array(priorities))
    for number in range(20, 23):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    # 23 steps have the items of 7 steps from steps 0, 2, ..., 16; the newest is number 8.
    newest = 8 % ring._items * NUM_ENVS + np.arange(NUM_ENVS)
    masses = np.asarray(ring._tree.leaves(state.masses, newest))
    np.testing.assert_allclose(masses, [2.626528] * NUM_ENVS, rtol=1e-5)  # 5 to the power of 0.6


def test_no_item_spans_a_break():
    cfg = CONFIGS["transitions"]
    ring, state = make(cfg)
    for number in range(4):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    _, state = ring.restart(None, None, state)
    for number in range(4, 8):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    starts = {start for start, _ in held(state, cfg, ring._items)}
    assert starts == {0, 1, 4, 5}
    assert int(state.held) == 4 * NUM_ENVS


def test_counters_stay_at_the_largest_number():
    cfg = CONFIGS["sequences"]
    ring, state = make(cfg)
    largest = np.iinfo(np.int32).max
    state = state._replace(inserts=jnp.int32(largest - 4), drawn=jnp.int32(largest - 5))
    for number in range(20):
        state = ring.add(state, step_of(number, [1] * NUM_ENVS))
    for _ in range(3):
        state, _, weights = ring.draw(state)
        assert np.isfinite(weights).all() and weights.min() > 0.01
    assert state.inserts == state.drawn == largest
    assert ring.can_sample(state._replace(credit=jnp.int32(100)))


def test_rates_that_cannot_be_counted_are_refused():
    for rate, size, text in (
        (None, 5, "must be given"),
        (1e6 + 0.123, 10**4, "rounder numbers"),
        (4e-4, 5, "a larger --replay.samples-per-insert"),
        (6e-4, 5, "within 1 % of a fraction"),
    ):
        cfg = ReplayConfig(
            sampler="uniform",
            batch_size=4,
            unroll_length=1,
            max_size=20_000,
            min_size=size,
            samples_per_insert=rate,
        )
        with pytest.raises(ValueError, match=text):
            Ring(cfg, _Actors(), None, 1)


def levels_of(masses):
    """A tree and its levels with these masses."""
    tree = SumTree(len(masses))
    levels = [np.zeros(len(level)) for level in jax.eval_shape(tree.empty)]
    levels[0][: len(masses)] = masses
    for below, level in itertools.pairwise(levels):
        level[: len(below) // 16] = below.reshape(-1, 16).sum(1)
    return tree, tuple(jnp.asarray(level, jnp.float32) for level in levels)


def probabilities(tree, levels, leaves):
    """The probability of each of these leaves: the share of the 2^32 bit patterns of each level."""
    find, depth = jax.jit(tree.find), len(levels)
    bits, found = np.zeros((depth, len(leaves)), np.uint32), np.ones(len(leaves))
    for level in range(depth):
        below = 16 ** (depth - 1 - level)
        ends = []
        for first in (leaves // below, leaves // below + 1):
            low, high = np.zeros(len(leaves), np.int64), np.full(len(leaves), 2**32)
            while (low < high).any():  # the first pattern that gives this node or a later one
                bits[level] = middle = np.minimum((low + high) // 2, 2**32 - 1)
                reached = np.asarray(find(levels, jnp.asarray(bits))) // below >= first
                low, high = (
                    np.where(reached | (low == high), low, middle + 1),
                    np.where(reached, np.minimum(middle, high), high),
                )
            ends.append(low)
        found *= (ends[1] - ends[0]) / 2**32
        bits[level] = ends[0]
    return found


@pytest.mark.parametrize("spread", [0.0, 2.0, 3.0])
@pytest.mark.parametrize(
    "size", [1000, 10**6, pytest.param(10**7, marks=[pytest.mark.slow, pytest.mark.chosen])]
)
def test_leaves_are_drawn_in_proportion_to_their_mass_up_to_ten_millions(size, spread):
    rng = np.random.default_rng(0)
    masses = np.exp(0.6 * spread * rng.normal(size=size)).astype(np.float32)
    tree, levels = levels_of(masses)
    leaves = rng.integers(0, size, 200)
    leaves[:2] = 0, size - 1
    expected = masses.astype(np.float64)[leaves] / masses.sum(dtype=np.float64)
    np.testing.assert_allclose(probabilities(tree, levels, leaves), expected, rtol=1e-3)


def test_leaves_without_mass_are_never_drawn():
    masses = np.zeros(40_000, np.float32)
    masses[[3, 39_999]] = 1e-9, 3e-9
    tree, levels = levels_of(masses)
    drawn = np.asarray(jax.jit(tree.draw, static_argnums=2)(levels, jax.random.PRNGKey(0), 4000))
    assert set(drawn.tolist()) == {3, 39_999}
    assert abs((drawn == 3).mean() - 0.25) < 0.03


def test_products_of_bits_are_those_of_whole_numbers():
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 1000), dtype=np.uint64).astype(np.uint32)
    words[:, :4] = [[0, 2**32 - 1, 2**32 - 1, 1], [2**32 - 1, 0, 2**32 - 1, 2**32 - 1]]
    for end in (1, 7, 10**7, 2**31 + 3, 2**32 - 1):
        expected = [(int(x) * end) >> 32 for x in words[0]]
        assert np.asarray(scaled(words[0], jnp.uint32(end))).tolist() == expected
        expected = [(((int(x) << 32) + int(y)) * end) >> 64 for x, y in words.T]
        assert np.asarray(scaled(words[0], jnp.uint32(end), words[1])).tolist() == expected
