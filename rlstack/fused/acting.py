"""Acting inside a compiled loop: the work of Actor and Inferencer as one pure function."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.agent import Agent
from rlstack.exploration import with_env_ids
from rlstack.jax_envs.environment import BatchedEnv, BatchState
from rlstack.networks.layers import forms
from rlstack.specs.masks import without_choice
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep, Transition

T = TypeVar("T")

# What may be wrong with a step: a reward or an observation, or an integer in an observation.
NOT_FINITE, OUTSIDE = 1, 2


class Acting(NamedTuple):
    """The state of acting."""

    env: BatchState
    timestep: TimeStep  # [B, ...] the steps to act on next
    agent: AgentState  # [B, ...]
    rng_key: PRNGKey
    returns: Array  # [B] float32, of the episodes so far, without `timestep`
    lengths: Array  # [B] int32, numbers of actions in these episodes


class EpisodeStats(NamedTuple):
    """Counts of what happened in some steps, for each environment; `total` sums them."""

    frames: Array  # [B] int32
    episodes: Array  # [B] int32, episodes that ended
    returns: Array  # [B] float32, the sum of their returns
    lengths: Array  # [B] float32, the sum of their lengths
    bad: Array  # [B] uint8, the sum of what was wrong: `NOT_FINITE`, `OUTSIDE`
    no_choice: Array  # [B] int32, steps whose action mask marks no action as legal
    metrics: dict[str, Array]  # [B] float32, by name the sum of the environments' own numbers

    def total(self) -> EpisodeStats:
        """Returns the sums over the environments, ``[]``; bad and no_choice stay ``[B]``."""
        return self.numbers(lambda x: x.sum())

    def numbers(self, change: Callable[[Array], Array]) -> EpisodeStats:
        """Returns the tally with each of its sums changed; bad and no_choice stay."""
        return self._replace(
            metrics={name: change(x) for name, x in self.metrics.items()},
            frames=change(self.frames),
            episodes=change(self.episodes),
            returns=change(self.returns),
            lengths=change(self.lengths),
        )

    def after(self, earlier: EpisodeStats) -> EpisodeStats:
        """Returns what happened in these steps and in earlier ones."""
        return EpisodeStats(
            earlier.frames + self.frames,
            earlier.episodes + self.episodes,
            earlier.returns + self.returns,
            earlier.lengths + self.lengths,
            earlier.bad | self.bad,
            earlier.no_choice + self.no_choice,
            {name: earlier.metrics[name] + x for name, x in self.metrics.items()},
        )


class Played(NamedTuple):
    """The data that an evaluation needs of one step, ``[B]``, or of several, ``[T, B]``."""

    step_type: Array  # int32
    reward: Array  # float32
    bad: Array  # uint8, as in `EpisodeStats`
    metrics: dict[str, Array]  # float32, of the episodes that end here


class Acted(NamedTuple):
    """The result of acting on one step of some environments."""

    output: PyTree  # [B, ...], the output of the agent's ``actor_step``
    state: AgentState  # [B, ...] before the step
    next_state: AgentState  # [B, ...]
    next_key: PRNGKey


class Actors:
    """Acts in a batch of environments; the methods are pure."""

    def __init__(
        self, agent: Agent, env: BatchedEnv, num_envs: int, *, check_finite: bool = True
    ) -> None:
        """Stores the parts.

        Args:
          agent: the agent whose ``actor_step`` acts.
          env: the environments.
          num_envs: number of environments, B.
          check_finite: whether to look for rewards and observations that are not finite.
        """
        self.agent, self.env, self.num_envs = agent, env, num_envs
        self._check_finite = check_finite
        self._without_choice = without_choice(env.spec)

    def start(self, env_keys: PRNGKey, rng_key: PRNGKey) -> Acting:
        """Starts an episode in every environment.

        Args:
          env_keys: ``[B, ...]``, from `BatchedEnv.keys`.
          rng_key: the acting key.
        """
        env, timestep = self.env.reset(env_keys)
        zeros = jnp.zeros(self.num_envs)
        state = self.initial_state()
        return Acting(env, timestep, state, rng_key, zeros, zeros.astype(jnp.int32))

    def restart(self, env_keys: PRNGKey, acting: Acting) -> Acting:
        """Starts an episode in every environment; the agent's state and the key stay."""
        return self.start(env_keys, acting.rng_key)._replace(agent=acting.agent)

    def initial_state(self) -> AgentState:
        """Returns the agent's state at the start of a run, ``[B, ...]``."""
        return with_env_ids(self.agent.initial_state(self.num_envs), np.arange(self.num_envs))

    def tally(self) -> EpisodeStats:
        """Returns a tally with all counts 0."""
        none = no_tally(self.num_envs)
        return none._replace(metrics=dict.fromkeys(self.env.metric_names, none.returns))

    def total(self, tally: EpisodeStats) -> EpisodeStats:
        """Returns the sums of a tally, for a `Report`."""
        return tally.total()

    def frames(self, total: EpisodeStats) -> Array:
        """Returns the frames in sums that count towards a budget, [] int32."""
        return total.frames

    def step(
        self, params: Params, version: Array, acting: Acting, tally: EpisodeStats
    ) -> tuple[Acting, EpisodeStats, Transition]:
        """Acts once in every environment.

        Args:
          params: the params to act with.
          version: the version of these params, [] int32.
          acting: the state.
          tally: the counts before this step.

        Returns:
          The new state, the new tally, and the step, ``[B, ...]``, as a replay stores it.
        """
        timestep = acting.timestep
        acted = self.act(params, timestep, acting.agent, acting.rng_key)
        env, received = self.env.step(acting.env, self.action(acted.output.action))
        transition = Transition(
            timestep, acted.output, acted.state, jnp.full(self.num_envs, version)
        )
        bad = self._bad(received)
        none = no_choice(self._without_choice, timestep)
        returns, lengths, stepped = account(timestep, acting.returns, acting.lengths, bad, none)
        metrics: dict[str, Array] = {
            name: jnp.where(timestep.last(), x, 0.0)
            for name, x in self.env.episode_metrics(acting.env).items()
        }
        acting = Acting(env, received, acted.next_state, acted.next_key, returns, lengths)
        return acting, stepped._replace(metrics=metrics).after(tally), transition

    def begin(self, env_keys: PRNGKey, rng_key: PRNGKey) -> tuple[Acting, Played]:
        """Starts an episode in every environment, as `start` does; returns also their first steps.

        Args:
          env_keys: ``[B, ...]``, from `BatchedEnv.keys` or of an earlier state.
          rng_key: the acting key.
        """
        acting = strongly_typed(self.start(env_keys, rng_key))
        row = self._row(acting)
        return acting, jax.tree.map(lambda x: x[None], row)

    def play(
        self, params: Params, acting: Acting, steps: Array | int, most: int
    ) -> tuple[Acting, Played]:
        """Acts several times in every environment, for an evaluation.

        Args:
          params: the params to act with.
          acting: the state.
          steps: the number of times.
          most: the largest number of times, T.

        Returns:
          The new state, and the steps that the environments made, ``[T, B]``; rows after
          ``steps`` are 0.
        """

        def once(i: Array, carry: tuple[Acting, Played]) -> tuple[Acting, Played]:
            acting, played = carry
            after, _, _ = self.step(params, jnp.zeros((), jnp.int32), acting, self.tally())
            # XLA then leaves out what counts episodes, and compiles in less time.
            acting = after._replace(returns=acting.returns, lengths=acting.lengths)
            row = self._row(acting)
            return acting, jax.tree.map(lambda rows, x: rows.at[i].set(x), played, row)

        empty = jax.tree.map(
            lambda x: jnp.zeros((most, *x.shape), x.dtype),
            jax.eval_shape(self._row, acting),
        )
        with forms.in_loop():
            return jax.lax.fori_loop(0, steps, once, (acting, empty))

    def act(self, params: Params, timestep: TimeStep, state: AgentState, rng_key: PRNGKey) -> Acted:
        """Acts on one step of every environment, without stepping the environments.

        Args:
          params: the params to act with.
          timestep: ``[B, ...]``.
          state: ``[B, ...]``, the agent's.
          rng_key: the acting key.
        """
        next_key, step_key = jax.random.split(rng_key)
        state = self.agent.reset_state(state, timestep.first())
        output, next_state = self.agent.actor_step(step_key, params, timestep, state)
        return Acted(output, state, next_state, next_key)

    def _row(self, acting: Acting) -> Played:
        timestep, metrics = acting.timestep, self.env.episode_metrics(acting.env)
        return Played(timestep.step_type, timestep.reward, self._bad(timestep), metrics)

    def _bad(self, timestep: TimeStep) -> Array:
        return faults(self.env, timestep, self._check_finite)

    def action(self, action: PyTree) -> PyTree:
        """Returns the action in the environment's dtypes and bounds, as pools do."""

        def fitted(spec: specs.Array, x: Array) -> Array:
            if jnp.issubdtype(spec.dtype, jnp.floating) and hasattr(spec, "minimum"):
                x = jnp.clip(x, spec.minimum, spec.maximum)
            return jnp.asarray(x, spec.dtype)

        return jax.tree.map(fitted, self.env.spec.action, action)


def no_tally(rows: int) -> EpisodeStats:
    """Returns a tally of nothing, for this number of environments."""
    none, zeros = jnp.zeros(rows, jnp.int32), jnp.zeros(rows)
    return EpisodeStats(none, none, zeros, zeros, jnp.zeros(rows, jnp.uint8), none, {})


def account(
    timestep: TimeStep, returns: Array, lengths: Array, bad: Array, none: Array
) -> tuple[Array, Array, EpisodeStats]:
    """Counts one step of every environment.

    Args:
      timestep: ``[B, ...]``.
      returns: ``[B]`` float32, of the episodes so far, without this step.
      lengths: ``[B]`` int32, likewise.
      bad: ``[B]`` uint8, what `faults` found.
      none: ``[B]`` int32, 1 where the action mask marks no action as legal.

    Returns:
      The returns and lengths with this step, 0 where an episode has ended, and its tally.
    """
    last, follows = timestep.last(), (~timestep.first()).astype(jnp.int32)
    returns, lengths = returns + timestep.reward, lengths + follows
    # Sums over the environments wait for the end of the iteration: in each step of a small
    # batch, they would take a noticeable part of the time.
    stepped = EpisodeStats(
        follows,
        last.astype(jnp.int32),
        jnp.where(last, returns, 0.0),
        jnp.where(last, lengths, 0).astype(jnp.float32),
        bad,
        none,
        {},
    )
    return jnp.where(last, 0.0, returns), jnp.where(last, 0, lengths), stepped


def no_choice(find: Callable[[TimeStep], Array] | None, timestep: TimeStep) -> Array:
    """Returns 1 where the mask marks no action as legal, ``[B]`` int32; see `without_choice`."""
    rows = timestep.step_type.shape[0]
    return jnp.zeros(rows, jnp.int32) if find is None else find(timestep).astype(jnp.int32)


def faults(env: BatchedEnv, timestep: TimeStep, finite: bool) -> Array:
    """Returns what is wrong with steps ``[B, ...]``, ``[B]`` uint8, 0 for nothing.

    Args:
      env: the environments that made them.
      timestep: the steps.
      finite: whether NaN and infinity are wrong.
    """
    bad = OUTSIDE * env.outside(timestep).astype(jnp.uint8)
    return bad | NOT_FINITE * _not_finite(timestep).astype(jnp.uint8) if finite else bad


def _not_finite(timestep: TimeStep) -> Array:
    """Returns where a reward, an observation or an extra is not finite, ``[B]`` bool."""
    rows = timestep.reward.shape[0]
    bad = jnp.zeros(rows, bool)
    for x in [timestep.reward, *jax.tree.leaves((timestep.observation, timestep.extras))]:
        if jnp.issubdtype(x.dtype, jnp.floating):
            bad |= ~jnp.isfinite(x).reshape((rows, -1)).all(axis=1)
    return bad


def strongly_typed(state: T) -> T:
    """Returns a state at the start without weak types.

    With them, a function from states to states would be compiled twice: for these types and for
    those of its own results.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype), state)
