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
from jax import Array

from rlstack.configs.entities import RaggedTransformerConfig
from rlstack.networks.base import ActorCriticOutput, Network, feed_forward
from rlstack.networks.ragged import heads, packed_rows
from rlstack.networks.ragged.blocks import Blocks, TokenRows
from rlstack.networks.ragged.embedding import Embedding
from rlstack.networks.ragged.entity_layout import (
    EntityLayout,
    leading_shape,
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
        logits = heads.policy_logits(layout, cfg.d_qk, tokens, observation)
        if cfg.separate_value:
            tokens = _tokens(layout, cfg, observation, "value_torso")
        return ActorCriticOutput(logits, heads.value(tokens, present(layout, observation)))

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
        return heads.policy_logits(layout, cfg.d_qk, tokens, observation)

    return _network(layout, cfg, obs_spec, forward)


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
