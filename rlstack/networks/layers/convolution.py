"""Convolutions of images in the form that runs fastest where they are traced.

`Conv2D` has the parameters of ``hk.Conv2D``, by name, shape and initial values, and computes the
same function, except for the order of sums. So checkpoints do not depend on the form. There are
three forms:

- *plain*: XLA's convolution.
- *folded*: the forward pass is XLA's convolution. The gradients are those of the same convolution
  after space-to-depth, which moves the stride into the channels: an 8 x 8 kernel with stride 4
  becomes a 2 x 2 kernel with stride 1 and 16 times as many channels. The gradient of a small kernel
  is then one product of matrices, which takes a fifth of the time of XLA's gradient on the CPU
  (first layer of the Nature network).
- *products*: one product of matrices after space-to-depth. On the CPU it is as fast in the body of
  a compiled loop, and under ``jax.vmap`` over kernels, as outside. XLA's convolution is 10 to 30
  times slower there.

The form is chosen when a function is traced: plain on accelerators and with JAX 0.5; otherwise
products in the body of a loop, and elsewhere folded if the kernel is a multiple of the stride
(`rlstack.networks.layers.forms`). Only the plain form has forward-mode derivatives (``jax.jvp``)
for all kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

import haiku as hk
import jax
import jax.numpy as jnp

from rlstack.networks.layers import forms
from rlstack.networks.layers.products import multiply

Padding = Literal["VALID", "SAME"]
Sizes = tuple[int, int]  # height and width
Pads = tuple[Sizes, ...]  # pixels before and after, by height and width

_SMALL = 4  # largest height x width of kernels that multiply pixels; larger ones multiply patches
_IMAGES = ("NHWC", "HWIO", "NHWC")  # axes of images, kernels and results


class Conv2D(hk.Module):
    """A convolution of images; a replacement for ``hk.Conv2D`` with the same parameters."""

    def __init__(
        self,
        output_channels: int,
        kernel_shape: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "SAME",
        w_init: hk.initializers.Initializer | None = None,
        name: str | None = None,
    ) -> None:
        """Makes the layer.

        Args:
          output_channels: number of channels of the result.
          kernel_shape: height and width of the kernel; one number for both.
          stride: vertical and horizontal step between two applications of the kernel.
          padding: VALID, or SAME: zeros around the image, so that stride 1 keeps its size.
          w_init: initial kernel; by default a truncated normal distribution with the standard
              deviation 1 / sqrt(inputs of one output), as in ``hk.Conv2D``.
          name: the name of the Haiku module; ``conv2_d`` by default.
        """
        super().__init__(name=name)
        self._channels, self._padding, self._w_init = output_channels, padding, w_init
        self._kernel, self._stride = _pair(kernel_shape), _pair(stride)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps images ``[B, H, W, C]`` to ``[B, H', W', output_channels]``.

        Raises:
          ValueError: the input has other axes.
        """
        if x.ndim != 4:
            raise ValueError(f"Conv2D: images must have the axes [B, H, W, C]; got {x.shape}.")
        shape = (*self._kernel, x.shape[-1], self._channels)
        deviation = 1 / math.sqrt(math.prod(shape[:-1]))
        w_init = self._w_init or hk.initializers.TruncatedNormal(stddev=deviation)
        w = hk.get_parameter("w", shape, x.dtype, init=w_init)
        b = hk.get_parameter("b", shape[-1:], x.dtype, init=jnp.zeros)
        return convolve(x, w, self._stride, self._padding) + b


def convolve(x: jax.Array, w: jax.Array, stride: Sizes, padding: Padding) -> jax.Array:
    """Convolves images ``[B, H, W, C]`` with a kernel ``[h, w, C, D]`` to ``[B, H', W', D]``."""
    chosen = forms.forced() or _fastest(w.shape[:2], stride)
    pads = tuple(jax.lax.padtype_to_pads(x.shape[1:3], w.shape[:2], stride, padding))
    if chosen == "plain":
        return _by_xla(x, w, stride, pads)
    if chosen == "folded":
        return _with_folded_gradients(x, w, stride, pads)
    x, w = _folded(x, w, stride, pads)
    return _by_pixels(x, w) if _is_small(w) else _by_patches(x, w)


def _fastest(kernel: Sequence[int], stride: Sizes) -> forms.Form:
    if forms.plain_only():
        return "plain"
    if forms.is_in_loop():
        return "products"
    # A kernel that is no multiple of the stride is filled up with zeros, which costs more.
    folds = all(k % s == 0 for k, s in zip(kernel, stride, strict=True))
    return "folded" if folds and max(stride) > 1 else "plain"


def _folded(x: jax.Array, w: jax.Array, stride: Sizes, pads: Pads) -> tuple[jax.Array, jax.Array]:
    """Pads images and kernel and moves the stride into their channels.

    Returns:
      Images and a kernel whose convolution with stride 1 and without padding is the result.
    """
    batch, channels = x.shape[0], x.shape[3]
    kernel, filled, widths = w.shape[:2], [], []
    for size, k, s, (low, high) in zip(x.shape[1:3], kernel, stride, pads, strict=True):
        outputs = max(0, (size + low + high - k) // s + 1)
        filled.append(-(-k // s) * s)
        # Pixels that no application of the kernel sees are cut off: a negative width.
        widths.append((low, (outputs - 1) * s + filled[-1] - size - low, 0))
    if any(low or high for low, high, _ in widths):
        x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *widths, (0, 0, 0)])
    if stride == (1, 1):
        return x, w
    missing = [(0, new - old) for new, old in zip(filled, kernel, strict=True)]
    w = jnp.pad(w, [*missing, (0, 0), (0, 0)])
    (vertical, horizontal), (height, width) = stride, x.shape[1:3]
    x = x.reshape(
        batch, height // vertical, vertical, width // horizontal, horizontal, channels
    ).transpose(0, 1, 3, 2, 4, 5)
    w = w.reshape(
        filled[0] // vertical, vertical, filled[1] // horizontal, horizontal, *w.shape[2:]
    ).transpose(0, 2, 1, 3, 4, 5)
    return x.reshape(*x.shape[:3], -1), w.reshape(*w.shape[:2], -1, w.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _with_folded_gradients(x: jax.Array, w: jax.Array, stride: Sizes, pads: Pads) -> jax.Array:
    return _by_xla(x, w, stride, pads)


def _forward(
    x: jax.Array, w: jax.Array, stride: Sizes, pads: Pads
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _by_xla(x, w, stride, pads), (x, w)


def _backward(
    stride: Sizes, pads: Pads, inputs: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = inputs

    def from_images(x: jax.Array) -> jax.Array:
        return _by_xla(*_folded(x, w, stride, pads))

    def from_kernel(w: jax.Array) -> jax.Array:
        images, kernel = _folded(x, w, stride, pads)
        return (_by_pixels if _is_small(kernel) else _by_xla)(images, kernel)

    return *jax.vjp(from_images, x)[1](gradient), *jax.vjp(from_kernel, w)[1](gradient)


_with_folded_gradients.defvjp(_forward, _backward)


def _by_xla(
    x: jax.Array, w: jax.Array, stride: Sizes = (1, 1), pads: Pads = ((0, 0), (0, 0))
) -> jax.Array:
    return jax.lax.conv_general_dilated(x, w, stride, pads, dimension_numbers=_IMAGES)


def _is_small(kernel: jax.Array) -> bool:
    return math.prod(kernel.shape[:2]) <= _SMALL


def _by_pixels(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies each pixel by the whole kernel, then sums the products of each output pixel.

    No patches are copied, neither here nor for the gradient of the kernel. Some products of the
    last rows and columns are not used.
    """
    (rows, columns, channels, outputs), (batch, height, width, _) = w.shape, x.shape
    pixels = x.reshape(-1, channels)
    # As one matrix product: XLA chooses a layout for an einsum with which the gradient is slower.
    products = pixels @ w.transpose(2, 0, 1, 3).reshape(channels, -1)
    products = products.reshape(batch, height, width, rows * columns, outputs)
    height, width = height - rows + 1, width - columns + 1
    shifted = [
        products[:, row : row + height, column : column + width, row * columns + column]
        for row in range(rows)
        for column in range(columns)
    ]
    return functools.reduce(jnp.add, shifted)


def _by_patches(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiplies slices of the images, joined along the channels, by the kernel."""
    height, width = x.shape[1] - w.shape[0] + 1, x.shape[2] - w.shape[1] + 1
    slices = [
        x[:, row : row + height, column : column + width]
        for row in range(w.shape[0])
        for column in range(w.shape[1])
    ]
    patches = jnp.concatenate(slices, axis=-1) if len(slices) > 1 else slices[0]
    return multiply(patches, w.reshape(-1, w.shape[-1]))


def _pair(size: int | Sequence[int]) -> Sizes:
    height, width = (size, size) if isinstance(size, int) else size
    return height, width
