"""The choice of the form in which layers are computed, which depends on where they are traced.

Code that is traced cannot see whether it becomes part of a compiled loop, so whoever makes the loop
says it::

    with forms.in_loop():
        carry, logs = jax.lax.scan(update, carry, minibatches)

A function that ``jax.jit`` traced before, outside of the loop, keeps its form, which costs only
speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal

import jax

Form = Literal["plain", "folded", "products"]

_FORCED: ContextVar[Form | None] = ContextVar("form", default=None)
_IN_LOOP: ContextVar[bool] = ContextVar("in_loop", default=False)
# The older CPU runtime of JAX 0.5 writes outside of its memory where a folded convolution is one
# function with other code. A process may choose that runtime for another network before this one.
_PLAIN_ONLY = jax.__version_info__ < (0, 6)


@contextlib.contextmanager
def in_loop() -> Iterator[None]:
    """Marks what this thread traces in this context as the body of a compiled loop."""
    token = _IN_LOOP.set(True)
    try:
        yield
    finally:
        _IN_LOOP.reset(token)


@contextlib.contextmanager
def form(chosen: Form) -> Iterator[None]:
    """Gives all layers that this thread traces in this context one form.

    With plain, all layers have XLA's own gradients, so networks have forward-mode derivatives
    (``jax.jvp``). The other forms are those of a convolution
    (`rlstack.networks.layers.convolution`).
    """
    token = _FORCED.set(chosen)
    try:
        yield
    finally:
        _FORCED.reset(token)


def forced() -> Form | None:
    """Returns the form that the context `form` sets, or None outside of it."""
    return _FORCED.get()


def is_in_loop() -> bool:
    """Returns whether the caller is inside the context `in_loop`."""
    return _IN_LOOP.get()


def plain_only() -> bool:
    """Returns whether layers that are traced now have XLA's own gradients.

    They do on accelerators, with JAX 0.5, and in ``form("plain")``.
    """
    return _PLAIN_ONLY or _FORCED.get() == "plain" or _platform() != "cpu"


def _platform() -> str:
    """Returns the platform, such as cpu, of the device on which functions run by default."""
    device = getattr(jax.config, "jax_default_device", None)
    return getattr(device, "platform", device) or jax.default_backend()
