"""Episodic novelty: how far an observation is from the earlier ones of its episode.

Badia et al. (2020), "Never Give Up", https://arxiv.org/abs/2002.06038, section 2 and algorithm 1.
The constants are those of its table of hyperparameters (appendix A).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlstack.types import Array

KERNEL_EPSILON = 1e-4  # of the inverse kernel
CLUSTER_DISTANCE = 8e-3  # distances up to this, in mean distances, count as 0
PSEUDO_COUNT = 1e-3  # c, so that the novelty is finite
LARGEST_SIMILARITY = 8.0  # s_m: there is no novelty beyond it


class EpisodicMemory(NamedTuple):
    """The embeddings of an episode, for each environment; a part of the acting state."""

    embeddings: Array  # [B, M, E] float32, a ring
    num_seen: Array  # [B] int32, observations of the episode so far
    distance: Array  # [B] float32, running mean of squared distances to neighbours, over episodes
    num_distances: Array  # [B] int32, steps in that mean


def initial_memory(batch_size: int, size: int, width: int) -> EpisodicMemory:
    """Returns empty memories for ``size`` embeddings ``[width]`` of each environment."""
    count = jnp.zeros(batch_size, jnp.int32)
    embeddings = jnp.zeros((batch_size, size, width))
    return EpisodicMemory(embeddings, count, jnp.zeros(batch_size), count)


def emptied(memory: EpisodicMemory, first: Array) -> EpisodicMemory:
    """Empties the memories where ``first`` ([B] bool) holds; mean distances stay."""
    return memory._replace(
        embeddings=jnp.where(first[:, None, None], 0.0, memory.embeddings),
        num_seen=jnp.where(first, 0, memory.num_seen),
    )


def episodic_novelty(
    memory: EpisodicMemory, embedding: Array, num_neighbours: int
) -> tuple[Array, EpisodicMemory]:
    """Compares embeddings with their memories, and adds them.

    The novelty is ``1 / (sqrt(sum of kernels) + c)`` over the nearest neighbours, with the kernel
    ``epsilon / (d + epsilon)`` of the squared distance d in units of its running mean. The paper
    leaves open what counts before there are enough neighbours: here the kernels that are there
    count for all, and the first observation of an episode has no novelty.

    Args:
      memory: the memories, with M places.
      embedding: ``[B, E]``.
      num_neighbours: k, at most M.

    Returns:
      The novelty ``[B]`` float32, at least 0; and the memories with the embeddings.
    """
    size = memory.embeddings.shape[1]
    squares = jnp.square(memory.embeddings - embedding[:, None]).sum(-1)
    known = jnp.arange(size) < memory.num_seen[:, None]
    nearest = -jax.lax.top_k(jnp.where(known, -squares, -jnp.inf), num_neighbours)[0]
    near = jnp.isfinite(nearest)
    number = near.sum(-1)
    nearest, shown = jnp.where(near, nearest, 0.0), jnp.maximum(number, 1)

    steps = memory.num_distances + (number > 0)
    change = nearest.sum(-1) / shown - memory.distance
    distance = memory.distance + jnp.where(number > 0, change / jnp.maximum(steps, 1), 0.0)
    scaled = nearest / jnp.maximum(distance, 1e-12)[:, None]
    scaled = jnp.maximum(scaled - CLUSTER_DISTANCE, 0.0)
    kernels = jnp.where(near, KERNEL_EPSILON / (scaled + KERNEL_EPSILON), 0.0)
    similarity = jnp.sqrt(num_neighbours * kernels.sum(-1) / shown) + PSEUDO_COUNT
    is_novel = (number > 0) & (similarity <= LARGEST_SIMILARITY)

    place = jnp.arange(size) == (memory.num_seen % size)[:, None]
    embeddings = jnp.where(place[..., None], embedding[:, None], memory.embeddings)
    memory = EpisodicMemory(embeddings, memory.num_seen + 1, distance, steps)
    return jnp.where(is_novel, 1 / similarity, 0.0), memory
