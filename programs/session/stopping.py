"""What ends the training of a run: a budget that is spent, or a stop rule.

A learning rate that falls to 0 ends only learning; `LearningRates` tells the user of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlstack.checks import no_exits
from rlstack.optimizers import OptimizerConfig, component_fields
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.member_config import AgentConfig
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.session import errors
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_config import BUDGETS
from rlstack.references import call_factory, check_callable, name_of
from rlstack.storage import jsonl

RETURN = "evaluator/episode_return"
EPISODES = "actor/episodes"  # that have ended in the run so far

_AS_GOOD_AS_0 = 1e-3  # fraction of the largest learning rate that counts as 0
_NEAR_THE_END = 0.95  # fraction of the budget after which a schedule may end without a warning

StopRule = Callable[[int, Mapping[str, Any]], bool | str]

_WANTED = "() -> rule, with rule(step, logs) -> bool or str"


def spent_budget(experiment: Experiment, frames: int, updates: int, seconds: float) -> str:
    """Returns the name of the budget that is spent, or an empty string.

    Args:
      experiment: the experiment, which holds the budgets.
      frames: environment steps of the run so far.
      updates: updates of the learner so far.
      seconds: training time so far, in seconds.
    """
    if frames >= experiment.all_frames:
        return "frames"
    if experiment.updates and updates >= experiment.updates:
        return "updates"
    if experiment.hours and seconds >= 3600 * experiment.hours:
        return "hours"
    return ""


def expected_frames(experiment: Experiment, frames: int, updates: int, seconds: float) -> int:
    """Returns the frames at which the first budget will be spent, at the pace so far.

    Args:
      experiment: the experiment, which holds the budgets.
      frames: environment steps of the run so far.
      updates: updates of the learner so far.
      seconds: training time so far, in seconds.
    """
    spent = [frames / experiment.all_frames]
    spent += [updates / experiment.updates] if experiment.updates else []
    spent += [seconds / (3600 * experiment.hours)] if experiment.hours else []
    return round(frames / max(spent)) if frames else experiment.all_frames


def is_complete(experiment: Experiment, result: Result, *, same_budget: bool) -> bool:
    """Whether a run with this result has nothing left to train.

    Args:
      experiment: the experiment with its current budgets.
      result: the result of the run so far.
      same_budget: True if the budgets are unchanged since the run ended. With changed budgets, a
        run that a stop rule ended can continue.
    """
    if spent_budget(experiment, result.env_frames, result.learner_steps, result.wall_seconds):
        return True
    return same_budget and result.ended_by not in BUDGETS


def make_rules(cfg: StopConfig) -> dict[str, StopRule]:
    """Returns the stop rules by their names.

    Raises:
      ValueError: a user's stop rule cannot be imported.
      WrongKindError: a user's stop rule is not a function with the arguments of `StopRule`.
    """
    rules: dict[str, StopRule] = {}
    if cfg.return_reached is not None:
        rules["stop.return_reached"] = _Reached(RETURN, cfg.return_reached)
    if cfg.patience:
        rules["stop.patience"] = _NoProgress(cfg.patience)
    if cfg.episodes:
        rules["stop.episodes"] = _Reached(EPISODES, cfg.episodes)
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
        """Feeds the stopping rules one line of logs."""
        for name, reason in self._answers(step, logs):
            self.reason = self.reason or (f"{name}: {reason}" if reason else name)

    def replay(self, metrics: Path) -> None:
        """Feeds the stopping rules the metrics logged before a resume.

        They update the rules' state but cannot stop this command.
        """
        if self._rules and metrics.exists():
            for line in jsonl.read_logs(metrics):
                self._answers(int(line[jsonl.FRAMES]), line)

    def _answers(self, step: int, logs: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Returns the names of the rules that say stop, with the reasons that they give."""
        found = []
        for name, rule in self._rules.items():
            try:
                with no_exits():
                    answer = rule(step, logs)
            except Exception as error:
                if name not in self._failed:
                    self._failed.add(name)
                    self._tell(f"the stop rule {name} raised {errors.described(error)}")
                continue
            if answer:
                found.append((name, answer if isinstance(answer, str) else ""))
        return found


class _Reached:
    def __init__(self, name: str, least: float) -> None:
        self._name, self._least = name, least

    def __call__(self, step: int, logs: Mapping[str, Any]) -> bool | str:
        value = float(logs.get(self._name, "nan"))
        return f"{value:g} >= {self._least:g}" if value >= self._least else False


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


class _Falling(NamedTuple):
    """A learning rate that falls to 0."""

    option: str  # the config field of the optimizer, such as agent.optimizer
    cfg: OptimizerConfig
    updates: str  # the log that counts the learner's updates


class _Seen:
    """Totals of one learning rate over the lines of logs."""

    def __init__(self) -> None:
        self.sum = 0.0  # sum of the learning rates of all updates
        # Frames and updates at the first and the last log line with this learning rate.
        self._first = self._last = 0, 0

    def add(self, frames: int, updates: int, mean: float) -> None:
        """Adds a log line, whose `mean` covers the updates since the previous line."""
        self.sum += mean * (updates - self._last[1])
        self._first = self._first if any(self._first) else self._last
        self._last = frames, updates

    def updates_at(self, frames: int) -> float:
        """Returns how many updates there will be at these frames, at the pace so far."""
        (frames_0, updates_0), (frames_1, updates_1) = self._first, self._last
        pace = (updates_1 - updates_0) / max(frames_1 - frames_0, 1)
        return updates_1 + pace * (frames - frames_1)


class LearningRates:
    """A logger that warns of learning rates that fall to 0 well before the budget is spent.

    A schedule counts optimizer steps, so that a resumed run continues the same schedule. It does
    not follow ``--frames``: a run that is longer than its schedule learns nothing after its end.
    """

    def __init__(
        self,
        experiment: Experiment,
        tell: Callable[[str], None],
        *,
        start_frames: int = 0,
        start_seconds: float = 0.0,
        earlier: Path | None = None,
    ) -> None:
        """Reads the logs of the earlier commands, if this one resumes a run.

        Args:
          experiment: the experiment, which holds the budgets and optimizers.
          tell: shows the user a line; called at most once per optimizer.
          start_frames: frames of the earlier commands.
          start_seconds: training time of the earlier commands, in seconds.
          earlier: the metrics file of the earlier commands.
        """
        self._experiment, self._tell = experiment, tell
        self._falling = _falling(experiment)
        self._resumed = start_frames > 0
        self._began = time.monotonic() - start_seconds
        self._last: dict[str, int] = {}  # frames of the last line with more than 0, by log
        self._seen = {log: _Seen() for log in self._falling}
        self._told: set[str] = set()
        self._whole = not self._resumed  # whether the lines of all commands are known
        if self._falling and self._resumed and earlier is not None and earlier.exists():
            self._whole = True
            for line in jsonl.read_logs(earlier):
                self._find_0(int(line[jsonl.FRAMES]), line)

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Checks a line of logs, and warns if a learning rate is 0 long before the run's end."""
        for name in self._find_0(step, logs):
            option, cfg, _ = self._falling[name]
            seconds = time.monotonic() - self._began
            updates = int(logs.get("learner/steps", 0))
            total = expected_frames(self._experiment, step, updates, seconds)
            end = self._last.get(name, step)
            if end < _NEAR_THE_END * total and option not in self._told:
                self._told.add(option)
                known = name in self._last or not self._resumed
                seen = self._seen[name]
                needed = _steps_needed(cfg, seen, total) if self._whole and seen.sum > 0 else 0
                self._tell(_warning(name, option, cfg, end, total, needed, known=known))

    def _find_0(self, step: int, logs: Mapping[str, Any]) -> list[str]:
        """Returns the names of the learning rates that have fallen to 0 in this line."""
        found = []
        for name, (_, cfg, updates) in self._falling.items():
            if name not in logs or updates not in logs:
                continue
            rate = float(logs[name])
            self._seen[name].add(step, int(logs[updates]), rate)
            if rate > _AS_GOOD_AS_0 * cfg.learning_rate:
                self._last[name] = step
            elif name in self._last or not cfg.warmup_steps:  # else it may not have risen yet
                found.append(name)
        return found

    def close(self) -> None:
        """Does nothing."""


def _falling(experiment: Experiment) -> dict[str, _Falling]:
    """Returns the learning rates that fall to 0, by the names of their logs."""
    agents: dict[str, tuple[str, AgentConfig]] = {"": ("agent", experiment.agent)}
    if experiment.policies:
        agents = {
            f"{name}/": ("agent", experiment.agent)
            if member.agent is None
            else (f"policies.{name}.agent", member.agent)
            for name, member in experiment.policies.items()
        }
    found: dict[str, tuple[str, object]] = {}
    for prefix, (option, agent) in agents.items():
        log = f"{prefix}learner/learning_rate"
        default = f"{option}.optimizer", getattr(agent, "optimizer", None)
        found[log] = default
        for component in component_fields(type(agent)):
            own = getattr(agent, f"{component}_optimizer")
            given = f"{option}.{component}_optimizer", own
            found[f"{log}/{component}"] = default if own is None else given
    return {
        log: _Falling(option, cfg, f"{log.rpartition('learner/')[0]}learner/steps")
        for log, (option, cfg) in found.items()
        if isinstance(cfg, OptimizerConfig) and _falls_to_0(cfg)  # else of a user's own agent
    }


def _falls_to_0(cfg: OptimizerConfig) -> bool:
    return cfg.anneal_steps > 0 and cfg.schedule != "constant" and cfg.final_learning_rate == 0


def _steps_needed(cfg: OptimizerConfig, seen: _Seen, total: int) -> int:
    """Returns the anneal_steps with which the learning rate falls to 0 at the end of the run.

    The schedule gives the sum of the learning rate over all optimizer steps; the logs give its sum
    over all updates. Their ratio is the number of steps per update, even if log lines are rare.

    Args:
      cfg: the optimizer whose learning rate has fallen to 0.
      seen: totals of the optimizer's log lines since the start of the run.
      total: the frames of the run.
    """
    of_all_steps = cfg.learning_rate * (cfg.anneal_steps + 1) / 2  # linear and cosine alike
    steps = of_all_steps / seen.sum * seen.updates_at(total)
    # Of three digits, so that seeds of one program agree; rounded up, but not for rounding errors.
    unit = 10 ** max(math.floor(math.log10(steps)) - 2, 0)
    return unit * math.ceil(steps / unit - 0.01)


def _warning(
    name: str,
    option: str,
    cfg: OptimizerConfig,
    end: int,
    total: int,
    needed: int,
    *,
    known: bool,
) -> str:
    """Returns the warning that a learning rate fell to 0 too early.

    Args:
      name: the name of the log.
      option: the config field of the optimizer.
      cfg: the config of the optimizer.
      end: the frames at which the learning rate had fallen to 0.
      total: the frames of the run.
      needed: the anneal_steps that the run needs; 0 if unknown.
      known: True if the rate fell to 0 at ``end``; False if it may have been 0 before.
    """
    # Of three digits, because lines of logs are apart, and so that seeds of one program agree.
    when = (
        f"about frame {float(f'{end:.3g}'):,.0f}" if known else f"frame {end:,} or an earlier one"
    )
    argument = "--" + f"{option}.anneal_steps".replace("_", "-")
    steps = f"about {argument} {needed}" if needed else f"a larger {argument}"
    return (
        f"{name} has been 0 since {when} of {total:,}, so nothing is learned with it any more: "
        f"{option}.anneal_steps is {cfg.anneal_steps:,} and does not follow --frames. A new run of "
        f"this length needs {steps}"
    )
