"""Calls of a compiled loop, and the work of the host between two calls."""

from __future__ import annotations

import abc
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from rlstack.fused.acting import EpisodeStats
from rlstack.fused.learning import Updates
from rlstack.fused.loop import NO_LIMIT, Limits, LoopState, Report
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.learning.update import in_thread
from rlstack.programs.build.environments import fault_error
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.references import name_of
from rlstack.specs.masks import COUNTER, no_choice_warning, without_choice
from rlstack.storage import checkpoint
from rlstack.types import PRNGKey

Phase = Callable[[str], AbstractContextManager]
_log = logging.getLogger(__name__)
_GROWTH = 8  # most times as many iterations as in the call before


class Pace:
    """Chooses the number of iterations of each call, so that calls take a given time.

    Attributes:
      iterations: number of iterations in the next call.
    """

    def __init__(self, call_seconds: float) -> None:
        """Starts with one iteration for the first call.

        Args:
          call_seconds: the wanted duration of a call, in seconds.
        """
        self.iterations, self._wanted = 1, call_seconds

    def adapt(self, iterations: int, seconds: float) -> None:
        """Chooses the next number of iterations from the duration of a call.

        Args:
          iterations: number of iterations of the call.
          seconds: duration of the call, without compilation.
        """
        rate = iterations / max(seconds, 1e-6)
        self.iterations = max(1, min(math.ceil(rate * self._wanted), _GROWTH * self.iterations))


class CompiledRun(abc.ABC):
    """A run that a compiled loop trains; subclasses define where the loop's state is stored.

    Attributes:
      experiment: the run's experiment.
      learner: the learner, or the learners of several policies.
      starting_seconds: see `rlstack.programs.run.host.HostLoop`.
    """

    learner: Any
    starting_seconds = 0.0

    def __init__(self, experiment: Experiment, env: BatchedEnv) -> None:
        """Starts with no restarts of the environments."""
        self.experiment, self._env = experiment, env
        self._restarts = 0
        self._no_choice = None if without_choice(env.spec) is None else 0
        self._seconds = 0.0  # duration of the last call

    @property
    @abc.abstractmethod
    def state(self) -> LoopState:
        """The state of the run's loop. The next call may donate its arrays."""

    @state.setter
    @abc.abstractmethod
    def state(self, state: LoopState) -> None: ...

    @abc.abstractmethod
    def restart_environments(self) -> None:
        """Starts new episodes in all environments, with the current `env_keys`."""

    @property
    @abc.abstractmethod
    def env_frames(self) -> int:
        """Environment steps so far, of this run and of those that it resumes."""

    def until_due(self, periodic: PeriodicActions) -> int:
        """Returns the frames until an evaluation, a checkpoint or the end of the budget."""
        return int(min(self.experiment.frames, periodic.next_due) - self.env_frames)

    @abc.abstractmethod
    def accept(self, learning: Any, report: Report, seconds: float) -> None:
        """Records the result of a call.

        Args:
          learning: the params and learner state after the call.
          report: this run's part of the call's report.
          seconds: duration of the call.

        Raises:
          NonFiniteError: an update gave NaN or infinity; params and learner state are as before.
          EnvError: an environment gave NaN or infinity; all environments are restarted.
        """

    @abc.abstractmethod
    def log(self, periodic: PeriodicActions, report: Report) -> None:
        """Logs the means over a call; see `log_call`."""

    @abc.abstractmethod
    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""

    @property
    def env_keys(self) -> PRNGKey:
        """The keys of the environments, ``[B, ...]``: new ones after each restart of them."""
        rank = self._restarts
        first = role_seed(self.experiment.seed, *(("env", rank) if rank else ("env",)))
        return self._env.keys(np.arange(first, first + self.experiment.env.num_envs))

    def check_envs(self, report: Report) -> None:
        """Counts masks; restarts environments with NaN, infinity or integers out of their space.

        Raises:
          EnvError: an environment gave such a value.
        """
        self._count_masks(np.asarray(report.tally.no_choice))
        if not report.tally.bad.any():
            return
        self._restarts += 1
        self.restart_environments()
        raise fault_error(self.experiment.env.name, np.asarray(report.tally.bad))

    def _count_masks(self, steps: np.ndarray) -> None:
        """Counts steps ``[B]`` whose mask marks no action as legal; warns of the first."""
        if self._no_choice is None or not steps.any():
            return
        if not self._no_choice:
            when = f"before frame {self.env_frames:,}"
            name, env_id = name_of(self.experiment.env.name), int(np.argmax(steps > 0))
            _log.warning(no_choice_warning(env_id, name, when))
        self._no_choice += int(steps.sum())

    def by_policy(self) -> Mapping[str, Mapping[str, float]]:
        """Returns the counters of each of several policies, for the result; here there is one."""
        return {}

    @property
    def env_stats(self) -> dict[str, object]:
        """The counters of the environments, for `stats`."""
        return {} if self._no_choice is None else {f"env/{COUNTER}": self._no_choice}


class Calls(CompiledRun):
    """Calls a compiled loop, and evaluates, saves and logs on the host between two calls."""

    def compile(
        self, loop: Any, begin: Callable[[Any], LoopState], keys: Any, phase: Phase
    ) -> None:
        """Makes the state of a loop. Meanwhile a thread compiles the loop; `call` waits for it.

        Args:
          loop: a `rlstack.fused.loop.CompiledLoop`.
          begin: returns the state at the start; pure.
          keys: the argument of `begin`.
          phase: called with a text about what may take long, and entered while it lasts.
        """
        self._loop, self._phase = loop, phase
        self._pace = Pace(self.experiment.fused.call_seconds)

        start = CompiledQuickly(begin)
        shapes = start.eval_shape(keys)
        placed = loop.shardings(shapes)
        # By default also the results go where the compiler wants them, and the next call compiles.
        self._run = jax.jit(loop.run, donate_argnums=0, out_shardings=(placed, None))
        self._compiling = in_thread(self._compile, shapes, placed)
        self.state = start(keys)

    def _compile(self, shapes: LoopState, placed: LoopState | None) -> None:
        if placed is not None:
            shapes = jax.tree.map(
                lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                shapes,
                placed,
            )
        self._run.lower(shapes, Limits(1, NO_LIMIT, NO_LIMIT)).compile()

    @property
    def state(self) -> LoopState:
        """The state of the loop."""
        return self._state

    @state.setter
    def state(self, state: LoopState) -> None:
        self._state = self._loop.placed(state)

    def restart_environments(self) -> None:
        """Starts new episodes in all environments, with the current `env_keys`."""
        self.state = jax.jit(self._loop.restart)(self._state, self.env_keys)

    def advance(self, periodic: PeriodicActions) -> None:
        """Calls the compiled program: it acts and learns for about `fused.call_seconds`.

        A call ends at the first iteration after which an evaluation or a checkpoint is due.

        Raises:
          NonFiniteError, EnvError: see `CompiledRun.accept`.
        """
        if not self._compiling.done():
            with self._phase("compiling the loop"):
                checkpoint.load_libraries()  # meanwhile
                self._compiling.result()
        most = min(self.experiment.updates or NO_LIMIT, NO_LIMIT)
        frames = min(self.until_due(periodic), NO_LIMIT // 2)
        report = self.call(Limits(self._pace.iterations, frames, most))
        self._pace.adapt(int(report.iterations), self._seconds)
        self.log(periodic, report)

    def call(self, limits: Limits) -> Report:
        """Runs the compiled program until one of the limits."""
        self._compiling.result()
        started = time.perf_counter()
        self._state, report = self._run(self._state, limits)
        report = jax.block_until_ready(report)
        self.accept(self._state.learning, report, time.perf_counter() - started)
        return report

    def close(self) -> None:
        """Waits for the thread that compiles the loop."""
        wait([self._compiling])


def log_call(
    periodic: PeriodicActions,
    tally: EpisodeStats,
    prefixes: Sequence[str],
    learned: tuple[Updates, int, Sequence[str], str] | None,
) -> None:
    """Logs the means over a call. Each mean is repeated once per episode or update it stands for.

    Args:
      periodic: receives the logs.
      tally: episode statistics of one agent.
      prefixes: prefixes for the names of the episode logs; the logs are written once for each.
      learned: the agent's updates, their number, the names of their logs and the prefix of these
        names; None for an agent that does not learn.
    """
    episodes = int(tally.episodes)
    if episodes:
        sums = {"episode_return": tally.returns, "episode_length": tally.lengths}
        logs = {k: np.full(episodes, v / episodes) for k, v in sums.items()}
        for prefix in prefixes:
            periodic.log(logs, prefix)
    if learned is not None and learned[1]:
        updates, number, names, prefix = learned
        means = np.asarray(updates.logs) / number
        logs = {k: np.full(number, v) for k, v in zip(names, means, strict=True)}
        periodic.log(logs, prefix)
