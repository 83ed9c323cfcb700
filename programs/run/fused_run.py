"""One run in a compiled loop, as its host sees it: counters, logs, checkpoints and evaluations.

The topology fused has one such run in a program (`programs.run.fused`), and a set of runs several
(`programs.sets.together`).
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, TextIO, cast

import jax
import jax.numpy as jnp
import numpy as np

from programs.components.agent import make_agent
from programs.components.evaluation import evaluate
from programs.components.replay import announce_replay
from programs.components.seeds import acting_key, role_key, role_seed
from programs.experiment import Experiment
from programs.tracking.periodic import PeriodicActions
from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import Evaluation, Evaluator
from rlstack.agent import Agent
from rlstack.checks import EnvError
from rlstack.devices import mesh_of
from rlstack.fused.learning import Learning
from rlstack.fused.loop import FusedLoop, LoopState, Report
from rlstack.fused.ring import RingState
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.learning.learner import non_finite
from rlstack.networks import in_parts
from rlstack.types import Batch, LearnerState, Params, PRNGKey, PyTree, Transition


class Keys(NamedTuple):
    """The random keys that a run begins with."""

    learner: PRNGKey
    env: PRNGKey  # [B, ...]
    acting: PRNGKey
    replay: PRNGKey


class Parts(NamedTuple):
    """What is compiled, and what it needs."""

    agent: Agent
    loop: FusedLoop
    step_spec: Transition  # of one step, as a replay stores it


def make_parts(experiment: Experiment, env: BatchedEnv) -> Parts:
    """Makes the agent and the loop.

    Raises:
      ValueError: the agent does not fit the environment.
    """
    agent = make_agent(experiment, env.spec)
    step_spec = transition_spec(agent, env.spec)
    if experiment.learner.micro_batches > 1:
        parts = experiment.learner.micro_batches
        agent = agent.with_network(lambda network: in_parts(network, parts))
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


def begin(parts: Parts, keys: Keys) -> LoopState:
    """Returns the state at the start of a run, with newly initialised params; pure."""
    params_key, learner_key = jax.random.split(keys.learner)
    params = parts.agent.initial_params(params_key)
    learner_state = parts.agent.initial_learner_state(learner_key, params)
    learning = Learning(params, learner_state, jnp.zeros((), jnp.int32))
    return parts.loop.start(learning, keys.env, keys.acting, keys.replay)


class Learned:
    """What a run has learned.

    Attributes:
      params: the newest params.
      learner_state: the newest learner state.
      version: number of updates.
    """

    def __init__(self) -> None:
        """Has nothing yet."""
        self.params: Params = None
        self.learner_state: LearnerState = None
        self.version = 0

    def take(self, learning: Learning) -> None:
        """Takes the newest; the arrays before it may have been donated."""
        # Of several devices, the copy of the first: readers of the params need one.
        learning = jax.tree.map(lambda x: x.addressable_data(0), learning)
        self.params, self.learner_state = learning.params, learning.learner_state
        self.version = int(learning.version)

    def save(self) -> PyTree:
        """Returns what `rlstack.learning.learner.Learner.save` does."""
        return {
            "params": self.params,
            "learner_state": self.learner_state,
            "version": np.int64(self.version),
        }


class FusedRun(abc.ABC):
    """One run whose state is in a compiled loop; a subclass says where.

    Attributes:
      experiment: what runs.
      learner: what it has learned.
      env_frames: environment steps so far, of this run and of those that it resumes.
      starting_seconds: see `programs.run.single_process.SingleProcess`.
    """

    starting_seconds = 0.0

    def __init__(
        self,
        experiment: Experiment,
        parts: Parts,
        evaluator: Evaluator,
        log_names: Callable[[], Sequence[str]],
    ) -> None:
        """Counts from 0.

        Args:
          experiment: what runs.
          parts: of its loop.
          evaluator: for its agent.
          log_names: returns the names of the agent's logs, once the loop has been traced.
        """
        self.experiment, self.step_spec = experiment, parts.step_spec
        self.learner = Learned()
        self.env_frames = 0
        self._env, self._evaluator, self._log_names = parts.loop.env, evaluator, log_names
        self._restarts = 0
        self._learned = 0  # updates in the last call
        self._seconds = 0.0  # of the last call

    @property
    @abc.abstractmethod
    def state(self) -> LoopState:
        """The state of its loop; its arrays may be donated by the next call."""

    @state.setter
    @abc.abstractmethod
    def state(self, state: LoopState) -> None: ...

    def read(self, part: Callable[[LoopState], PyTree]) -> PyTree:
        """Returns a part of the state."""
        return part(self.state)

    @abc.abstractmethod
    def restart_environments(self) -> None:
        """Starts new episodes, with the env keys of now."""

    @property
    def keys(self) -> Keys:
        """The keys that the run begins with; new env keys after each restart of environments."""
        seed, rank = self.experiment.seed, self._restarts
        role = ("env", rank) if rank else ("env",)
        first = role_seed(seed, *role)
        env = self._env.keys(np.arange(first, first + self.experiment.env.num_envs))
        return Keys(role_key(seed, "learner"), env, acting_key(seed, 0), role_key(seed, "replay"))

    def announce(self, stream: TextIO, runs: int = 1) -> None:
        """Prints the memory that the replays of this number of runs need.

        Raises:
          ValueError: there is not enough memory.
        """
        announce_replay(self.experiment, self.step_spec, stream, runs)

    def accept(self, learning: Learning, report: Report, seconds: float) -> None:
        """Takes the result of a call.

        Args:
          learning: after the call.
          report: of this run in the call.
          seconds: that the call took.

        Raises:
          NonFiniteError: an update gave NaN or infinity; params and learner state are as before.
          EnvError: an environment gave NaN or infinity; all environments are restarted.
        """
        before = self.learner.version
        self.learner.take(learning)
        self.env_frames += int(report.tally.frames)
        self._learned, self._seconds = self.learner.version - before, seconds
        if report.updates.failed:
            logs = dict(zip(self._log_names(), report.updates.failed_logs, strict=True))
            learner, batch = self.learner, cast("Batch", report.updates.batch)
            before_it = learner.params, learner.learner_state
            raise non_finite(logs, before_it, batch, learner.version)
        if report.tally.bad.any():
            self._refuse_env(np.flatnonzero(report.tally.bad))

    def _refuse_env(self, ids: np.ndarray) -> None:
        self._restarts += 1
        self.restart_environments()
        name = self.experiment.env.name
        raise EnvError(
            f"Env {', '.join(map(str, ids))} ({name}): rewards and observations must be finite; "
            "they were not. Mend the environment, or turn the check off with "
            "--env.check-finite False."
        )

    def log(self, periodic: PeriodicActions, report: Report) -> None:
        """Passes on means of a call, once for each of the values that they stand for."""
        tally, updates = report.tally, self._learned
        episodes = int(tally.episodes)
        if episodes:
            sums = {"episode_return": tally.returns, "episode_length": tally.lengths}
            periodic.log({k: np.full(episodes, v / episodes) for k, v in sums.items()}, "actor/")
        if updates:
            means = np.asarray(report.updates.logs) / updates
            names = self._log_names()
            logs = {k: np.full(updates, v) for k, v in zip(names, means, strict=True)}
            periodic.log(logs, "learner/")

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        found: dict[str, object] = {"learner/steps": self.learner.version}
        found["fused/call_seconds"] = self._seconds
        if self.experiment.replay.sampler != "fifo":
            valid, inserts, drawn = self.read(
                lambda state: (state.replay.valid, state.replay.inserts, state.replay.drawn)
            )
            found |= {
                "replay/size": np.asarray(valid).sum(),
                "replay/inserts": np.asarray(inserts),
                "replay/samples": np.asarray(drawn),
            }
        return found

    def evaluate(
        self, progress: Callable[[int, int], None] | None = None, brief: bool = False
    ) -> Evaluation:
        """Evaluates the current params with the greedy policy, in separate environments.

        Args:
          progress: called after each step with the number of episodes that ended, and of all.
          brief: whether each environment plays one episode only.
        """
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
        self.env_frames = int(saved["counters"]["env_frames"])
        self._restarts = int(saved["counters"]["restarts"])
        learner = saved["learner"]
        version = jnp.asarray(learner["version"], jnp.int32)
        learning = Learning(learner["params"], learner["learner_state"], version)
        fresh = self.state
        acting = jax.tree.unflatten(jax.tree.structure(fresh.acting), saved["acting"])
        replay = fresh.replay
        if self._keeps(fresh):
            replay = jax.tree.unflatten(jax.tree.structure(replay), saved["replay"])
        # Copies, because an array must not be donated twice.
        self.state = jax.tree.map(jnp.array, LoopState(learning, acting, replay))
        self.learner.take(self.state.learning)

    def _keeps(self, state: LoopState) -> bool:
        """Whether checkpoints have the replay: always the step that the next unroll begins with."""
        return self.experiment.checkpoint_replay or not isinstance(state.replay, RingState)
