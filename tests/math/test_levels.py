"""Weights of levels, their scores, and which are kept: with numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.math import levels
from tests.agent_cases import quick_jit

LOWEST = float(np.finfo(np.float32).min)
updated = quick_jit(levels.updated, static_argnames="from_max_return")
by_level = quick_jit(levels.by_level)


def table(level, score, played=None, count=10, **fields):
    made = levels.initial_table(len(level))
    return made._replace(
        level=jnp.array(level, jnp.int32),
        score=jnp.array(score, jnp.float32),
        played=jnp.array(played or [0] * len(level), jnp.int32),
        num_episodes=jnp.int32(count),
        **{name: jnp.array(value) for name, value in fields.items()},
    )


def test_weights_of_ranks():
    """Ranks 3, 1 and 2 have (1/3)^2, 1 and (1/2)^2, of 49/36 together; an empty row has none."""
    found = levels.rank_weights(table([7, 8, 9, -1], [1.0, 3.0, 2.0, LOWEST]), temperature=0.5)
    np.testing.assert_allclose(found, [4 / 49, 36 / 49, 9 / 49, 0], rtol=1e-6)


def test_weights_of_staleness_and_their_mixture():
    """Levels last played 0, 6 and 2 episodes ago."""
    held = table([7, 8, 9, -1], [1.0, 3.0, 2.0, LOWEST], played=[10, 4, 8, 0])
    np.testing.assert_allclose(levels.staleness_weights(held), [0, 0.75, 0.25, 0])
    found = levels.level_weights(held, temperature=0.5, staleness_coeff=0.3)
    by_rank = np.array([4, 36, 9, 0]) / 49
    np.testing.assert_allclose(found, 0.7 * by_rank + [0, 0.225, 0.075, 0], rtol=1e-6)
    fresh = held._replace(played=jnp.full(4, 10))
    np.testing.assert_allclose(levels.staleness_weights(fresh), [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)
    empty = levels.initial_table(2)
    np.testing.assert_array_equal(levels.level_weights(empty, 0.3, 0.5), [0, 0])


# Transitions of levels 5, 3 and 5, and one that is none.
LEVEL = np.array([[5, 3], [5, 3], [5, 9]], np.int32)
PRESENT = np.array([[True, True], [True, True], [True, False]])
AMOUNT = np.array([[1.0, 4.0], [2.0, 6.0], [6.0, 100.0]], np.float32)
ENDED = np.array([[False, False], [True, False], [False, True]])
RETURN = np.array([[0.5, 0.0], [2.0, 1.0], [9.0, 50.0]], np.float32)


def seen(**changes):
    given = {
        "level": LEVEL, "present": PRESENT, "amount": AMOUNT, "ended": ENDED,
        "episode_return": RETURN,
    }  # fmt: skip
    return by_level(**{name: jnp.array(x) for name, x in (given | changes).items()})


def test_transitions_are_summed_by_level():
    found = seen()
    rows = {
        int(level): (float(total), int(steps), float(most), int(episodes))
        for level, total, steps, most, episodes, present in zip(
            found.level, found.total, found.steps, found.max_return, found.episodes, found.present,
            strict=True,
        )
        if present
    }  # fmt: skip
    assert rows == {5: (9.0, 3, 2.0, 1), 3: (10.0, 2, LOWEST, 0)}
    assert len(found.level) == 6


def rows_of(found, *names):
    return {
        int(level): tuple(float(getattr(found, name)[i]) for name in names)
        for i, level in enumerate(found.level)
        if level >= 0
    }


def test_a_score_goes_on_until_an_episode_ends_and_then_begins_anew():
    """Level 3: 10 in 2 steps, then 2 in 1 step with an end, then 5 in 1 step."""
    start = levels.initial_table(4)
    first = updated(start, seen(), 0.3, 0.3, from_max_return=False)
    assert rows_of(first, "score", "episodes") == {5: (3.0, 1), 3: (5.0, 0)}
    assert int(first.num_episodes) == 1
    more = {"level": jnp.array([3]), "present": jnp.array([True])}
    more |= {"amount": jnp.array([2.0]), "ended": jnp.array([True])}
    more |= {"episode_return": jnp.array([7.0])}
    second = updated(first, by_level(**more), 0.3, 0.3, from_max_return=False)
    assert rows_of(second, "score", "max_return")[3] == (4.0, 7.0)
    assert rows_of(second, "played") == {5: (1,), 3: (2,)}
    more |= {"amount": jnp.array([5.0]), "ended": jnp.array([False])}
    third = updated(second, by_level(**more), 0.3, 0.3, from_max_return=False)
    assert rows_of(third, "score", "mean_return")[3] == (5.0, 7.0)


def test_a_score_from_the_highest_return_needs_one():
    """Amounts are minus values: level 5 has 2 + (-9 / 3); level 3 has no return yet."""
    found = updated(levels.initial_table(4), seen(amount=-AMOUNT), 0.3, 0.3, from_max_return=True)
    assert rows_of(found, "score") == {5: (-1.0,)}
    later = seen(level=np.full((3, 2), 5, np.int32), amount=-AMOUNT, episode_return=0 * RETURN)
    found = updated(found, later, 0.3, 0.3, from_max_return=True)
    assert rows_of(found, "score", "max_return") == {5: (pytest.approx(2.0 - 19 / 5), 2.0)}


@pytest.mark.parametrize(
    "score, kept",
    [
        # The new levels 20 (score 8) and 21 (score 3). The lowest weights are those of 12, 10, 11.
        ([4.0, 5.0, 1.0], {10, 11, 20}),  # 3 is below the 4 of level 10
        ([2.0, 5.0, 1.0], {11, 20, 21}),
        ([10.0, 11.0, 9.0], {10, 11, 12}),
    ],
)
def test_a_new_level_takes_the_place_of_the_lowest_if_it_is_better(score, kept):
    held = table([10, 11, 12], score)
    new = by_level(
        jnp.array([21, 20]), jnp.ones(2, bool), jnp.array([3.0, 8.0]), jnp.zeros(2, bool),
        jnp.zeros(2),
    )  # fmt: skip
    found = updated(held, new, 0.3, 0.0, from_max_return=False)
    assert set(rows_of(found, "score")) == kept
    if 20 in kept:
        assert rows_of(found, "score", "played")[20] == (8.0, 10)


def test_stale_levels_are_kept():
    """With staleness alone, the level that was played last makes room, whatever its score is."""
    held = table([10, 11, 12], [4.0, 5.0, 1.0], played=[3, 9, 5])
    new = by_level(
        jnp.array([20]), jnp.ones(1, bool), jnp.array([6.0]), jnp.zeros(1, bool), jnp.zeros(1)
    )
    found = updated(held, new, 0.3, 1.0, from_max_return=False)
    assert set(rows_of(found, "score")) == {10, 12, 20}


def test_draws_follow_the_weights_and_new_levels_are_uniform():
    held = table([7, 8, -1], [1.0, 1.0, LOWEST])
    chosen = levels.sampling(held, jnp.array([3.0, 1.0, 5.0]), 0.5)
    drawn, replays = quick_jit(levels.draw, static_argnums=(2, 3))(
        jax.random.PRNGKey(0), chosen, 4, 8000
    )
    drawn, replays = np.asarray(drawn), np.asarray(replays)
    assert abs(replays.mean() - 0.5) < 0.03
    assert abs((drawn[replays] == 7).mean() - 0.75) < 0.03
    assert set(drawn[replays]) == {7, 8}
    np.testing.assert_allclose(np.bincount(drawn[~replays]) / (~replays).sum(), 0.25, atol=0.03)
    alike = levels.sampling(held, jnp.zeros(3), 1.0)
    np.testing.assert_allclose(alike.cumulative, [0.5, 1, 1])
    none = levels.Sampling(jnp.zeros(0, jnp.int32), jnp.zeros(0), jnp.zeros(()))
    assert not levels.draw(jax.random.PRNGKey(0), none, 4, 5)[1].any()
