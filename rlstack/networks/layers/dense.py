"""Dense layers with norm, dropout and skip connections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.configs.network import Activation, Norm, NormPlace
from rlstack.networks.layers.linear import Linear, linear
from rlstack.networks.layers.products import multiply


class Block(NamedTuple):
    """The options of a dense layer besides its weights and its activation."""

    norm: Norm = "none"
    batch_norm_decay: float = 0.999
    dropout: float = 0.0  # share of the outputs that is set to 0 in training mode
    skip: bool = False  # whether the input is added to the output
    spectral_norm: bool = False
    noise: float = 0.0  # sigma of a `NoisyLinear`; 0 is a plain layer
    norm_place: NormPlace = "inner"  # between weights and activation, or of input and output
    renorm_after: int = 0  # updates before batch_renorm corrects


PLAIN = Block()


def dense(
    x: jax.Array,
    size: int,
    activation: Callable[[jax.Array], jax.Array],
    block: Block = PLAIN,
    is_training: bool = False,
    w_init: hk.initializers.Initializer | None = None,
    name: str | None = None,
) -> jax.Array:
    """Maps ``[B, D]`` to ``[B, size]``: weights, norm, activation, dropout, skip, in this order.

    An outer norm comes last. Call it inside a Haiku transform.

    Args:
      x: the input.
      size: size of the output.
      activation: the activation.
      block: the options of the layer.
      is_training: whether to apply dropout and to let batch norm use the batch.
      w_init: initial weights of a plain layer.
      name: the name of the Haiku module with the weights.
    """
    layer: Callable[[jax.Array], jax.Array]
    if block.spectral_norm:
        layer = SpectralLinear(size, w_init, is_training, name)
    else:
        layer = linear(size, noise=block.noise, w_init=w_init, name=name)
    y = layer(x)
    if block.norm_place == "inner":
        y = normalised(y, block, is_training)
    y = activation(y)
    if block.dropout and is_training:
        y = hk.dropout(hk.next_rng_key(), block.dropout, y)
    if block.skip:
        if x.shape != y.shape:
            x = Linear(size, hk.initializers.Orthogonal(), "skip", with_bias=False)(x)
        y = x + y
    return y if block.norm_place == "inner" else normalised(y, block, is_training)


def activation_of(name: Activation) -> Callable[[jax.Array], jax.Array]:
    """Returns the activation of this name."""
    found: Callable[[jax.Array], jax.Array] = mish if name == "mish" else getattr(jax.nn, name)
    return found


def mish(x: jax.Array) -> jax.Array:
    """Returns x tanh(log(1 + e^x)), Misra (2019), https://arxiv.org/abs/1908.08681.

    With u = e^x (e^x + 2), the tanh is u / (u + 2): one exponential instead of two, a logarithm and
    a tanh, which take more time on a CPU than the products of a small layer.
    """
    power = jnp.exp(jnp.minimum(x, 20.0))  # above, the tanh is 1
    u = power * (power + 2.0)
    return x * (u / (u + 2.0))


def normalised(x: jax.Array, block: Block, is_training: bool) -> jax.Array:
    """Applies the configured norm to ``[B, D]``; call it inside a Haiku transform."""
    if block.norm == "none":
        return x
    if block.norm == "layer":
        return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)
    if block.norm == "rms":
        return hk.RMSNorm(axis=-1)(x)
    renorm = block.norm == "batch_renorm"
    norm = BatchNorm(block.batch_norm_decay, renorm, renorm_after=block.renorm_after)
    return norm(x, is_training)


def residual_block(x: jax.Array, activation: Any, block: Block, is_training: bool) -> jax.Array:
    """Adds to ``[B, D]`` what a layer of 4 D units finds in its norm.

    Lee et al. (2024), "SimBa", https://arxiv.org/abs/2410.09754, equation 4: a sum of the input
    and of norm, weights, activation, weights. Call it inside a Haiku transform.
    """
    size = x.shape[-1]
    init = hk.initializers.VarianceScaling(2.0, "fan_in", "truncated_normal")
    y = Linear(4 * size, init)(normalised(x, block, is_training))
    return x + Linear(size, init)(activation(y))


class BatchNorm(hk.Module):
    """Batch norm over ``[B, D]``, Ioffe and Szegedy (2015), https://arxiv.org/abs/1502.03167.

    In training mode it uses the mean and variance of the batch, and moves the running statistics
    towards them: at first these are the mean over all updates, later an exponential moving average.
    In evaluation mode it uses the running statistics. Before the first update they are mean 0 and
    variance 1, unlike those of ``hk.BatchNorm``, because agents act before they learn.

    With renormalisation, Ioffe (2017), https://arxiv.org/abs/1702.03275, equation 1, the outputs of
    training mode are those of evaluation mode; gradients flow through the statistics of the batch.
    So an update begins with the log-probabilities of acting. The paper limits the correction, r to
    3 and d to 5. Here it has no limits: the steps of a good policy are alike, their variance falls
    below a ninth of the running one, and with the limits the outputs would differ. With
    ``renorm_after`` it has the paper's limits, and none of it happens before that many updates.
    """

    def __init__(
        self,
        decay: float = 0.999,
        renorm: bool = False,
        eps: float = 1e-5,
        name: str | None = None,
        renorm_after: int = 0,
    ) -> None:
        """Makes the layer.

        Args:
          decay: largest share of the running statistics that an update keeps.
          renorm: whether training mode corrects towards the running statistics.
          eps: added to the variance.
          name: name of the module.
          renorm_after: updates before the limited correction begins; 0: without limits, at once.
        """
        super().__init__(name=name)
        self._decay, self._renorm, self._eps = decay, renorm, eps
        self._renorm_after = renorm_after

    def __call__(self, x: jax.Array, is_training: bool) -> jax.Array:
        """Maps ``[B, D]`` to ``[B, D]``."""
        size = x.shape[-1:]
        scale = hk.get_parameter("scale", size, init=jnp.ones)
        offset = hk.get_parameter("offset", size, init=jnp.zeros)
        mean = hk.get_state("mean", size, init=jnp.zeros)
        variance = hk.get_state("variance", size, init=jnp.ones)
        if not is_training:
            return (x - mean) * jax.lax.rsqrt(variance + self._eps) * scale + offset
        batch_mean, batch_variance = x.mean(axis=0), x.var(axis=0)
        count = hk.get_state("count", (), jnp.int32, init=jnp.zeros)
        rate = jnp.maximum(1 - self._decay, 1 / (count + 1))
        hk.set_state("count", count + 1)
        hk.set_state("mean", (1 - rate) * mean + rate * batch_mean)
        hk.set_state("variance", (1 - rate) * variance + rate * batch_variance)
        y = (x - batch_mean) * jax.lax.rsqrt(batch_variance + self._eps)
        if self._renorm:
            deviation = jnp.sqrt(variance + self._eps)
            ratio = jnp.sqrt(batch_variance + self._eps) / deviation
            shift = (batch_mean - mean) / deviation
            if self._renorm_after:
                begun = count >= self._renorm_after
                ratio = jnp.where(begun, jnp.clip(ratio, 1 / 3, 3.0), 1.0)
                shift = jnp.where(begun, jnp.clip(shift, -5.0, 5.0), 0.0)
            ratio, shift = jax.lax.stop_gradient((ratio, shift))
            y = y * ratio + shift
        return y * scale + offset


class SpectralLinear(hk.Module):
    """A dense layer whose weights are divided by their largest singular value.

    Miyato et al. (2018), https://arxiv.org/abs/1802.05957, algorithm 1: the state is the singular
    vector, and each update makes one step of the power iteration.
    """

    def __init__(
        self,
        size: int,
        w_init: hk.initializers.Initializer | None = None,
        is_training: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name)
        self._size, self._is_training = size, is_training
        self._w_init = w_init or hk.initializers.VarianceScaling()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps ``[..., D]`` to ``[..., size]``."""
        w = hk.get_parameter("w", (x.shape[-1], self._size), init=self._w_init)
        b = hk.get_parameter("b", (self._size,), init=jnp.zeros)
        return multiply(x, hk.SpectralNorm()(w, update_stats=self._is_training)) + b
