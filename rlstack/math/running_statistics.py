"""Running mean and variance of observations, or of rewards.

`rlstack.families.normalised` uses them to normalise the inputs of any agent.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.types import Array, PyTree


class RunningStatistics(NamedTuple):
    """Mean and variance of every float entry of an observation; other entries have none."""

    num_seen: Array  # [] float32, number of observations
    mean: PyTree  # [...] float32 per entry
    variance: PyTree  # [...] float32 per entry


def initial_statistics(obs_spec: PyTree) -> RunningStatistics:
    """Returns the statistics of no observations: mean 0, variance 1."""
    return RunningStatistics(
        num_seen=jnp.zeros(()),
        mean=[jnp.zeros(s.shape) for s in _float_leaves(obs_spec)],
        variance=[jnp.ones(s.shape) for s in _float_leaves(obs_spec)],
    )


def update_statistics(
    stats: RunningStatistics, observation: PyTree, mask: Array | None = None
) -> RunningStatistics:
    """Adds a batch by the parallel algorithm of Chan et al. (1979), equation 2.1.

    Args:
      stats: the statistics so far.
      observation: pytree of ``[N, ...]``, or of any leading axes that all entries share.
      mask: bool, of the shape of the leading axes, which rows to add; all by default.
    """
    leaves = _float_leaves(observation)
    if not leaves:
        return stats
    num_rows = leaves[0].size // max(1, np.prod(stats.mean[0].shape, dtype=int))
    counts = jnp.ones(num_rows) if mask is None else jnp.reshape(mask, -1).astype(jnp.float32)
    batch_count = counts.sum()
    total = stats.num_seen + batch_count
    share = counts / jnp.maximum(batch_count, 1)

    def merge(mean: Array, variance: Array, x: Array) -> tuple[Array, Array]:
        rows = x.reshape((-1, *mean.shape))
        batch_mean = _weighted(share, rows)
        batch_variance = _weighted(share, (rows - batch_mean) ** 2)
        delta = batch_mean - mean
        weight = batch_count / jnp.maximum(total, 1)
        spread = delta**2 * weight * (1 - weight)
        return mean + delta * weight, variance * (1 - weight) + batch_variance * weight + spread

    merged = [merge(*args) for args in zip(stats.mean, stats.variance, leaves, strict=True)]
    return RunningStatistics(total, [m for m, _ in merged], [v for _, v in merged])


def normalise(stats: RunningStatistics, observation: PyTree, clip: float = 10.0) -> PyTree:
    """Standardises the float entries of an observation and clips them to ``[-clip, clip]``."""
    leaves, structure = jax.tree.flatten(observation)
    moments = iter(zip(stats.mean, stats.variance, strict=True))

    def standardise(x: Array) -> Array:
        if not _is_float(x):
            return x
        mean, variance = next(moments)
        return jnp.clip((x - mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)

    return jax.tree.unflatten(structure, [standardise(x) for x in leaves])


def _weighted(share: Array, rows: Array) -> Array:
    # By default GPUs and TPUs round the factors of a product, by up to 0.5 for a mean of 1,000.
    return jnp.tensordot(share, rows, axes=1, precision=jax.lax.Precision.HIGHEST)


def _is_float(x: Array) -> bool:
    return bool(np.issubdtype(x.dtype, np.floating))


def _float_leaves(tree: PyTree) -> list[Array]:
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]
