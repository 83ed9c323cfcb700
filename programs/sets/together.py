"""Several runs of the topology fused in one compiled program: their loops under ``vmap``.

Runs may differ in their seed and in numbers of the agent's config that JAX can trace: numbers that
only enter the computation, such as a learning rate, and no shapes. Each run learns what it learns
alone, up to rounding, because XLA joins other operations. Their directories are those of single
runs, so that any of them can be resumed alone.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from programs.components import xla
from programs.components.evaluation import make_evaluator
from programs.components.seeds import role_key
from programs.env_config import Option
from programs.experiment import Experiment
from programs.run.fused import QUICKLY, Pace
from programs.run.fused_run import FusedRun, Keys, Parts, begin, make_parts
from programs.run.train import Books, Opened
from programs.tracking.display import ProgressDisplay
from programs.tracking.progress import Progress, open_logs
from programs.tracking.result import Result
from programs.tracking.signals import Interrupted, StopSignals
from rlstack.acting.evaluator import Evaluator
from rlstack.checks import EnvError
from rlstack.fused.loop import NO_LIMIT, LoopState, Report
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.learning.learner import NonFiniteError
from rlstack.storage import checkpoint
from rlstack.storage.loggers import Fanout
from rlstack.types import Array, PyTree

Values = Mapping[str, Any]  # name of an option -> its value in each run, [N]


def can_trace(experiment: Experiment, name: str, values: Sequence[Option]) -> bool:
    """Whether JAX can trace an option of the agent, so that one program has all its values.

    Args:
      experiment: one of the runs.
      name: of the option, such as ``agent.optimizer.learning_rate``.
      values: that it has.
    """
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    if not name.startswith("agent.") or not numbers:
        return False
    env = make_batch(experiment.env.name, experiment.env.options)
    dtype = jnp.float32 if any(isinstance(v, float) for v in values) else jnp.int32
    key = jax.random.PRNGKey(0)
    keys = Keys(key, env.keys(np.arange(experiment.env.num_envs)), key, key)

    def run(value: Array) -> Any:
        parts = make_parts(_with_values(experiment, {name: value}), env)
        return parts.loop.run_all(begin(parts, keys), 1, NO_LIMIT)

    try:
        jax.eval_shape(run, jax.ShapeDtypeStruct((), dtype))
    except Exception:  # whatever needs a number in Python: a condition, a shape, numpy
        return False
    return True


def train(
    runs: Sequence[Opened], values: Mapping[str, Sequence[Option]], display: ProgressDisplay
) -> list[Result | Exception]:
    """Trains several runs to their ends.

    Args:
      runs: with directories that may be written to, of one experiment with different seeds and
        values.
      values: the value of each option in each run, for the options that are traced.
      display: shows the progress of all.

    Returns:
      The result of each run, or the error that ended it.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; checkpoints are saved.
    """
    xla.configure(convolutions=True)
    with contextlib.ExitStack() as stack:
        with display.phase("making the runs"):
            group = _Group([run.experiment for run in runs], values)
        group.members[0].announce(display.stream, len(runs))
        shown = _Shown(display)
        kept = []
        for run, member in zip(runs, group.members, strict=True):
            start = Progress.of(run.start_from)
            files = open_logs(run.directory, start, run.experiment.loggers, display.write_line)
            logger = Fanout([files, shown.of(start.env_frames)])
            stack.callback(logger.close)
            if run.start_from is not None:
                member.load(checkpoint.restore(run.start_from, member.template()))
            books = Books(run.experiment, run.directory, member, logger, start, display)
            kept.append(_Kept(run, member, books))
        with StopSignals(has_progress=lambda: group.called) as signals:
            with display.phase("compiling the loops"):
                group.call(kept)
            while any(one.goes_on for one in kept) and signals.received is None:
                group.call(kept)
            if signals.received is not None:
                for one in kept:
                    if one.goes_on:
                        one.books.end()
                raise Interrupted(signals.received)
        return [one.outcome() for one in kept]


class _Kept:
    """A run with its books.

    Attributes:
      goes_on: whether it trains.
    """

    def __init__(self, run: Opened, member: _Member, books: Books) -> None:
        self.member, self.books, self._run = member, books, run
        self._error: Exception | None = None
        self.goes_on = not self._ended()
        if not self.goes_on:  # it was interrupted before its last evaluation
            books.end()

    def _ended(self) -> bool:
        return bool(
            self.books.periodic.ended_by(self.member.env_frames, self.member.learner.version)
        )

    def left(self) -> tuple[int, int]:
        """Returns frames and updates until something is due."""
        experiment, member = self._run.experiment, self.member
        due = min(experiment.frames, self.books.periodic.next_due) - member.env_frames
        updates = (experiment.updates or NO_LIMIT) - member.learner.version
        return int(min(due, NO_LIMIT // 2)), updates

    def take(self, learning: Any, report: Report, seconds: float) -> None:
        """Takes the result of a call; a failure ends this run only."""
        try:
            with self.books.kept_on_failure():
                self.member.accept(learning, report, seconds)
                self.member.log(self.books.periodic, report)
                self.books.periodic.tick(self.member.env_frames, self.member.stats)
        except (NonFiniteError, EnvError) as error:
            self._error, self.goes_on = error, False
            return
        if self._ended():
            self.goes_on = False
            self.books.end()

    def outcome(self) -> Result | Exception:
        """Evaluates and writes the result; returns it, or the error that ended the run."""
        if self._error is not None:
            return self._error
        result = self.books.result()
        self._run.directory.write_result(result._asdict())
        return result


class _Member(FusedRun):
    """One of the runs of a group."""

    def __init__(
        self, experiment: Experiment, parts: Parts, evaluator: Evaluator, group: _Group, index: int
    ) -> None:
        super().__init__(experiment, parts, evaluator, lambda: group.log_names)
        self._group, self._index = group, index

    @property
    def state(self) -> LoopState:
        """Its part of the state of all."""
        return jax.tree.map(lambda x: x[self._index], self._group.states)

    @state.setter
    def state(self, state: LoopState) -> None:
        index = self._index
        self._group.states = jax.tree.map(
            lambda all_, x: all_.at[index].set(x), self._group.states, state
        )

    def read(self, part: Callable[[LoopState], PyTree]) -> PyTree:
        """Returns a part of the state, without a copy of the whole."""
        return _row(part(self._group.states), self._index)

    def restart_environments(self) -> None:
        """Starts new episodes, with the env keys of now."""
        loop = make_parts(self.experiment, self._env).loop
        self.state = jax.jit(loop.restart)(self.state, self.keys.env)


class _Group:
    """The loops of several runs under ``vmap``.

    Attributes:
      members: the runs.
      states: of all, ``[N, ...]``.
    """

    def __init__(
        self, experiments: Sequence[Experiment], values: Mapping[str, Sequence[Option]]
    ) -> None:
        base = self._base = experiments[0]
        env = self._env = make_batch(base.env.name, base.env.options)
        parts = make_parts(base, env)
        self._loop = parts.loop
        evaluators = _evaluators(experiments, env)
        self.members = [
            _Member(experiment, parts, evaluator, self, i)
            for i, (experiment, evaluator) in enumerate(zip(experiments, evaluators, strict=True))
        ]
        self._values = {name: jnp.asarray(found) for name, found in values.items()}
        self._pace = Pace(base.fused.call_seconds)
        self._called = False
        keys = jax.tree.map(lambda *x: jnp.stack(x), *(member.keys for member in self.members))
        start = jax.jit(jax.vmap(self._begin), compiler_options=QUICKLY)
        # Copies, because an array must not be donated twice, as params and as target params.
        self.states: LoopState = jax.tree.map(jnp.array, start(self._values, keys))
        for member in self.members:
            member.learner.take(member.state.learning)
        run_all = jax.vmap(self._run_all, in_axes=(0, 0, None, None))
        self._run = jax.jit(run_all, donate_argnums=1)
        rows = range(len(experiments))
        self._split = jax.jit(lambda learning: [_row(learning, i) for i in rows])

    @property
    def log_names(self) -> tuple[str, ...]:
        """The names of the agent's logs, once the loops have been traced."""
        return self._loop.log_names

    @property
    def called(self) -> bool:
        """Whether the first call has ended."""
        return self._called

    def call(self, kept: Sequence[_Kept]) -> None:
        """Makes iterations until something may be due for a run that goes on."""
        left = [one.left() for one in kept if one.goes_on]
        if not left:
            return
        frames, updates = (min(numbers) for numbers in zip(*left, strict=True))
        # No run passes the iteration at which it would end alone: steps that begin an episode are
        # no frames, so a call may end before it, and another one follows.
        most = min(-(-frames // self._loop.frames), -(-updates // self._loop.most_updates))
        iterations = max(1, min(self._pace.iterations, most))
        started = time.perf_counter()
        limit = min(self._base.updates or NO_LIMIT, NO_LIMIT)
        self.states, report = self._run(self._values, self.states, iterations, limit)
        report = jax.block_until_ready(report)
        seconds = time.perf_counter() - started
        if self._called:  # the first call compiles
            self._pace.adapt(iterations, seconds)
        self._called = True
        learned = self._split(self.states.learning)
        batch = report.updates.batch  # large, and needed only after a failure
        host = jax.tree.map(np.asarray, report._replace(updates=report.updates._replace(batch=())))
        for i, one in enumerate(kept):
            if one.goes_on:
                mine = _row(host, i)
                if mine.updates.failed:
                    mine = mine._replace(updates=mine.updates._replace(batch=_row(batch, i)))
                one.take(learned[i], mine, seconds)

    def _parts(self, values: Values) -> Parts:
        parts = make_parts(_with_values(self._base, values), self._env)
        self._loop = parts.loop  # which has the names of the logs once it is traced
        return parts

    def _begin(self, values: Values, keys: Keys) -> LoopState:
        return begin(self._parts(values), keys)

    def _run_all(
        self, values: Values, state: LoopState, iterations: Array, limit: Array
    ) -> tuple[LoopState, Report]:
        return self._parts(values).loop.run_all(state, iterations, limit)


class _Shown:
    """Shows the sum of the runs' frames and the means of their newest logs."""

    def __init__(self, display: ProgressDisplay) -> None:
        self._display = display
        self._frames: list[int] = []
        self._logs: list[dict[str, Any]] = []

    def of(self, frames: int) -> _ShownRun:
        """Returns the logger of one more run, which has made these frames."""
        self._frames.append(frames)
        self._logs.append({})
        return _ShownRun(self, len(self._frames) - 1)

    def write(self, index: int, step: int, logs: Mapping[str, Any]) -> None:
        """Takes the logs of one run."""
        self._frames[index] = max(self._frames[index], step)
        self._logs[index].update(logs)
        newest = [found for found in self._logs if found]
        means = {
            name: float(np.mean([found[name] for found in newest if name in found]))
            for name in logs
        }
        self._display.write(sum(self._frames), means)


class _ShownRun:
    def __init__(self, shown: _Shown, index: int) -> None:
        self._shown, self._index = shown, index

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        self._shown.write(self._index, step, logs)

    def close(self) -> None:
        """The display is closed by whoever made it."""


def _evaluators(experiments: Sequence[Experiment], env: BatchedEnv) -> list[Evaluator]:
    """Makes an evaluator for each run; runs with the same agent share its compiled functions."""
    made: list[tuple[Any, Evaluator]] = []
    found = []
    for experiment in experiments:
        same = next((e for cfg, e in made if cfg == experiment.agent), None)
        if same is None or experiment.evaluator.factory:
            evaluator = make_evaluator(experiment, env.spec)
            made.append((experiment.agent, evaluator))
        else:
            evaluator = same.with_key(role_key(experiment.seed, "evaluator"))
        found.append(evaluator)
    return found


def _with_values(experiment: Experiment, values: Values) -> Experiment:
    """Returns an experiment with values that JAX traces, which no check of a config can read."""
    for name, value in values.items():
        experiment = _traced(experiment, name.replace("-", "_").split("."), value)
    return experiment


def _traced(config: Any, path: Sequence[str], value: Any) -> Any:
    field, *rest = path
    changed = copy.copy(config)
    new = _traced(getattr(config, field), rest, value) if rest else value
    object.__setattr__(changed, field, new)
    return changed


def _row(tree: PyTree, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
