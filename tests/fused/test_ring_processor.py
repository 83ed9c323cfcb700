"""Item processors in the compiled replay see and do what they do on hosts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.fused.ring import Ring
from rlstack.replay import ReplayConfig
from rlstack.types import TimeStep, Transition
from tests.replay.test_episodes import Probe, seen
from tests.replay.test_hindsight import FIRST, LAST, MID, arrived, reward

NUM_ENVS = 3
CONFIG = ReplayConfig(
    sampler="uniform",
    batch_size=16,
    unroll_length=5,
    period=2,
    max_size=36,
    samples_per_insert=16.0,
    item_processor=Probe,
)


def coded(number, step_type):
    """A step of each environment that says which one it is."""
    code = jnp.arange(NUM_ENVS) * 100_000 + number
    ones = jnp.ones(NUM_ENVS, jnp.float32)
    observation = {"code": code.astype(jnp.int32)}
    timestep = TimeStep(jnp.asarray(step_type, jnp.int32), ones, ones, observation)
    return Transition(timestep, (), (), jnp.zeros(NUM_ENVS, jnp.int32))


class _Agent:
    def read_once(self, state):
        return state  # which is empty


class _Actors:
    num_envs = NUM_ENVS
    agent = _Agent()

    def tally(self):
        return None


def make(cfg, step):
    ring = Ring(cfg, _Actors(), None, 1)
    return ring, ring.empty(step, jax.random.PRNGKey(0))


class Drawn:
    """A batch, for `seen`."""

    def __init__(self, trajectory):
        self.batch = self
        self.trajectory = jax.tree.map(np.asarray, trajectory)


def held(types, breaks, now, rows, env, start):
    """The first and last step that are held of the episode of a step, one by one."""
    first = last = start
    while first > max(0, now + 1 - rows) and types[first][env] != FIRST and first not in breaks:
        first -= 1
    while last < now and types[last + 1][env] != FIRST and last + 1 not in breaks:
        last += 1
    return first, last


def test_any_history_shows_the_steps_of_the_episode_that_are_held():
    ring, state = make(CONFIG, coded(0, [FIRST] * NUM_ENVS))
    add, draw, items = jax.jit(ring.add), jax.jit(ring.draw), jax.jit(ring.items)
    rng, rows = np.random.default_rng(0), 12 * 2 + 5
    types, breaks, over, checked = [], [], np.ones(NUM_ENVS, bool), 0
    for now in range(120):
        ends = ~over & (rng.random(NUM_ENVS) < 0.12)
        types.append(np.where(over, FIRST, np.where(ends, LAST, MID)))
        over = ends
        # A step that is not good is not added; the next one takes its place.
        state = add(state, coded(999, [FIRST] * NUM_ENVS), jnp.zeros((), bool))
        if now in (50, 51, 80):
            state, breaks = ring.broken(state), [*breaks, now]
        state = add(state, coded(now, types[-1]))
        if now < 10 or not bool(ring.can_sample(state)):
            continue
        state, cells, _ = draw(state)
        for env, start, before, after, *codes in seen(Drawn(items(state, cells))):
            first, last = held(types, breaks, now, rows, env, start)
            assert (start - before, start + after) == (first, last)
            oldest, drawn, newest, clipped = (code - env * 100_000 for code in codes)
            assert (oldest, newest, clipped) == (first, last, last)
            assert first <= drawn <= last
            checked += 1
    assert checked > 500


@pytest.mark.slow
@pytest.mark.chosen
def test_items_of_one_draw_are_the_same_whenever_they_are_made_and_others_in_the_next():
    ring, state = make(CONFIG, coded(0, [FIRST] * NUM_ENVS))
    for now in range(40):
        state = ring.add(state, coded(now, [FIRST if now % 20 == 0 else MID] * NUM_ENVS))
    state, cells, _ = ring.draw(state)
    one, again = ring.items(state, cells), jax.jit(ring.items)(state, cells)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    later, _, _ = ring.draw(state)
    other = ring.items(later, cells).timestep.reward
    assert (np.asarray(one.timestep.reward)[3] != np.asarray(other)[3]).any()


def test_a_replay_without_a_processor_has_no_more_arrays_than_before():
    ring, state = make(dataclasses.replace(CONFIG, item_processor=""), coded(0, [FIRST] * NUM_ENVS))
    state = ring.add(state, coded(0, [FIRST] * NUM_ENVS))
    assert state.begins == ()
    arrays = 9 + len(jax.tree.leaves(state.steps))  # the fields before `begins`
    assert len(jax.tree.leaves(state)) == arrays
    assert ring.items is not None and state.masses == ()


def goal_step(place, goal, kind, paid, discount):
    seen = {name: jnp.float32(place)[:, None] for name in ("observation", "achieved_goal")}
    observation = {**seen, "desired_goal": jnp.float32(goal)[:, None]}
    timestep = TimeStep(jnp.int32(kind), jnp.float32(paid), jnp.float32(discount), observation)
    return Transition(timestep, (), (), jnp.zeros(NUM_ENVS, jnp.int32))


@pytest.mark.parametrize("strategy", ["future", "final", "episode"])
def test_hindsight_is_that_of_numpy(strategy):
    """Given the goals that were drawn, all else follows; they are those of later steps."""
    from tests.replay.test_hindsight import second, walk

    options = {"reward": reward, "terminated": arrived, "strategy": strategy}
    cfg = dataclasses.replace(
        CONFIG,
        period=1,
        unroll_length=2,
        max_size=90,
        starts="not_last",
        item_processor="rlstack.replay.hindsight:Hindsight",
        item_processor_options=options,
    )
    walks = [list(walk(np.random.default_rng(env), 150)) for env in range(NUM_ENVS)]
    ring, state = make(cfg, goal_step(*np.zeros((5, NUM_ENVS))))
    add, draw = jax.jit(ring.add), jax.jit(ring.draw)
    items, gather = jax.jit(ring.items), jax.jit(ring.gather)
    relabelled, count = 0, 0
    for now in range(150):
        state = add(state, goal_step(*np.transpose([one[now] for one in walks])))
        if now < 20 or now % 5:
            continue
        state, cells, _ = draw(state)
        starts, env_ids = (np.asarray(x).tolist() for x in ring._locate(state, cells))
        found = jax.tree.map(np.asarray, items(state, cells))
        wanted = jax.tree.map(np.array, gather(state, cells))
        own = wanted.timestep.observation["desired_goal"][0, :, 0].copy()
        goals = found.timestep.observation["desired_goal"][0, :, 0]
        for b, (env, start) in enumerate(zip(env_ids, starts, strict=True)):
            one, last, first = walks[env], start, start
            while last < now and one[last][2] != LAST:
                last += 1
            while first > max(0, now + 1 - 32) and one[first][2] != FIRST:
                first -= 1
            from_step = {"future": start + 1, "final": last, "episode": first}[strategy]
            assert goals[b] == own[b] or goals[b] in [x[0] for x in one[from_step : last + 1]]

        def choose(b, env, start, goals=goals, own=own):
            return None if goals[b] == own[b] else float(goals[b])

        made = second(wanted, list(zip(env_ids, starts, strict=True)), choose)
        jax.tree.map(np.testing.assert_array_equal, found.timestep, made.timestep)
        relabelled, count = relabelled + (goals != own).sum(), count + len(own)
    assert 0.3 < relabelled / count < 0.8


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("seed", range(2))
def test_shares_and_goals_are_uniform(seed):
    """Items from the first step of one long episode: the goal is any of its later places."""
    cfg = dataclasses.replace(
        CONFIG,
        batch_size=30_000,
        max_size=30_000,
        unroll_length=1,
        period=1,
        samples_per_insert=60_000.0,
        item_processor="rlstack.replay.hindsight:Hindsight",
        item_processor_options={"reward": reward, "share": 0.5},
    )
    ring, state = make(cfg, goal_step(*np.zeros((5, NUM_ENVS))))
    for now in range(6):
        kind = FIRST if now == 0 else MID
        columns = np.transpose([(now, 99, kind, 0, 1)] * NUM_ENVS)
        state = ring.add(state, goal_step(*columns))
    state = state._replace(rng_key=jax.random.PRNGKey(seed))
    cells = jnp.zeros(30_000, jnp.int32)  # the first step of the first environment
    goals = np.asarray(ring.items(state, cells).timestep.observation["desired_goal"])[0, :, 0]
    shares = [(goals == place).mean() for place in range(1, 6)]
    np.testing.assert_allclose(shares, 0.1, atol=0.009)  # 5 standard errors
    assert abs((goals == 99).mean() - 0.5) < 0.015
