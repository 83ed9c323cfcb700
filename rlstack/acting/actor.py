"""The Actor: one batch per step through environments, inferencer and replay.

One path serves synchronous and asynchronous pools: (env_ids, timestep) -> inferencer -> replay ->
environments. A synchronous pool gives a step of all its environments, an asynchronous one a step of
those that are ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from rlstack.acting.inference import Inference, InferencerLike
from rlstack.acting.step_processor import ProcessedSteps, Processor
from rlstack.agent import Agent
from rlstack.networks.base import dummy_timestep
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import Node, Stop, StoppedError, client_of, is_client
from rlstack.types import (
    EnvSpec,
    Logs,
    LogWriter,
    PRNGKey,
    StartSpec,
    StepType,
    TimeStep,
    Transition,
)

_LAST = int(StepType.LAST)  # numpy compares with plain ints much faster than with enums
_SERVICE_TIMEOUT = 300.0  # seconds to wait for an inference service that does not answer
_LOOK_PERIOD = 1.0  # seconds between two checks of whether to stop, during a wait for the replay


class ReplayWriter(Protocol):
    """The writer's side of a ReplayBuffer; only `Actor.run` passes a timeout."""

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        """Stores one step of the environments ``env_ids``; None stands for all in order."""


class Actor(Node):
    """Steps a pool of environments; counts frames and episodes.

    Attributes:
      env_frames: environment steps made.
      episodes: episodes ended.
    """

    def __init__(
        self,
        env_builder: Any,
        inferencer: InferencerLike,
        replay_buffer: ReplayWriter | None,
        rank: int | None = None,
        step_processor: Processor | None = None,
    ) -> None:
        """Starts all environments.

        Args:
          env_builder: an `rlstack.envs.SyncEnv` or `AsyncEnv`, which the caller closes; or a
              function without arguments that makes one, which `run` closes before it returns.
          inferencer: chooses the actions; it may be the ``courier.Client`` of an Inferencer's node.
          replay_buffer: stores the steps; None in evaluation.
          rank: the number of this actor among the actors of a program. Global ids are
              ``rank * num_envs + id``. None if there is only one actor, whose ids need no offset.
          step_processor: changes the steps on their way to the replay buffer, see
              `rlstack.acting.step_processor`. The pool must have been made with ``step_info``.
        """
        self._owns_env = callable(env_builder)
        self._env = env = env_builder() if self._owns_env else env_builder
        self._should_stop: Callable[[], bool] = lambda: False
        self._inferencer = self._local_inferencer(inferencer, replay_buffer, rank)
        self._replay_buffer = replay_buffer
        self._offset = (rank or 0) * env.num_envs
        self._is_sync = env.is_sync
        # A pool that is not one of rlstack's may have no numbers.
        self._metrics = getattr(env, "episode_metrics", None)
        self._env_ids: np.ndarray | None = None
        self._processed = None if step_processor is None else ProcessedSteps(step_processor, env)
        if self._is_sync:
            self._timestep = env.reset()
            # None means all in order, so that the inferencer need not check each id.
            self._global_ids = None if rank is None else env.env_ids + self._offset
            if self._processed is not None:
                self._processed.receive(None, self._timestep)
        else:
            env.async_reset()
            self.receive()
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self.env_frames = 0
        self.episodes = 0

    def step(self) -> Logs | None:
        """Acts once on one batch.

        Returns:
          ``actor/episode_return`` and ``actor/episode_length`` of the episodes that ended,
          ``[episodes]`` each, and ``episode/...``, the numbers that the environments give of them,
          for those episodes that have them. None if no episode ended.
        """
        logs = self.act()
        self.receive()
        return logs

    def act(self) -> Logs | None:
        """Does the first half of `step`: acts, sends the actions and stores the step.

        The actors of several policies in one pool all act before the first of them receives.
        """
        timestep = self._timestep
        answer = self._inferencer.inference(self._global_ids, timestep)
        # The environments step while this step is stored and counted.
        if self._is_sync:
            self._env.send(answer.agent_output.action)
        else:
            self._env.send(self._env_ids, answer.agent_output.action)
        if self._processed is not None:
            self._store(self._processed, Transition(timestep, *answer))
        elif self._replay_buffer is not None:
            self._replay_buffer.add(self._global_ids, Transition(timestep, *answer))
        return self._account(timestep)

    def receive(self) -> None:
        """Does the second half of `step`: waits for the next batch of the environments."""
        if self._is_sync:
            self._timestep = self._env.recv()
        else:
            self._env_ids, self._timestep = self._env.recv()
            self._global_ids = self._env_ids + self._offset
        if self._processed is not None:
            self._processed.receive(self._env_ids, self._timestep)

    def run(self, stop: Stop = None, logger: LogWriter | None = None) -> None:
        """Steps until told to stop, or until the replay buffer is closed.

        Args:
          stop: a function or a ``threading.Event`` that says when to stop. It is also checked while
              the replay buffer is full or the inference service does not answer. None: stops when
              the Launchpad program of this node stops; without such a program, never.
          logger: receives the logs of `step`, in one line for each episode that ends, at the
              number of frames so far.
        """
        replay_buffer = self._replay_buffer
        with self._running(stop) as self._should_stop:
            if replay_buffer is not None:
                self._replay_buffer = _StoppableWriter(replay_buffer, self._should_stop)
            try:
                while not self._should_stop():
                    logs = self.step()
                    if logs is not None and logger is not None:
                        for episode in _by_episode(logs):
                            logger.write(self.env_frames, episode)
            except (StoppedError, ReplayClosedError):
                pass
            finally:
                self._replay_buffer = replay_buffer
                if self._owns_env:
                    self._env.close()

    def _served(self) -> None:
        """Returns None: other nodes do not call an actor."""

    def _local_inferencer(
        self, inferencer: InferencerLike, replay_buffer: ReplayWriter | None, rank: int | None
    ) -> InferencerLike:
        if not is_client(inferencer):
            return inferencer
        from rlstack.acting.inference_client import InferenceClient
        from rlstack.acting.inference_service import InferenceService
        from rlstack.rpc import codec

        client = client_of(inferencer, InferenceService, name="inferencer")
        # Answers contain the agent's own records; the steps in replay are made of them.
        codec.register(Inference)
        codec.register_records(getattr(replay_buffer, "spec", None))
        # The service numbers the incarnations: a restarted actor has a later one on every host.
        return InferenceClient(
            client, rank or 0, None, lambda: self._should_stop(), _SERVICE_TIMEOUT
        )

    def _store(self, processed: ProcessedSteps, transition: Transition) -> None:
        """Stores the steps that the step processor returns for a step."""
        for step in processed.process(self._env_ids, transition):
            if self._replay_buffer is not None:
                self._replay_buffer.add(step.env_ids + self._offset, step.transition)

    def _account(self, timestep: TimeStep) -> Logs | None:
        """Counts frames and sums the returns of episodes."""
        ids, step_type = self._env_ids, timestep.step_type
        # A frame is a step that follows an action: every step except FIRST, and FIRST is 0.
        follows = step_type != 0
        if ids is None:
            self._returns += timestep.reward
            self._lengths += follows
        else:
            self._returns[ids] += timestep.reward
            self._lengths[ids] += follows
        self.env_frames += int(np.count_nonzero(follows))
        last = step_type == _LAST
        if not np.count_nonzero(last):  # three times as fast as any()
            return None
        ended = last.nonzero()[0] if ids is None else ids[last]
        self.episodes += len(ended)
        logs: Logs = {
            "actor/episode_return": self._returns[ended],
            "actor/episode_length": self._lengths[ended],
        }
        if self._metrics is not None:
            for name, values in self._metrics(ended).items():
                logs[f"episode/{name}"] = values
        if self._processed is not None:
            logs |= self._processed.logs(np.asarray(ended))
        self._returns[ended] = 0
        self._lengths[ended] = 0
        return logs


def _by_episode(logs: Logs) -> Iterator[Logs]:
    """Yields one line of logs for each episode; some episodes may lack some of the numbers."""
    for i in range(max(map(len, logs.values()))):
        yield {name: values[i] for name, values in logs.items() if i < len(values)}


class _StoppableWriter:
    """Writes to a replay buffer; waits while the buffer is full, until told to stop."""

    def __init__(self, replay_buffer: Any, should_stop: Callable[[], bool]) -> None:
        self._replay_buffer, self._should_stop = replay_buffer, should_stop

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        while True:
            try:
                self._replay_buffer.add(env_ids, transition, timeout=_LOOK_PERIOD)
                return
            except ReplayTimeoutError:
                if self._should_stop():
                    raise StoppedError from None


def transition_spec(agent: Agent, spec: EnvSpec) -> Transition:
    """Returns the spec of what an Actor writes to replay: one environment's step.

    Args:
      agent: the agent that acts.
      spec: the spec of the environments.

    Returns:
      A `Transition` of ``jax.ShapeDtypeStruct`` without the batch axis, of `StartSpec` where the
      learner reads the state at the first step of an item only.
    """

    def one_step(rng_key: PRNGKey, timestep: TimeStep) -> Transition:
        state = agent.initial_state(1)
        output, _ = agent.actor_step(rng_key, agent.initial_params(rng_key), timestep, state)
        return Transition(timestep, output, state, timestep.step_type)

    # Only shapes are computed, also for the key, so that no device is used.
    rng_key = jax.eval_shape(jax.random.PRNGKey, 0)
    first = dummy_timestep(spec.observation, extras_spec=spec.extras)
    example = jax.eval_shape(lambda key: one_step(key, first), rng_key)
    step = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example)
    state = jax.tree.map(
        lambda x, once: StartSpec(x.shape, x.dtype) if once else x,
        step.agent_state,
        agent.read_once(step.agent_state),
    )
    return step._replace(agent_state=state)
