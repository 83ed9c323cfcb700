"""The topology fused: a compiled loop, and the work of the host between its calls.

A loop trains one policy or several: those of one run (`Fused`), and with ``vmap`` those of several
runs of one policy each (`rlstack.programs.study.vmapped`).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.fused.acting import EpisodeStats
from rlstack.fused.learning import Learning, Updates
from rlstack.fused.loop import NO_LIMIT, Limits, LoopState, Report
from rlstack.fused.ring import RingState
from rlstack.jax_envs.factory import make_batch
from rlstack.learning.device_replay import check_room
from rlstack.learning.learner import NonFiniteError, non_finite
from rlstack.learning.update import in_thread
from rlstack.programs.build.devices import learner_device
from rlstack.programs.build.environments import fault_error
from rlstack.programs.build.evaluation import compile_evaluation, make_evaluator
from rlstack.programs.build.fused import Keys, Parts
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.policy_reports import PolicyReports
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.random.compiled_quickly import CompiledQuickly
from rlstack.references import name_of
from rlstack.specs.masks import COUNTER, no_choice_warning, without_choice
from rlstack.storage import checkpoint
from rlstack.types import Batch, LearnerState, Params, PRNGKey, PyTree, Transition

if TYPE_CHECKING:  # a run of one policy does not import these
    from rlstack.programs.build.policies.members import Division
    from rlstack.programs.build.policies.versions import Versions

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


class Learned:
    """The params and learner state of a run, copied from the compiled loop after each call.

    Attributes:
      params: the newest params.
      learner_state: the newest learner state.
      version: number of updates.
    """

    def __init__(self) -> None:
        """Starts empty, with version 0; `take` sets the params."""
        self.params: Params = None
        self.learner_state: LearnerState = None
        self.version = 0

    def take(self, learning: Learning) -> None:
        """Stores the newest state; the arrays of the previous one may have been donated."""
        # Readers of the params need one copy: with several devices, the one on the first device.
        learning = jax.tree.map(lambda x: x.addressable_data(0), learning)
        self.params, self.learner_state = learning.params, learning.learner_state
        self.version = int(learning.version)

    @property
    def learning(self) -> Learning:
        """The same content as a `Learning`, the form that the compiled loop uses."""
        return Learning(self.params, self.learner_state, jnp.asarray(self.version, jnp.int32))

    def save(self) -> PyTree:
        """Returns the state in the format of `rlstack.learning.learner.Learner.save`."""
        return {
            "params": self.params,
            "learner_state": self.learner_state,
            "version": np.int64(self.version),
        }

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        self.params, self.learner_state = saved["params"], saved["learner_state"]
        self.version = int(saved["version"])


def failed_update(learned: Learned, updates: Updates, names: Sequence[str]) -> NonFiniteError:
    """Returns the error of an update that was dropped.

    Args:
      learned: params and learner state before the update.
      updates: the updates of the call, with the batch and the logs of the one that failed.
      names: names of the update's logs.
    """
    logs = dict(zip(names, updates.failed_logs, strict=True))
    before = learned.params, learned.learner_state
    return non_finite(logs, before, cast("Batch", updates.batch), learned.version)


def check_loop(experiment: Experiment, shapes: PyTree) -> None:
    """Raises a ValueError if the state of a loop does not fit into its devices' memory.

    Args:
      experiment: the loop's experiment.
      shapes: shapes and dtypes of the state.
    """
    devices = max(1, len(experiment.learner.devices))
    size = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    way_out = "Lower --replay.max-size, --env.num-envs or the number of seeds."
    check_room(size // devices, learner_device(experiment), way_out)


class FusedRun(PolicyReports):
    """A run that a compiled loop trains; subclasses define where the loop's state is stored.

    Attributes:
      frames: environment steps of each policy so far, in this run and those that it resumes.
      starting_seconds: see `rlstack.programs.run.single_process.SingleProcessRun`.
    """

    starting_seconds = 0.0

    def __init__(self, experiment: Experiment, parts: Parts) -> None:
        """Starts all counters at 0.

        Args:
          experiment: the run's experiment.
          parts: the compiled loop and its components.
        """
        self.experiment, self._parts, self._env = experiment, parts, parts.loop.env
        self._learned = {name: Learned() for name in parts.agents}
        self.learners = self._learned
        self.frames = dict.fromkeys(self.division.members if self.division else [""], 0)
        self._versions: dict[str, Versions] = {}
        self._new: dict[str, int] = {}  # updates of each policy in the last call
        self._restarts = 0
        self._no_choice = None if without_choice(self._env.spec) is None else 0
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

    def read(self, part: Callable[[LoopState], PyTree]) -> PyTree:
        """Returns a part of the state."""
        return part(self.state)

    @property
    def keys(self) -> Keys:
        """The keys that the run begins with; new env keys after each restart of environments."""
        return self._parts.keys(self.experiment, self.env_keys)

    @property
    def env_keys(self) -> PRNGKey:
        """The keys of the environments, ``[B, ...]``: new ones after each restart of them."""
        rank = self._restarts
        first = role_seed(self.experiment.seed, *(("env", rank) if rank else ("env",)))
        return self._env.keys(np.arange(first, first + self.experiment.env.num_envs))

    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""
        return self.frames[name]

    def until_due(self, periodic: PeriodicActions) -> int:
        """Returns the frames until an evaluation, a checkpoint, a version or the end is due."""
        due = int(min(self.experiment.frames, periodic.next_due) - self.env_frames)
        if self.division is None:
            return due
        seats = sum(len(member.seats) for member in self.division.learning)
        for name, versions in self._versions.items():
            of = self.division.members[self.division.members[name].cfg.history.of]
            # Steps of games until then; all seats of a game make the same steps.
            steps = -(-(versions.next_due - self.frames[of.name]) // len(of.seats))
            due = min(due, steps * seats)
        return due

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
        before = {name: learned.version for name, learned in self._learned.items()}
        self._take(learning)
        self._new = {n: self._learned[n].version - version for n, version in before.items()}
        self._seconds = seconds
        for name, frames in zip(self.frames, np.atleast_1d(report.tally.frames), strict=True):
            self.frames[name] += int(frames)
        updates = self._parts.by_name(report.updates)
        for name, learned in self._learned.items():
            if updates[name].failed:
                error = failed_update(learned, updates[name], self._log_names()[name])
                if name:
                    error.before["policy"] = name  # for `rlstack rerun`
                raise error
        self._check_envs(report)
        for name, versions in self._versions.items():
            played = self.state.acting.agent[name]
            versions.results = played.games, played.wins
            of = self._history_of(name)
            if versions.is_due(self.frames[of]):
                self._give(name, versions.add(self.frames[of], self._learned[of].params))

    def _take(self, learning: Any) -> None:
        by_name = self._parts.by_name(learning)
        for name, learned in self._learned.items():
            learned.take(by_name[name])

    def _log_names(self) -> Mapping[str, Sequence[str]]:
        """Returns the names of each policy's logs, once the loop has been traced."""
        return self._parts.by_name(self._parts.loop.log_names)

    def _history_of(self, name: str) -> str:
        """Returns the name of the learning policy whose earlier versions a policy plays."""
        assert self.division is not None
        return self.division.members[name].cfg.history.of

    def _give(self, name: str, slot: int | None = None) -> None:
        """Passes the saved versions of a policy, and their results, to the compiled loop."""
        from rlstack.programs.build.policies.fused import with_versions

        assert self.division is not None
        member, versions = self.division.members[name], self._versions[name]
        self.state = with_versions(self.state, member, versions, slot)

    def _check_envs(self, report: Report) -> None:
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

    def log(self, periodic: PeriodicActions, report: Report) -> None:
        """Logs the means over a call; see `_log_call`."""
        updates = self._parts.by_name(report.updates)
        for i, name in enumerate(self.frames):
            tally = report.tally.numbers(_element(i))
            prefixes = [f"{name}/actor/"] if name else []
            if name not in self._learned:
                _log_call(periodic, tally, prefixes, None)
                continue
            to = f"{name}/learner/" if name else "learner/"
            learned = updates[name], self._new[name], self._log_names()[name], to
            _log_call(periodic, tally, [*prefixes, "actor/"], learned)

    def _step_spec(self, name: str) -> Transition:
        return self._parts.step_specs[name]

    def _replay_stats(self, name: str) -> Mapping[str, object]:
        def counters(state: LoopState) -> tuple[Any, ...]:
            ring = self._parts.by_name(state.replay)[name]
            return (ring.held, ring.inserts, ring.drawn) if isinstance(ring, RingState) else ()

        found = map(np.asarray, self.read(counters))
        return dict(zip(("size", "inserts", "samples"), found, strict=False))

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        of_envs = {} if self._no_choice is None else {f"env/{COUNTER}": self._no_choice}
        return super().stats() | {"fused/call_seconds": self._seconds, **of_envs}

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        return self._saved(lambda name, replay: jax.tree.leaves(replay))

    def _saved(self, leaves_of: Callable[[str, Any], list[Any]]) -> PyTree:
        state = self.state
        frames: PyTree = {name: np.int64(frames) for name, frames in self.frames.items()}
        replay: PyTree = {
            name: leaves_of(name, one) if self._keeps(one) else ()
            for name, one in self._parts.by_name(state.replay).items()
        }
        saved: dict[str, PyTree] = {}
        if self.division is None:
            frames, replay = frames[""], replay[""]
        else:
            # Where `read_versions` finds them, as in the other topologies.
            saved["policies"] = {
                name: {"inferencer": {"versions": versions.save()}}
                for name, versions in self._versions.items()
            }
        return saved | {
            "learner": self.learner.save(),
            "acting": jax.tree.leaves(self._parts.unchanging(state.acting)),
            "replay": replay,
            "counters": {"env_frames": frames, "restarts": np.int64(self._restarts)},
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        return self.save()

    def older_template(self) -> PyTree:
        """Returns the structure that earlier versions saved."""

        def leaves_of(name: str, replay: Any) -> list[Any]:
            if not isinstance(replay, RingState):
                return jax.tree.leaves(replay)
            return list(self._store(name).older_leaves(replay, self._step_spec(name)))

        return self._saved(leaves_of)

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; the episodes go on where they were."""
        fresh, parts = self.state, self._parts
        frames, replay = saved["counters"]["env_frames"], saved["replay"]
        if self.division is None:
            frames, replay = {"": frames}, {"": replay}
        self.frames = {name: int(frames[name]) for name in self.frames}
        self._restarts = int(saved["counters"]["restarts"])
        self.learner.load(saved["learner"])
        learning = {name: learned.learning for name, learned in self._learned.items()}
        kept = {
            name: self._with_replay(name, one, replay[name]) if self._keeps(one) else one
            for name, one in parts.by_name(fresh.replay).items()
        }
        acting = _with_leaves(parts.unchanging(fresh.acting), saved["acting"])
        acting = parts.with_the_rest(acting, fresh.acting)
        # Copies, because an array must not be donated twice.
        loaded = LoopState(parts.joined(learning), acting, parts.joined(kept))
        self.state = jax.tree.map(jnp.array, loaded)
        self._take(self.state.learning)
        for name, versions in self._versions.items():
            versions.load(saved["policies"][name]["inferencer"]["versions"])
            self._give(name)

    def _with_replay(self, name: str, fresh: Any, leaves: Sequence[Any]) -> Any:
        """Returns a saved replay, which an earlier version may have saved."""
        if [x.shape for x in leaves] == [x.shape for x in jax.tree.leaves(fresh)]:
            return _with_leaves(fresh, leaves)
        return self._store(name).from_older(fresh, self._step_spec(name), leaves)

    def _store(self, name: str) -> Any:
        return self._parts.by_name(self._parts.loop.stores)[name]

    def _keeps(self, replay: Any) -> bool:
        """Whether checkpoints contain a replay.

        A state that is no ring is always saved: it holds the step that begins the next unroll.
        """
        return self.experiment.checkpoint_replay or not isinstance(replay, RingState)


def _element(i: int) -> Callable[[Any], Any]:
    """Returns a function that takes the number of one policy; there may be only one."""
    return lambda x: np.atleast_1d(x)[i]


def _with_leaves(tree: PyTree, leaves: Sequence[Any]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


class Fused(FusedRun):
    """The policies of an experiment in one compiled loop, and the calls of it."""

    def __init__(self, experiment: Experiment, phase: Phase = contextlib.nullcontext) -> None:
        """Makes the parts. Meanwhile a thread compiles the loop; `call` waits for it.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is not one in JAX, the policies do not fit the seats of the
            games, or an agent does not fit the environment.
        """
        env = make_batch(experiment.env.name, experiment.env.options, experiment.env.levels)
        if experiment.policies:
            from rlstack.programs.build.policies.fused import make_parts
            from rlstack.programs.build.policies.members import divide

            self.division = divide(experiment)
            parts = make_parts(experiment, self.division, env)
        else:
            parts = Parts(experiment, env)
        super().__init__(experiment, parts)
        self._loop, self._phase = parts.loop, phase
        keys = self.keys
        self._pace = Pace(experiment.fused.call_seconds)
        if self.division is None:
            evaluator = make_evaluator(experiment, env.spec)
            self._evaluate_with(evaluator)
            # The loop, its start and the evaluation compile at the same time.
            shapes = jax.eval_shape(parts.agents[""].initial_params, keys.learner)
            params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
            evaluating = in_thread(compile_evaluation, experiment, evaluator, params)
        self._start(keys)
        self._take(self._state.learning)
        if self.division is None:
            with phase("compiling the evaluation"):
                evaluating.result()
        else:
            self._add_versions(self.division)
            self._make_evaluator(env.spec)

    def _add_versions(self, division: Division) -> None:
        from rlstack.programs.build.policies.versions import Versions

        for name, member in division.members.items():
            if member.kind == "history":
                cfg = member.cfg.history
                self._versions[name] = Versions(cfg, self._learned[cfg.of].params)

    def _start(self, keys: Keys) -> None:
        """Makes the state of the loop, and starts to compile the loop."""
        start = CompiledQuickly(self._parts.begin)
        shapes = start.eval_shape(keys)
        check_loop(self.experiment, shapes)
        placed = self._loop.shardings(shapes)
        # By default also the results go where the compiler wants them, and the next call compiles.
        self._run = jax.jit(self._loop.run, donate_argnums=0, out_shardings=(placed, None))
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
          NonFiniteError, EnvError: see `FusedRun.accept`.
        """
        if not self._compiling.done():
            with self._phase("compiling the loop"):
                checkpoint.load_libraries()  # while the thread compiles
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


def _log_call(
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
        own = {k: np.full(episodes, v / episodes) for k, v in tally.metrics.items()}
        periodic.log(own, "episode/")
    if learned is not None and learned[1]:
        updates, number, names, prefix = learned
        means = np.asarray(updates.logs) / number
        logs = {k: np.full(number, v) for k, v in zip(names, means, strict=True)}
        periodic.log(logs, prefix)
