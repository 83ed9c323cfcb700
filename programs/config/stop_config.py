"""The config of the rules that end training before its budget."""

from __future__ import annotations

import dataclasses

from rlstack.checks import Checked
from rlstack.references import Hook


@dataclasses.dataclass(frozen=True)
class StopConfig(Checked):
    """When training ends before its budget. Rules see evaluations, or lines of logs."""

    return_reached: float | None = None
    """Mean return of an evaluation that ends training. Needs evaluator.period FRAMES."""
    patience: int = 0
    """Number of evaluations in a row without a better mean return that ends training. 0 is no
    limit. Needs evaluator.period FRAMES."""
    episodes: int = 0
    """Number of episodes in a line of logs that ends training. 0 is no limit."""
    factory: Hook = ""
    """A rule of your own, as "module:callable" of a function () -> rule, with
    rule(step, logs) -> True or a reason to end. It sees every line of logs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "patience", "episodes")
        if self.return_reached is not None:
            self.require_finite("return_reached")
