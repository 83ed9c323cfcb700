"""Several runs of the topology fused in one compiled program: their loops under ``vmap``.

Runs may differ in their seed, and in numbers of the agent's config and of the environment's options
that JAX can trace: those that only enter the computation, such as a learning rate, and no shapes.
Each run learns what it learns alone, up to rounding, because XLA joins other operations. Their
directories are those of single runs, so that any of them can be resumed alone.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.evaluator import Evaluator
from rlstack.checks import EnvError
from rlstack.fused.learning import Learning
from rlstack.fused.loop import NO_LIMIT, LoopState, Report
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.learning.learner import NonFiniteError
from rlstack.programs.build import xla
from rlstack.programs.build.evaluation import make_evaluator
from rlstack.programs.build.fused import Keys, Parts
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config import options
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.fused import FusedRun, Pace, check_loop
from rlstack.programs.run.run_session import RunSession, allowance_of
from rlstack.programs.run.train import Opened
from rlstack.programs.session import origin
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.progress import Progress, open_logs
from rlstack.programs.session.result import Result
from rlstack.programs.session.signals import Interrupted, StopSignals
from rlstack.programs.study.space import Range, Values
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.storage import allocator, checkpoint
from rlstack.storage.loggers import Fanout
from rlstack.types import Array, PyTree

Traced = Mapping[str, Any]  # name of an option -> its value in each run, [N]
_OF_ENVS = "env.options."


def can_trace(experiment: Experiment, name: str, values: Values) -> bool:
    """Whether JAX can trace an option, so that one program can serve all its values.

    It is an option of the agent or of the environments.

    Args:
      experiment: the experiment of one of the runs.
      name: name of the option, such as ``agent.optimizer.learning_rate``.
      values: the values of the option in the runs.
    """
    some = values.ends if isinstance(values, Range) else values
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in some)
    if not name.startswith(("agent.", _OF_ENVS)) or not numbers:
        return False
    env = _make_batch(experiment)
    dtype = jnp.float32 if any(isinstance(v, float) for v in some) else jnp.int32
    key = jax.random.PRNGKey(0)
    keys = Keys(key, env.keys(np.arange(experiment.env.num_envs)), key, key)

    def run(value: Array) -> Any:
        parts = _parts(experiment, {name: value}, env)
        return parts.loop.run_all(parts.begin(keys), 1, NO_LIMIT)

    try:
        jax.eval_shape(run, jax.ShapeDtypeStruct((), dtype))
    except Exception:  # whatever needs a number in Python: a condition, a shape, numpy
        return False
    return True


def train(
    opened: Sequence[Opened],
    values: Mapping[str, Sequence[Option]],
    display: ProgressDisplay,
    kind: Callable[..., VmappedRuns] | None = None,
) -> list[Result | Exception]:
    """Trains several runs, new or resumed, to their ends.

    Args:
      opened: runs of one experiment with different seeds and values; this command must have claimed
        their directories.
      values: the value of each option in each run, for the options that are traced.
      display: shows the progress of all.
      kind: makes the group from the runs and the values; `VmappedRuns` by default.

    Returns:
      The result of each run, or the error that ended it.

    Raises:
      Interrupted: SIGINT or SIGTERM was received; checkpoints are saved.
    """
    xla.configure_runs([one.experiment for one in opened])
    allocator.keep_freed_memory()
    with contextlib.ExitStack() as stack:
        with display.phase("making the runs"):
            group = (kind or VmappedRuns)(opened, values)
        first = group.runs[0]
        group.announce(display.stream)
        allowance = allowance_of(first)
        tell = functools.cache(display.write_line)  # several runs may say the same
        starts = [Progress.of(one.start_from) for one in opened]
        frames = [start.env_frames for start in starts]
        logs: list[dict[str, Any]] = [{} for _ in opened]
        for i, (run, one, start) in enumerate(zip(group.runs, opened, starts, strict=True)):
            files = open_logs(one.directory, start, one.experiment, tell)
            logger = Fanout([files, _Shown(display, frames, logs, i)])
            stack.callback(logger.close)
            if one.start_from is not None:
                with origin.compared(one.directory, one.start_from):
                    older = run.older_template()
                    run.load(checkpoint.restore(one.start_from, run.template(), older=older))
            run.session = RunSession(
                one.experiment, one.directory, run, logger, start, display, allowance
            )
            if run.is_over():  # it was interrupted before its last evaluation
                run.active = False
                run.session.end()
        group.train(display)
        return [run.outcome() for run in group.runs]


class VmappedRun(FusedRun):
    """One run of a group, with its logs, evaluations and checkpoints.

    Attributes:
      active: True while the run trains; False once it has stopped.
      directory: the run's directory, claimed by this command.
      session: writes the logs and checkpoints; `train` sets it.
    """

    session: RunSession

    def __init__(
        self, opened: Opened, parts: Parts, evaluator: Evaluator, group: VmappedRuns, index: int
    ) -> None:
        super().__init__(opened.experiment, parts)
        self._evaluate_with(evaluator)
        self._group, self._index = group, index
        self._error: Exception | None = None
        self.active, self.directory = True, opened.directory

    @property
    def state(self) -> LoopState:
        """This run's part of the group's state."""
        return _row(self._group.states, self._index)

    @state.setter
    def state(self, state: LoopState) -> None:
        index = self._index
        self._group.states = jax.tree.map(
            lambda all_, x: all_.at[index].set(x), self._group.states, state
        )

    def _log_names(self) -> Mapping[str, Sequence[str]]:
        return {"": self._group.log_names}

    def read(self, part: Callable[[LoopState], PyTree]) -> PyTree:
        """Returns a part of the state, without a copy of the whole."""
        return _row(part(self._group.states), self._index)

    def restart_environments(self) -> None:
        """Starts new episodes in all environments, with the current `env_keys`."""
        loop = Parts(self.experiment, _make_batch(self.experiment)).loop
        self.state = jax.jit(loop.restart)(self.state, self.keys.env)

    def is_over(self) -> bool:
        """Whether a budget is spent, or a stop rule says that the run ends."""
        return bool(self.session.periodic.ended_by(self.env_frames, self.learner.version))

    def left(self) -> tuple[int, int]:
        """Returns frames and updates until something is due."""
        updates = (self.experiment.updates or NO_LIMIT) - self.learner.version
        return min(self.until_due(self.session.periodic), NO_LIMIT // 2), updates

    @property
    def diverged(self) -> bool:
        """Whether an update with NaN has ended this run."""
        return isinstance(self._error, NonFiniteError)

    def retry(self) -> None:
        """Lets a run that an update with NaN ended continue; other runs stay as they are."""
        if self.diverged:
            self._error, self.active = None, True

    def take(self, learning: Learning, report: Report, seconds: float) -> None:
        """Records the result of a call; a failure ends this run only."""
        try:
            with self.session.kept_on_failure():
                self.accept(learning, report, seconds)
                self.log(self.session.periodic, report)
                self.session.periodic.tick(self.env_frames, self.stats)
        except (NonFiniteError, EnvError) as error:
            self._error, self.active = error, False
            return
        if self.is_over():
            self.active = False
            self.session.end()

    def outcome(self) -> Result | Exception:
        """Evaluates and writes the result; returns it, or the error that ended the run."""
        if self._error is not None:
            return self._error
        result = self.session.result()
        self.directory.write_result(result._asdict())
        return result


class PendingCall(NamedTuple):
    """The outcome of a call in each run, including runs that have stopped."""

    iterations: int
    returns: np.ndarray  # [N] float32, the sum of before plus those of the episodes that ended
    episodes: np.ndarray  # [N] int32, that ended


class VmappedRuns:
    """The loops of several runs under ``vmap``.

    Attributes:
      runs: the runs.
      states: the loop states of all runs, stacked: ``[N, ...]``.
    """

    def __init__(self, opened: Sequence[Opened], values: Mapping[str, Sequence[Option]]) -> None:
        base = self._base = opened[0].experiment
        env = self._env = _make_batch(base)
        parts = Parts(base, env)
        self._loop, self._step_spec = parts.loop, parts.step_specs[""]
        evaluators = _evaluators([one.experiment for one in opened], env)
        self.runs = [
            VmappedRun(one, parts, evaluator, self, i)
            for i, (one, evaluator) in enumerate(zip(opened, evaluators, strict=True))
        ]
        self._values = _arrays(values)
        self._pace = Pace(base.fused.call_seconds)
        self._called = False
        keys = jax.tree.map(lambda *x: jnp.stack(x), *(run.keys for run in self.runs))
        start = CompiledQuickly(jax.vmap(self._begin))
        check_loop(base, start.eval_shape(self._values, keys))
        self.states: LoopState = start(self._values, keys)
        for run in self.runs:
            run.learner.take(run.state.learning)
        run_all = jax.vmap(self._run_all, in_axes=(0, 0, None, None, 0))
        self._run = jax.jit(run_all, donate_argnums=1)
        rows = range(len(opened))
        self._split = jax.jit(lambda learning: [_row(learning, i) for i in rows])
        self._copy = jax.jit(_copied, donate_argnums=0)

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that the replays of all runs need.

        Raises:
          ValueError: there is not enough memory.
        """
        announce_replay(self._base, self._step_spec, stream, len(self.runs))

    @property
    def log_names(self) -> tuple[str, ...]:
        """The names of the agent's logs, once the loops have been traced."""
        return self._loop.log_names

    @property
    def frames(self) -> int:
        """The largest number of frames of a run in one iteration."""
        return self._loop.frames

    def train(self, display: ProgressDisplay) -> None:
        """Makes calls until no run is active; see `train`."""
        with StopSignals(display.write_line, has_progress=lambda: self._called) as signals:
            with display.phase("compiling the loops"):
                self.call()
            while any(run.active for run in self.runs) and signals.received is None:
                self.call()
            for run in self.runs:
                if run.active:
                    run.session.end()
            self.save()
            if signals.received is not None:
                raise Interrupted(signals.received)

    def save(self) -> None:
        """Saves what belongs to no run, after the runs have saved; nothing for independent runs."""

    def call(self, most: int = NO_LIMIT, returns: np.ndarray | None = None) -> PendingCall:
        """Makes iterations until something may be due for a run that goes on.

        Args:
          most: maximum number of iterations, at least 1.
          returns: ``[N]`` float32, sums of episode returns to which this call adds; zeros by
            default.
        """
        before = np.zeros(len(self.runs), np.float32) if returns is None else returns
        left = [run.left() for run in self.runs if run.active]
        if not left:
            return PendingCall(0, before, np.zeros(len(self.runs), np.int32))
        frames, updates = (min(numbers) for numbers in zip(*left, strict=True))
        # No run passes the iteration at which it would end alone: steps that begin an episode are
        # no frames, so a call may end before it, and another one follows.
        due = min(-(-frames // self._loop.frames), -(-updates // self._loop.most_updates))
        iterations = max(1, min(self._pace.iterations, due, most))
        started = time.perf_counter()
        limit = min(self._base.updates or NO_LIMIT, NO_LIMIT)
        self.states, report = self._run(self._values, self.states, iterations, limit, before)
        report = jax.block_until_ready(report)
        seconds = time.perf_counter() - started
        if self._called:  # the first call compiles
            self._pace.adapt(iterations, seconds)
        self._called = True
        learned = self._split(self.states.learning)
        batch = report.updates.batch  # large, and needed only after a failure
        host = jax.tree.map(np.asarray, report._replace(updates=report.updates._replace(batch=())))
        called = PendingCall(iterations, host.tally.returns, host.tally.episodes)
        host = host._replace(tally=host.tally._replace(returns=called.returns - before))
        for i, run in enumerate(self.runs):
            if run.active:
                mine = _row(host, i)
                if mine.updates.failed:
                    mine = mine._replace(updates=mine.updates._replace(batch=_row(batch, i)))
                run.take(learned[i], mine, seconds)
        return called

    def copy(self, sources: Sequence[int], values: Mapping[str, Sequence[Option]]) -> None:
        """Copies params and learner states between runs, and gives all runs new option values.

        Each run keeps its own number of updates, environments and replay.

        Args:
          sources: ``[N]``, for each run the number of the run that it copies; its own number to
            copy nothing.
          values: the new value of each option in each run, as in the constructor.
        """
        self._values = _arrays(values)
        learning = self._copy(self.states.learning, np.asarray(sources, np.int32))
        self.states = self.states._replace(learning=learning)
        split = self._split(learning)
        for i, source in enumerate(sources):
            if source != i:  # a run that has ended keeps its params of that time
                self.runs[i].learner.take(split[i])

    def _parts(self, values: Traced) -> Parts:
        parts = _parts(self._base, values, self._env)
        self._loop = parts.loop  # which has the names of the logs once it is traced
        return parts

    def _begin(self, values: Traced, keys: Keys) -> LoopState:
        return self._parts(values).begin(keys)

    def _run_all(
        self, values: Traced, state: LoopState, iterations: Array, limit: Array, returns: Array
    ) -> tuple[LoopState, Report]:
        return self._parts(values).loop.run_all(state, iterations, limit, returns)


def _make_batch(experiment: Experiment) -> BatchedEnv:
    return make_batch(experiment.env.name, experiment.env.options, experiment.env.levels)


def _parts(base: Experiment, values: Traced, env: BatchedEnv) -> Parts:
    """Returns the loop of an experiment with traced values; `env` has the base's own options."""
    for name, value in values.items():
        base = options.placed(base, name, value)
    if any(name.startswith(_OF_ENVS) for name in values):
        env = _make_batch(base)
    return Parts(base, env)


def _copied(learning: Learning, sources: Array) -> Learning:
    """Returns the learning of all runs, ``[N, ...]``, with params and learner states of sources."""
    of_sources = jax.tree.map(lambda x: x[sources], learning)
    return of_sources._replace(version=learning.version)


def _arrays(values: Mapping[str, Sequence[Option]]) -> dict[str, Array]:
    return {name: jnp.asarray(found) for name, found in values.items()}


def _evaluators(experiments: Sequence[Experiment], env: BatchedEnv) -> list[Evaluator]:
    """Makes an evaluator for each run; those of equal agents share their compiled functions."""
    made: list[tuple[Any, Evaluator]] = []
    found = []
    for experiment in experiments:
        key = experiment.agent, experiment.evaluator
        same = next((e for cfg, e in made if cfg == key), None)
        if same is None or experiment.evaluator.factory:
            evaluator = make_evaluator(experiment, env.spec)
            made.append((key, evaluator))
        else:
            evaluator = same.with_key(role_key(experiment.seed, "evaluator"))
        found.append(evaluator)
    return found


class _Shown(NamedTuple):
    """Shows the sum of all runs' frames and the means of their newest logs; each run has one."""

    display: ProgressDisplay
    frames: list[int]  # of all runs
    logs: list[dict[str, Any]]  # of all runs
    place: int  # of the run among all

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        self.frames[self.place] = max(self.frames[self.place], step)
        self.logs[self.place].update(logs)
        newest = [found for found in self.logs if found]
        means = {
            name: float(np.mean([found[name] for found in newest if name in found]))
            for name in logs
        }
        self.display.write(sum(self.frames), means)

    def close(self) -> None:
        """The display is closed by whoever made it."""


def _row(tree: PyTree, index: int) -> Any:
    return jax.tree.map(lambda x: x[index], tree)
