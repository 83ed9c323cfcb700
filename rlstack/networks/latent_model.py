"""A model of the environment that is learned for planning: states, rewards, policies and values.

Its three functions are those of MuZero, Schrittwieser et al. (2020), arXiv:1911.08265.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.configs.network import DENSE_TORSOS, NetworkConfig
from rlstack.distributions import num_parameters
from rlstack.networks.base import dummy_timestep
from rlstack.networks.configured import block_of, features_of, head_of, torso_of
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.dense import normalised
from rlstack.networks.precision import in_precision
from rlstack.networks.q_network import count_actions
from rlstack.networks.torsos import is_image_batch
from rlstack.types import Array, Params, PRNGKey, PyTree


class Predictions(NamedTuple):
    """What a model predicts of a latent state."""

    policy: jax.Array  # [B, A], logits, or [B, 2 D], the parameters of continuous actions
    value: jax.Array  # [B, N], logits of atoms


class LearnedModel(NamedTuple):
    """Pure functions of explicit params; a latent state is float32 ``[B, ...]`` in [0, 1]."""

    init: Callable[[PRNGKey], Params]
    # (params, observation [B, ...]) -> latent state
    represent: Callable[[Params, PyTree], jax.Array]
    # (params, latent state, action [B], or [B, D] in [-1, 1]) -> the next latent state, logits of
    # the reward [B, N]
    step: Callable[[Params, Array, Array], tuple[jax.Array, jax.Array]]
    predict: Callable[[Params, Array], Predictions]  # (params, latent state) -> predictions


def learned_model(
    obs_spec: PyTree, action_spec: specs.Array, cfg: NetworkConfig | None = None
) -> LearnedModel:
    """Builds a learned model; its latent states are images or vectors.

    They are images ``[B, H, W, C]`` if the observation is one image and the configured torso has
    convolutions: the output of these. Two convolutions of 3 x 3 pixels then predict how an action
    changes the state. Otherwise the states are vectors of the size ``cfg.hidden_sizes[-1]``, and a
    dense torso predicts the change. Dense torsos of the configured sizes predict reward, policy and
    value. Each latent state is scaled to [0, 1], by its smallest and largest entry (paper, appendix
    G).

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one discrete action, or a continuous one.
      cfg: the torso, its sizes and the number of atoms of rewards and values.

    Raises:
      WrongKindError: the action is not a single one.
      ValueError: cfg has a recurrent core, noisy layers, batch norm, dropout or spectral norm.
    """
    cfg = cfg or NetworkConfig(hidden_sizes=(128, 128), activation="relu", norm="layer")
    if not np.issubdtype(getattr(action_spec, "dtype", int), np.floating):
        count_actions("learned_model", action_spec)
    dense = dense_like(cfg, "a learned model")

    def build() -> tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]:
        functions = _functions(cfg, dense, obs_spec, action_spec)

        def every(observation: PyTree) -> Predictions:
            state = functions[0](observation)
            action = jnp.zeros((len(state), *action_spec.shape), action_spec.dtype)
            return functions[2](functions[1](state, action)[0])

        return every, functions

    init, (represented, stepped, predicted) = hk.multi_transform(build)
    return LearnedModel(
        lambda rng_key: init(rng_key, dummy_timestep(obs_spec).observation),
        lambda params, observation: represented(params, None, observation),
        lambda params, state, action: stepped(params, None, state, action),
        lambda params, state: predicted(params, None, state),
    )


def _functions(
    cfg: NetworkConfig, dense: NetworkConfig, obs_spec: PyTree, action_spec: specs.Array
) -> tuple[Callable[..., Any], ...]:
    """Returns the functions of a `LearnedModel` without params, for a Haiku transform."""
    size, atoms, width = cfg.hidden_sizes[-1], cfg.num_atoms, num_parameters(action_spec)

    def represent(observation: PyTree) -> jax.Array:
        found = features_of(cfg, obs_spec, observation, "representation", keeps_image=True)
        return scaled(
            found if is_image_batch(found) else head_of(dense, size, 1.0, "first_state")(found)
        )

    def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The next state is the sum of the state and its change: most actions change little.
        is_continuous = jnp.issubdtype(action.dtype, jnp.floating)
        taken = action if is_continuous else jax.nn.one_hot(action, width)
        if is_image_batch(state):
            after = state + _change_of_image(cfg, state, taken)
            features = torso_of(dense, "dynamics")(after)
        else:
            features = torso_of(dense, "dynamics")(jnp.concatenate([state, taken], axis=-1))
            after = state + head_of(dense, size, 1.0, "next_state")(features)
        return scaled(after), head_of(dense, atoms, 0.01, "reward_head")(features)

    def predict(state: jax.Array) -> Predictions:
        features = torso_of(dense, "prediction")(state)
        policy = head_of(dense, width, 0.01, "policy_head")(features)
        return Predictions(policy, head_of(dense, atoms, 0.01, "value_head")(features))

    return tuple(in_precision(cfg.dtype, f) for f in (represent, step, predict))


def _change_of_image(cfg: NetworkConfig, state: jax.Array, taken: jax.Array) -> jax.Array:
    """Returns the change ``[B, H, W, C]`` of a latent image by the actions ``[B, A]``."""
    planes = jnp.broadcast_to(taken[:, None, None], (*state.shape[:3], taken.shape[-1]))
    x = Conv2D(state.shape[-1], 3, name="change")(jnp.concatenate([state, planes], axis=-1))
    x = jax.nn.relu(normalised(x, block_of(cfg), is_training=False))
    return Conv2D(state.shape[-1], 3, name="next_state")(x)


def dense_like(cfg: NetworkConfig, where: str) -> NetworkConfig:
    """Returns cfg for the parts of a model that read latent states, with a dense torso.

    Raises:
      ValueError: cfg has options that a model of latent states has not.
    """
    unused = ["core", "shared", "critic", "critic_observation", "critic_input", "duelling"]
    unused += ["noisy_sigma", "num_cosines", "policy_log_std", "dropout", "spectral_norm"]
    cfg.require_unused(where, *unused, "entities")
    cfg.require("norm", not cfg.has_statistics, f"none, layer or rms for {where}")
    return cfg if cfg.torso in DENSE_TORSOS else dataclasses.replace(cfg, torso="mlp")


def scaled(state: jax.Array) -> jax.Array:
    """Returns states ``[B, ...]`` moved and stretched so that each reaches from 0 to 1."""
    state, axes = state.astype(jnp.float32), tuple(range(1, state.ndim))
    least, most = (f(state, axis=axes, keepdims=True) for f in (jnp.min, jnp.max))
    return (state - least) / jnp.maximum(most - least, 1e-5)
