"""The config of the rules that end training before its budget."""

from __future__ import annotations

import dataclasses

from rlstack.checks import Checked
from rlstack.references import Hook


@dataclasses.dataclass(frozen=True)
class StopConfig(Checked):
    """When training ends before its budget. Rules on returns need evaluator.period FRAMES."""

    return_reached: float | None = None
    """Mean return of an evaluation that ends training."""
    patience: int = 0
    """Number of evaluations in a row without a better mean return that ends it. 0 is no limit."""
    episodes: int = 0
    """Number of episodes that ends training, at the next line of logs. 0 is no limit."""
    factory: Hook = ""
    """A rule of your own: "module:callable" of () -> rule, rule(step, logs) -> True or a reason."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "patience", "episodes")
        if self.return_reached is not None:
            self.require_finite("return_reached")
