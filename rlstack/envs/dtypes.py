"""The dtypes of observations and actions: those that JAX has by default, which are of 32 bits.

JAX stores float64, int64 and uint64 as float32, int32 and uint32. Pools do the same, so that a step
has the dtypes that an agent's output, replay and a checkpoint have. Gymnasium's ``Discrete`` and
``MultiDiscrete`` are int64 unless they are told otherwise. A value that does not fit is an error.

Worker processes import this module, so it must not import JAX.
"""

from __future__ import annotations

import numpy as np
from dm_env import specs
from numpy.typing import DTypeLike

from rlstack.checks import EnvError

_NARROWER: dict[np.dtype, np.dtype] = {
    np.dtype(np.float64): np.dtype(np.float32),
    np.dtype(np.int64): np.dtype(np.int32),
    np.dtype(np.uint64): np.dtype(np.uint32),
}


def narrow(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of 32 bits for one of 64 bits, and any other dtype as it is."""
    wide: np.dtype = np.dtype(dtype)
    return _NARROWER.get(wide, wide)


def narrow_spec(spec: specs.Array, where: str) -> specs.Array:
    """Returns the spec with at most 32 bits; bounds outside the dtype's range become its limits.

    Args:
      spec: of an observation or an action.
      where: its name in errors.

    Raises:
      EnvError: a discrete spec has more values than the dtype.
    """
    dtype = narrow(spec.dtype)
    if isinstance(spec, specs.DiscreteArray):
        if spec.num_values - 1 > np.iinfo(dtype).max:
            raise EnvError(
                f"{where}: a discrete space must have at most 2**31 values, because JAX has "
                f"integers of 32 bits; got {spec.num_values}. Encode the number in several parts, "
                "as a MultiDiscrete space does."
            )
        return specs.DiscreteArray(spec.num_values, dtype, spec.name)
    if dtype == spec.dtype:
        return spec
    if isinstance(spec, specs.BoundedArray):
        low, high = (_narrow_bound(bound, dtype) for bound in (spec.minimum, spec.maximum))
        return specs.BoundedArray(spec.shape, dtype, low, high, spec.name)
    return specs.Array(spec.shape, dtype, spec.name)


def _narrow_bound(bound: np.ndarray, dtype: np.dtype) -> np.ndarray:
    if dtype.kind in "iu":
        return np.clip(bound, np.iinfo(dtype).min, np.iinfo(dtype).max).astype(dtype)
    with np.errstate(over="ignore"):  # a bound above float32's largest number is infinite
        return np.asarray(bound, dtype)


def changed_by_cast(array: np.ndarray, cast: np.ndarray) -> bool:
    """Returns whether a cast from integers to other integers has changed a value."""
    if array.dtype.kind not in "iu" or np.can_cast(array.dtype, cast.dtype, "safe"):
        return False
    return bool((array != cast).any())


def too_wide(where: str, dtype: np.dtype, array: np.ndarray) -> EnvError:
    """Returns the error for integers that a cast has changed."""
    limits = np.iinfo(dtype)
    outside = array[(array > limits.max) | (array < limits.min)]
    return EnvError(
        f"{where} must fit {dtype}, because JAX has integers of 32 bits; got {outside.flat[0]}. "
        "Scale it in the environment, or declare a space of floats."
    )
