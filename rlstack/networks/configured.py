"""Builds the parts of a network from a `NetworkConfig`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax

from rlstack.configs.network import DENSE_TORSOS, NetworkConfig
from rlstack.networks.base import Core, Network, SequenceCore, feed_forward, recurrent, unrolled
from rlstack.networks.layers.dense import Block
from rlstack.networks.layers.linear import linear
from rlstack.networks.layers.sphere import SphereHead, SphereTorso
from rlstack.networks.precision import in_float32, in_precision
from rlstack.networks.stateful import feed_forward_with_state, recurrent_with_state
from rlstack.networks.torsos import (
    DENSE,
    EntryTorsos,
    ImpalaTorso,
    MinAtarTorso,
    MLPTorso,
    NatureTorso,
    Reader,
    ResidualTorso,
    critic_entry,
    is_image_batch,
    observation_entries,
    observation_features,
)
from rlstack.types import Array, PyTree


def feed_forward_of(
    cfg: NetworkConfig, forward: Callable[..., PyTree], obs_spec: PyTree
) -> Network:
    """Makes a network of a function of an observation ``[B, ...]`` and ``is_training``."""
    forward = in_precision(cfg.dtype, forward)
    if cfg.has_state or cfg.of_critic().has_state:
        return feed_forward_with_state(forward, obs_spec)
    return feed_forward(functools.partial(forward, is_training=False), obs_spec)


def recurrent_of(
    cfg: NetworkConfig,
    encode: Callable[..., PyTree],
    decode: Callable[..., PyTree],
    obs_spec: PyTree,
    beside: Callable[..., PyTree] | None = None,
    cores: Callable[[], Core] | None = None,
) -> Network:
    """Makes a network with the configured core.

    Args:
      cfg: the options.
      encode: maps an observation ``[N, ...]`` and ``is_training`` to features ``[N, D]``.
      decode: maps the core's output ``[N, D]`` to the network's output.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      beside: maps an observation ``[N, ...]`` and ``is_training`` to features ``[N, D]`` that
          pass the core; ``decode`` then takes them as a second argument.
      cores: makes another core than the configured one, for features of any structure.
    """
    core = cores or functools.partial(core_of, cfg)
    # The core keeps float32: its rounding errors would add up from step to step.
    encode = in_precision(cfg.dtype, encode)

    def after(hidden: Any, observation: PyTree, is_training: bool = False) -> PyTree:
        return decode(hidden, *([] if beside is None else [beside(observation, is_training)]))

    after = in_precision(cfg.dtype, after)
    if cfg.has_state or cfg.of_critic().has_state:
        return recurrent_with_state(encode, core, after, obs_spec)
    return recurrent(functools.partial(encode, is_training=False), core, after, obs_spec)


def features_of(
    cfg: NetworkConfig,
    obs_spec: PyTree,
    observation: PyTree,
    name: str,
    is_training: bool = False,
    reader: Reader = "policy",
    keeps_image: bool = False,
) -> jax.Array:
    """Maps an observation ``[B, ...]`` to features ``[B, D]``; call it inside a transform.

    Args:
      cfg: the options.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      observation: arrays ``[B, ...]`` in the structure of ``obs_spec``.
      name: the name of the torso's module. See `EntryTorsos` for the modules of several entries.
      is_training: whether to apply dropout and to let batch norm use the batch.
      reader: the network that the torso belongs to; it determines the visible entries.
      keeps_image: whether an observation that is one image keeps the axes ``[B, H, W, C]`` after
        the convolutions, if the torso has some.

    Raises:
      ValueError: the torso is for images, and the observation has none that it can take, or the
        axes of one cannot be guessed.
    """
    if cfg.torso in DENSE_TORSOS:
        torso = torso_of(cfg, name, is_training)
        return torso(dense_features(cfg, obs_spec, observation, reader))
    entries = observation_entries(
        obs_spec, observation, cfg.scale_pixels, reader, cfg.image_axes, critic_entry(cfg)
    )
    if not any(map(is_image_batch, entries.values())):
        shapes = ", ".join(str(tuple(x.shape[1:])) for x in entries.values())
        raise ValueError(
            f"NetworkConfig: torso={cfg.torso!r} needs an observation with an image [height, "
            f"width, channels]; got shape {shapes}. Use --network.torso mlp."
        )
    if len(entries) == 1:
        size = None if keeps_image else cfg.hidden_sizes[-1]
        return convolutions_of(cfg, name, size, is_training)(*entries.values())
    return EntryTorsos(
        lambda image: torso_of(cfg, image, is_training),
        lambda vectors: _mlp(cfg, vectors, is_training),
        cfg.hidden_sizes[-1],
        cfg.noisy_sigma,
        name,
    )(entries)


def dense_features(
    cfg: NetworkConfig, obs_spec: PyTree, observation: PyTree, reader: Reader = "policy"
) -> jax.Array:
    """Returns an observation as one array ``[B, ...]`` for dense layers; see `features_of`."""
    axes = DENSE if cfg.image_axes == "auto" else cfg.image_axes
    entry = critic_entry(cfg)
    return observation_features(obs_spec, observation, cfg.scale_pixels, reader, axes, entry)


def torso_of(
    cfg: NetworkConfig, name: str, is_training: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """Makes the configured torso; call it inside a Haiku transform."""
    if cfg.torso == "mlp":
        return _mlp(cfg, name, is_training)
    if cfg.torso == "sphere":
        return SphereTorso(cfg.hidden_sizes[0], len(cfg.hidden_sizes), name)
    if cfg.torso == "residual":
        return ResidualTorso(
            cfg.hidden_sizes, cfg.activation, name, block=block_of(cfg), is_training=is_training
        )
    return convolutions_of(cfg, name, cfg.hidden_sizes[-1], is_training)


def convolutions_of(
    cfg: NetworkConfig, name: str, size: int | None = None, is_training: bool = False
) -> Callable[[jax.Array], jax.Array]:
    """Makes the configured torso of images; without a size it has no dense layer."""
    kinds: dict[str, Any] = {"nature": NatureTorso, "impala": ImpalaTorso, "minatar": MinAtarTorso}
    torso: Callable[[jax.Array], jax.Array] = kinds[cfg.torso](
        size, cfg.noisy_sigma, name, block=block_of(cfg), is_training=is_training
    )
    return torso


def _mlp(cfg: NetworkConfig, name: str, is_training: bool) -> Callable[[jax.Array], jax.Array]:
    return MLPTorso(
        cfg.hidden_sizes,
        cfg.activation,
        cfg.noisy_sigma,
        name,
        block=block_of(cfg),
        is_training=is_training,
    )


def block_of(cfg: NetworkConfig) -> Block:
    """Returns the options of a layer besides its weights and its activation."""
    return Block(
        cfg.norm,
        cfg.batch_norm_decay,
        cfg.dropout,
        cfg.skip,
        cfg.spectral_norm,
        norm_place=cfg.norm_place,
        renorm_after=cfg.renorm_after,
    )


def head_of(
    cfg: NetworkConfig, size: int, gain: float, name: str
) -> Callable[[jax.Array], jax.Array]:
    """Makes a last layer, which computes in float32; call it inside a Haiku transform.

    Args:
      cfg: the options.
      size: the number of outputs.
      gain: the gain of orthogonal initial weights, if the layer is a plain one.
      name: the name of the module.
    """
    if cfg.torso == "sphere":
        return in_float32(SphereHead(size, name))
    init = hk.initializers.Orthogonal(gain)
    return in_float32(linear(size, noise=cfg.noisy_sigma, w_init=init, name=name))


def core_of(cfg: NetworkConfig, name: str = "core") -> Core:
    """Makes the configured recurrent core; call it inside a Haiku transform."""
    if cfg.core == "gtrxl":
        from rlstack.networks.gtrxl import GTrXL

        return GTrXL(cfg.core_size, cfg.core_layers, cfg.core_memory, cfg.core_heads, name)
    if cfg.core in ("mingru", "s5"):
        from rlstack.networks.scanned import ScannedCore, min_gru, s5

        recurrence = s5 if cfg.core == "s5" else min_gru
        return ScannedCore(recurrence, cfg.core_size, cfg.core_layers, name)
    layer = hk.LSTM if cfg.core == "lstm" else hk.GRU
    if cfg.core_layers == 1:
        return layer(cfg.core_size, name=name)
    return hk.DeepRNN([layer(cfg.core_size, name=name) for _ in range(cfg.core_layers)])


class TwoCores(SequenceCore):
    """The cores of a policy and of a value, side by side; inputs, outputs and states are pairs."""

    def __init__(self, cfg: NetworkConfig) -> None:
        super().__init__(name="cores")
        of_critic = cfg.of_critic()
        self._cores = (
            core_of(cfg) if cfg.core != "none" else None,
            core_of(of_critic, "value_core") if of_critic.core != "none" else None,
        )

    def __call__(self, features: Any, first: Array, state: Any) -> tuple[Any, Any]:
        """Maps a pair of ``[T, B, D]`` and a pair of states to pairs; without a core, to itself."""
        triples = zip(self._cores, features, state, strict=True)
        found = [unrolled(core, x, first, old) if core else (x, old) for core, x, old in triples]
        return tuple(x for x, _ in found), tuple(new for _, new in found)

    def initial_state(self, batch_size: int) -> Any:
        """Returns the pair of initial states; () without a core."""
        return tuple(core.initial_state(batch_size) if core else () for core in self._cores)
