"""What planners do without learning: rules for the agent `Scripted`.

Both are (s, S) rules: a facility whose goods, in stock and on the road, are below its reorder point
orders up to its base stock. If one shop orders, both do, because the tour of the lorry is paid
anyway. Their constants are the best of 120 random ones on training scenarios.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jax import Array

from supply_chain.environment import LARGEST_LEVELS
from supply_chain.simulator import CAPACITY, KNOWN_DAYS, LEAD_TIMES

# In units: the base stock and the reorder point of each facility.
BASE_STOCK = (225.0, 49.0, 33.0)
REORDER_POINT = (120.0, 31.0, 20.5)
# In days of expected demand.
BASE_COVER = (9.6, 2.45, 2.45)
REORDER_COVER = (5.0, 2.1, 2.1)


def base_stock(observation: dict[str, Array]) -> Array:
    """Orders up to a base stock in units, as a planner without forecasts does.

    Args:
      observation: of `supply_chain.environment`, ``[B, ...]``.

    Returns:
      The action ``levels``, ``[B, facilities]`` in [-1, 1].
    """
    ends = list(itertools.accumulate(LEAD_TIMES))
    roads = jnp.split(observation["on_the_road"], ends[:-1], axis=-1)
    on_the_road = jnp.stack([road.sum(axis=-1) for road in roads], axis=-1)
    held = (observation["stock"] + on_the_road) * jnp.asarray(CAPACITY)
    position = jnp.concatenate([held.sum(axis=-1, keepdims=True), held[:, 1:]], axis=-1)
    return 2.0 * _order(position, REORDER_POINT, BASE_STOCK) / jnp.asarray(LARGEST_LEVELS) - 1.0


def forecast_stock(observation: dict[str, Array]) -> Array:
    """Orders up to a number of days of expected demand, as a planner with forecasts does.

    So it prepares for weekends and for announced promotions.

    Args:
      observation: of `supply_chain.environment`, ``[B, ...]``.

    Returns:
      The action ``cover``, ``[B, facilities]`` in [-1, 1].
    """
    days = observation["cover"] * KNOWN_DAYS
    return 2.0 * _order(days, REORDER_COVER, BASE_COVER) / KNOWN_DAYS - 1.0


def _order(held: Array, below: tuple[float, ...], up_to: tuple[float, ...]) -> Array:
    """Returns the target of each facility, 0 for those that do not order, ``[B, facilities]``."""
    low = held < jnp.asarray(below)
    tour = low[:, 1:].any(axis=-1, keepdims=True)
    orders = jnp.concatenate([low[:, :1], tour, tour], axis=-1)
    return jnp.where(orders, jnp.asarray(up_to), 0.0)
