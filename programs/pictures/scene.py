"""The display of one step: a picture, some lines, and the policy's estimates of its choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from rlstack.programs.build.policies.policy import Prediction
from rlstack.programs.pictures.labels import Labels
from rlstack.programs.pictures.stage import Picture
from rlstack.types import PyTree

MAX_BARS = 14  # maximum number of bars in a scene; with more choices, the likeliest are shown


class Bar(NamedTuple):
    """One choice, shown as a bar."""

    label: str
    text: str  # probability or value of the choice
    share: float  # length of the bar, 0 to 1
    chosen: bool


Bars = tuple[tuple[str, tuple[Bar, ...]], ...]  # the choices of each chooser, by its title


class Scene(NamedTuple):
    """One step."""

    picture: Picture
    lines: tuple[str, ...]
    bars: Bars
    is_last: bool = False  # whether this is the last step of an episode


def bars_of(
    prediction: Prediction, observation: PyTree, labels: Labels, most: int = MAX_BARS
) -> Bars:
    """Returns the bars of all choices at a step.

    Args:
      prediction: the policy's prediction for one environment.
      observation: the observation of that environment.
      labels: names the choices.
      most: number of bars, at most.
    """
    chances = prediction.probabilities
    rows = {name: len(table) for name, table in chances.items()}
    found, left = [], most
    for name, row, title, least in labels.choosers(observation, rows):
        shares = chances[name][row]
        legal = np.flatnonzero(shares > 0)
        shown = legal
        if len(legal) > left:
            shown = legal[np.argsort(-shares[legal], kind="stable")][:left]
        left -= len(shown)
        chosen = _chosen(prediction.action, name, row) - least
        bars = [
            Bar(labels.choice(name, choice, row), *_amount(prediction, name, row, choice, legal),
                choice == chosen)
            for choice in shown.tolist()
        ]  # fmt: skip
        if bars:
            found.append((title, tuple(bars)))
    return tuple(found)


def numbers_of(prediction: Prediction) -> tuple[str, ...]:
    """Returns continuous actions as lines."""
    if prediction.probabilities:
        return ()
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(prediction.action)]
    numbers = np.concatenate(leaves)[:MAX_BARS]
    return tuple(f"action {i}: {number:+.3g}" for i, number in enumerate(numbers))


def _chosen(action: PyTree, name: str, row: int) -> int:
    """Returns the action of a row."""
    return int(np.ravel(action[name] if isinstance(action, Mapping) else action)[row])


def _amount(
    prediction: Prediction, name: str, row: int, choice: int, legal: np.ndarray
) -> tuple[str, float]:
    """Returns the probability or the value of a choice, and the length of its bar."""
    if not prediction.action_values:
        share = float(prediction.probabilities[name][row][choice])
        return f"{share:.0%}", share
    values = prediction.action_values[name][row]
    value, low, high = float(values[choice]), float(values[legal].min()), float(values[legal].max())
    return f"{value:.3g}", 1.0 if high == low else (value - low) / (high - low)
