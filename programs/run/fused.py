"""The topology fused: calls of one compiled loop, and on the host what is due between two calls."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TextIO

import jax
import jax.numpy as jnp
import numpy as np

from programs.components.agent import make_agent
from programs.components.evaluation import evaluate, make_evaluator
from programs.components.replay import announce_replay
from programs.components.seeds import acting_key, role_key, role_seed
from programs.experiment import Experiment
from programs.tracking.periodic import PeriodicActions
from rlstack.acting.actor import transition_spec
from rlstack.acting.evaluator import Evaluation
from rlstack.checks import EnvError
from rlstack.fused.learning import Learning
from rlstack.fused.loop import NO_LIMIT, FusedLoop, Limits, LoopState, Report
from rlstack.fused.ring import RingState
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_jax_env
from rlstack.learning.learner import Learner, non_finite
from rlstack.networks import in_parts
from rlstack.types import PRNGKey, PyTree

_GROWTH = 8  # most times as many iterations as in the call before


class Fused:
    """The parts of an experiment whose loop is compiled, and the calls of it."""

    def __init__(
        self,
        experiment: Experiment,
        phase: Callable[[str], AbstractContextManager] = contextlib.nullcontext,
    ) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is not one in JAX, or the agent does not fit it.
        """
        self.experiment, self._phase = experiment, phase
        cfg, seed = experiment.env, experiment.seed
        env = BatchedEnv(make_jax_env(cfg.name, cfg.options))
        agent = make_agent(experiment, env.spec)
        self.step_spec = transition_spec(agent, env.spec)
        # It holds params and learner state; its own step is never called.
        self.learner = Learner(experiment.learner, agent, None, role_key(seed, "learner"))
        if experiment.learner.micro_batches > 1:
            parts = experiment.learner.micro_batches
            agent = agent.with_network(lambda network: in_parts(network, parts))
        self._loop = FusedLoop(
            experiment.replay,
            agent,
            env,
            cfg.num_envs,
            steps_per_update=experiment.steps_per_update,
            check_updates=experiment.learner.check_finite,
            check_steps=cfg.check_finite,
        )
        self._evaluator = make_evaluator(experiment, env.spec)
        self._run = jax.jit(self._loop.run, donate_argnums=0)
        self._begin = jax.jit(self._loop.start)
        self._restarts = 0
        self.env_frames = 0
        self._iterations = 1
        self._seconds = 0.0  # of the last call
        self._state = self._start()

    def _start(self) -> LoopState:
        seed, learner = self.experiment.seed, self.learner
        # Copies, because an array must not be donated twice, as params and as target params.
        learning = jax.tree.map(
            jnp.array, Learning(learner.params, learner.learner_state, jnp.int32(learner.version))
        )
        replay_key = role_key(seed, "replay")
        return self._begin(learning, self._env_keys(), acting_key(seed, rank=0), replay_key)

    def _env_keys(self) -> PRNGKey:
        rank = self._restarts
        role = ("env", rank) if rank else ("env",)
        first = role_seed(self.experiment.seed, *role)
        return self._loop.env.keys(np.arange(first, first + self.experiment.env.num_envs))

    def announce(self, stream: TextIO) -> None:
        """Prints the memory that the replay needs.

        Raises:
          ValueError: there is not enough memory.
        """
        announce_replay(self.experiment, self.step_spec, stream)

    def train(self, periodic: PeriodicActions, stop: Callable[[], bool]) -> None:
        """Acts and learns until a budget is spent, a rule says stop, or ``stop()`` is true.

        A call ends at the first iteration after which an evaluation or a checkpoint is due.

        Raises:
          NonFiniteError: an update gave NaN or infinity; params and learner state are as before.
          EnvError: an environment gave NaN or infinity; all environments are restarted.
        """
        experiment, learner = self.experiment, self.learner
        most = min(experiment.updates or NO_LIMIT, NO_LIMIT)
        compiling: AbstractContextManager = self._phase("compiling the loop")
        while not (periodic.ended_by(self.env_frames, learner.version) or stop()):
            due = min(experiment.frames, periodic.next_due) - self.env_frames
            frames = int(min(due, NO_LIMIT // 2))
            started = time.perf_counter()
            with compiling:
                report = self._call(Limits(self._iterations, frames, most))
            self._seconds = time.perf_counter() - started
            if not isinstance(compiling, contextlib.nullcontext):
                compiling = contextlib.nullcontext()
            else:
                self._adapt(int(report.iterations))
            self._log(periodic, report)
            periodic.tick(self.env_frames, self.stats)

    def _call(self, limits: Limits) -> Report:
        before = self.learner.version
        self._state, report = self._run(self._state, limits)
        report = jax.block_until_ready(report)
        self._take(self._state.learning)
        self.env_frames += int(report.tally.frames)
        if report.updates.failed:
            logs = dict(zip(self._loop.log_names, report.updates.failed_logs, strict=True))
            learner = self.learner
            raise non_finite(
                logs, (learner.params, learner.learner_state), report.updates.batch, learner.version
            )
        if report.tally.bad.any():
            self._refuse_env(np.flatnonzero(report.tally.bad))
        self._learned = self.learner.version - before
        return report

    def _take(self, learning: Learning) -> None:
        """Gives the learner the newest params; the earlier ones were donated."""
        self.learner.params, self.learner.learner_state = learning.params, learning.learner_state
        self.learner.version = int(learning.version)

    def _adapt(self, iterations: int) -> None:
        """Chooses the iterations of the next call by the time of this one."""
        rate = iterations / max(self._seconds, 1e-6)
        wanted = rate * self.experiment.fused.call_seconds
        self._iterations = max(1, min(math.ceil(wanted), _GROWTH * self._iterations))

    def _refuse_env(self, ids: np.ndarray) -> None:
        self._restarts += 1
        self._state = jax.jit(self._loop.restart)(self._state, self._env_keys())
        name = self.experiment.env.name
        raise EnvError(
            f"Env {', '.join(map(str, ids))} ({name}): rewards and observations must be finite; "
            "they were not. Mend the environment, or turn the check off with "
            "--env.check-finite False."
        )

    def _log(self, periodic: PeriodicActions, report: Report) -> None:
        """Passes on means, once for each of the values that they stand for."""
        tally, updates = report.tally, self._learned
        episodes = int(tally.episodes)
        if episodes:
            sums = {"episode_return": tally.returns, "episode_length": tally.lengths}
            periodic.log({k: np.full(episodes, v / episodes) for k, v in sums.items()}, "actor/")
        if updates:
            names = self._loop.log_names
            means = np.asarray(report.updates.logs) / updates
            logs = {k: np.full(updates, v) for k, v in zip(names, means, strict=True)}
            periodic.log(logs, "learner/")

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        found: dict[str, object] = {"learner/steps": self.learner.version}
        found["fused/call_seconds"] = self._seconds
        ring = self._state.replay
        if isinstance(ring, RingState):
            found |= {
                "replay/size": np.asarray(ring.valid).sum(),
                "replay/inserts": np.asarray(ring.inserts),
                "replay/samples": np.asarray(ring.drawn),
            }
        return found

    def evaluate(self, progress: Callable[[int, int], None] | None = None) -> Evaluation:
        """Evaluates the current params with the greedy policy, in separate environments.

        Args:
          progress: called after each step with the number of episodes that ended, and of all.
        """
        return evaluate(self.experiment, self._evaluator, self.learner.params, progress)

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        state = self._state
        return {
            "learner": self.learner.save(),
            "acting": jax.tree.leaves(state.acting),
            "replay": jax.tree.leaves(state.replay) if self._keeps_replay else (),
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
        self.learner.load(saved["learner"])
        self.env_frames = int(saved["counters"]["env_frames"])
        self._restarts = int(saved["counters"]["restarts"])
        fresh = self._start()
        acting = jax.tree.unflatten(jax.tree.structure(fresh.acting), saved["acting"])
        replay = fresh.replay
        if self._keeps_replay:
            replay = jax.tree.unflatten(jax.tree.structure(replay), saved["replay"])
        self._state = jax.tree.map(jnp.array, LoopState(fresh.learning, acting, replay))

    @property
    def _keeps_replay(self) -> bool:
        """Whether checkpoints have the replay: always the step that the next unroll begins with."""
        ring = isinstance(self._state.replay, RingState)
        return self.experiment.checkpoint_replay or not ring

    def close(self) -> None:
        """Does nothing: there are no processes and no files."""
