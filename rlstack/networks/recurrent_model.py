"""A world model that is learned from sequences, with a policy and a critic that see its states.

Its parts are those of DreamerV3, Hafner et al. (2025), https://doi.org/10.1038/s41586-025-08744-2.
A state is a recurrent part and categories. The recurrent part follows from the state before and the
action. Categories are drawn: in acting and learning from the recurrent part and the observation
(the posterior), in imagination from the recurrent part alone (the prior).
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
from rlstack.configs.world_model import Sizes, WorldModelConfig
from rlstack.distributions import bounds_of, num_parameters
from rlstack.math.returns import symlog
from rlstack.networks.base import dummy_timestep
from rlstack.networks.image_codec import ImageDecoder, ImageEncoder
from rlstack.networks.layers.blocks import BlockGRU, Head, Layers
from rlstack.networks.layers.dense import Block, activation_of
from rlstack.networks.precision import in_precision
from rlstack.networks.torsos import critic_entry, entries_for, joined, observation_entries
from rlstack.types import Array, Params, PRNGKey, PyTree

_USED = {"dtype", "activation", "norm", "num_atoms", "image_axes", "scale_pixels"}
_FIRST_POLICY = 0.01  # scale of the last layer's weights: the policy begins near to uniform


class Seen(NamedTuple):
    """What is encoded of observations, and decoded; () for what observations do not have."""

    vector: Any  # [..., V], all vectors together, as symlog
    image: Any  # [..., H, W, C] in [0, 1], the channels of all images together


class Outlook(NamedTuple):
    """What a world model predicts of states, besides observations."""

    reward: jax.Array  # [..., N], logits of atoms
    continues: jax.Array  # [...], the logit of the discount


class Part(NamedTuple):
    """A network that sees features of states, with params of its own."""

    init: Callable[[PRNGKey], Params]
    apply: Callable[[Params, Array], jax.Array]  # (params, features [..., F]) -> [..., n]


class WorldModel(NamedTuple):
    """Pure functions of explicit params.

    The recurrent part of a state is float32 ``[B, D]``. Categories are one-hot rows, float32
    ``[B, S, K]``; S variables of K classes. Actions are those of `action_features`, ``[B, A]``.
    """

    init: Callable[[PRNGKey], Params]  # params of the functions below
    see: Callable[[PyTree], Seen]  # (observation [B, ...]) -> what is encoded; without params
    encode: Callable[[Params, Seen], jax.Array]  # (params, seen [B, ...]) -> [B, E]
    # (params, recurrent, categories, action) -> the next recurrent part
    follow: Callable[[Params, Array, Array, Array], jax.Array]
    posterior: Callable[[Params, Array, Array], jax.Array]  # (.., recurrent, encoded) -> logits
    prior: Callable[[Params, Array], jax.Array]  # (params, recurrent) -> logits [B, S, K]
    decode: Callable[[Params, Array, Array], Seen]  # (params, recurrent, categories) -> seen
    outlook: Callable[[Params, Array], Outlook]  # (params, features [B, F])
    policy: Part  # n is that of `rlstack.distributions.num_parameters`
    critic: Part  # n is the number of atoms
    recurrent: int  # D
    categories: tuple[int, int]  # S, K
    actions: int  # A


def world_model(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig | None = None
) -> Callable[[WorldModelConfig], WorldModel]:
    """Returns what builds a world model of some sizes.

    ``cfg`` has what is not a size: activation and norm of all layers, the number of atoms of
    rewards and values, the precision, and how images are read. Images are arrays of rank 3 whose
    values are known to be pixels or to be in [0, 1]. All other arrays are vectors.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation. Masks of actions and entries for
        critics are left out.
      action_spec: pytree of specs of discrete and bounded continuous actions.
      cfg: the options.

    Raises:
      ValueError: cfg has an option that a world model has no use for, or images differ in size.
    """
    cfg = cfg or NetworkConfig(activation="silu", norm="rms", num_atoms=255)
    unused = sorted(field for field in vars(cfg) if field not in _USED)
    cfg.require_unused("a world model (sizes are those of --agent.model)", *unused)
    cfg.require("norm", not cfg.has_statistics, "none, layer or rms for a world model")
    return functools.partial(_build, obs_spec, action_spec, cfg)


def _build(
    obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig, sizes: WorldModelConfig
) -> WorldModel:
    parts = _Parts(obs_spec, action_spec, cfg, sizes.sizes())
    init, applied = hk.multi_transform(parts.build)

    def without_key(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, *args: function(params, None, *args)

    encode, follow, posterior, prior, decode, outlook = map(without_key, applied)
    return WorldModel(
        lambda rng_key: init(rng_key, parts.observation),
        parts.see,
        encode,
        follow,
        posterior,
        prior,
        decode,
        outlook,
        parts.part(num_parameters(action_spec), _FIRST_POLICY, "policy"),
        parts.part(cfg.num_atoms, 0.0, "critic"),
        parts.sizes.recurrent,
        parts.shape,
        parts.action.shape[-1],
    )


class _Parts:
    """The functions of a world model; all but `see` are called inside a Haiku transform."""

    def __init__(
        self, obs_spec: PyTree, action_spec: PyTree, cfg: NetworkConfig, sizes: Sizes
    ) -> None:
        self.sizes, self.shape = sizes, (sizes.categoricals, sizes.classes)
        self._cfg = cfg
        action = jax.tree.map(lambda x: jnp.zeros((1, *x.shape), x.dtype), action_spec)
        self.action = action_features(action_spec, action)
        self._look = activation_of(cfg.activation), Block(cfg.norm)
        self._units = (sizes.units,) * sizes.layers
        self.see = functools.partial(_seen, obs_spec, cfg)
        self.observation = dummy_timestep(obs_spec).observation
        self._seen: Seen = jax.eval_shape(self.see, self.observation)

    def encode(self, seen: Seen) -> jax.Array:
        found = []
        if self._seen.vector:
            found.append(Layers(self._units, *self._look, "encoder")(seen.vector))
        if self._seen.image:
            found.append(ImageEncoder(self.sizes.depth, *self._look, "image_encoder")(seen.image))
        return jnp.concatenate(found, axis=-1)

    def follow(self, recurrent: jax.Array, categories: jax.Array, action: jax.Array) -> jax.Array:
        core = BlockGRU(self.sizes.hidden, self.sizes.blocks, *self._look, "core")
        return core(recurrent, categories.reshape(len(recurrent), -1), action)

    def posterior(self, recurrent: jax.Array, encoded: jax.Array) -> jax.Array:
        return self._logits(jnp.concatenate([recurrent, encoded], axis=-1), 1, "posterior")

    def prior(self, recurrent: jax.Array) -> jax.Array:
        return self._logits(recurrent, 2, "prior")

    def _logits(self, x: jax.Array, layers: int, name: str) -> jax.Array:
        hidden, size = (self.sizes.hidden,) * layers, self.shape[0] * self.shape[1]
        return Head(hidden, size, 1.0, *self._look, name)(x).reshape(*x.shape[:-1], *self.shape)

    def decode(self, recurrent: jax.Array, categories: jax.Array) -> Seen:
        vector: Any = ()
        image: Any = ()
        if self._seen.vector:
            head = Head(self._units, self._seen.vector.shape[-1], 1.0, *self._look, "decoder")
            vector = head(features_of(recurrent, categories))
        if self._seen.image:
            shape, sizes = self._seen.image.shape[1:], (self.sizes.depth, self.sizes.units)
            decoder = ImageDecoder(shape, *sizes, self.sizes.blocks, *self._look, "image_decoder")
            image = decoder(recurrent, categories.reshape(len(categories), -1))
        return Seen(vector, image)

    def outlook(self, features: jax.Array) -> Outlook:
        units = (self.sizes.units,)
        reward = Head(units, self._cfg.num_atoms, 0.0, *self._look, "reward")(features)
        continues = Head(units, 1, 1.0, *self._look, "continues")(features)
        return Outlook(reward, continues[..., 0])

    def build(self) -> tuple[Callable[..., Any], tuple[Callable[..., Any], ...]]:
        """Returns what calls all functions, and the functions, for `hk.multi_transform`."""
        precise = functools.partial(in_precision, self._cfg.dtype)
        encode = precise(self.encode)
        # The recurrent part keeps float32: its rounding errors would add up from step to step.
        others = map(precise, (self.posterior, self.prior, self.decode, self.outlook))
        posterior, prior, decode, outlook = others

        def every(observation: PyTree) -> None:
            categories = jnp.zeros((1, *self.shape))
            recurrent = jnp.zeros((1, self.sizes.recurrent))
            recurrent = self.follow(recurrent, categories, self.action)
            posterior(recurrent, encode(self.see(observation)))
            prior(recurrent)
            decode(recurrent, categories)
            outlook(features_of(recurrent, categories))

        return every, (encode, self.follow, posterior, prior, decode, outlook)

    def part(self, size: int, scale: float, name: str) -> Part:
        """Returns a network with ``size`` outputs that sees features."""

        def forward(features: jax.Array) -> jax.Array:
            return Head(self._units, size, scale, *self._look, name)(features)

        init, apply = hk.transform(in_precision(self._cfg.dtype, forward))
        zeros = jnp.zeros((1, self.sizes.recurrent + self.shape[0] * self.shape[1]))
        return Part(
            lambda rng_key: init(rng_key, zeros),
            lambda params, features: apply(params, None, features),
        )


def features_of(recurrent: Array, categories: Array) -> jax.Array:
    """Returns what heads, policy and critic see of states ``[..., D]``, ``[..., S, K]``."""
    flat = categories.reshape(*categories.shape[:-2], -1)
    return jnp.concatenate([recurrent, flat], axis=-1)


def action_features(action_spec: PyTree, action: PyTree) -> jax.Array:
    """Returns actions ``[..., *action]`` as numbers ``[..., A]``.

    Discrete choices are one-hot, continuous actions are scaled to [-1, 1].
    """

    def numbers(spec: specs.Array, x: Array) -> jax.Array:
        if not np.issubdtype(spec.dtype, np.integer):
            return jnp.asarray(bounds_of(spec, "a world model").to_unit(x))
        if isinstance(spec, specs.DiscreteArray) or not spec.shape:
            return jax.nn.one_hot(x, num_parameters(spec))
        least = np.broadcast_to(spec.minimum, spec.shape)
        most = np.broadcast_to(spec.maximum, spec.shape)
        rows = [
            jax.nn.one_hot(x[..., i] - low, int(high - low) + 1)
            for i, (low, high) in enumerate(zip(least, most, strict=True))
        ]
        return jnp.concatenate(rows, axis=-1)

    found = jax.tree.leaves(jax.tree.map(numbers, action_spec, action))
    return jnp.concatenate(found, axis=-1)


def _seen(obs_spec: PyTree, cfg: NetworkConfig, observation: PyTree) -> Seen:
    """Returns what is encoded of observations ``[B, ...]``."""
    entry = critic_entry(cfg)
    entries = observation_entries(
        obs_spec, observation, cfg.scale_pixels, "policy", cfg.image_axes, entry
    )
    leaves = jax.tree.leaves(entries_for("policy", obs_spec, entry))
    shown = [_is_image(spec, cfg.scale_pixels) for spec in leaves]
    pairs = list(zip(shown, entries.values(), strict=True))
    images = [x for is_image, x in pairs if is_image]
    vectors = [x for is_image, x in pairs if not is_image]
    shapes = {x.shape[1:3] for x in images}
    if len(shapes) > 1:
        raise ValueError(
            f"world_model: all images must have one height and width; got {sorted(shapes)}. Resize "
            "them in the environment."
        )
    return Seen(
        symlog(joined(vectors)) if vectors else (),
        jnp.concatenate(images, axis=-1) if images else (),
    )


def _is_image(spec: specs.Array, scale_pixels: bool) -> bool:
    """Returns whether an array has axes of an image, and values in [0, 1] once it is read."""
    if len(spec.shape) != 3:
        return False
    if (spec.dtype == np.uint8 and scale_pixels) or spec.dtype == bool:
        return True
    known = isinstance(spec, specs.BoundedArray)
    return known and bool(np.min(spec.minimum) >= 0 and np.max(spec.maximum) <= 1)
