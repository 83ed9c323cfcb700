"""The config of an optimizer and of its learning rate."""

from __future__ import annotations

import dataclasses
from typing import Literal

import optax

from rlstack.checks import Checked
from rlstack.optimizers import catalogue
from rlstack.optimizers.catalogue import Argument
from rlstack.references import nearest

Schedule = Literal["linear", "cosine", "exponential", "constant"]

_EPS = {"adam": 1e-5, "adamw": 1e-5, "rmsprop": 1e-5}  # larger than optax's, as is usual in RL


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Checked):
    """An optimizer of optax and its learning rate.

    On the command line, options of a component that are not given are those of agent.optimizer.
    """

    name: str = "adam"
    """The optimizer: a function of optax or optax.contrib that needs only gradients, such as adam,
    adamw, rmsprop, sgd, lion, muon or schedule_free_adamw. docs/optimizers.md lists them."""
    learning_rate: float = 3e-4
    """The learning rate after the warm-up, which is the largest one."""
    anneal_steps: int = 0
    """Optimizer steps, with the warm-up, after which the learning rate has fallen to
    final_learning_rate. 0 keeps it constant. It is a number of its own, and a preset's does not
    follow --frames: a longer run learns nothing once the learning rate is 0."""
    eps: float | None = None
    """Constant added to the denominator of the step; inside the square root for rmsprop. None is
    1e-5 for adam, adamw and rmsprop, and optax's value for others. Ignored by optimizers without
    it, such as sgd."""
    decay: float = 0.9
    """Decay rate of the running mean of squared gradients. rmsprop only."""
    weight_decay: float = 0.0
    """Strength of the weight decay, for optimizers that have it, such as adamw and lion."""
    schedule: Schedule = "linear"
    """How the learning rate falls after the warm-up: linearly, as half a cosine, by a constant
    factor per step (exponential), or not at all (constant)."""
    warmup_steps: int = 0
    """Optimizer steps at the start in which the learning rate rises linearly from 0."""
    final_learning_rate: float = 0.0
    """Learning rate after anneal_steps. exponential needs a positive one."""
    arguments: dict[str, Argument] = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer, as names and values, such as momentum 0.9 nesterov True
    for sgd. Others keep optax's defaults."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = catalogue.optimizers()
        if self.name not in known:
            hint = nearest(self.name, known)
            raise ValueError(
                f"OptimizerConfig: name must be one of optax's; got {self.name!r}{hint}"
            )
        self.require("learning_rate", self.learning_rate > 0, "positive")
        self.require_at_least(0, "anneal_steps", "warmup_steps", "final_learning_rate")
        self.require("eps", self.eps is None or self.eps >= 0, "at least 0")
        self.require("decay", 0 <= self.decay < 1, "in [0, 1)")
        self._check_schedule()
        self._check_arguments()

    def _check_schedule(self) -> None:
        falls = self.schedule in ("cosine", "exponential")
        self.require(
            "anneal_steps", bool(self.anneal_steps) or not falls, "positive for a schedule"
        )
        if self.anneal_steps and self.schedule != "constant":
            rule = f"more than the warmup_steps ({self.warmup_steps}), which it includes"
            self.require("anneal_steps", self.anneal_steps > self.warmup_steps, rule)
        positive = self.final_learning_rate > 0 or self.schedule != "exponential"
        self.require("final_learning_rate", positive, "positive if the schedule is exponential")
        reached = self.anneal_steps > 0 or not self.final_learning_rate
        self.require("final_learning_rate", reached, "0 without anneal_steps")
        if callable(learning_rate(self)) and not catalogue.takes_schedule(self.name):
            raise ValueError(
                f"OptimizerConfig: the learning rate of {self.name} must be constant; got "
                f"anneal_steps={self.anneal_steps} and warmup_steps={self.warmup_steps}. Set both "
                "to 0, or take another optimizer."
            )

    def _check_arguments(self) -> None:
        known = dict(catalogue.arguments(self.name))
        if self.weight_decay and "weight_decay" not in known:
            raise ValueError(
                f"OptimizerConfig: {self.name} decays no weights; got weight_decay="
                f"{self.weight_decay}. Set it to 0, or take an optimizer such as adamw."
            )
        own = {field.name for field in dataclasses.fields(self)}
        for name, value in self.arguments.items():
            if name in own:
                raise ValueError(
                    f"OptimizerConfig: arguments must not contain {name}, which is an option of "
                    f"its own; got {value!r}. Set the option {name.replace('_', '-')}."
                )
            if name not in known:
                hint = nearest(name, known.keys() - own)
                raise ValueError(
                    f"OptimizerConfig: arguments must be those of {self.name}; got {name!r}{hint}"
                )
            if not _fits(value, known[name]):
                raise ValueError(
                    f"OptimizerConfig: the argument {name} of {self.name} must be like its default "
                    f"{known[name]!r}; got {value!r}."
                )


def _fits(value: object, default: object) -> bool:
    if default is None:
        return isinstance(value, Argument)
    if isinstance(default, bool | str):
        return type(value) is type(default)
    return isinstance(value, int | float) and not isinstance(value, bool)


def make_optimizer(cfg: OptimizerConfig) -> optax.GradientTransformation:
    """Makes the configured optimizer."""
    given: dict[str, float | None] = {
        "eps": _EPS.get(cfg.name) if cfg.eps is None else cfg.eps,
        "decay": cfg.decay,
        "weight_decay": cfg.weight_decay,
    }
    known = catalogue.arguments(cfg.name)
    own = {name: value for name, value in given.items() if name in known and value is not None}
    return catalogue.optimizers()[cfg.name](learning_rate(cfg), **own, **cfg.arguments)


def learning_rate(cfg: OptimizerConfig) -> float | optax.Schedule:
    """Returns the learning rate: a number, or a function of the number of steps made."""
    peak, end = cfg.learning_rate, cfg.final_learning_rate
    steps = cfg.anneal_steps - cfg.warmup_steps
    after: optax.Schedule | None = None  # None is constant
    if cfg.anneal_steps and cfg.schedule == "linear":
        after = optax.linear_schedule(peak, end, steps)
    elif cfg.anneal_steps and cfg.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, steps, alpha=end / peak)
    elif cfg.anneal_steps and cfg.schedule == "exponential":
        after = optax.exponential_decay(peak, steps, end / peak, end_value=end)
    if not cfg.warmup_steps:
        return after or peak
    rise = optax.linear_schedule(0.0, peak, cfg.warmup_steps)
    return optax.join_schedules([rise, after or optax.constant_schedule(peak)], [cfg.warmup_steps])
