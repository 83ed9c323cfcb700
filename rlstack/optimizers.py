"""Optimizers made from configs, one for each component of a network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args

import jax
import optax

from rlstack.checks import Checked
from rlstack.stateful_params import weights_of, with_weights
from rlstack.types import Logs, Params, PyTree

Name = Literal["adam", "adamw", "rmsprop", "sgd"]
_NAMES: tuple[str, ...] = get_args(Name)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """One optax optimizer."""

    name: Name = "adam"
    """The optimizer, as implemented in optax."""
    learning_rate: float = 3e-4
    """Step size at the start of training."""
    anneal_steps: int = 0
    """Optimizer steps in which the learning rate falls linearly to 0. 0 keeps it constant."""
    eps: float = 1e-5
    """Constant added to the denominator of the step; inside the square root for rmsprop. Not for
    sgd."""
    decay: float = 0.9
    """Decay rate of the running mean of squared gradients. rmsprop only."""
    weight_decay: float = 0.0
    """Strength of the decoupled weight decay. adamw only."""

    def __post_init__(self) -> None:
        self.require_one_of("name", _NAMES)
        self.require("learning_rate", self.learning_rate > 0, "positive")
        self.require_at_least(0, "anneal_steps", "eps")
        self.require("decay", 0 <= self.decay < 1, "in [0, 1)")
        if self.weight_decay and self.name != "adamw":
            raise ValueError(
                f"OptimizerConfig: only adamw decays weights; got name={self.name!r} with "
                f"weight_decay={self.weight_decay}. Use --agent.optimizer.name adamw."
            )


def make_optimizer(cfg: OptimizerConfig) -> optax.GradientTransformation:
    """Makes the configured optimizer."""
    rate: optax.ScalarOrSchedule = cfg.learning_rate
    if cfg.anneal_steps:
        rate = optax.linear_schedule(cfg.learning_rate, 0.0, cfg.anneal_steps)
    if cfg.name == "adamw":
        return optax.adamw(rate, eps=cfg.eps, weight_decay=cfg.weight_decay)
    if cfg.name == "rmsprop":
        return optax.rmsprop(rate, decay=cfg.decay, eps=cfg.eps)
    return optax.sgd(rate) if cfg.name == "sgd" else optax.adam(rate, eps=cfg.eps)


def optimizer_step(
    optimizer: optax.GradientTransformation,
    params: Params,
    opt_state: optax.OptState,
    grads: PyTree,
) -> tuple[Params, optax.OptState, Logs]:
    """Applies gradients to params; returns the same as `rlstack.agent.Agent.apply_gradients`.

    The optimizer sees only the weights; states of networks stay as they are.
    """
    weights = weights_of(params)
    updates, opt_state = optimizer.update(grads, opt_state, weights)
    return with_weights(params, optax.apply_updates(weights, updates)), opt_state, {}


def component_optimizer(
    default: OptimizerConfig,
    components: Mapping[tuple[str, ...], OptimizerConfig | None],
    max_grad_norm: float,
) -> optax.GradientTransformation:
    """Clips all gradients by their global norm, then gives each component its own optimizer.

    Its ``init`` takes params; of networks with state it takes only the weights.

    Args:
      default: the optimizer of the modules that no component names.
      components: optimizers by names of Haiku modules. A name covers every module with a part of
          its path that starts with the name. None means the default.
      max_grad_norm: largest norm of the gradients of all components together; 0 does not clip.

    Raises:
      ValueError: max_grad_norm is negative. The optimizer's ``init`` raises it if a component has
          no module.
    """
    if max_grad_norm < 0:
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
    first = optimizer.init
    return optimizer._replace(init=lambda params: first(weights_of(params)))


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
