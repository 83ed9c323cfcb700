"""The bounds of continuous actions, and the conversion of actions to and from [-1, 1]."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.checks import ActionKindError
from rlstack.specs.bounds import has_finite_bounds
from rlstack.types import Array, PyTree


class Bounds(NamedTuple):
    """The bounds of an action; they let an agent work in [-1, 1] with any environment."""

    minimum: np.ndarray  # [D] float32
    maximum: np.ndarray  # [D] float32

    def unit_spec(self) -> specs.BoundedArray:
        """Returns the spec of the same actions, scaled to [-1, 1]."""
        return specs.BoundedArray(self.minimum.shape, np.float32, -1.0, 1.0)

    def to_unit(self, action: Array) -> Array:
        """Scales actions ``[..., D]`` to [-1, 1]."""
        return 2.0 * (action - self.minimum) / (self.maximum - self.minimum) - 1.0

    def from_unit(self, action: Array) -> Array:
        """Scales actions ``[..., D]`` from [-1, 1] to the bounds, and clips rounding errors."""
        moved = self.minimum + 0.5 * (action + 1.0) * (self.maximum - self.minimum)
        return jnp.clip(moved, self.minimum, self.maximum)


def bounds_of(action_spec: PyTree, where: str) -> Bounds:
    """Returns the bounds of a continuous action.

    Args:
      action_spec: one float array [D] with finite bounds.
      where: the name of the caller, for the error message.

    Raises:
      ActionKindError: the spec is not such an array.
    """
    if (
        not isinstance(action_spec, specs.BoundedArray)
        or not np.issubdtype(action_spec.dtype, np.floating)
        or len(action_spec.shape) != 1
        or not has_finite_bounds(action_spec)
    ):
        raise ActionKindError(
            f"{where}: the action must be one float array of rank 1 with finite bounds; got "
            f"{action_spec}. Declare finite bounds in the environment or in a wrapper of it, or "
            "use ppo."
        )
    both = action_spec.minimum, action_spec.maximum
    return Bounds(*(np.broadcast_to(x, action_spec.shape).astype(np.float32) for x in both))
