"""The optimizers of optax and LaProp, which optax does not have, by name; their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from rlstack.types import PyTree

Argument = int | float | bool | str

# These need more than the gradient of a batch: its loss, the loss function, or a gradient for each
# of its items.
_NOT_BY_GRADIENT = {"dpsgd", "lbfgs", "momo", "momo_adam", "sophia"}
# Their learning rate must be a number.
_CONSTANT_RATE = {"optimistic_adam", "rprop", "sm3"}
_LEAST_NORM = 1e-3  # of params, so that those that are 0 can move


@functools.cache
def optimizers() -> Mapping[str, Callable[..., optax.GradientTransformation]]:
    """Returns the optimizers of optax and `optax.contrib` that need only gradients and params.

    They are the functions whose first parameter is ``learning_rate``, except parts of optimizers
    (``scale_by_...``); and `laprop`.
    """
    found: dict[str, Callable[..., optax.GradientTransformation]] = {"laprop": laprop}
    for module in (optax, optax.contrib):
        for name, value in vars(module).items():
            is_function = inspect.isfunction(value) or isinstance(value, functools.partial)
            if not is_function or name.startswith(("_", "scale_by_")):
                continue
            first = next(iter(inspect.signature(value).parameters), "")
            if first == "learning_rate" and name not in _NOT_BY_GRADIENT:
                found[name] = value
    return dict(sorted(found.items()))


@functools.cache
def arguments(name: str) -> Mapping[str, Argument | None]:
    """Returns the arguments of an optimizer besides its learning rate, with optax's defaults.

    Arguments that are no numbers, truth values or texts are left out, such as masks.
    """
    parameters = inspect.signature(optimizers()[name]).parameters.values()
    return {
        parameter.name: parameter.default
        for parameter in parameters
        if parameter.name not in ("learning_rate", "key", "base_optimizer")
        and not parameter.name.endswith(("mask", "dimension_numbers"))
        and (parameter.default is None or isinstance(parameter.default, Argument))
    }


def takes_schedule(name: str) -> bool:
    """Returns whether an optimizer's learning rate may change during training."""
    return name not in _CONSTANT_RATE


def laprop(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-20,
    agc: float = 0.0,
) -> optax.GradientTransformation:
    """Returns the optimizer of Ziyin et al. (2020), https://arxiv.org/abs/2002.04839.

    Gradients are divided by the root of the mean of their squares before the momentum is taken of
    them, so that a gradient that is large for once does not last. Both means are corrected for
    their first steps.

    Args:
      learning_rate: the step size.
      b1: decay of the momentum.
      b2: decay of the mean of squared gradients.
      eps: added to the root.
      agc: largest norm of the gradient of an array, relative to the norm of its params; 0 does not
        clip. Brock et al. (2021), https://arxiv.org/abs/2102.06171, with one norm for an array.
    """
    scaled = optax.scale_by_rms(b2, eps, eps_in_sqrt=False, bias_correction=True)
    rest = scaled, optax.ema(b1), optax.scale_by_learning_rate(learning_rate)
    clip = optax.stateless(lambda updates, params: clipped(updates, params, agc))
    return optax.chain(*([clip] if agc else []), *rest)


def clipped(updates: PyTree, params: PyTree, most: float) -> PyTree:
    """Scales each gradient down to a norm of at most ``most`` times the norm of its params."""

    def clip(update: jax.Array, param: jax.Array) -> jax.Array:
        norm, bound = jnp.linalg.norm(update.ravel()), jnp.linalg.norm(param.ravel())
        bound = most * jnp.maximum(bound, _LEAST_NORM)
        return update / jnp.maximum(norm / bound, 1.0)

    return jax.tree.map(clip, updates, params)
