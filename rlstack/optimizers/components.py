"""One optimizer for each component of an agent: a part of its params, such as the policy head."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlstack.optimizers.config import OptimizerConfig, learning_rate, make_optimizer
from rlstack.stateful_params import on_sphere, weights_of, with_weights
from rlstack.types import Logs, Params, PyTree

_SUFFIX = "_optimizer"

Components = Mapping[tuple[str, ...], OptimizerConfig | None]


class ComponentOptimizer(optax.GradientTransformation):
    """A gradient transformation that knows its learning rates.

    Attributes:
      rates: the learning rate of each component, and under "" the rate of all other components. A
        rate is a number or a function of the number of steps made.
    """

    rates: Mapping[str, float | optax.Schedule]

    def __new__(
        cls,
        init: Callable[[Params], optax.OptState],
        update: Callable[..., Any],
        rates: Mapping[str, float | optax.Schedule],
    ) -> ComponentOptimizer:
        """Makes an optimizer of these functions of optax."""
        made = super().__new__(cls, init, update)
        made.rates = rates
        return made

    def learning_rates(self, opt_state: optax.OptState) -> Logs:
        """Returns the learning rates of the next step, by the name of their log.

        A component whose optimizer counts no steps has a log only if its rate is constant.
        """
        counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
        logs: Logs = {}
        for component, rate in self.rates.items():
            name = f"learning_rate/{component}" if component else "learning_rate"
            if not callable(rate):
                logs[name] = jnp.asarray(rate, jnp.float32)
            elif counts:  # all of them are equal, because every step takes all components
                logs[name] = jnp.asarray(rate(counts[0][1]), jnp.float32)
        return logs


def optimizer_step(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    grads: PyTree,
) -> tuple[Params, optax.OptState, Logs]:
    """Applies gradients to params; returns the same as `rlstack.agent.Agent.apply_gradients`.

    The optimizer sees only the weights; states of networks stay as they are. Weights of norm 1 have
    it after the step too. The logs are the learning rates of this step, if the optimizer is a
    `component_optimizer`.
    """
    known = isinstance(optimizer, ComponentOptimizer)
    logs = optimizer.learning_rates(opt_state) if known else {}
    weights = weights_of(params)
    updates, opt_state = optimizer.update(grads, opt_state, weights)
    weights = on_sphere(optax.apply_updates(weights, updates))
    return with_weights(params, weights), opt_state, logs


def component_optimizer(
    default: OptimizerConfig,
    components: Components,
    max_grad_norm: float,
) -> ComponentOptimizer:
    """Clips all gradients by their global norm, then gives each component its own optimizer.

    Its ``init`` takes params; of networks with state it takes only the weights.

    Args:
      default: the optimizer of the modules that no component names.
      components: optimizers by names of Haiku modules. A name covers every module with a part of
          its path that starts with the name. The first name is the component's: its log is
          ``learning_rate/NAME``. None means the default.
      max_grad_norm: largest norm of the gradients of all components together; 0 does not clip.

    Raises:
      ValueError: max_grad_norm is negative or NaN. The optimizer's ``init`` raises it if a
          component has no module.
    """
    if not max_grad_norm >= 0:
        raise ValueError(
            f"component_optimizer: max_grad_norm must be at least 0; got {max_grad_norm}."
        )
    own = {names: cfg for names, cfg in components.items() if cfg is not None}
    optimizer = make_optimizer(default)
    if own:
        transforms = {_label(names): make_optimizer(cfg) for names, cfg in own.items()}
        optimizer = optax.multi_transform(
            {_label(()): optimizer, **transforms}, lambda params: _labels(params, list(own))
        )
    if max_grad_norm:
        optimizer = optax.chain(optax.clip_by_global_norm(max_grad_norm), optimizer)
    rates = {"": learning_rate(default)}
    rates |= {names[0]: learning_rate(cfg) for names, cfg in own.items()}
    first = optimizer.init
    return ComponentOptimizer(lambda params: first(weights_of(params)), optimizer.update, rates)


def component_fields(config: type) -> tuple[str, ...]:
    """Returns the components of an agent, by the fields of its config's class.

    The component ``torso`` has the field ``torso_optimizer: OptimizerConfig | None``.
    """
    if not dataclasses.is_dataclass(config):
        return ()
    kinds = typing.get_type_hints(config)
    return tuple(
        field.name.removesuffix(_SUFFIX)
        for field in dataclasses.fields(config)
        if field.name.endswith(_SUFFIX) and kinds[field.name] == OptimizerConfig | None
    )


def require_component(config: type, component: str) -> None:
    """Raises a ValueError that names the agent's components, unless it has this one."""
    known = component_fields(config)
    if component in known:
        return
    if not known:
        raise ValueError(
            f"{config.__name__}: the agent has no components with optimizers; got {component}."
        )
    raise ValueError(
        f"{config.__name__}: the components with optimizers are {', '.join(known)}; "
        f"got {component}."
    )


def _label(names: tuple[str, ...]) -> str:
    """Returns a component's label for optax, which would flatten a tuple; "" for the default."""
    return " or ".join(names)


def _labels(params: Params, components: list[tuple[str, ...]]) -> Params:
    def component(path: tuple[object, ...]) -> str:
        names = [getattr(key, "key", getattr(key, "name", "")) for key in path]
        parts = [part for name in names for part in str(name).split("/")]
        covers = (c for c in components if any(part.startswith(c) for part in parts))
        return _label(next(covers, ()))

    paths, structure = jax.tree_util.tree_flatten_with_path(params)
    labels = [component(path) for path, _ in paths]
    for names in components:
        if _label(names) not in labels:
            held = ", ".join(jax.tree_util.keystr(path) for path, _ in paths)
            raise ValueError(
                f"component_optimizer: the name of a module must start with {_label(names)}; "
                f"the network has {held}. Leave that component's optimizer out."
            )
    return structure.unflatten(labels)
