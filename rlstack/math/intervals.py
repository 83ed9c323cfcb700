"""Statistics of the scores of several runs on several tasks, with bootstrap confidence intervals.

Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice",
https://arxiv.org/abs/2108.13264. All computation is on the host, in numpy.

The scores of a method are one array for each task, ``[..., N]`` with N runs; tasks may have
different numbers of runs. Each statistic takes such a sequence and keeps the leading axes, which
are the resamples of a bootstrap.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Scores = Sequence[Array]
Statistic = Callable[..., Array]

RESAMPLES = 10_000
_SEED = 0  # the same intervals for the same scores
_CHUNK = 4_000_000  # numbers that one call of a statistic gets, about 32 MB


class Interval(NamedTuple):
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


class Band(NamedTuple):
    """Estimates with their confidence intervals, each ``[K]``."""

    estimate: Array
    low: Array
    high: Array


def interquartile_mean(values: Sequence[float] | Array) -> Array:
    """Returns the mean of the middle half of the values, over the last axis.

    A quarter of the values, rounded down, is left out at each end, as in SciPy's ``trim_mean``. So
    fewer than four values have their mean.
    """
    ordered = np.sort(np.asarray(values, float), axis=-1)
    number = ordered.shape[-1]
    cut = number // 4
    return ordered[..., cut : number - cut].mean(axis=-1)


def mean(scores: Scores) -> Array:
    """Returns the mean over tasks of the mean over runs."""
    return _task_means(scores).mean(axis=-1)


def median(scores: Scores) -> Array:
    """Returns the median over tasks of the mean over runs (section 2).

    Of a single task it returns the median over its runs, because there the mean over runs is no
    median of anything.
    """
    if len(scores) == 1:
        return np.median(scores[0], axis=-1)
    return np.median(_task_means(scores), axis=-1)


def iqm(scores: Scores) -> Array:
    """Returns the interquartile mean of all runs of all tasks (section 4.3).

    Runs count equally, so a task with more runs than others has more weight.
    """
    return interquartile_mean(np.concatenate(scores, axis=-1))


def optimality_gap(scores: Scores, target: float = 1.0) -> Array:
    """Returns by how much scores miss a target on average, without what exceeds it (section 4.3).

    Args:
      scores: normalised, so that the target means the same in each task.
      target: the score beyond which improvement does not count (gamma).
    """
    return target - mean([np.minimum(score, target) for score in scores])


def probability_of_improvement(x: Scores, y: Scores) -> Array:
    """Returns the probability that a run of X is better than one of Y on a random task (4.3).

    It is the mean over tasks of the Mann-Whitney U statistic divided by the number of pairs. Equal
    scores count half.

    Args:
      x: scores of the method X.
      y: scores of the method Y on the same tasks, in the same order.

    Raises:
      ValueError: the numbers of tasks differ.
    """
    if len(x) != len(y):
        raise ValueError(
            "probability_of_improvement: x and y must have the same tasks; got "
            f"{len(x)} and {len(y)} tasks."
        )
    each = []
    for first, second in zip(x, y, strict=True):
        left, right = first[..., :, None], second[..., None, :]
        each.append(np.mean((left > right) + 0.5 * (left == right), axis=(-2, -1)))
    return np.stack(each, axis=-1).mean(axis=-1)


def performance_profile(scores: Scores, thresholds: Sequence[float] | Array) -> Array:
    """Returns the fraction of runs with a score above each threshold (section 4.2).

    Args:
      scores: the scores of one method.
      thresholds: ``[K]`` (tau).

    Returns:
      ``[..., K]``, the mean over tasks.
    """
    levels = np.asarray(thresholds, float)
    above = [np.mean(score[..., None] > levels, axis=-2) for score in scores]
    return np.stack(above, axis=-1).mean(axis=-1)


def bootstrap(values: Sequence[float] | Array, level: float = 0.95) -> Interval:
    """Returns the interquartile mean of some runs, with a percentile bootstrap interval.

    Args:
      values: one for each run.
      level: probability that the interval should cover.

    Raises:
      ValueError: there are no values.
    """
    return interval(iqm, [np.asarray(values, float)], level=level)


def interval(
    statistic: Statistic, *methods: Scores, level: float = 0.95, resamples: int = RESAMPLES
) -> Interval:
    """Returns a statistic with its stratified percentile bootstrap interval (section 4.1).

    Args:
      statistic: a function of the scores of each method, such as `iqm`.
      *methods: the scores of each method.
      level: probability that the interval should cover.
      resamples: number of bootstrap samples.

    Raises:
      ValueError: there are no tasks, or a task has no runs.
    """
    found = band(statistic, *methods, level=level, resamples=resamples)
    return Interval(*map(float, found))


def band(
    statistic: Statistic, *methods: Scores, level: float = 0.95, resamples: int = RESAMPLES
) -> Band:
    """Returns a statistic of K numbers with the interval of each one; see `interval`.

    A bootstrap sample has as many runs of each task as there are, drawn with replacement from the
    runs of this task, and independently for each method.
    """
    scores = [[np.asarray(task, float) for task in method] for method in methods]
    for tasks in scores:
        shapes = [task.shape for task in tasks]
        if not shapes or any(len(shape) != 1 or not shape[0] for shape in shapes):
            raise ValueError(
                f"bootstrap: each task must have scores [N] with N >= 1; got shapes {shapes}."
            )
    estimate = np.asarray(statistic(*scores))
    rng = np.random.default_rng(_SEED)
    # A statistic may compare pairs of runs, or runs with K thresholds.
    runs = [sum(map(len, tasks)) for tasks in scores]
    most = max(len(task) for tasks in scores for task in tasks)
    chunk = max(1, _CHUNK // (max(runs) * max(estimate.size, most if len(scores) > 1 else 1)))
    found = []
    for start in range(0, resamples, chunk):
        number = min(chunk, resamples - start)
        drawn = [[_resampled(rng, task, number) for task in tasks] for tasks in scores]
        found.append(statistic(*drawn))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(found), [tail, 1 - tail], axis=0)
    return Band(estimate, low, high)


def wilson(score: float, number: int, level: float = 0.95) -> Interval:
    """Returns the mean score of some games with its interval of Wilson (1927), equation 2.

    The interval stays within [0, 1], and is not empty where all games were won. Scores between 0
    and 1, such as 1/2 for a draw, vary less than wins and losses of the same mean, so that it is
    then wider than it needs to be.

    Args:
      score: mean of the scores, 0 for a loss and 1 for a win.
      number: number of games.
      level: probability that the interval should cover.

    Raises:
      ValueError: there are no games, or the score is not in [0, 1].
    """
    if number < 1 or not 0.0 <= score <= 1.0:
        raise ValueError(
            f"wilson: number must be at least 1, and score in [0, 1]; got {number} and {score}."
        )
    z = statistics.NormalDist().inv_cdf((1 + level) / 2)
    weight = z * z / number
    centre = (score + weight / 2) / (1 + weight)
    half = np.sqrt(weight * score * (1 - score) + weight * weight / 4) / (1 + weight)
    return Interval(float(score), max(0.0, float(centre - half)), min(1.0, float(centre + half)))


def _resampled(rng: np.random.Generator, runs: Array, number: int) -> Array:
    return runs[rng.integers(0, len(runs), (number, len(runs)))]


def _task_means(scores: Scores) -> Array:
    return np.stack([score.mean(axis=-1) for score in scores], axis=-1)
