"""Statistics of the returns of several runs, with bootstrap confidence intervals.

Agarwal et al. (2021), "Deep reinforcement learning at the edge of the statistical precipice",
https://arxiv.org/abs/2108.13264. All computation is on the host, in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

_RESAMPLES = 10_000
_SEED = 0  # the same intervals for the same returns


class Interval(NamedTuple):
    """An estimate with its confidence interval."""

    estimate: float
    low: float
    high: float


def interquartile_mean(values: Sequence[float] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the mean of the middle half of the values, over the last axis.

    A quarter of the values, rounded down, is left out at each end, as in SciPy's ``trim_mean``. So
    fewer than four values have their mean.
    """
    ordered = np.sort(np.asarray(values, float), axis=-1)
    number = ordered.shape[-1]
    cut = number // 4
    return ordered[..., cut : number - cut].mean(axis=-1)


def bootstrap(values: Sequence[float] | np.ndarray[Any, Any], level: float = 0.95) -> Interval:
    """Returns the interquartile mean of some runs, with a percentile bootstrap interval.

    Args:
      values: one for each run.
      level: probability that the interval should cover.

    Raises:
      ValueError: there are no values.
    """
    values = np.asarray(values, float)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"bootstrap: values must be [N] with N >= 1; got shape {values.shape}.")
    rng = np.random.default_rng(_SEED)
    drawn = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))]
    tail = (1 - level) / 2
    low, high = np.quantile(interquartile_mean(drawn), [tail, 1 - tail])
    return Interval(float(interquartile_mean(values)), float(low), float(high))
