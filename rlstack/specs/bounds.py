"""The absence of bounds in the specs of real numbers.

Worker processes of environments import this module, so it must not import JAX.
"""

from __future__ import annotations

import numpy as np
from dm_env import specs


def with_open_bounds(spec: specs.Array) -> specs.Array:
    """Returns the spec, with infinity for bounds that stand for none.

    Environments write "no bound" as infinity, or as the largest number of the dtype or one near
    it. A bound of half the largest number or more counts as none, so that the difference of two
    bounds is finite. Specs of integers have no such bounds. A spec without any bound becomes a
    plain array.
    """
    if not isinstance(spec, specs.BoundedArray) or not np.issubdtype(spec.dtype, np.floating):
        return spec
    most = np.finfo(spec.dtype).max / 2
    low = np.where(spec.minimum <= -most, -np.inf, spec.minimum)
    high = np.where(spec.maximum >= most, np.inf, spec.maximum)
    if np.isinf(low).all() and np.isinf(high).all():
        return specs.Array(spec.shape, spec.dtype, spec.name)
    low, high = low.astype(spec.dtype), high.astype(spec.dtype)
    return specs.BoundedArray(spec.shape, spec.dtype, low, high, spec.name)


def has_finite_bounds(spec: specs.Array) -> bool:
    """Returns whether every number of a spec has two bounds, the lower one below the upper one."""
    opened = with_open_bounds(spec)
    if not isinstance(opened, specs.BoundedArray):
        return False
    low, high = opened.minimum, opened.maximum
    return bool(np.isfinite(low).all() and np.isfinite(high).all() and np.all(low < high))
