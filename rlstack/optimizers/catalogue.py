"""The optimizers of optax and one of our own, by name, and their arguments."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping

import optax
import optax.contrib

from rlstack.optimizers.laprop import laprop

Argument = int | float | bool | str

# These need more than the gradient of a batch: its loss, the loss function, or a gradient for each
# of its items.
_NOT_BY_GRADIENT = {"dpsgd", "lbfgs", "momo", "momo_adam", "sophia"}
# Their learning rate must be a number.
_CONSTANT_RATE = {"optimistic_adam", "rprop", "sm3"}


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
