"""Torsos: Haiku modules from observations, a float array ``[B, ...]``, to features ``[B, D]``.

`observation_features` converts any pytree of observations to such an array.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.configs.network import Activation, ImageAxes, NetworkConfig
from rlstack.networks.layers.convolution import Conv2D
from rlstack.networks.layers.dense import (
    PLAIN,
    Block,
    activation_of,
    dense,
    normalised,
    residual_block,
)
from rlstack.networks.layers.linear import Linear, linear
from rlstack.specs import ACTION_MASK, CRITIC_STATE
from rlstack.types import PyTree

_NATURE_SIZE = 36  # each side: smaller images have no pixel left after the third convolution
# Whose torso reads an observation. A policy never sees the entry for critics; a critic sees it with
# the other entries (all), or alone (state).
Reader = Literal["policy", "all", "state"]
# Dense layers learn from any order. They get uint8 images with the shortest axis last, as params
# of earlier versions expect, and other arrays as they are.
DENSE: Literal["dense"] = "dense"


def action_mask(observation: PyTree) -> jax.Array | None:
    """Returns the action mask of a dict observation, bool ``[B, A]`` or a pytree, or None."""
    if isinstance(observation, Mapping) and ACTION_MASK in observation:
        return jax.tree.map(lambda mask: mask.astype(bool), observation[ACTION_MASK])
    return None


def critic_entry(cfg: NetworkConfig) -> str:
    """Returns the name of the entry of a dict observation that only critics see, if it is there."""
    return cfg.critic_observation or CRITIC_STATE


def require_critic_entry(cfg: NetworkConfig, obs_spec: PyTree) -> None:
    """Raises a ValueError if ``cfg.critic_observation`` names no entry that a policy can lack."""
    name = cfg.critic_observation
    if name is None:
        return
    names = sorted(obs_spec) if isinstance(obs_spec, Mapping) else []
    usable = [entry for entry in names if entry != ACTION_MASK]
    if name not in usable or len(usable) == 1:
        raise ValueError(
            "NetworkConfig: critic_observation must name an entry of the observation, or of the "
            "extras of a step, and leave the policy another one; got "
            f"{name!r} for {'the entries ' + ', '.join(names) if names else 'a plain array'}. "
            "Use --network.critic-observation none if the critic sees what the policy sees."
        )


def has_critic_state(tree: PyTree, entry: str = CRITIC_STATE) -> bool:
    """Returns whether an observation or its spec has the entry that only a critic sees."""
    return isinstance(tree, Mapping) and entry in tree


def without_critic_state(tree: PyTree, entry: str = CRITIC_STATE) -> PyTree:
    """Removes the entry that only a critic sees from an observation or its spec."""
    if has_critic_state(tree, entry):
        return {name: value for name, value in tree.items() if name != entry}
    return tree


def entries_for(reader: Reader, tree: PyTree, critic_entry: str = CRITIC_STATE) -> PyTree:
    """Returns the part of an observation or its spec that a reader's torso sees."""
    if reader == "state" and has_critic_state(tree, critic_entry):
        return tree[critic_entry]
    if reader == "policy":
        tree = without_critic_state(tree, critic_entry)
    if isinstance(tree, Mapping) and ACTION_MASK in tree:
        return {name: value for name, value in tree.items() if name != ACTION_MASK}
    return tree


def observation_features(
    obs_spec: PyTree,
    observation: PyTree,
    scale_pixels: bool = True,
    reader: Reader = "policy",
    image_axes: ImageAxes | Literal["dense"] = "auto",
    critic_entry: str = CRITIC_STATE,
) -> jax.Array:
    """Converts an observation to one float array ``[B, ...]`` for a torso.

    Images (arrays of rank 3) have the channels last, and those of uint8 are scaled to [0, 1].
    Discrete entries become one-hot. Several entries are flattened and concatenated. The action mask
    is left out, and for a policy the entry that only a critic sees.

    Args:
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      observation: arrays ``[B, ...]`` in the structure of ``obs_spec``.
      scale_pixels: whether to divide images of uint8 by 255.
      reader: the network that reads the observation; it determines the visible entries.
      image_axes: the order of the axes of images; ``auto`` guesses it where that is safe.
      critic_entry: the name of the entry that only a critic sees.

    Raises:
      ValueError: the observation is one image whose axes cannot be guessed, see `channels_first`.
    """
    alone = len(jax.tree.leaves(entries_for(reader, obs_spec, critic_entry))) == 1
    axes = image_axes if alone or image_axes != "auto" else DENSE
    found = observation_entries(obs_spec, observation, scale_pixels, reader, axes, critic_entry)
    entries = list(found.values())
    return entries[0] if len(entries) == 1 else joined(entries)


def observation_entries(
    obs_spec: PyTree,
    observation: PyTree,
    scale_pixels: bool = True,
    reader: Reader = "policy",
    image_axes: ImageAxes | Literal["dense"] = "auto",
    critic_entry: str = CRITIC_STATE,
) -> dict[str, jax.Array]:
    """Converts each entry of an observation as `observation_features` does, without joining them.

    Returns:
      Float arrays ``[B, ...]`` by the names of the entries, in the order of the tree. The names can
      be parts of the names of Haiku modules.

    Raises:
      ValueError: the axes of an image cannot be guessed, see `channels_first`.
    """
    seen_spec = entries_for(reader, obs_spec, critic_entry)
    paths, _ = jax.tree_util.tree_flatten_with_path(seen_spec)
    leaves = jax.tree.leaves(entries_for(reader, observation, critic_entry))
    entries: dict[str, jax.Array] = {}
    for (path, spec), x in zip(paths, leaves, strict=True):
        name = _entry_name(path)
        while name in entries:
            name += "_"
        entries[name] = _leaf_features(spec, x, scale_pixels, image_axes)
    return entries


def joined(entries: Iterable[jax.Array]) -> jax.Array:
    """Flattens arrays ``[B, ...]`` and concatenates them to ``[B, D]``."""
    return jnp.concatenate([x.reshape((x.shape[0], -1)) for x in entries], axis=-1)


def _entry_name(path: tuple[Any, ...]) -> str:
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", ""))) for key in path]
    return re.sub(r"[^A-Za-z0-9_]", "_", "_".join(map(str, keys)))


def channels_first(shape: Sequence[int], image_axes: ImageAxes = "auto") -> bool:
    """Returns True if an image has its channels on the first axis, False if on the last.

    The guess takes an axis that is at most half as long as each of the others. The last axis need
    only be the shortest one if the others are equally long, as in MinAtar.

    Args:
      shape: the shape of the image, without a batch axis.
      image_axes: the order of the axes; ``auto`` guesses it from the shape.

    Raises:
      ValueError: the order is ``auto``, and the shape does not determine it.
    """
    if image_axes != "auto":
        return image_axes == "chw"
    first, middle, last = shape
    if 2 * first <= min(middle, last):
        return True
    if 2 * last <= min(first, middle) or last < first == middle:
        return False
    raise ValueError(
        f"NetworkConfig: image_axes must be hwc or chw for an image of shape {tuple(shape)}, which "
        "does not tell whether its channels are last or first; got auto. Use --network.image-axes "
        "hwc if they are last, chw if they are first, or --network.torso mlp."
    )


def is_image_batch(x: jax.Array) -> bool:
    """Returns whether an array can go through convolutions: ``[B, H, W, C]``."""
    return x.ndim == 4


def _leaf_features(
    spec: specs.Array,
    x: jax.Array,
    scale_pixels: bool,
    image_axes: ImageAxes | Literal["dense"],
) -> jax.Array:
    if isinstance(spec, specs.DiscreteArray):
        return jax.nn.one_hot(x, spec.num_values)
    x = x.astype(jnp.float32)
    if len(spec.shape) != 3:
        return x
    pixels = spec.dtype == np.uint8
    if image_axes == DENSE:
        moves = pixels and spec.shape[0] == min(spec.shape)
    else:
        moves = channels_first(spec.shape, image_axes)
    x = jnp.moveaxis(x, 1, -1) if moves else x
    return x / 255.0 if pixels and scale_pixels else x


class MLPTorso(hk.Module):
    """Dense layers over the flattened input; orthogonal initial weights with gain sqrt(2)."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Activation = "tanh",
        noise: float = 0.0,
        name: str | None = None,
        *,
        block: Block = PLAIN,
        is_training: bool = False,
    ) -> None:
        super().__init__(name=name)
        self._sizes, self._is_training = tuple(sizes), is_training
        self._block = block._replace(noise=noise)
        self._activation = activation_of(activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[B, ...]`` to ``[B, sizes[-1]]``."""
        x = x.reshape((x.shape[0], -1))
        if self._block.norm_place == "outer":
            x = normalised(x, self._block, self._is_training)
        init = hk.initializers.Orthogonal(np.sqrt(2))
        for size in self._sizes:
            x = dense(x, size, self._activation, self._block, self._is_training, init)
        return x


class ResidualTorso(hk.Module):
    """The torso of SimBa: a dense layer, a `residual_block` for each size, and a norm."""

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Activation = "relu",
        name: str | None = None,
        *,
        block: Block = PLAIN,
        is_training: bool = False,
    ) -> None:
        super().__init__(name=name)
        self._sizes, self._block, self._is_training = tuple(sizes), block, is_training
        self._activation = activation_of(activation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[B, ...]`` to ``[B, sizes[0]]``; all sizes are equal."""
        x = x.reshape((x.shape[0], -1))
        x = Linear(self._sizes[0], hk.initializers.Orthogonal())(x)
        for _ in self._sizes:
            x = residual_block(x, self._activation, self._block, self._is_training)
        return normalised(x, self._block, self._is_training)


class ImageTorso(hk.Module):
    """Convolutions, then a dense layer.

    A subclass defines `convolved`, as ``hk.transparent``: the names of params then leave it out.
    """

    w_init: hk.initializers.Initializer | None = None  # of the dense layer

    def __init__(
        self,
        hidden_size: int | None,
        noise: float = 0.0,
        name: str | None = None,
        *,
        block: Block = PLAIN,
        is_training: bool = False,
    ) -> None:
        """Stores the options of the dense layer. If hidden_size is None, there is no such layer."""
        super().__init__(name=name)
        self._hidden_size, self._is_training = hidden_size, is_training
        self._block = block._replace(noise=noise)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images ``[B, H, W, C]`` to ``[B, hidden_size]``, or to images if that is None."""
        x = self.convolved(x)
        if self._hidden_size is None:
            return x
        x = x.reshape((x.shape[0], -1))
        block, is_training = self._block, self._is_training
        return dense(x, self._hidden_size, jax.nn.relu, block, is_training, self.w_init)

    @abc.abstractmethod
    def convolved(self, x: jax.Array) -> jax.Array:
        """Maps images ``[B, H, W, C]`` to images of features, which are not negative."""


class NatureTorso(ImageTorso):
    """The convolutions of Mnih et al. (2015), https://doi.org/10.1038/nature14236, then dense."""

    w_init = hk.initializers.Orthogonal(np.sqrt(2))

    @hk.transparent
    def convolved(self, x: jax.Array) -> jax.Array:
        """Maps images as `ImageTorso.convolved` says.

        Raises:
          ValueError: the images are smaller than 36 x 36.
        """
        height, width = x.shape[1:3]
        if min(height, width) < _NATURE_SIZE:
            raise ValueError(
                f"NatureTorso: images [height, width, channels] must have at least {_NATURE_SIZE} "
                f"x {_NATURE_SIZE} pixels; got {height} x {width}. "
                "Use --network.torso impala or mlp."
            )
        for channels, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
            layer = Conv2D(channels, kernel, stride, padding="VALID", w_init=self.w_init)
            x = jax.nn.relu(layer(x))
        return x


class ImpalaTorso(ImageTorso):
    """The deep residual torso of Espeholt et al. (2018), figure 3, arXiv:1802.01561."""

    channels: tuple[int, ...] = (16, 32, 32)

    @hk.transparent
    def convolved(self, x: jax.Array) -> jax.Array:
        """Maps images as `ImageTorso.convolved` says."""
        for channels in self.channels:
            x = Conv2D(channels, 3, 1, padding="SAME")(x)
            x = hk.max_pool(x, (3, 3, 1), (2, 2, 1), padding="SAME")
            for _ in range(2):
                residual = Conv2D(channels, 3, 1, padding="SAME")(jax.nn.relu(x))
                x = x + Conv2D(channels, 3, 1, padding="SAME")(jax.nn.relu(residual))
        return jax.nn.relu(x)


class MinAtarTorso(ImageTorso):
    """16 filters of 3 x 3, then dense: Young and Tian (2019), https://arxiv.org/abs/1903.03176.

    With layer norm, the channels of each pixel are normalised too, as Gallici et al. (2024) do.
    Images have at least 3 x 3 pixels.
    """

    w_init = hk.initializers.Orthogonal(np.sqrt(2))

    @hk.transparent
    def convolved(self, x: jax.Array) -> jax.Array:
        """Maps images as `ImageTorso.convolved` says."""
        x = Conv2D(16, 3, 1, padding="VALID", w_init=self.w_init)(x)
        if self._block.norm == "layer":
            x = hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
        return jax.nn.relu(x)


class EntryTorsos(hk.Module):
    """A torso for each image and one for all vectors together, then a dense layer over all."""

    def __init__(
        self,
        make_image_torso: Callable[[str], Callable[[jax.Array], jax.Array]],
        make_vector_torso: Callable[[str], Callable[[jax.Array], jax.Array]],
        hidden_size: int,
        noise: float = 0.0,
        name: str | None = None,
    ) -> None:
        """Stores how to make the torsos.

        Args:
          make_image_torso: maps a module's name to the torso of an image.
          make_vector_torso: maps a module's name to the torso of the vectors.
          hidden_size: size of the last layer.
          noise: see `rlstack.networks.layers.linear.linear`.
          name: the name of this module. The modules in it are ``image_NAME``, with the name of each
            image, ``vectors`` and ``joined``.
        """
        super().__init__(name=name)
        self._make_image_torso, self._make_vector_torso = make_image_torso, make_vector_torso
        self._hidden_size, self._noise = hidden_size, noise

    def __call__(self, entries: Mapping[str, jax.Array]) -> jax.Array:
        """Maps images ``[B, H, W, C]`` and vectors ``[B, ...]`` to ``[B, hidden_size]``."""
        images = {name: x for name, x in entries.items() if is_image_batch(x)}
        found = [self._make_image_torso(f"image_{name}")(x) for name, x in images.items()]
        vectors = [x for name, x in entries.items() if name not in images]
        if vectors:
            found.append(self._make_vector_torso("vectors")(joined(vectors)))
        init = hk.initializers.Orthogonal(np.sqrt(2))
        dense = linear(self._hidden_size, noise=self._noise, w_init=init, name="joined")
        return jax.nn.relu(dense(joined(found)))
