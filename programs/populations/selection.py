"""Truncation selection, and the change of what was copied. Functions of numbers only.

Jaderberg et al. 2017, https://arxiv.org/abs/1711.09846, section 4.1: a member among the worst 20 %
by its recent episode returns copies the weights and hyperparameters of a member drawn from the best
20 %. It then multiplies each hyperparameter by 1.2 or 0.8, or draws it anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from rlstack.programs.env_config import Option
from rlstack.programs.populations.population import Hyperparameters, Population, draw, fitted
from rlstack.programs.sweeps.space import Range, Values

_FACTORS = (0.8, 1.2)


class Copy(NamedTuple):
    """A member that takes the params and the learner state of another one."""

    selection: int  # counts from 1
    frames: int  # of the member
    member: int
    source: int
    score: float  # of the member
    source_score: float
    before: Hyperparameters
    after: Hyperparameters  # those of the source, changed


def select(
    population: Population,
    selection: int,
    scores: Sequence[float],
    frames: Sequence[int],
    values: Sequence[Hyperparameters],
    among: Sequence[int],
) -> list[Copy]:
    """Returns which members copy which.

    Args:
      population: with the rule.
      selection: its number, from 1.
      scores: of each member, the mean of its recent episode returns; -inf for one that failed.
      frames: of each member.
      values: of each member.
      among: the members that take part.
    """
    rng = population.rng(selection)
    ordered = sorted(among, key=lambda i: (scores[i], i))
    count = max(1, int(len(ordered) * population.pbt.fraction))
    if len(ordered) < 2:
        return []
    best = ordered[-count:]
    copies = []
    for member in ordered[:count]:
        source = best[int(rng.integers(len(best)))]
        after = _changed(population, values[source], rng)
        if scores[source] > scores[member]:
            copies.append(
                Copy(
                    selection,
                    frames[member],
                    member,
                    source,
                    scores[member],
                    scores[source],
                    values[member],
                    after,
                )
            )
    return copies


def _changed(
    population: Population, values: Mapping[str, Option], rng: np.random.Generator
) -> Hyperparameters:
    """Returns values near the given ones or drawn anew, within their ranges."""
    return {
        name: _one(space, values[name], population.pbt.resample, rng)
        for name, space in population.vary.items()
    }


def _one(space: Values, value: Option, resample: float, rng: np.random.Generator) -> Option:
    if rng.random() < resample:
        return draw(space, rng)
    factor = _FACTORS[int(rng.integers(len(_FACTORS)))]
    if not isinstance(space, Range):  # choices have no neighbours
        return value
    number = float(value) * factor
    if space.whole and round(number) == value:  # a small integer would never change
        number = float(value) + (1 if factor > 1 else -1)
    return fitted(space, number)
