"""Action values, plain or duelling, and distributions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.checks import WrongKindError
from rlstack.configs.network import NetworkConfig
from rlstack.networks.base import Network
from rlstack.networks.configured import features_of, feed_forward_of, head_of, recurrent_of
from rlstack.networks.layers.dense import activation_of
from rlstack.networks.layers.linear import linear
from rlstack.networks.torsos import Reader
from rlstack.types import Array, PyTree

# What networks of action values do not have.
_UNUSED = ("shared", "critic", "policy_log_std", "entities")
_OF_CRITICS = ("critic_observation", "critic_input")


def q_network(
    obs_spec: PyTree,
    action_spec: specs.DiscreteArray,
    cfg: NetworkConfig | None = None,
    reader: Reader = "policy",
) -> Network:
    """Builds a network that returns the action values, ``[B, A]``.

    With ``cfg.duelling``, they are a state value plus advantages, which have mean 0 over actions
    (Wang et al. 2016, equation 9, arXiv:1511.06581).

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      action_spec: one discrete action.
      cfg: the torso and the optional recurrent core.
      reader: which entries it sees: those of a policy, or those of a policy's critic.

    Raises:
      WrongKindError: the action is not a single discrete one.
    """
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("q_network", action_spec)
    _check_unused("a network of action values", cfg, reader, "num_atoms", "num_cosines")

    def decode(features: jax.Array) -> jax.Array:
        return _heads(cfg, num_actions, 1, features)[..., 0]

    return _encoded(obs_spec, cfg, decode, reader)


def q_network_without_noise(
    obs_spec: PyTree, action_spec: specs.DiscreteArray, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a `q_network` for agents that explore by epsilon, and give it no key for noise.

    Raises:
      ValueError: the config asks for noisy layers.
    """
    if cfg and cfg.noisy_sigma:
        raise ValueError(
            "NetworkConfig: noisy_sigma must be 0 for this agent, which explores by epsilon; got "
            f"{cfg.noisy_sigma}. Use the agent's options of epsilon, or an agent such as dqn."
        )
    return q_network(obs_spec, action_spec, cfg)


def distributional_q_network(
    obs_spec: PyTree,
    action_spec: specs.DiscreteArray,
    cfg: NetworkConfig | None = None,
    reader: Reader = "policy",
) -> Network:
    """Builds a network that returns ``cfg.num_atoms`` numbers per action, ``[B, A, N]``.

    The agent interprets them as logits of atoms or as values at quantiles. Arguments and errors are
    those of `q_network`.
    """
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("distributional_q_network", action_spec)
    _check_unused("a network of distributions", cfg, reader, "num_cosines")

    def decode(features: jax.Array) -> jax.Array:
        return _heads(cfg, num_actions, cfg.num_atoms, features)

    return _encoded(obs_spec, cfg, decode, reader)


class AtFractions(NamedTuple):
    """The observation of an implicit network."""

    observation: PyTree  # [B, ...]
    fractions: Array  # [B, N] float32 in [0, 1], of the requested quantiles


def implicit_q_network(
    obs_spec: PyTree, action_spec: specs.DiscreteArray, cfg: NetworkConfig | None = None
) -> Network:
    """Builds a network from `AtFractions` to the quantiles of each action's value, ``[B, A, N]``.

    Dabney et al. (2018), https://arxiv.org/abs/1806.06923, section 3.1 and equation 4: the torso's
    output is multiplied by a cosine embedding of the fraction; one more layer of that size and the
    head follow.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation, without fractions.
      action_spec: one discrete action.
      cfg: the torso; recurrent cores are not supported.

    Raises:
      WrongKindError: the action is not a single discrete one.
      ValueError: cfg has a recurrent core.
    """
    cfg = cfg or NetworkConfig(activation="relu")
    num_actions = count_actions("implicit_q_network", action_spec)
    _check_unused("an implicit network", cfg, "policy", "num_atoms")
    if cfg.core != "none":
        raise ValueError(
            f"implicit_q_network: the network must be feed-forward; got core={cfg.core!r}. "
            "Use --network.core none."
        )
    size, activation = cfg.hidden_sizes[-1], activation_of(cfg.activation)
    gain = hk.initializers.Orthogonal(np.sqrt(2))

    def forward(inputs: AtFractions, is_training: bool) -> jax.Array:
        features = features_of(cfg, obs_spec, inputs.observation, "torso", is_training)[:, None]
        angles = np.pi * jnp.arange(cfg.num_cosines) * inputs.fractions[..., None]
        embed = linear(size, noise=cfg.noisy_sigma, name="fraction_embedding")
        embedding = jax.nn.relu(embed(jnp.cos(angles)))
        mix = linear(size, noise=cfg.noisy_sigma, w_init=gain, name="quantile_layer")
        quantiles = _heads(cfg, num_actions, 1, activation(mix(features * embedding)))
        return jnp.moveaxis(quantiles[..., 0], 1, -1)

    return feed_forward_of(cfg, forward, AtFractions(obs_spec, specs.Array((1,), np.float32)))


def count_actions(where: str, action_spec: specs.Array) -> int:
    """Returns the number of actions.

    Raises:
      WrongKindError: the spec is not one discrete choice.
    """
    if not isinstance(action_spec, specs.DiscreteArray):
        raise WrongKindError(
            f"{where}: the action must be one discrete choice; got {action_spec}. Use an agent "
            "with a policy, such as ppo, for continuous and structured actions."
        )
    return int(np.asarray(action_spec.num_values))


def _check_unused(what: str, cfg: NetworkConfig, reader: Reader, *more: str) -> None:
    """Raises a ValueError if the network would ignore an option."""
    cfg.require_unused(what, *_UNUSED, *more, *(_OF_CRITICS if reader == "policy" else ()))


def _encoded(
    obs_spec: PyTree,
    cfg: NetworkConfig,
    decode: Callable[[jax.Array], jax.Array],
    reader: Reader,
) -> Network:
    """Builds a network from the configured torso, the optional core, and ``decode``."""

    def encode(observation: PyTree, is_training: bool) -> jax.Array:
        return features_of(cfg, obs_spec, observation, "torso", is_training, reader)

    if cfg.core != "none":
        return recurrent_of(cfg, encode, decode, obs_spec)

    def forward(observation: PyTree, is_training: bool) -> jax.Array:
        return decode(encode(observation, is_training))

    return feed_forward_of(cfg, forward, obs_spec)


def _heads(cfg: NetworkConfig, num_actions: int, num_atoms: int, features: jax.Array) -> jax.Array:
    """Maps features ``[..., D]`` to ``[..., num_actions, num_atoms]``, plain or duelling.

    Duelling applies to each atom separately (Hessel et al. 2018, arXiv:1710.02298, section 3).
    """

    def head(num_rows: int, name: str) -> jax.Array:
        outputs = head_of(cfg, num_rows * num_atoms, 1.0, name)(features)
        return outputs.reshape((*features.shape[:-1], num_rows, num_atoms))

    of_actions = head(num_actions, "value_head")
    if not cfg.duelling:
        return of_actions
    advantages = of_actions - of_actions.mean(axis=-2, keepdims=True)
    return head(1, "state_value_head") + advantages
