"""The options of the environments and of the opponents in them."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from rlstack.checks import Checked

Option = int | float | bool | str


@dataclasses.dataclass(frozen=True)
class OpponentsConfig(Checked):
    """The opponents in games of several agents; these games have an option `agents`."""

    runs: tuple[str, ...] = ()
    """Directories of runs, or of single checkpoints, whose agents play without learning.
    Games are divided evenly among them. If empty, the learner plays all places."""
    share: float = 1.0
    """Fraction of the environments with opponents. In the others the learner plays all places."""
    greedy: bool = False
    """Whether opponents take their best action. Otherwise they sample, as in training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("share", 0 < self.share <= 1, "in (0, 1]")


@dataclasses.dataclass(frozen=True)
class EnvConfig(Checked):
    """The environments, their number, and how they run in parallel."""

    name: str
    """An EnvPool or Gymnasium id, "module:callable" of a class or function that makes one, or
    "rust:PATH" of a program that has all environments."""
    num_envs: int = 8
    """Number of environments of one actor."""
    type: Literal["auto", "cpp", "for_loop", "thread", "process", "jax"] = "auto"
    """How environments are stepped: by EnvPool (cpp), a Python loop, threads or worker processes.
    auto is cpp for names that EnvPool has; otherwise for_loop, or thread if wait_num is set.
    jax is for environments in JAX; the name is then an id of gymnax, "brax/NAME", "craftax/NAME",
    "jaxmarl/NAME", or "module:callable"."""
    wait_num: int = 0
    """Number of environments in each batch of an asynchronous pool: the first ones to be ready.
    0 makes the pool synchronous: each batch has all environments."""
    num_workers: int = 0
    """Number of threads or processes of the pool. 0 chooses by the number of cores."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Arguments for the constructor of the environment, as names and values. They are added to
    those of the preset; the value None removes one."""
    eval_options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Arguments that differ in evaluation, such as whole episodes instead of single lives."""
    levels: int = 0
    """Number of levels that the learner chooses among in training, see docs/levels.md; 0: the
    environments draw their episodes by themselves."""
    check_finite: bool = True
    """Whether a reward or an observation that is NaN or infinite ends the run with an error that
    names the environment. Turn it off for environments that mean something by infinity."""
    step_timeout: float = 60.0
    """Seconds without a finished step, reset or call of the step processor after which a worker
    process is restarted (type process) or the run is saved and ends (thread, for_loop). Raise it
    for slower steps; lower it to notice hangs sooner."""
    start_timeout: float = 120.0
    """Longest time in seconds for a worker process to build its environments (type process), or for
    one environment to be built (thread, for_loop)."""
    max_restarts: int = 10
    """How many worker processes of a pool may restart within restart_window before the run ends
    with the last one's error (type process)."""
    restart_window: float = 300.0
    """Seconds of work after which a restart is forgotten (type process). Hangs and starts do not
    count as work."""
    opponents: OpponentsConfig = OpponentsConfig()
    """Opponents in training. num_envs counts only the places that the learner plays."""
    eval_opponents: OpponentsConfig = OpponentsConfig()
    """Opponents in evaluation. The result lists the return against each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_envs")
        self.require_at_least(0, "max_restarts", "num_workers")
        for field in ("options", "eval_options"):
            plain = not any("." in name for name in getattr(self, field))
            self.require(field, plain, "names of arguments")
        self.require("levels", 0 <= self.levels < 2**31, "in [0, 2^31)")
        for field in ("step_timeout", "start_timeout", "restart_window"):
            self.require(field, 0 < getattr(self, field) < math.inf, "positive seconds")
        fits = 0 <= self.wait_num <= self.num_envs
        self.require("wait_num", fits, f"in 0..num_envs ({self.num_envs})")
