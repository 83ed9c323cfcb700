"""A learned model of continuous control: states, rewards, and a policy and critic that see states.

Its parts are those of TD-MPC2, Hansen et al. (2024), arXiv:2310.16828, section 3.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.configs.network import NetworkConfig
from rlstack.networks.base import dummy_timestep
from rlstack.networks.configured import features_of, head_of, torso_of
from rlstack.networks.latent_model import dense_like
from rlstack.networks.policy_and_critic import PolicyAndCritic, policy_and_distributional_critic
from rlstack.networks.precision import in_precision
from rlstack.types import Array, Params, PRNGKey, PyTree

GROUP = 8  # numbers of a latent state that sum to 1 (paper, appendix H)


class LatentControl(NamedTuple):
    """Pure functions of explicit params; a latent state is float32 ``[..., D]`` in [0, 1]."""

    init: Callable[[PRNGKey], Params]  # params of the next two
    # (params, observation [B, ...]) -> latent state [B, D]
    represent: Callable[[Params, PyTree], jax.Array]
    # (params, latent state [B, D], action [B, A] in [-1, 1]) -> the next state, logits of the
    # reward [B, N]
    step: Callable[[Params, Array, Array], tuple[jax.Array, jax.Array]]
    heads: PolicyAndCritic  # their observations are latent states


def latent_control(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> LatentControl:
    """Builds a model with dense latent states of the size ``cfg.hidden_sizes[-1]``.

    The configured torso reads the observation, and a layer with layer norm gives the latent state.
    Dense torsos of the same sizes follow an action, and are policy and critic. Each eight numbers
    of a latent state are a softmax. ``cfg.num_atoms`` is the number of atoms of rewards and values.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one continuous action.
      cfg: the torso, its sizes and the number of atoms.

    Raises:
      ValueError: cfg has a recurrent core, noisy layers, batch norm, dropout or spectral norm, or
        a size of states that is not a multiple of 8.
    """
    cfg = cfg or NetworkConfig(hidden_sizes=(256, 256), activation="mish", norm="layer")
    size = cfg.hidden_sizes[-1]
    cfg.require("hidden_sizes", size % GROUP == 0, f"multiples of {GROUP} in the last place")
    dense = dense_like(cfg, "a model for control")
    precise = functools.partial(in_precision, cfg.dtype)

    def latent(features: jax.Array, name: str) -> jax.Array:
        norm = hk.LayerNorm(-1, create_scale=True, create_offset=True, name=f"{name}_norm")
        return in_groups(norm(head_of(dense, size, 1.0, name)(features)))

    def represent(observation: PyTree) -> jax.Array:
        return latent(features_of(cfg, obs_spec, observation, "encoder"), "encoder_state")

    def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        inputs = jnp.concatenate([state, action], axis=-1)
        after = latent(torso_of(dense, "dynamics")(inputs), "next_state")
        reward = head_of(dense, cfg.num_atoms, 0.01, "reward_head")
        return after, reward(torso_of(dense, "reward")(inputs))

    def build() -> tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]:
        functions = precise(represent), precise(step)

        def every(observation: PyTree) -> jax.Array:
            state = functions[0](observation)
            return functions[1](state, jnp.zeros((len(state), *action_spec.shape)))[0]

        return every, functions

    init, (represented, stepped) = hk.multi_transform(build)
    latent_spec = specs.Array((size,), np.float32)
    return LatentControl(
        lambda rng_key: init(rng_key, dummy_timestep(obs_spec).observation),
        lambda params, observation: represented(params, None, observation),
        lambda params, state, action: stepped(params, None, state, action),
        policy_and_distributional_critic(latent_spec, action_spec, dense),
    )


def in_groups(x: jax.Array) -> jax.Array:
    """Returns ``[..., D]`` float32: softmax of each eight numbers (SimNorm: paper, equation 5)."""
    groups = x.reshape((*x.shape[:-1], -1, GROUP)).astype(jnp.float32)
    return jax.nn.softmax(groups).reshape(x.shape)
