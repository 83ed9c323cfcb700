"""The Actor: moves environments, an inferencer and replay by one batch a step.

One path serves synchronous and asynchronous pools: (env_ids, timestep) -> inferencer -> replay ->
environments. A synchronous pool always gives all its environments, an asynchronous one whichever
are ready.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np

from rlstack.acting.inferencer import Inference
from rlstack.agent import Agent
from rlstack.networks.base import dummy_timestep
from rlstack.types import EnvSpec, Logs, PRNGKey, StepType, TimeStep, Transition

_LAST = int(StepType.LAST)  # numpy compares with plain ints much faster than with enums


class Infers(Protocol):
    """A local Inferencer, or a client of one."""

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch of environments."""


class Adds(Protocol):
    """The writer's side of a ReplayBuffer."""

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        """Stores one step of some environments; None means all in order."""


class Actor:
    """Steps a pool of environments; counts frames and episodes."""

    def __init__(
        self, env: Any, inferencer: Infers, replay: Adds | None, rank: int | None = None
    ) -> None:
        """Starts all environments.

        Args:
          env: an `rlstack.envs.SyncEnv` or `AsyncEnv`; closing it is the caller's business.
          inferencer: who acts.
          replay: who remembers; None for nobody (evaluation).
          rank: of this actor among its peers; global ids are ``rank * num_envs + id``. None for
            a lone actor, whose environments are all there are.
        """
        self._env = env
        self._inferencer = inferencer
        self._replay = replay
        self._offset = (rank or 0) * env.num_envs
        self._is_sync = env.is_sync
        self._env_ids: np.ndarray | None = None
        if self._is_sync:
            self._timestep = env.reset()
            # A lone actor's ids are all in order: None says so without a look at each.
            self._global_ids = None if rank is None else env.env_ids + self._offset
        else:
            env.async_reset()
            self._receive()
        self._returns = np.zeros(env.num_envs, np.float64)
        self._lengths = np.zeros(env.num_envs, np.int64)
        self.env_frames = 0
        self.episodes = 0

    def step(self) -> Logs | None:
        """Acts once on one batch.

        Returns:
          None, or where episodes ended their ``actor/episode_return`` and
          ``actor/episode_length``, ``[episodes]`` each.
        """
        timestep = self._timestep
        answer = self._inferencer.inference(self._global_ids, timestep)
        # The environments step while this step is remembered and counted.
        if self._is_sync:
            self._env.send(answer.agent_output.action)
        else:
            self._env.send(self._env_ids, answer.agent_output.action)
        if self._replay is not None:
            self._replay.add(self._global_ids, Transition(timestep, *answer))
        logs = self._account(timestep)
        self._receive()
        return logs

    def run(self, stop: Callable[[], bool]) -> None:
        """Steps until told to stop."""
        while not stop():
            self.step()

    def _receive(self) -> None:
        if self._is_sync:
            self._timestep = self._env.recv()
        else:
            self._env_ids, self._timestep = self._env.recv()
            self._global_ids = self._env_ids + self._offset

    def _account(self, timestep: TimeStep) -> Logs | None:
        """Counts frames and adds up the episodes' returns."""
        ids, step_type = self._env_ids, timestep.step_type
        if ids is None:
            self._returns += timestep.reward
            self._lengths += 1
        else:
            self._returns[ids] += timestep.reward
            self._lengths[ids] += 1
        # A frame is the answer to an action: every step but FIRST, whose value is 0.
        self.env_frames += int(np.count_nonzero(step_type))
        last = step_type == _LAST
        if not np.count_nonzero(last):  # three times as fast as any()
            return None
        ended = last.nonzero()[0] if ids is None else ids[last]
        self.episodes += len(ended)
        logs: Logs = {
            "actor/episode_return": self._returns[ended],
            "actor/episode_length": self._lengths[ended] - 1,  # n actions show n + 1 steps
        }
        self._returns[ended] = 0
        self._lengths[ended] = 0
        return logs


def transition_spec(agent: Agent, spec: EnvSpec) -> Transition:
    """Returns what an Actor writes to replay, as shapes and dtypes of one environment's step.

    Args:
      agent: the agent that acts.
      spec: of the environments.

    Returns:
      A `Transition` of ``jax.ShapeDtypeStruct`` without the batch axis.
    """

    def one_step(rng_key: PRNGKey, timestep: TimeStep) -> Transition:
        state = agent.initial_state(1)
        output, _ = agent.actor_step(rng_key, agent.initial_params(rng_key), timestep, state)
        return Transition(timestep, output, state, timestep.step_type)

    # Shapes alone, the key's too: no device is needed, nor taken.
    rng_key = jax.eval_shape(jax.random.PRNGKey, 0)
    example = jax.eval_shape(lambda key: one_step(key, dummy_timestep(spec.observation)), rng_key)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), example)
