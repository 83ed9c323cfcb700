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
from rlstack.networks.configured import block_of, convolutions_of, features_of, head_of, torso_of
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.dense import normalised
from rlstack.networks.precision import in_precision
from rlstack.networks.q_network import count_actions
from rlstack.networks.torsos import entries_for, observation_features
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
    """Builds a model whose latent states are vectors or images.

    The configured torso reads the observation. If it has convolutions, and the observation is one
    image, they give the latent states, ``[B, H, W, C]``; two more convolutions, of 3 x 3 pixels,
    find the change that an action makes. Other latent states are vectors of the size
    ``cfg.hidden_sizes[-1]``, and a dense torso finds the change. Dense torsos of the same sizes
    predict reward, policy and value. Each latent state is scaled to [0, 1], by its smallest and
    largest entry (paper, appendix G).

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one discrete action, or a continuous one.
      cfg: the torso, its sizes and the number of atoms of rewards and values.

    Raises:
      WrongKindError: the action is not a single one.
      ValueError: cfg has a recurrent core, noisy layers, batch norm, dropout or spectral norm.
    """
    cfg = cfg or NetworkConfig(hidden_sizes=(128, 128), activation="relu", norm="layer")
    if not _is_continuous(action_spec):
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
    has_images = cfg.torso not in DENSE_TORSOS and _is_image(obs_spec)

    def represent(observation: PyTree) -> jax.Array:
        if has_images:
            return scaled(_image_of(cfg, obs_spec, observation))
        features = features_of(cfg, obs_spec, observation, "representation")
        return scaled(head_of(dense, size, 1.0, "first_state")(features))

    def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        # The next state is the sum of the state and its change: most actions change little.
        taken = action if _is_continuous(action_spec) else jax.nn.one_hot(action, width)
        if has_images:
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


def _is_continuous(action_spec: specs.Array) -> bool:
    return bool(np.issubdtype(getattr(action_spec, "dtype", int), np.floating))


def _is_image(obs_spec: PyTree) -> bool:
    """Returns whether a policy sees one image and nothing else."""
    leaves = jax.tree.leaves(entries_for("policy", obs_spec))
    return len(leaves) == 1 and len(leaves[0].shape) == 3


def _image_of(cfg: NetworkConfig, obs_spec: PyTree, observation: PyTree) -> jax.Array:
    """Returns the image ``[B, H, W, C]`` that convolutions make of an observation."""
    image = observation_features(obs_spec, observation, cfg.scale_pixels, image_axes=cfg.image_axes)
    return convolutions_of(cfg, "representation")(image)


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
