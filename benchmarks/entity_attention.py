"""Environments of very different sizes, and the ragged transformer's work on them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.configs.entities import PackingMode
from rlstack.entity import ActionSpace, Categorical, EntityType, ObsSpace
from rlstack.entity.padded import PaddedCodec
from rlstack.networks import RaggedTransformerConfig
from rlstack.networks.ragged.entity_layout import EntityLayout, lengths
from rlstack.networks.ragged.packed_rows import PACKING, with_packing
from rlstack.networks.ragged.transformer import ragged_transformer
from rlstack.types import EnvSpec, Params, PyTree, StepType, TimeStep


def skewed(num_envs: int) -> tuple[EnvSpec, Callable[[np.random.Generator], PyTree]]:
    """Returns the spec of environments of very different sizes, and a function of observations."""
    space = ObsSpace({"Unit": EntityType(("x", "y"), 8), "Thing": EntityType(("x", "y"), 120)})
    actions: ActionSpace = {"move": Categorical(("up", "down", "left", "right"), 8)}
    codec = PaddedCodec(space, actions, "skewed")

    def make(rng: np.random.Generator) -> PyTree:
        size = np.clip(np.round(rng.lognormal(2.0, 0.9, num_envs)), 2, 128).astype(np.int32)
        units = np.clip(size // 4, 1, 8).astype(np.int32)
        count = {"Unit": units, "Thing": size - units}
        there = {
            kind: np.arange(space.entities[kind].capacity) < number[:, None]
            for kind, number in count.items()
        }
        features = {
            kind: np.where(rows[..., None], rng.normal(size=(*rows.shape, 2)), 0).astype(np.float32)
            for kind, rows in there.items()
        }
        actors = np.where(there["Unit"], np.arange(8), -1).astype(np.int32)
        return {
            "features": features,
            "count": count,
            "visible": there,
            "actors": {"move": actors},
            "action_mask": {"move": np.ones((num_envs, 8 * 4), bool)},
        }

    return EnvSpec(codec.observation_spec, codec.action_spec), make


def passes(spec: EnvSpec, what: str, batches: list, packing: PackingMode) -> Callable[[], object]:
    """Returns a function that runs the network on these batches: "forward" or its "gradient"."""
    cfg = RaggedTransformerConfig(d_model=64, packing=packing)
    network = ragged_transformer(spec.observation, spec.action, cfg)
    params = network.init(jax.random.PRNGKey(0))
    assert network.lay_out is not None
    zeros = np.zeros(len(batches[0]["actors"]["move"]), np.float32)
    mid = np.full(len(zeros), StepType.MID, np.int32)

    def forward(params: Params, observation: PyTree) -> jax.Array:
        output, _ = network.apply(None, params, TimeStep(mid, zeros, zeros, observation), ())
        return jnp.square(output.policy).mean() + output.value.mean()

    function = jax.jit(forward if what == "forward" else jax.grad(forward))

    def run() -> None:
        for observation in batches:
            assert network.lay_out is not None
            jax.block_until_ready(function(params, network.lay_out(observation)))

    return run


def shares(layout: EntityLayout, batches: list) -> dict[str, float]:
    """Returns the mean shares of entities and of padding in packed rows."""
    found = []
    for observation in batches:
        rows = with_packing(layout, "always", observation)[PACKING]["source"]
        found.append(lengths(layout, observation).sum() / rows.size)
    mean = float(np.mean(found))
    return {"entities": mean, "padding": 1 - mean}
