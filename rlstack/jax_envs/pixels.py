"""CartPole of gymnax seen as images, for agents that learn from pixels without an emulator."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.jax_envs.environment import Outcome
from rlstack.jax_envs.factory import make_jax_env
from rlstack.types import Array, PRNGKey, PyTree


class PixelState(NamedTuple):
    """The state of the task and what was seen of it."""

    env: PyTree
    image: Array  # [H, W] float32 in [0, 1], of the newest step


class CartPole:
    """gymnax's CartPole-v1, whose observation is the newest image and the one before it.

    An image has a row of the cart and the pole above it, with edges that are smooth, so the two
    images show velocities too. With a single image, agents need memory. Rewards and ends are those
    of CartPole-v1.
    """

    def __init__(self, height: int = 12, width: int = 24, images: int = 2, **options: Any) -> None:
        """Makes the task with 1 or 2 images in an observation; ``options`` are gymnax's.

        Raises:
          ValueError: an image is too small, there are others, or as `make_jax_env`.
        """
        if height < 4 or width < 8 or images not in (1, 2):
            raise ValueError(
                "CartPole: height must be at least 4, width at least 8, and images 1 or 2; got "
                f"{height}, {width} and {images}."
            )
        self._env: Any = make_jax_env("CartPole-v1", options)
        self._height, self._width, self._images = height, width, images

    def observation_spec(self) -> specs.BoundedArray:
        """Returns the spec of the images, the newest one first."""
        shape = self._height, self._width, self._images
        return specs.BoundedArray(shape, np.uint8, 0, 255, "images")

    def action_spec(self) -> specs.DiscreteArray:
        """Returns the spec of the two forces."""
        spec: specs.DiscreteArray = self._env.action_spec()
        return spec

    def reset(self, rng_key: PRNGKey) -> tuple[PixelState, Array]:
        """Starts an episode, with the same image twice."""
        env, seen = self._env.reset(rng_key)
        state = PixelState(env, self._image(seen))
        return state, self._observe(state.image, state.image)

    def step(self, rng_key: PRNGKey, state: PixelState, action: Array) -> Outcome:
        """Pushes the cart."""
        outcome: Outcome = self._env.step(rng_key, state.env, action)
        image = self._image(outcome.observation)
        seen = self._observe(image, state.image)
        return outcome._replace(state=PixelState(outcome.state, image), observation=seen)

    def _image(self, seen: Array) -> Array:
        """Draws a state (position, velocity, angle, angular velocity)."""
        place, _, angle, _ = seen
        above = jnp.arange(self._height)[::-1, None] * 1.0  # pixels above the cart
        cart = (place / 4.8 + 0.5) * (self._width - 1)
        distance = jnp.abs(jnp.arange(self._width) - cart - above * jnp.tan(angle))
        return jnp.clip(jnp.where(above == 0, 2.5, 1.0) - distance, 0.0, 1.0)

    def _observe(self, newest: Array, before: Array) -> Array:
        images = jnp.stack([newest, before], axis=-1)[..., : self._images]
        return (255 * images).astype(jnp.uint8)
