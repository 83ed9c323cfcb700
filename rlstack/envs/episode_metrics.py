"""Numbers that environments give with the last step of an episode, to be logged.

Worker processes import this module, so it must not import JAX.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def numbers_of(info: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Returns the finite numbers among the entries of a step's info, by name.

    Booleans count as 0 and 1. The entries of a nested dict are named ``outer/inner``. Arrays that
    hold more than one number, texts and other objects are left out.
    """
    found: dict[str, float] = {}
    for name, value in info.items():
        if isinstance(value, Mapping):
            found.update(numbers_of(value, f"{prefix}{name}/"))
        elif _is_number(value):
            with contextlib.suppress(OverflowError):  # an integer that no float can hold
                number = float(value)
                if math.isfinite(number):
                    found[f"{prefix}{name}"] = number
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, bool | int | float):
        return True
    # Scalars and arrays without axes, of numpy and of other libraries.
    dtype = getattr(value, "dtype", None)
    return getattr(value, "shape", None) == () and getattr(dtype, "kind", "") in (
        "b",
        "i",
        "u",
        "f",
    )


def by_name(episodes: Iterable[Mapping[str, float]]) -> dict[str, np.ndarray]:
    """Returns each number's values, one for each of the episodes that have it."""
    values: dict[str, list[float]] = {}
    for metrics in episodes:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: np.array(found) for name, found in values.items()}
