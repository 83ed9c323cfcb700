"""Policies explore at the stated rate, among legal actions, and each row by its own counts."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack import distributions as dist
from rlstack import exploration as ex
from rlstack.types import StepType, TimeStep

KEY = jax.random.PRNGKey(0)
MANY = 20_000


def counts(env_steps, episodes=None):
    env_steps = jnp.asarray(env_steps, jnp.int32)
    episodes = jnp.zeros_like(env_steps) if episodes is None else jnp.asarray(episodes, jnp.int32)
    return ex.Counts(env_steps, episodes, jnp.arange(env_steps.shape[0], dtype=jnp.int32))


def repeated(distribution, rows=MANY):
    """The distribution [...] as [rows, ...]."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *jnp.shape(x))), distribution)


def discrete(rows=MANY):
    """Logits of 4 actions of which the second is illegal, although it has the largest logit."""
    return repeated(dist.categorical([1.0, 9.0, 0.0, -1.0], [True, False, True, True]), rows)


POLICIES = {
    "sample": (ex.Sample(), discrete),
    "greedy": (ex.Greedy(), discrete),
    "epsilon_greedy": (ex.EpsilonGreedy(ex.Linear(1.0, 0.1, 100)), discrete),
    "ladder": (ex.EpsilonGreedy(ex.EpsilonLadder(8)), discrete),
    "softmax": (ex.Softmax(ex.Exponential(2.0, 0.1, 50)), discrete),
    "gaussian": (
        ex.GaussianNoise(ex.MultiPhaseLinear(((0, 0.5), (9, 0.1))), minimum=-1.0, maximum=1.0),
        lambda rows=MANY: repeated(dist.Deterministic(jnp.array([0.9, 0.0])), rows),
    ),
    "uniform": (
        ex.UniformNoise(0.3, relative=True),
        lambda rows=MANY: repeated(dist.Normal(jnp.array([0.9, 2.0]), jnp.zeros(2)), rows),
    ),
}
every_policy = pytest.mark.parametrize("name", POLICIES)


@pytest.mark.slow
@pytest.mark.chosen
@every_policy
def test_policies_pickle_hash_and_jit(name):
    policy, make = POLICIES[name]
    again = pickle.loads(pickle.dumps(policy))
    assert again == policy and hash(again) == hash(policy)
    args = KEY, make(rows=8), counts(np.arange(8) * 10)
    plain, jitted = policy(*args), jax.jit(again)(*args)
    np.testing.assert_allclose(plain, jitted, rtol=1e-6)
    assert plain.shape[0] == 8
    assert plain.dtype == (np.float32 if name in ("gaussian", "uniform") else np.int32)


@every_policy
def test_a_row_depends_on_its_own_row_alone(name):
    policy, make = POLICIES[name]
    distribution, progress = make(rows=8), counts(np.arange(8) * 10)
    before = policy(KEY, distribution, progress)

    def change(x):
        return x.at[3:].add(1) if jnp.issubdtype(x.dtype, jnp.integer) else x.at[3:].multiply(-1.0)

    others = jax.tree.map(lambda x: change(jnp.asarray(x)), (distribution, progress))
    after = policy(KEY, *others)
    np.testing.assert_array_equal(before[:3], after[:3])


def frequencies(actions, n=4):
    return np.bincount(np.asarray(actions), minlength=n) / len(actions)


def test_greedy_and_sample():
    progress = counts(np.zeros(MANY))
    np.testing.assert_array_equal(ex.Greedy()(KEY, discrete(), progress), 0)
    want = np.asarray(discrete(1).probs()[0])
    got = frequencies(ex.Sample()(KEY, discrete(), progress))
    np.testing.assert_allclose(got, want, atol=0.015)


def test_epsilon_greedy_is_uniform_over_legal_actions_with_probability_epsilon():
    progress = counts(np.zeros(MANY))
    got = frequencies(ex.EpsilonGreedy(0.3)(KEY, discrete(), progress))
    np.testing.assert_allclose(got, [0.8, 0.0, 0.1, 0.1], atol=0.015)
    assert got[1] == 0.0
    np.testing.assert_array_equal(ex.EpsilonGreedy(0.0)(KEY, discrete(), progress), 0)
    got = frequencies(ex.EpsilonGreedy(1.0)(KEY, discrete(), progress))
    np.testing.assert_allclose(got, [1 / 3, 0.0, 1 / 3, 1 / 3], atol=0.015)


def test_epsilon_greedy_follows_each_rows_counts():
    progress = counts(np.repeat([0, 100], MANY // 2))
    policy = ex.EpsilonGreedy(ex.Linear(1.0, 0.0, 100))
    action = policy(KEY, discrete(), progress)
    assert np.mean(action[: MANY // 2] == 0) < 0.4
    np.testing.assert_array_equal(action[MANY // 2 :], 0)


def test_epsilon_greedy_tosses_one_coin_for_all_choices_of_a_row():
    multi = dist.multi_categorical(
        np.array([5.0, 0.0, 9.0, 0.0, 3.0, 3.1]), [3, 3], np.array([1, 0]), [1, 1, 0, 1, 1, 1]
    )
    joint = dist.Joint({"a": repeated(multi), "b": discrete()})
    action = ex.EpsilonGreedy(0.5)(KEY, joint, counts(np.zeros(MANY)))
    first, second, third = action["a"][:, 0], action["a"][:, 1], action["b"]
    assert set(np.unique(first)) == {1, 2} and set(np.unique(second)) == {0, 1, 2}
    assert set(np.unique(third)) == {0, 2, 3}
    # first and third differ from their modes together: 1/2 * 1/2 * 2/3, not 1/4 * 1/3
    both = np.mean((first != 1) & (third != 0))
    np.testing.assert_allclose(both, 0.5 * 0.5 * 2 / 3, atol=0.015)
    np.testing.assert_allclose(np.mean(second != 2), 0.5 * 2 / 3, atol=0.015)


def test_softmax():
    progress = counts(np.zeros(MANY))
    p = np.exp(np.array([1.0, -np.inf, 0.0, -1.0]) / 2.0)
    got = frequencies(ex.Softmax(2.0)(KEY, discrete(), progress))
    np.testing.assert_allclose(got, p / p.sum(), atol=0.015)
    np.testing.assert_array_equal(ex.Softmax(1e-9)(KEY, discrete(), progress), 0)
    far_down = repeated(dist.categorical([-1e4, 0.0, -2e4], [True, False, True]), 100)
    np.testing.assert_array_equal(ex.Softmax(1e-6)(KEY, far_down, counts(np.zeros(100))), 0)


def test_noise_has_the_scale_it_says():
    progress = counts(np.zeros(MANY))
    mode = repeated(dist.Deterministic(jnp.array([0.5, -2.0])))
    noise = np.asarray(ex.GaussianNoise(0.1)(KEY, mode, progress) - mode.value)
    np.testing.assert_allclose(noise.std(0), [0.1, 0.1], rtol=0.03)
    np.testing.assert_allclose(noise.mean(0), [0.0, 0.0], atol=0.005)
    noise = np.asarray(ex.GaussianNoise(0.1, relative=True)(KEY, mode, progress) - mode.value)
    np.testing.assert_allclose(noise.std(0), [0.05, 0.2], rtol=0.03)
    noise = np.asarray(ex.UniformNoise(0.1)(KEY, mode, progress) - mode.value)
    assert np.all(np.abs(noise) <= 0.1 + 1e-6) and np.all(np.abs(noise).max(0) > 0.099)
    np.testing.assert_allclose(noise.std(0), 0.1 / np.sqrt(3), rtol=0.03)


@pytest.mark.parametrize("kind", [ex.GaussianNoise, ex.UniformNoise])
def test_noise_respects_bounds_from_itself_the_spec_or_the_distribution(kind):
    progress = counts(np.zeros(100))
    low, high = np.array([-0.2, 0.4]), np.array([0.1, 3.0])
    mode = repeated(dist.Deterministic(jnp.array([0.0, 0.5])), 100)
    spec = specs.BoundedArray((2,), np.float32, low, high)
    given = kind(5.0, minimum=tuple(low), maximum=tuple(high))
    for policy in (given, kind(5.0).bounded_by(spec)):
        assert pickle.loads(pickle.dumps(policy)) == policy
        action = np.asarray(policy(KEY, mode, progress))
        np.testing.assert_allclose(action.min(0), low, rtol=1e-6)
        np.testing.assert_allclose(action.max(0), high, rtol=1e-6)
    squashed = repeated(dist.TanhNormal(*(jnp.asarray(x) for x in (low, high, low, high))), 100)
    action = np.asarray(kind(5.0)(KEY, squashed, progress))
    np.testing.assert_allclose([action.min(0), action.max(0)], [low, high], rtol=1e-6)
    free = kind(5.0).bounded_by(specs.Array((2,), np.float32))
    assert np.ptp(free(KEY, mode, progress)) > 4
    joint = dist.Joint((mode, mode))
    one, two = given(KEY, joint, progress)
    assert np.any(one != two) and one.shape == (100, 2)


def test_policies_name_what_they_cannot_do():
    real = repeated(dist.Normal(jnp.zeros(2), jnp.zeros(2)), 3)
    progress = counts(np.zeros(3))
    with pytest.raises(TypeError, match="EpsilonGreedy: the action must be discrete; got Normal"):
        ex.EpsilonGreedy(0.1)(KEY, real, progress)
    with pytest.raises(TypeError, match="Softmax: the action must be discrete; got Normal"):
        ex.Softmax()(KEY, dist.Joint((real,)), progress)
    with pytest.raises(
        TypeError, match="GaussianNoise: the action must be continuous; got Categorical"
    ):
        ex.GaussianNoise(0.1)(KEY, discrete(3), progress)
    with pytest.raises(ValueError, match="the spec must be that of one array; got dict"):
        ex.UniformNoise(0.1).bounded_by({})
    with pytest.raises(ValueError, match="the counts must have env_ids; got None"):
        ex.EpsilonLadder(3)(progress._replace(env_ids=None))
    with pytest.raises(ValueError, match="DrawnByEpisode: the counts must have env_ids; got None"):
        ex.DrawnByEpisode(0.0, 1.0)(progress._replace(env_ids=None))


def test_schedules_by_hand():
    steps = counts([0, 10, 15, 20, 10_000])
    np.testing.assert_allclose(ex.Constant(0.3)(steps), 0.3)
    linear = ex.Linear(1.0, 0.0, 10, begin=10)
    np.testing.assert_allclose(linear(steps), [1, 1, 0.5, 0, 0])
    points = ex.MultiPhaseLinear(((10, 1.0), (20, 0.5), (40, 0.0)))
    np.testing.assert_allclose(points(counts([0, 10, 15, 20, 30, 99])), [1, 1, 0.75, 0.5, 0.25, 0])
    halves = ex.Exponential(1.0, 0.2, 10)
    np.testing.assert_allclose(halves(counts([0, 10, 20])), [1.0, 0.6, 0.4], rtol=1e-6)
    others = ex.Constant(0.3), ex.EpsilonLadder(5), ex.DrawnByEpisode(0.0, 1.0)
    for schedule in (*others, linear, points, halves):
        assert pickle.loads(pickle.dumps(schedule)) == schedule
        got = jax.jit(schedule)(steps)
        assert got.shape == (5,) and got.dtype == np.float32
        np.testing.assert_allclose(got, schedule(steps), rtol=1e-6)


def test_schedules_count_episodes_or_the_steps_of_all_environments():
    progress = counts([0, 3], episodes=[5, 10])
    np.testing.assert_allclose(ex.Linear(0.0, 1.0, 10, over="episodes")(progress), [0.5, 1.0])
    np.testing.assert_allclose(ex.Linear(0.0, 1.0, 12, num_envs=2)(progress), [0.0, 0.5])
    # int32 would overflow here
    far = ex.Linear(0.0, 1.0, 4 * 10**9, num_envs=2)(counts([10**9]))
    np.testing.assert_allclose(far, 0.5, rtol=1e-6)


def test_epsilon_ladder():
    # Ape-X: 0.4 ** (1 + 7 i / (n - 1))
    np.testing.assert_allclose(
        ex.epsilon_ladder(np.arange(3), 3), [0.4, 0.4**4.5, 0.4**8], rtol=1e-5
    )
    np.testing.assert_allclose(ex.epsilon_ladder(0, 1), 0.4, rtol=1e-6)
    got = ex.EpsilonLadder(3)(counts(np.zeros(6)))
    np.testing.assert_allclose(got, np.tile(ex.epsilon_ladder(np.arange(3), 3), 2), rtol=1e-6)


def test_values_drawn_by_episode_are_uniform_and_functions_of_environment_and_episode():
    schedule = ex.DrawnByEpisode(2.0, 6.0)
    grid = [
        np.asarray(schedule(counts(np.full(500, step), episodes=np.full(500, episode))))
        for step, episode in ((0, 0), (70, 0), (99, 1))
    ]
    np.testing.assert_array_equal(grid[0], grid[1])  # the same within an episode
    assert abs(np.corrcoef(grid[0], grid[2])[0, 1]) < 0.2
    for drawn in grid:
        assert drawn.min() >= 2 and drawn.max() < 6
        np.testing.assert_allclose(drawn.mean(), 4.0, atol=0.2)
        np.testing.assert_allclose(drawn.var(), 16 / 12, atol=0.15)
    np.testing.assert_array_equal(ex.DrawnByEpisode(0.3, 0.3)(counts([5, 6])), np.float32(0.3))


def test_counts_are_found_and_numbered_anywhere_in_a_state():
    state = {"core": np.ones(3), "inside": (ex.initial_counts(3), None)}
    found = ex.with_env_ids(state, np.array([7, 2, 9]))
    assert found["inside"][0].env_ids.tolist() == [7, 2, 9]
    assert found["inside"][0].env_ids.dtype == np.int32
    assert found["inside"][0].env_steps.tolist() == [0, 0, 0] and found["core"] is state["core"]
    assert ex.with_env_ids((), np.arange(3)) == ()


def test_counts_of_a_run_are_set_anywhere_in_a_state():
    state = {"core": np.ones(3), "inside": (ex.initial_counts(3), None)}
    found = ex.with_run_counts(state, ex.RunCounts(7, 2))["inside"][0]
    assert found.env_steps.tolist() == [7] * 3 and found.episodes.tolist() == [2] * 3
    assert found.env_ids.tolist() == [0, 1, 2] and all(x.dtype == np.int32 for x in found)
    kept = ex.with_run_counts(found, ex.RunCounts(9, None))  # the episodes are not known
    assert kept.env_steps.tolist() == [9] * 3 and kept.episodes.tolist() == [2] * 3
    assert ex.with_run_counts((), ex.RunCounts(7, 2)) == ()


@pytest.mark.parametrize("over", ["env_steps", "episodes"])
def test_after_the_end_of_training_a_schedule_stays_where_it_was(over):
    values = np.tile([0.0, 1.0], (2000, 1))
    half = ex.EpsilonGreedy(ex.Linear(1.0, 0.0, 100, over=over, num_envs=10))
    frozen = ex.After(half, ex.RunCounts(5, 5))  # epsilon is 1/2
    for made in (0, 50):  # what its environments have made since does not matter
        drawn = frozen(
            KEY, dist.Categorical(values), counts(np.full(2000, made), np.full(2000, made))
        )
        assert 0.20 < np.mean(drawn == 0) < 0.30
    assert ex.explores(frozen)


def test_greedy_takes_some_random_actions_with_an_epsilon():
    values = np.tile([0.0, 2.0, 1.0, dist.ILLEGAL], (4000, 1))
    best = ex.Greedy()(KEY, dist.Categorical(values), counts(np.zeros(4000)))
    assert (best == 1).all()
    judged = ex.Greedy(0.3)
    drawn = judged(KEY, dist.Categorical(values), counts(np.zeros(4000)))
    shares = [np.mean(drawn == i) for i in range(4)]
    np.testing.assert_allclose(shares, [0.1, 0.8, 0.1, 0.0], atol=0.02)
    # A noisy network then acts with its mean weights, as without an epsilon.
    assert not ex.explores(judged)


def test_counts_follow_the_episodes():
    progress = ex.initial_counts(2)
    kinds = [[StepType.FIRST, StepType.FIRST], [StepType.MID, StepType.LAST], [1, 0], [2, 1]]
    for kind in kinds:
        timestep = TimeStep(np.array(kind, np.int32), np.zeros(2), np.ones(2), ())
        progress = jax.jit(ex.next_counts)(progress, timestep)
    np.testing.assert_array_equal(progress.env_steps, [3, 3])
    np.testing.assert_array_equal(progress.episodes, [1, 1])
    np.testing.assert_array_equal(progress.env_ids, [0, 1])
    assert all(x.dtype == np.int32 for x in progress)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: ex.MultiPhaseLinear(((0, 1.0), (5, 0.5), (5, 0.1))), "without duplicates"),
        (lambda: ex.MultiPhaseLinear(((5, 1.0), (0, 0.5))), "steps that increase"),
        (lambda: ex.MultiPhaseLinear(()), "points must be one or more"),
        (lambda: ex.Linear(1.0, 0.0, 0), "steps must be positive; got 0"),
        (lambda: ex.Linear(1.0, 0.0, 1, begin=-1), "begin must be at least 0; got -1"),
        (lambda: ex.Linear(1.0, 0.0, 1, over="frames"), "over must be one of env_steps, episodes"),
        (lambda: ex.Linear(1.0, 0.0, 1, num_envs=0), "num_envs must be positive"),
        (lambda: ex.Exponential(1.0, 0.0, 0), "half_life must be positive"),
        (lambda: ex.EpsilonLadder(0), "num_envs must be positive"),
        (lambda: ex.DrawnByEpisode(1.0, 0.5), "minimum must be at most maximum"),
        (lambda: ex.EpsilonLadder(2, base=0.0), "base must be in"),
        (lambda: ex.EpsilonLadder(2, alpha=-1.0), "alpha must be at least 0"),
        (lambda: ex.EpsilonGreedy(1.5), "epsilon must be in"),
        (lambda: ex.Softmax(0.0), "temperature must be positive"),
        (lambda: ex.GaussianNoise(-0.1), "GaussianNoise: scale must be at least 0"),
        (lambda: ex.UniformNoise(-0.1), "UniformNoise: scale must be at least 0"),
    ],
)
def test_ranges_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
