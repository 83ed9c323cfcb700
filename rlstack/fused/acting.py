"""Acting inside a compiled loop: what the Actor and the Inferencer do, as one pure function."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.agent import Agent
from rlstack.exploration import with_env_ids
from rlstack.jax_envs.environment import BatchedEnv, BatchState
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep, Transition


class Acting(NamedTuple):
    """The state of acting."""

    env: BatchState
    timestep: TimeStep  # [B, ...] the steps to act on next
    agent: AgentState  # [B, ...]
    rng_key: PRNGKey
    returns: Array  # [B] float32, of the episodes so far, without `timestep`
    lengths: Array  # [B] int32, likewise, in steps


class Tally(NamedTuple):
    """What happened in some steps, of each environment; the sums are `total`'s."""

    frames: Array  # [B] int32
    episodes: Array  # [B] int32, that ended
    returns: Array  # [B] float32, the sum of their returns
    lengths: Array  # [B] float32, the sum of their lengths
    bad: Array  # [B] bool, where a reward or an observation was not finite

    def total(self) -> Tally:
        """Returns the sums over the environments, ``[]``; ``bad`` stays ``[B]``."""
        return Tally(
            self.frames.sum(), self.episodes.sum(), self.returns.sum(), self.lengths.sum(), self.bad
        )

    def after(self, earlier: Tally) -> Tally:
        """Returns what happened in these steps and in earlier ones."""
        return Tally(
            earlier.frames + self.frames,
            earlier.episodes + self.episodes,
            earlier.returns + self.returns,
            earlier.lengths + self.lengths,
            earlier.bad | self.bad,
        )


class Actors:
    """Acts in a batch of environments; the methods are pure."""

    def __init__(
        self, agent: Agent, env: BatchedEnv, num_envs: int, *, check_finite: bool = True
    ) -> None:
        """Stores the parts.

        Args:
          agent: acts by its ``actor_step``.
          env: the environments.
          num_envs: their number, B.
          check_finite: whether to look for rewards and observations that are not finite.
        """
        self.agent, self.env, self.num_envs = agent, env, num_envs
        self._check_finite = check_finite

    def start(self, env_keys: PRNGKey, rng_key: PRNGKey) -> Acting:
        """Starts an episode in every environment.

        Args:
          env_keys: ``[B, ...]``, from `BatchedEnv.keys`.
          rng_key: the acting key.
        """
        env, timestep = self.env.reset(env_keys)
        state = with_env_ids(self.agent.initial_state(self.num_envs), np.arange(self.num_envs))
        zeros = jnp.zeros(self.num_envs)
        return Acting(env, timestep, state, rng_key, zeros, zeros.astype(jnp.int32))

    def tally(self) -> Tally:
        """Returns a tally of nothing."""
        none, zeros = jnp.zeros(self.num_envs, jnp.int32), jnp.zeros(self.num_envs)
        return Tally(none, none, zeros, zeros, jnp.zeros(self.num_envs, bool))

    def step(
        self, params: Params, version: Array, acting: Acting, tally: Tally
    ) -> tuple[Acting, Tally, Transition]:
        """Acts once in every environment.

        Args:
          params: to act with.
          version: of these params, [] int32.
          acting: the state.
          tally: of what happened before.

        Returns:
          The new state, the new tally, and the step, ``[B, ...]``, as a replay stores it.
        """
        next_key, step_key = jax.random.split(acting.rng_key)
        timestep = acting.timestep
        state = self.agent.reset_state(acting.agent, timestep.first())
        output, next_state = self.agent.actor_step(step_key, params, timestep, state)
        env, received = self.env.step(acting.env, self._action(output.action))
        transition = Transition(timestep, output, state, jnp.full(self.num_envs, version))

        last = timestep.last()
        returns, lengths = acting.returns + timestep.reward, acting.lengths + 1
        # Sums over the environments wait for the end of the iteration: in each step of a small
        # batch, they would take a noticeable part of the time.
        stepped = Tally(
            (~timestep.first()).astype(jnp.int32),
            last.astype(jnp.int32),
            jnp.where(last, returns, 0.0),
            jnp.where(last, lengths - 1, 0).astype(jnp.float32),  # n actions give n + 1 steps
            self._is_bad(received),
        )
        returns, lengths = jnp.where(last, 0.0, returns), jnp.where(last, 0, lengths)
        acting = Acting(env, received, next_state, next_key, returns, lengths)
        return acting, stepped.after(tally), transition

    def _action(self, action: PyTree) -> PyTree:
        """Returns the action in the environment's dtypes and bounds, as pools do."""

        def fitted(spec: specs.Array, x: Array) -> Array:
            if jnp.issubdtype(spec.dtype, jnp.floating) and hasattr(spec, "minimum"):
                x = jnp.clip(x, spec.minimum, spec.maximum)
            return jnp.asarray(x, spec.dtype)

        return jax.tree.map(fitted, self.env.spec.action, action)

    def _is_bad(self, timestep: TimeStep) -> Array:
        bad = jnp.zeros(self.num_envs, bool)
        if not self._check_finite:
            return bad
        for x in [timestep.reward, *jax.tree.leaves(timestep.observation)]:
            if jnp.issubdtype(x.dtype, jnp.floating):
                bad |= ~jnp.isfinite(x).reshape((self.num_envs, -1)).all(axis=1)
        return bad
