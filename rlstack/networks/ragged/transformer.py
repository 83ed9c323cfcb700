"""A transformer over the entities of a step, after RogueNet.

Winter (2023), https://clemenswinter.com/2023/04/14/entity-based-reinforcement-learning/, and the
code it describes. A layer per type embeds each entity as a token. Blocks let the tokens of one
environment attend to each other; there is no layer norm after the last block. The tokens of the
acting entities give the logits, and the mean of all tokens gives the value. Differences from
RogueNet: some types may lack a feature that others have; statistics of observations are frozen
during learning and evaluation (`rlstack.families.normalised`); see also
`rlstack.networks.ragged.relative_positions`.

Attention runs on rows of tokens. Without packing, a row is an environment, padded to all its slots.
With a packing in the observation (`rlstack.networks.ragged.packed_rows`), short environments share
rows, which saves padding; the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rlstack.configs.entities import RaggedTransformerConfig
from rlstack.networks.base import ActorCriticOutput, Network, feed_forward
from rlstack.networks.layers.linear import Linear
from rlstack.networks.ragged import packed_rows
from rlstack.networks.ragged.blocks import Blocks, TokenRows, layer_norm
from rlstack.networks.ragged.entity_layout import (
    GLOBAL,
    SELECT_ENTITY,
    EntityAction,
    EntityLayout,
    leading_shape,
    module_names,
    present,
    read_layout,
    token_types,
    visible,
)
from rlstack.networks.ragged.relative_positions import PairCodes, RelativePositions
from rlstack.networks.ragged.translation import POSES, standardiser, translated
from rlstack.types import PyTree


def ragged_transformer(
    obs_spec: PyTree, action_spec: PyTree, cfg: RaggedTransformerConfig | None = None
) -> Network:
    """Builds a policy and a value over entities; its output is an `ActorCriticOutput`.

    The policy's parameters are the logits of all actions in the order of ``jax.tree.leaves``,
    ``[B, sum of capacity * choices]``, before the observation's ``action_mask`` is applied. The
    modules are named ``torso`` (or ``policy_torso`` and ``value_torso``), ``policy_head_ACTION``
    and ``value_head``.

    Args:
      obs_spec: the observation spec of an entity environment, see `entity_layout`.
      action_spec: dict of ``dm_env.specs``, one per action.
      cfg: the config of the transformer; None takes the defaults.

    Raises:
      ValueError: the specs are not those of an entity environment, or cfg names a type or feature
        that the environment lacks.
    """
    cfg = cfg or RaggedTransformerConfig()
    layout = read_layout(obs_spec, action_spec)

    def forward(observation: PyTree) -> ActorCriticOutput:
        observation = translated(layout, cfg, observation)
        name = "policy_torso" if cfg.separate_value else "torso"
        tokens = _tokens(layout, cfg, observation, name)
        logits = policy_logits(layout, cfg.d_qk, tokens, observation)
        if cfg.separate_value:
            tokens = _tokens(layout, cfg, observation, "value_torso")
        return ActorCriticOutput(logits, mean_value(tokens, present(layout, observation)))

    return _network(layout, cfg, obs_spec, forward)


def ragged_policy(
    obs_spec: PyTree, action_spec: PyTree, cfg: RaggedTransformerConfig | None = None
) -> Network:
    """Builds the policy without the value; its output is the logits of all actions.

    Arguments and errors are those of `ragged_transformer`.
    """
    cfg = cfg or RaggedTransformerConfig()
    layout = read_layout(obs_spec, action_spec)

    def forward(observation: PyTree) -> Array:
        observation = translated(layout, cfg, observation)
        tokens = _tokens(layout, cfg, observation, "torso")
        return policy_logits(layout, cfg.d_qk, tokens, observation)

    return _network(layout, cfg, obs_spec, forward)


class Embedding(hk.Module):
    """A dense layer, ReLU and layer norm per type; a type without features is a learned vector.

    The global features are concatenated to the features of every entity.
    """

    def __init__(self, layout: EntityLayout, d_model: int) -> None:
        """Makes the module; ``d_model`` is the width of a token."""
        super().__init__(name="embedding")
        self._layout, self._d_model = layout, d_model

    def __call__(self, observation: PyTree) -> Array:
        """Returns the tokens of all slots, including empty ones, ``[B, E, D]``."""
        features = observation["features"]
        (batch,) = leading_shape(observation)
        shared = features.get(GLOBAL)
        names = module_names([kind.name for kind in self._layout.types])
        parts = []
        for kind in self._layout.types:
            found = [features[kind.name]] if kind.features else []
            if shared is not None and kind.name != GLOBAL:
                found.append(jnp.broadcast_to(shared, (batch, kind.capacity, shared.shape[-1])))
            if found:
                parts.append(self._embedded(names[kind.name], jnp.concatenate(found, axis=-1)))
            else:
                init = hk.initializers.RandomNormal()
                name = f"{names[kind.name]}_vector"
                vector = hk.get_parameter(name, (self._d_model,), init=init)
                parts.append(jnp.broadcast_to(vector, (batch, kind.capacity, self._d_model)))
        return jnp.concatenate(parts, axis=1)

    def _embedded(self, name: str, x: Array) -> Array:
        # Biases are random, because with zero biases the norm reduces a single feature to its sign.
        bound = 1 / np.sqrt(x.shape[-1])
        init = hk.initializers.RandomUniform(-bound, bound)
        layer = Linear(self._d_model, init, f"{name}_linear", b_init=init)
        return layer_norm(f"{name}_norm")(jax.nn.relu(layer(x)))


def policy_logits(layout: EntityLayout, d_qk: int, tokens: Array, observation: PyTree) -> Array:
    """Returns the logits of all actions, ``[B, sum of capacity * choices]``, unmasked.

    Args:
      layout: the layout of the observation and the actions.
      d_qk: width of queries and keys of actions that select entities.
      tokens: ``[B, E, D]``, by slot.
      observation: an observation with the slots of the actors; the logits of missing actors are
        undefined.
    """
    names = module_names([action.name for action in layout.actions])
    parts = []
    for action in layout.actions:
        name = f"policy_head_{names[action.name]}"
        slots = observation["actors"][action.name]
        # A product with one-hot rows: the gradient of an indexed read is a scatter, which is slow.
        chosen = slots[..., None] == jnp.arange(tokens.shape[1])
        actors = chosen.astype(tokens.dtype) @ tokens  # [B, A, D]
        logits = (
            _select(layout, name, d_qk, actors, tokens)
            if action.kind == SELECT_ENTITY
            else _categorical(action, name, actors)
        )
        parts.append(logits.reshape((logits.shape[0], -1)))
    return jnp.concatenate(parts, axis=-1)


def mean_value(tokens: Array, filled: Array) -> Array:
    """Returns the value ``[B]``, initially 0: linear in the mean of all tokens, also hidden ones.

    Args:
      tokens: ``[B, E, D]``.
      filled: bool ``[B, E]``, which slots hold an entity.
    """
    weights = filled / jnp.maximum(filled.sum(-1, keepdims=True), 1)
    mean = jnp.einsum("be,bed->bd", weights, tokens)
    return Linear(1, w_init=jnp.zeros, name="value_head")(mean)[..., 0]


def _network(
    layout: EntityLayout,
    cfg: RaggedTransformerConfig,
    obs_spec: PyTree,
    forward: Callable[[PyTree], PyTree],
) -> Network:
    return feed_forward(forward, obs_spec)._replace(
        standardiser=standardiser(layout, cfg, obs_spec),
        lay_out=lambda observation: packed_rows.with_packing(layout, cfg.packing, observation),
    )


def _tokens(
    layout: EntityLayout, cfg: RaggedTransformerConfig, observation: PyTree, name: str
) -> Array:
    """Returns the tokens after the last block, ``[B, E, D]``, by slot."""
    with hk.name_scope(name):
        table = Embedding(layout, cfg.d_model)(observation)
        return packed_rows.in_rows(
            lambda x, rows, extra: _blocks(layout, cfg, x, rows, extra),
            table,
            _rows(layout, observation),
            (
                observation[POSES],
                jnp.broadcast_to(jnp.asarray(token_types(layout)), table.shape[:2]),
            ),
            observation.get(packed_rows.PACKING),
        )


def _rows(layout: EntityLayout, observation: PyTree) -> TokenRows:
    (batch,) = leading_shape(observation)
    environment = jnp.where(present(layout, observation), jnp.arange(batch)[:, None], -1)
    return TokenRows(environment, visible(layout, observation))


def _blocks(
    layout: EntityLayout,
    cfg: RaggedTransformerConfig,
    x: Array,
    rows: TokenRows,
    extra: tuple[PyTree, Array],
) -> Array:
    poses, types = extra
    codes = PairCodes(None, None)
    if jax.tree.leaves(poses) and cfg.pooling == "none" and cfg.num_layers:
        size = cfg.d_model // cfg.num_heads
        make = RelativePositions(cfg.relative_positions, size, len(layout.types))
        codes = make(poses, types, x)
    return Blocks(cfg)(x, rows, codes)


def _categorical(action: EntityAction, name: str, actors: Array) -> Array:
    """Returns logits ``[B, A, choices]``, initially near zero: the first policy is near uniform."""
    init = hk.initializers.Orthogonal(0.01)
    return Linear(action.num_choices, w_init=init, name=name)(actors)


def _select(layout: EntityLayout, name: str, d_qk: int, actors: Array, tokens: Array) -> Array:
    """Returns logits ``[B, A, slots]``: products of the actor's query and each entity's key."""
    init = hk.initializers.VarianceScaling(1 / 3, "fan_in", "uniform")
    query = Linear(d_qk, w_init=init, name=f"{name}_query")(actors)
    key = Linear(d_qk, w_init=init, name=f"{name}_key")(tokens)
    logits = jnp.einsum("bad,bed->bae", query, key) / np.sqrt(d_qk)
    # A `GLOBAL` that never acts has a slot but no token; the action mask excludes it.
    missing = layout.num_slots - tokens.shape[1]
    return jnp.pad(logits, ((0, 0), (0, 0), (0, missing)))
