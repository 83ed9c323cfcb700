"""Levels with their scores, and the probabilities with which they are played again.

Prioritised level replay, Jiang et al. (2021a), https://arxiv.org/abs/2010.03934: the probability of
a level is the share of its rank by score (equation 3) and, for a part, of its staleness (section
3.2). The new levels that are kept are as in Jiang et al. (2021b), https://arxiv.org/abs/2110.02439.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PRNGKey

_NONE = np.iinfo(np.int32).max  # sorted behind all levels
LOWEST = float(np.finfo(np.float32).min)  # less than any score; learner states are finite
_RATE = 0.1  # least weight of new episodes in the mean return of a level


class LevelTable(NamedTuple):
    """One row for each level, in any order, with its statistics; empty rows have the level -1."""

    level: Array  # [N] int32
    score: Array  # [N] float32, `LOWEST` in empty rows
    max_return: Array  # [N] float32, of all its episodes, undiscounted; or `LOWEST`
    mean_return: Array  # [N] float32, of its first ten episodes, later an exponential mean; or 0
    episodes: Array  # [N] int32, those that have ended
    played: Array  # [N] int32, `num_episodes` when the level was last learned from
    total: Array  # [N] float32, sum of the amounts of the newest episodes
    steps: Array  # [N] float32, number of amounts in the sum
    ended: Array  # [N] bool, whether these episodes have ended
    num_episodes: Array  # [] int32, all that have ended


class LevelSteps(NamedTuple):
    """Transitions summed by level; rows after the last level have `present` False."""

    level: Array  # [M] int32, each level once
    present: Array  # [M] bool
    total: Array  # [M] float32, sum of amounts
    steps: Array  # [M] float32, number of transitions
    max_return: Array  # [M] float32, of the episodes that ended here; `LOWEST` without any
    sum_return: Array  # [M] float32, of the same episodes
    episodes: Array  # [M] int32, their number


class Sampling(NamedTuple):
    """The levels that are played next; without rows all levels are new ones."""

    level: Array  # [N] int32
    cumulative: Array  # [N] float32, the sums of their weights
    replay: Array  # [] float32, probability of these levels


def initial_table(size: int, *, full: bool = False) -> LevelTable:
    """Returns an empty table, or with ``full`` one of the levels 0, 1, ... with a score of 0."""
    level = np.arange(size) if full else np.full(size, -1)
    return LevelTable(
        level=jnp.asarray(level, jnp.int32),
        score=jnp.full(size, 0.0 if full else LOWEST),
        max_return=jnp.full(size, LOWEST),
        mean_return=jnp.zeros(size),
        episodes=jnp.zeros(size, jnp.int32),
        played=jnp.zeros(size, jnp.int32),
        total=jnp.zeros(size),
        steps=jnp.zeros(size),
        ended=jnp.zeros(size, bool),
        num_episodes=jnp.zeros((), jnp.int32),
    )


def rank_weights(table: LevelTable, temperature: float) -> Array:
    """Returns ``(1 / rank) ** (1 / temperature)`` of the scores, ``[N]``, with the sum 1.

    The highest score has the rank 1. Empty rows have the weight 0; without levels all have.
    """
    order = jnp.argsort(-table.score)  # stable; empty rows come last
    rank = jnp.zeros_like(order).at[order].set(jnp.arange(1, len(order) + 1, dtype=order.dtype))
    return _shares(jnp.where(table.level >= 0, (1.0 / rank) ** (1.0 / temperature), 0.0))


def staleness_weights(table: LevelTable) -> Array:
    """Returns the share of each level in the numbers of episodes since it was played, ``[N]``.

    All levels have the same weight if there was none.
    """
    held = table.level >= 0
    stale = jnp.where(held, table.num_episodes - table.played, 0).astype(jnp.float32)
    return _shares(jnp.where(stale.sum() > 0, stale, held))


def level_weights(table: LevelTable, temperature: float, staleness_coeff: float) -> Array:
    """Returns the mixture of both weights, ``[N]``; see `rank_weights`, `staleness_weights`."""
    by_rank = rank_weights(table, temperature)
    return (1 - staleness_coeff) * by_rank + staleness_coeff * staleness_weights(table)


def by_level(
    level: Array, present: Array, amount: Array, ended: Array, episode_return: Array
) -> LevelSteps:
    """Sums transitions by their level.

    Args:
      level: int32, of any shape; the others have the same shape.
      present: bool, False where there is no transition.
      amount: float32, what is averaged over the steps of a level.
      ended: bool, whether an episode ends with the transition.
      episode_return: float32, the return of the episode where it ends.

    Returns:
      M rows for M transitions, because each may be of another level.
    """
    ids = jnp.where(present, level, _NONE).reshape(-1)
    order = jnp.argsort(ids)
    ids, number = ids[order], len(order)
    begins = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])
    segment = jnp.cumsum(begins) - 1

    def summed(x: Array, where: Array) -> Array:
        chosen = jnp.where(where & present, x, jnp.zeros((), jnp.result_type(x)))
        return jax.ops.segment_sum(chosen.reshape(-1)[order], segment, number)

    last = ended & present
    returns = jnp.where(last, episode_return, LOWEST).reshape(-1)[order]
    levels = jnp.full(number, _NONE, jnp.int32).at[segment].set(ids)
    return LevelSteps(
        level=levels,
        present=levels != _NONE,
        total=summed(amount, present),
        steps=summed(jnp.ones(level.shape), present),
        max_return=jnp.full(number, LOWEST).at[segment].max(returns),
        sum_return=summed(episode_return, last),
        episodes=summed(jnp.ones(level.shape, jnp.int32), last),
    )


def updated(
    table: LevelTable,
    seen: LevelSteps,
    temperature: float,
    staleness_coeff: float,
    *,
    from_max_return: bool,
) -> LevelTable:
    """Returns the table with new transitions, and with new levels that are worth keeping.

    The score of a level is the mean amount over the steps of its newest episodes. A sum goes on
    over several calls until an episode of the level has ended, and begins anew with the next call.
    The best of the new levels takes an empty row, else that of the level with the lowest weight if
    its score is higher; the second best that of the second lowest, and so on.

    Args:
      table: the table.
      seen: the transitions of one batch.
      temperature: of `level_weights`.
      staleness_coeff: of `level_weights`.
      from_max_return: whether the score is the level's highest return plus the mean amount; a new
        level without a return is then not kept.
    """
    size = len(table.level)
    order = jnp.argsort(table.level)
    place = jnp.clip(jnp.searchsorted(table.level[order], seen.level), 0, size - 1)
    row = order[place]
    known = seen.present & (table.level[row] == seen.level)
    count = table.num_episodes + seen.episodes.sum()
    found = _merged(table, row, known, seen, count, from_max_return)
    table = _put(table, jnp.where(known, row, size), found)._replace(num_episodes=count)

    most = min(len(seen.level), size)
    score = jnp.where(seen.present & ~known, found.score, LOWEST)
    score, best = jax.lax.top_k(score, most)
    weights = level_weights(table, temperature, staleness_coeff)
    lowest = jnp.argsort(jnp.where(table.level >= 0, weights, -1.0))[:most]
    target = jnp.where(score > table.score[lowest], lowest, size)
    return _put(table, target, jax.tree.map(lambda x: x[best] if jnp.ndim(x) else x, found))


def sampling(table: LevelTable, weights: Array, replay: Array | float) -> Sampling:
    """Returns the levels of a table to play next.

    Args:
      table: the levels.
      weights: ``[N]``, at least 0. If all are 0, the levels are drawn alike.
      replay: probability that an episode plays one of them.
    """
    held = table.level >= 0
    weights = jnp.where(held, weights, 0.0)
    weights = _shares(jnp.where(weights.sum() > 0, weights, held))
    return Sampling(table.level, jnp.cumsum(weights), jnp.asarray(replay, jnp.float32))


def draw(rng_key: PRNGKey, chosen: Sampling, number: int, rows: int) -> tuple[Array, Array]:
    """Draws the levels of the next episodes.

    Args:
      rng_key: the key.
      chosen: the levels that are played again.
      number: new levels are drawn from ``[0, number)``, all alike.
      rows: the number of draws, B.

    Returns:
      The levels ``[B]`` int32, and whether each is one of those played again, ``[B]`` bool.
    """
    new_key, coin_key, level_key = jax.random.split(rng_key, 3)
    new = jax.random.randint(new_key, (rows,), 0, number)
    if not len(chosen.level):
        return new, jnp.zeros(rows, bool)
    at = jax.random.uniform(level_key, (rows,)) * chosen.cumulative[-1]
    row = jnp.searchsorted(chosen.cumulative, at, side="right")
    level = chosen.level[jnp.minimum(row, len(chosen.level) - 1)]
    # Rounding may lead to an empty row.
    replays = (jax.random.uniform(coin_key, (rows,)) < chosen.replay) & (level >= 0)
    return jnp.where(replays, level, new), replays


def _shares(weights: Array) -> Array:
    total = weights.sum()
    return weights / jnp.where(total > 0, total, 1.0)


def _merged(
    table: LevelTable,
    row: Array,
    known: Array,
    seen: LevelSteps,
    count: Array,
    from_max_return: bool,
) -> LevelTable:
    """Returns what is known of the levels of some transitions, ``[M]``.

    Args:
      table: the table.
      row: ``[M]``, where the levels are in it.
      known: ``[M]`` bool, whether they are.
      seen: the transitions.
      count: all episodes that have ended.
      from_max_return: see `updated`.
    """

    def before(x: Array, fresh: float) -> Array:
        return jnp.where(known, x[row], jnp.asarray(fresh, x.dtype))

    goes_on = known & ~table.ended[row]
    total = jnp.where(goes_on, table.total[row], 0.0) + seen.total
    steps = jnp.where(goes_on, table.steps[row], 0.0) + seen.steps
    max_return = jnp.maximum(before(table.max_return, LOWEST), seen.max_return)
    episodes = before(table.episodes, 0) + seen.episodes
    rate = jnp.maximum(seen.episodes / jnp.maximum(episodes, 1), _RATE)
    mean = before(table.mean_return, 0.0)
    newest = seen.sum_return / jnp.maximum(seen.episodes, 1)
    score = total / jnp.maximum(steps, 1.0)
    return LevelTable(
        level=seen.level,
        score=max_return + score if from_max_return else score,
        max_return=max_return,
        mean_return=jnp.where(seen.episodes > 0, mean + rate * (newest - mean), mean),
        episodes=episodes,
        played=jnp.full(seen.level.shape, count),
        total=total,
        steps=steps,
        ended=seen.episodes > 0,
        num_episodes=count,
    )


def _put(table: LevelTable, row: Array, found: LevelTable) -> LevelTable:
    """Writes rows ``[M]`` to the table; those of a number outside of the table are left out."""

    def write(old: Array, new: Array) -> Array:
        return jnp.asarray(old).at[row].set(new, mode="drop") if jnp.ndim(old) else old

    return jax.tree.map(write, table, found)
