"""Keeping continuous actions within what an environment takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.types import Array, PyTree


def clip_to_spec(action_spec: PyTree, action: PyTree) -> PyTree:
    """Clips the float entries of an action ``[B, ...]`` to their bounds; others pass unchanged."""

    def clip(spec: specs.Array, x: Array) -> Array:
        if isinstance(spec, specs.BoundedArray) and np.issubdtype(spec.dtype, np.floating):
            return jnp.clip(x, spec.minimum, spec.maximum)
        return x

    return jax.tree.map(clip, action_spec, action)
