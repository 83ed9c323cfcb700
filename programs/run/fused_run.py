"""One run of a compiled loop: its counters, logs, checkpoints and evaluations.

The topology fused has one such run in a program (`Fused`), and a study several
(`rlstack.programs.study.vmapped`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO, cast

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import Evaluation, Evaluator
from rlstack.agent import Agent
from rlstack.devices import mesh_of
from rlstack.fused.learning import Learning, Updates
from rlstack.fused.loop import FusedLoop, LoopState, Report
from rlstack.fused.ring import RingState
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.learning.learner import NonFiniteError, non_finite
from rlstack.learning.update import in_thread
from rlstack.networks import in_parts
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.evaluation import compile_evaluation, evaluate, make_evaluator
from rlstack.programs.build.replay import announce_replay
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.calls import Calls, CompiledRun, Phase, log_call
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.types import Array, Batch, EnvSpec, LearnerState, Params, PRNGKey, PyTree, Transition


class Keys(NamedTuple):
    """The random keys that a run begins with."""

    learner: PRNGKey
    env: PRNGKey  # [B, ...]
    acting: PRNGKey
    replay: PRNGKey


class Parts(NamedTuple):
    """A compiled loop of one agent, and its components."""

    agent: Agent
    loop: FusedLoop
    step_spec: Transition  # shapes and dtypes of one step, as a replay stores it


def make_parts(experiment: Experiment, env: BatchedEnv) -> Parts:
    """Makes the agent and the loop.

    Raises:
      ValueError: the agent does not fit the environment.
    """
    agent, step_spec = make_learning_agent(experiment, env.spec)
    loop = FusedLoop(
        experiment.replay,
        agent,
        env,
        experiment.env.num_envs,
        steps_per_update=experiment.steps_per_update,
        check_updates=experiment.learner.check_finite,
        check_steps=experiment.env.check_finite,
        mesh=mesh_of(experiment.learner.devices, "Experiment: learner.devices"),
    )
    return Parts(agent, loop, step_spec)


def make_learning_agent(experiment: Experiment, spec: EnvSpec) -> tuple[Agent, Transition]:
    """Returns an agent for a compiled loop, and the spec of one step as a replay stores it.

    Raises:
      ValueError: the agent does not fit the environment.
    """
    agent = make_agent(experiment, spec)
    step_spec = transition_spec(agent, spec)
    if experiment.learner.micro_batches > 1:
        parts = experiment.learner.micro_batches
        agent = agent.with_network(lambda network: in_parts(network, parts))
    return agent, step_spec


def begin(parts: Parts, keys: Keys) -> LoopState:
    """Returns the state at the start of a run, with newly initialised params; pure."""
    learning = untrained(parts.agent, keys.learner)
    return parts.loop.start(learning, keys.env, keys.acting, keys.replay)


def untrained(agent: Agent, rng_key: PRNGKey) -> Learning:
    """Returns newly initialised params and learner state; pure."""
    params_key, learner_key = jax.random.split(rng_key)
    params = agent.initial_params(params_key)
    learner_state = agent.initial_learner_state(learner_key, params)
    return Learning(params, learner_state, jnp.zeros((), jnp.int32))


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


def ring_stats(held: Array, inserts: Array, drawn: Array) -> dict[str, object]:
    """Returns the counters of a replay, from fields of its `RingState`."""
    return {
        "size": np.asarray(held),
        "inserts": np.asarray(inserts),
        "samples": np.asarray(drawn),
    }


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


class FusedRun(CompiledRun):
    """One run of one policy, trained by a compiled loop.

    Attributes:
      learner: the newest params and learner state.
    """

    def __init__(
        self,
        experiment: Experiment,
        parts: Parts,
        evaluator: Evaluator,
        log_names: Callable[[], Sequence[str]],
    ) -> None:
        """Starts all counters at 0.

        Args:
          experiment: the run's experiment.
          parts: the compiled loop and its components.
          evaluator: evaluates the agent.
          log_names: returns the names of the agent's logs, once the loop has been traced.
        """
        super().__init__(experiment, parts.loop.env)
        self.step_spec, self.learner = parts.step_spec, Learned()
        self._frames = 0
        self._evaluator, self._log_names = evaluator, log_names
        self._learned = 0  # updates in the last call

    def read(self, part: Callable[[LoopState], PyTree]) -> PyTree:
        """Returns a part of the state."""
        return part(self.state)

    @property
    def keys(self) -> Keys:
        """The keys that the run begins with; new env keys after each restart of environments."""
        seed = self.experiment.seed
        keys = role_key(seed, "learner"), self.env_keys, acting_key(seed, 0)
        return Keys(*keys, role_key(seed, "replay"))

    @property
    def env_frames(self) -> int:
        """Environment steps so far, of this run and of those that it resumes."""
        return self._frames

    def announce(self, stream: TextIO, runs: int = 1) -> None:
        """Prints the memory that the replays of this number of runs need.

        Raises:
          ValueError: there is not enough memory.
        """
        announce_replay(self.experiment, self.step_spec, stream, runs)

    def accept(self, learning: Learning, report: Report, seconds: float) -> None:
        """Records the result of a call; see `CompiledRun.accept`."""
        before = self.learner.version
        self.learner.take(learning)
        self._frames += int(report.tally.frames)
        self._learned, self._seconds = self.learner.version - before, seconds
        if report.updates.failed:
            raise failed_update(self.learner, report.updates, self._log_names())
        self.check_envs(report)

    def log(self, periodic: PeriodicActions, report: Report) -> None:
        """Logs the means over a call; see `log_call`."""
        learned = report.updates, self._learned, self._log_names(), "learner/"
        log_call(periodic, report.tally, ("actor/",), learned)

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        found: dict[str, object] = {"learner/steps": self.learner.version}
        found |= {"fused/call_seconds": self._seconds, **self.env_stats}
        if self.experiment.replay.sampler != "fifo":
            of = self.read(lambda s: (s.replay.held, s.replay.inserts, s.replay.drawn))
            found |= {f"replay/{name}": value for name, value in ring_stats(*of).items()}
        return found

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params; see `rlstack.programs.run.run_session.Run.evaluate`."""
        params = self.learner.params
        return evaluate(self.experiment, self._evaluator, params, progress, brief=brief)

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        state = self.state
        return {
            "learner": self.learner.save(),
            "acting": jax.tree.leaves(state.acting),
            "replay": jax.tree.leaves(state.replay) if self._keeps(state) else (),
            "counters": {
                "env_frames": np.int64(self.env_frames),
                "restarts": np.int64(self._restarts),
            },
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        return self.save()

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; the episodes go on where they were."""
        self._frames = int(saved["counters"]["env_frames"])
        self._restarts = int(saved["counters"]["restarts"])
        self.learner.load(saved["learner"])
        fresh = self.state
        acting = jax.tree.unflatten(jax.tree.structure(fresh.acting), saved["acting"])
        replay = fresh.replay
        if self._keeps(fresh):
            replay = jax.tree.unflatten(jax.tree.structure(replay), saved["replay"])
        # Copies, because an array must not be donated twice.
        self.state = jax.tree.map(jnp.array, LoopState(self.learner.learning, acting, replay))
        self.learner.take(self.state.learning)

    def _keeps(self, state: LoopState) -> bool:
        """Whether checkpoints contain the replay.

        A state that is no ring is always saved: it holds the step that begins the next unroll.
        """
        return self.experiment.checkpoint_replay or not isinstance(state.replay, RingState)


class Fused(Calls, FusedRun):
    """The parts of an experiment whose loop is compiled, and the calls of it."""

    def __init__(self, experiment: Experiment, phase: Phase = contextlib.nullcontext) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is not one in JAX, or the agent does not fit it.
        """
        env = make_batch(experiment.env.name, experiment.env.options)
        parts = make_parts(experiment, env)
        evaluator = make_evaluator(experiment, env.spec)
        super().__init__(experiment, parts, evaluator, lambda: parts.loop.log_names)
        # The loop, its start and the evaluation compile at the same time.
        shapes = jax.eval_shape(parts.agent.initial_params, self.keys.learner)
        params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
        evaluating = in_thread(compile_evaluation, experiment, evaluator, params)
        self.compile(parts.loop, functools.partial(begin, parts), self.keys, phase)
        self.learner.take(self._state.learning)
        with phase("compiling the evaluation"):
            evaluating.result()
