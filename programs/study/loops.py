"""The loops of several runs under ``vmap``, as one compiled program."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.evaluator import Evaluator
from rlstack.fused.learning import Learning
from rlstack.fused.loop import NO_LIMIT, LoopState, Report
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.programs.build.evaluation import make_evaluator
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.calls import Pace
from rlstack.programs.run.fused_run import FusedRun, Keys, Parts, begin, make_parts
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.types import Array, PyTree

Values = Mapping[str, Any]  # name of an option -> its value in each run, [N]


def can_trace(experiment: Experiment, name: str, values: Sequence[Option]) -> bool:
    """Whether JAX can trace an option of the agent, so that one program can serve all its values.

    Args:
      experiment: the experiment of one of the runs.
      name: name of the option, such as ``agent.optimizer.learning_rate``.
      values: the values of the option in the runs.
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


class Member(FusedRun):
    """One of the runs of a group."""

    def __init__(
        self, experiment: Experiment, parts: Parts, evaluator: Evaluator, group: Group, index: int
    ) -> None:
        super().__init__(experiment, parts, evaluator, lambda: group.log_names)
        self._group, self._index = group, index

    @property
    def state(self) -> LoopState:
        """This run's part of the group's state."""
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
        """Starts new episodes in all environments, with the current `env_keys`."""
        loop = make_parts(self.experiment, self._env).loop
        self.state = jax.jit(loop.restart)(self.state, self.keys.env)


class ResultSink(Protocol):
    """Receives the results of one run's calls, in this process."""

    active: bool  # whether the run trains

    def left(self) -> tuple[int, int]:
        """Returns frames and updates until something is due."""

    def take(self, learning: Learning, report: Report, seconds: float) -> None:
        """Receives the result of a call; see `FusedRun.accept`."""


class PendingCall(NamedTuple):
    """The outcome of a call in each run, including runs that have stopped."""

    iterations: int
    returns: np.ndarray  # [N] float32, the sum of before plus those of the episodes that ended
    episodes: np.ndarray  # [N] int32, that ended


class Group:
    """The loops of several runs under ``vmap``.

    Attributes:
      members: the runs.
      states: the loop states of all runs, stacked: ``[N, ...]``.
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
            Member(experiment, parts, evaluator, self, i)
            for i, (experiment, evaluator) in enumerate(zip(experiments, evaluators, strict=True))
        ]
        self._values = _arrays(values)
        self._pace = Pace(base.fused.call_seconds)
        self._called = False
        keys = jax.tree.map(lambda *x: jnp.stack(x), *(member.keys for member in self.members))
        start = CompiledQuickly(jax.vmap(self._begin))
        self.states: LoopState = start(self._values, keys)
        for member in self.members:
            member.learner.take(member.state.learning)
        run_all = jax.vmap(self._run_all, in_axes=(0, 0, None, None, 0))
        self._run = jax.jit(run_all, donate_argnums=1)
        rows = range(len(experiments))
        self._split = jax.jit(lambda learning: [_row(learning, i) for i in rows])
        self._copy = jax.jit(_copied, donate_argnums=0)

    @property
    def log_names(self) -> tuple[str, ...]:
        """The names of the agent's logs, once the loops have been traced."""
        return self._loop.log_names

    @property
    def frames(self) -> int:
        """The largest number of frames of a run in one iteration."""
        return self._loop.frames

    @property
    def called(self) -> bool:
        """Whether the first call has ended."""
        return self._called

    def call(
        self, kept: Sequence[ResultSink], most: int = NO_LIMIT, returns: np.ndarray | None = None
    ) -> PendingCall:
        """Makes iterations until something may be due for a run that goes on.

        Args:
          kept: for each run, the object that receives its results.
          most: maximum number of iterations, at least 1.
          returns: ``[N]`` float32, sums of episode returns to which this call adds; zeros by
            default.
        """
        before = np.zeros(len(kept), np.float32) if returns is None else returns
        left = [one.left() for one in kept if one.active]
        if not left:
            return PendingCall(0, before, np.zeros(len(kept), np.int32))
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
        for i, one in enumerate(kept):
            if one.active:
                mine = _row(host, i)
                if mine.updates.failed:
                    mine = mine._replace(updates=mine.updates._replace(batch=_row(batch, i)))
                one.take(learned[i], mine, seconds)
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
                self.members[i].learner.take(split[i])

    def _parts(self, values: Values) -> Parts:
        parts = make_parts(_with_values(self._base, values), self._env)
        self._loop = parts.loop  # which has the names of the logs once it is traced
        return parts

    def _begin(self, values: Values, keys: Keys) -> LoopState:
        return begin(self._parts(values), keys)

    def _run_all(
        self, values: Values, state: LoopState, iterations: Array, limit: Array, returns: Array
    ) -> tuple[LoopState, Report]:
        return self._parts(values).loop.run_all(state, iterations, limit, returns)


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
