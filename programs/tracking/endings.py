"""What ends the training of a run: a budget that is spent, or a stop rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from programs.experiment import Experiment
from programs.stop_config import StopConfig
from programs.tracking.result import Result
from rlstack.references import call_factory, check_callable, name_of
from rlstack.storage import jsonl

RETURN = "evaluator/episode_return"
BUDGETS = ("frames", "updates", "hours")

StopRule = Callable[[int, Mapping[str, Any]], bool | str]

_WANTED = "() -> rule, with rule(step, logs) -> bool or str"


def spent_budget(experiment: Experiment, frames: int, updates: int, seconds: float) -> str:
    """Returns the name of the budget that is spent, or an empty string.

    Args:
      experiment: its budgets.
      frames: environment steps of the run so far.
      updates: updates of the learner.
      seconds: of training.
    """
    if frames >= experiment.frames:
        return "frames"
    if experiment.updates and updates >= experiment.updates:
        return "updates"
    if experiment.hours and seconds >= 3600 * experiment.hours:
        return "hours"
    return ""


def is_complete(experiment: Experiment, result: Result, *, same_budget: bool) -> bool:
    """Whether a run with this result has nothing left to train.

    Args:
      experiment: with its budgets of now.
      result: of the run until now.
      same_budget: whether the budgets are those with which the run ended. A run that a stop rule
        ended goes on if it gets others.
    """
    if spent_budget(experiment, result.env_frames, result.learner_steps, result.wall_seconds):
        return True
    return same_budget and result.ended_by not in BUDGETS


def make_rules(cfg: StopConfig) -> dict[str, StopRule]:
    """Returns the stop rules by their names.

    Raises:
      ValueError: the user's own cannot be imported.
      WrongKindError: it is not such a function.
    """
    rules: dict[str, StopRule] = {}
    if cfg.return_reached is not None:
        rules["stop.return_reached"] = _ReturnReached(cfg.return_reached)
    if cfg.patience:
        rules["stop.patience"] = _NoProgress(cfg.patience)
    if cfg.factory:
        own = call_factory("Experiment: stop.factory", cfg.factory, _WANTED)
        name = name_of(cfg.factory)
        check_callable(f"Experiment: stop.factory {name} must be a function {_WANTED}", own, 0, {})
        rules[name] = own
    return rules


class StopRules:
    """The stop rules of a run, which see every line of logs.

    Attributes:
      reason: why training must end; empty until a rule says so.
    """

    def __init__(self, cfg: StopConfig, tell: Callable[[str], None]) -> None:
        """Makes the rules.

        Args:
          cfg: names them.
          tell: shows the user a line. A rule that raises an exception is told once, and goes on
            without an effect.
        """
        self._rules, self._tell = make_rules(cfg), tell
        self._failed: set[str] = set()
        self.reason = ""

    def see(self, step: int, logs: Mapping[str, Any]) -> None:
        """Shows the rules a line of logs."""
        for name, reason in self._answers(step, logs):
            self.reason = self.reason or (f"{name}: {reason}" if reason else name)

    def replay(self, metrics: Path) -> None:
        """Shows the rules the lines of an earlier command, which do not end this one."""
        if self._rules and metrics.exists():
            for line in jsonl.read(metrics):
                self._answers(int(line.get("env_frames", 0)), line)

    def _answers(self, step: int, logs: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the names of the rules that say stop, with the reasons that they give."""
        found = []
        for name, rule in self._rules.items():
            try:
                answer = rule(step, logs)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    self._tell(f"the stop rule {name} raised {type(error).__name__}: {error}")
                continue
            if answer:
                found.append((name, answer if isinstance(answer, str) else ""))
        return found


class _ReturnReached:
    def __init__(self, least: float) -> None:
        self._least = least

    def __call__(self, step: int, logs: Mapping[str, Any]) -> bool | str:
        mean = float(logs.get(RETURN, "nan"))
        return f"{mean:g} >= {self._least:g}" if mean >= self._least else False


class _NoProgress:
    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._best = float("-inf")
        self._since = 0  # evaluations since the best one

    def __call__(self, step: int, logs: Mapping[str, Any]) -> bool | str:
        if RETURN not in logs:
            return False
        mean = float(logs[RETURN])
        if mean > self._best:
            self._best, self._since = mean, 0
        else:
            self._since += 1
        if self._since < self._patience:
            return False
        return f"{self._since} evaluations without a better return than {self._best:g}"
