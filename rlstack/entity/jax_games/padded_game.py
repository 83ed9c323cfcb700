"""What the games in JAX share: the specs of the game in Python, and observations that fit them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlstack.entity.environment import Environment
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import GLOBAL
from rlstack.types import Array, PyTree


class PaddedGame:
    """The specs of a game, and its padded observations; see `rlstack.entity.padded`."""

    def __init__(self, game: Environment) -> None:
        """Computes the specs; ``game`` is the same game in Python."""
        self._codec = PaddedCodec(game.obs_space, game.action_space, type(game).__name__)
        self._capacities = {t: kind.capacity for t, kind in game.obs_space.entities.items()}

    def observation_spec(self) -> PyTree:
        """Returns the specs of the padded arrays."""
        return self._codec.observation_spec

    def action_spec(self) -> PyTree:
        """Returns the specs of the choices by action type, int32 ``[capacity]``."""
        return self._codec.action_spec

    def observe(
        self,
        count: Mapping[str, Array | int],
        actors: Mapping[str, str],
        *,
        features: Mapping[str, Array] | None = None,
        global_features: Array | None = None,
        masks: Mapping[str, Array] | None = None,
    ) -> PyTree:
        """Returns a padded observation, in which all entities are visible.

        Args:
          count: the number of entities, by type.
          actors: the entity type whose entities all act, by action type.
          features: ``[capacity, features]`` by type, for types with features. Rows after the count
            may have any values.
          global_features: ``[global features]``, if the game has some.
          masks: bool ``[capacity, choices]`` by action type; without one every choice is legal.
        """
        present = {t: np.arange(n) < count[t] for t, n in self._capacities.items()}
        arrays: dict[str, Any] = {
            name: jnp.where(jnp.asarray(present[name])[:, None], rows, 0.0).astype(jnp.float32)
            for name, rows in (features or {}).items()
        }
        if global_features is not None:
            arrays[GLOBAL] = global_features[None].astype(jnp.float32)
        slots, legal = {}, {}
        for action, kind in actors.items():
            acting = present[kind]
            first = self._codec.slots.offsets[kind]
            slots[action] = jnp.where(acting, first + np.arange(len(acting)), -1).astype(jnp.int32)
            choices = self._codec.action_spec[action].maximum + 1
            mask = (masks or {}).get(action, jnp.ones((len(acting), choices), bool))
            # Without an actor only choice 0 is legal.
            mask = jnp.where(jnp.asarray(acting)[:, None], mask, np.arange(choices) == 0)
            legal[action] = mask.reshape(-1)
        return {
            "features": arrays,
            "count": {t: jnp.asarray(n, jnp.int32) for t, n in count.items()},
            "visible": {t: jnp.asarray(here) for t, here in present.items()},
            "actors": slots,
            "action_mask": legal,
        }
