"""Conversion of a network's output to the distribution for an action spec, with its bounds."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.checks import ActionKindError
from rlstack.distributions.continuous import Normal, TanhNormal
from rlstack.distributions.discrete import categorical, check_mask, multi_categorical
from rlstack.distributions.joint import Distribution, Joint
from rlstack.specs import has_finite_bounds
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

    def normal_from_unit(self, policy: Normal) -> Normal:
        """Scales a Gaussian of actions ``[..., D]`` from [-1, 1] to the bounds."""
        half = 0.5 * (self.maximum - self.minimum)
        return Normal(self.from_unit(policy.mean), policy.log_std + jnp.log(half))


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


# The range to which SAC clips its policy's log standard deviation (Haarnoja et al. 2018, the
# authors' code).
LOG_STD_RANGE = (-20.0, 2.0)


def num_parameters(action_spec: PyTree) -> int:
    """Returns how many numbers per row ``from_parameters`` needs for ``action_spec``.

    It is A for one choice among A actions, the sum of the sizes for several choices, and 2 D for a
    float action [D]. For a pytree of specs it is the sum, in the order of ``jax.tree.leaves``.

    Raises:
      ValueError: there is no distribution for a spec.
    """
    return sum(_width(spec) for spec in jax.tree.leaves(action_spec))


def from_parameters(
    action_spec: PyTree, parameters: Array, mask: PyTree = None, *, squash: bool = False
) -> Distribution:
    """Converts a network's output to the distribution for ``action_spec``.

    Args:
      action_spec: a ``dm_env.specs`` array or a pytree of them. DiscreteArray (or a scalar integer
        BoundedArray from 0): ``Categorical``. Integer BoundedArray [K]: ``MultiCategorical``.
        Float array [D]: ``Normal`` of concatenated mean and log_std, or ``TanhNormal`` with
        ``squash``. A pytree: ``Joint``.
      parameters: [..., num_parameters(action_spec)].
      mask: legal discrete choices, [..., A] or [..., sum of sizes], or [..., K, A] for K choices of
        the same size; for a pytree the same pytree of masks, with None for an action without one.
      squash: whether to squash float actions by tanh to the spec's bounds, which must be finite,
        and clip log_std to ``LOG_STD_RANGE`` as SAC does.

    Raises:
      ValueError: there is no distribution for a spec, the last axis of the parameters has the wrong
        size, a mask does not have the shape of its parameters, or a float action has a mask.
    """
    parameters = jnp.asarray(parameters, jnp.float32)
    width = num_parameters(action_spec)
    if parameters.ndim == 0 or parameters.shape[-1] != width:
        raise ValueError(
            f"from_parameters: this action spec needs parameters [..., {width}]; got shape "
            f"{parameters.shape}. Set the size of the head to num_parameters(action_spec)."
        )
    if isinstance(action_spec, specs.Array):
        return _from_spec(action_spec, parameters, mask, squash)
    leaves, treedef = jax.tree.flatten(action_spec)
    masks = [None] * len(leaves) if mask is None else treedef.flatten_up_to(mask)
    parts = jnp.split(parameters, np.cumsum([_width(spec) for spec in leaves])[:-1].tolist(), -1)
    return Joint(
        jax.tree.unflatten(
            treedef,
            [_from_spec(*row, squash) for row in zip(leaves, parts, masks, strict=True)],
        )
    )


def _from_spec(
    spec: specs.Array, parameters: Array, mask: Array | None, squash: bool
) -> Distribution:
    """Does the same for one array spec; the caller has checked the number of parameters."""
    if np.issubdtype(spec.dtype, np.integer):
        sizes = _sizes(spec)
        if mask is not None:
            by_choice = (*parameters.shape[:-1], len(sizes), sizes[0])
            if spec.shape and len(set(sizes)) == 1 and np.shape(mask) == by_choice:
                mask = mask.reshape(parameters.shape)
            check_mask(f"from_parameters: {spec}", parameters, mask)
        if not spec.shape:
            return categorical(parameters, mask)
        minimum = np.broadcast_to(spec.minimum, spec.shape)
        return multi_categorical(parameters, sizes, minimum, mask)
    if mask is not None:
        raise ValueError(f"from_parameters: only discrete actions take a mask; got one for {spec}.")
    mean, log_std = jnp.split(parameters, 2, axis=-1)
    if not squash:
        return Normal(mean, log_std)
    if not has_finite_bounds(spec):
        raise ValueError(
            f"from_parameters: squash needs finite bounds with minimum < maximum; got {spec}. "
            "Use squash=False."
        )
    both = spec.minimum, spec.maximum
    low, high = (jnp.broadcast_to(jnp.asarray(x, jnp.float32), mean.shape) for x in both)
    return TanhNormal(mean, jnp.clip(log_std, *LOG_STD_RANGE), low, high)


def _width(spec: specs.Array) -> int:
    """Returns the number of parameters of one array spec."""
    if not isinstance(spec, specs.Array):
        raise ValueError(
            f"num_parameters: an action spec must be a pytree of dm_env specs; got {spec!r}."
        )
    if np.issubdtype(spec.dtype, np.integer):
        return sum(_sizes(spec))
    if not np.issubdtype(spec.dtype, np.floating) or len(spec.shape) != 1:
        raise ValueError(
            f"num_parameters: a continuous action must be a float array of rank 1; got {spec}. "
            "Flatten it in an environment adapter."
        )
    return 2 * spec.shape[0]


def _sizes(spec: specs.Array) -> list[int]:
    """Returns the number of values of every component of an integer spec."""
    if isinstance(spec, specs.DiscreteArray):
        return [int(spec.num_values)]
    if not isinstance(spec, specs.BoundedArray) or len(spec.shape) > 1:
        raise ValueError(
            f"num_parameters: an integer action must be a DiscreteArray, or a BoundedArray of rank "
            f"0 or 1; got {spec}. Flatten or bound it in an environment adapter."
        )
    if not spec.shape and int(spec.minimum) != 0:
        raise ValueError(
            f"num_parameters: the minimum of a scalar integer action must be 0; got {spec}. "
            "Shift it in an environment adapter, or give it shape [1]."
        )
    sizes = np.broadcast_to(spec.maximum.astype(np.int64) - spec.minimum + 1, spec.shape or (1,))
    return [int(size) for size in sizes]
