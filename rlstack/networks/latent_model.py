"""A model of the environment that is learned for planning: states, rewards, policies and values.

Its three functions are those of MuZero, Schrittwieser et al. (2020), arXiv:1911.08265.
"""

from __future__ import annotations

import dataclasses
import functools
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
from rlstack.networks.configured import features_of, head_of, torso_of
from rlstack.networks.precision import in_precision
from rlstack.networks.q_network import count_actions
from rlstack.types import Array, Params, PRNGKey, PyTree


class Predictions(NamedTuple):
    """What a model predicts of a latent state."""

    policy: jax.Array  # [B, A], logits, or [B, 2 D], the parameters of continuous actions
    value: jax.Array  # [B, N], logits of atoms


class LearnedModel(NamedTuple):
    """Pure functions of explicit params; a latent state is float32 ``[B, D]`` in [0, 1]."""

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
    """Builds a model with dense latent states of the size ``cfg.hidden_sizes[-1]``.

    The configured torso reads the observation. Two dense torsos of the same sizes follow an action
    and predict policy and value. Each latent state is scaled to [0, 1], by its smallest and largest
    entry (paper, appendix G).

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one discrete action, or a continuous one.
      cfg: the torso, its sizes and the number of atoms of rewards and values.

    Raises:
      WrongKindError: the action is not a single one.
      ValueError: cfg has a recurrent core, noisy layers, batch norm, dropout or spectral norm.
    """
    cfg = cfg or NetworkConfig(hidden_sizes=(128, 128), activation="relu", norm="layer")
    is_continuous = np.issubdtype(getattr(action_spec, "dtype", int), np.floating)
    if not is_continuous:
        count_actions("learned_model", action_spec)
    dense = dense_like(cfg, "a learned model")
    size, atoms, width = cfg.hidden_sizes[-1], cfg.num_atoms, num_parameters(action_spec)
    precise = functools.partial(in_precision, cfg.dtype)

    def represent(observation: PyTree) -> jax.Array:
        features = features_of(cfg, obs_spec, observation, "representation")
        return scaled(head_of(dense, size, 1.0, "first_state")(features))

    def step(state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array]:
        taken = action if is_continuous else jax.nn.one_hot(action, width)
        inputs = jnp.concatenate([state, taken], axis=-1)
        features = torso_of(dense, "dynamics")(inputs)
        # The difference to the state: most actions change little.
        after = state + head_of(dense, size, 1.0, "next_state")(features)
        return scaled(after), head_of(dense, atoms, 0.01, "reward_head")(features)

    def predict(state: jax.Array) -> Predictions:
        features = torso_of(dense, "prediction")(state)
        policy = head_of(dense, width, 0.01, "policy_head")(features)
        return Predictions(policy, head_of(dense, atoms, 0.01, "value_head")(features))

    def build() -> tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]:
        functions = precise(represent), precise(step), precise(predict)

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
    """Returns states ``[B, D]`` moved and stretched so that each reaches from 0 to 1."""
    least, most = (f(state, axis=-1, keepdims=True) for f in (jnp.min, jnp.max))
    return (state - least) / jnp.maximum(most - least, 1e-5)
