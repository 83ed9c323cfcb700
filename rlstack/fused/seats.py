"""Acting of several policies in the seats of the same games, as one pure function.

A row of the environments is a seat of a game. Each policy plays some *places*, and each place is
one of the rows. Where seats are drawn, the places of a game are dealt to its rows anew in each
episode, as `rlstack.envs.seats.views.SharedPool` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.fused.acting import Acted, Actors, EpisodeStats, account, faults, no_choice, no_tally
from rlstack.fused.history import HistoryActors
from rlstack.jax_envs.environment import BatchedEnv, BatchState
from rlstack.specs.masks import without_choice
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep, Transition

Player = Actors | HistoryActors


class Seating(NamedTuple):
    """Random seat assignment: ``rows[i]`` is the environment row that place i plays."""

    rows: Array  # [B] int32
    rng_key: PRNGKey


class SetActing(NamedTuple):
    """The state of acting; places are in the order of the policies."""

    env: BatchState
    timestep: TimeStep  # [B, ...], the step that each place acts on next
    agent: dict[str, AgentState]  # [places of the policy, ...]
    rng_key: dict[str, PRNGKey]
    returns: Array  # [B] float32, returns of the episodes so far, without `timestep`
    lengths: Array  # [B] int32, numbers of actions in the episodes so far
    given: dict[str, PyTree]  # params or `VersionTable` of the other policies; no step changes it
    seating: Seating | tuple[()]
    # [B] float32, the returns of the games so far, also of seats that have left; () in checkpoints
    scores: Array | tuple[()]


class SetKeys(NamedTuple):
    """The random keys of acting, and the params of the policies that do not learn (``given``)."""

    acting: dict[str, PRNGKey]
    given: dict[str, PyTree]
    seating: PRNGKey | None  # None for fixed seats


class SetActors:
    """Acts with several policies in a batch of environments; the methods are pure.

    Attributes:
      env: the environments.
      num_envs: number of environments, B.
      places: the places of each policy among all places.
    """

    def __init__(
        self,
        players: Mapping[str, Player],
        rows: Mapping[str, Sequence[int]],
        env: BatchedEnv,
        *,
        num_seats: int,
        learning: Sequence[str],
        check_finite: bool = True,
    ) -> None:
        """Stores the parts.

        Args:
          players: policy name -> the player that acts for the policy.
          rows: policy name -> the rows that it plays, in increasing order; together all rows.
          env: the environments.
          num_seats: seats of one game, which are consecutive rows.
          learning: the policies whose frames count towards the budget.
          check_finite: whether to look for rewards and observations that are not finite.
        """
        self.env, self._players, self._check_finite = env, dict(players), check_finite
        self._order = np.concatenate([np.asarray(rows[name]) for name in players])  # row of a place
        self.num_envs = len(self._order)
        ends = np.cumsum([player.num_envs for player in players.values()])
        self.places = {
            name: slice(int(end) - player.num_envs, int(end))
            for (name, player), end in zip(players.items(), ends, strict=True)
        }
        self._row_order = np.argsort(self._order)
        self._num_seats = num_seats
        self._games = self._order // num_seats  # the game of each place, which never changes
        self._without_choice = without_choice(env.spec)
        self._counted = np.array([name in learning for name in players])

    def start(self, env_keys: PRNGKey, keys: SetKeys) -> SetActing:
        """Starts an episode in every environment.

        Args:
          env_keys: ``[B, ...]``, from `BatchedEnv.keys`.
          keys: the keys for acting.
        """
        env, timestep = self.env.reset(env_keys)
        seating: Seating | tuple[()] = ()
        if keys.seating is not None:
            seating = Seating(jnp.asarray(self._order, jnp.int32), keys.seating)
        seating, timestep = self._seated(seating, timestep)
        zeros = jnp.zeros(self.num_envs)
        agent = {name: player.initial_state() for name, player in self._players.items()}
        return SetActing(
            env,
            timestep,
            agent,
            dict(keys.acting),
            zeros,
            zeros.astype(jnp.int32),
            dict(keys.given),
            seating,
            zeros,
        )

    def restart(self, env_keys: PRNGKey, acting: SetActing) -> SetActing:
        """Starts an episode in every environment; the policies' states and the keys stay."""
        seating = acting.seating.rng_key if isinstance(acting.seating, Seating) else None
        fresh = self.start(env_keys, SetKeys(acting.rng_key, acting.given, seating))
        agent = {
            name: player.restarted(acting.agent[name])
            if isinstance(player, HistoryActors)
            else acting.agent[name]
            for name, player in self._players.items()
        }
        return fresh._replace(agent=agent)

    def tally(self) -> EpisodeStats:
        """Returns a tally with all counts 0, by place; its last two fields are by row."""
        return no_tally(self.num_envs)

    def total(self, tally: EpisodeStats) -> EpisodeStats:
        """Returns the sums of each policy, ``[policies]``; the last two fields stay ``[B]``."""

        def sums(x: Array) -> Array:
            return jnp.stack([x[places].sum() for places in self.places.values()])

        return tally.numbers(sums)

    def frames(self, total: EpisodeStats) -> Array:
        """Returns the frames in sums that count towards a budget, [] int32."""
        return jnp.where(self._counted, total.frames, 0).sum()

    def step(
        self,
        params: Mapping[str, Params],
        version: Mapping[str, Array],
        acting: SetActing,
        tally: EpisodeStats,
    ) -> tuple[SetActing, EpisodeStats, dict[str, Transition]]:
        """Acts once with every policy; then all environments step.

        Args:
          params: the params of each policy that learns.
          version: the version of each of these params, [] int32.
          acting: the state.
          tally: the counts before this step.

        Returns:
          The new state, the new tally, and the steps of the policies that learn, ``[places, ...]``
          each, as a replay stores them.
        """
        acted: dict[str, Acted] = {}
        steps = {}
        for name, player in self._players.items():
            timestep = jax.tree.map(lambda x, at=self.places[name]: x[at], acting.timestep)
            plays = params[name] if name in params else acting.given[name]
            one = player.act(plays, timestep, acting.agent[name], acting.rng_key[name])
            if name in params:
                versions = jnp.full(player.num_envs, version[name])
                steps[name] = Transition(timestep, one.output, one.state, versions)
            acted[name] = one
        actions = [self._players[name].action(one.output.action) for name, one in acted.items()]
        action = jax.tree.map(lambda *x: jnp.concatenate(x), *actions)
        env, received = self.env.step(acting.env, self._in_rows(acting.seating, action))
        bad = faults(self.env, received, self._check_finite)
        none = no_choice(self._without_choice, acting.timestep)
        none = none if self._without_choice is None else self._in_rows(acting.seating, none)
        before = acting.timestep, acting.returns, acting.lengths
        returns, lengths, stepped = account(*before, bad, none)
        seating, timestep = self._seated(acting.seating, received)
        agent = {name: one.next_state for name, one in acted.items()}
        begins = self._begins(received)[jnp.asarray(self._games)]
        assert not isinstance(acting.scores, tuple)
        scores = jnp.where(begins, 0.0, acting.scores + timestep.reward)
        agent = self._judged(agent, timestep, scores)
        keys = {name: one.next_key for name, one in acted.items()}
        acting = SetActing(
            env, timestep, agent, keys, returns, lengths, acting.given, seating, scores
        )
        return acting, stepped.after(tally), steps

    def _in_rows(self, seating: Seating | tuple[()], by_place: PyTree) -> PyTree:
        """Returns what belongs to places in the order of rows."""
        if isinstance(seating, Seating):
            place_of = (
                jnp.zeros(self.num_envs, jnp.int32)
                .at[seating.rows]
                .set(jnp.arange(self.num_envs, dtype=jnp.int32), unique_indices=True)
            )
            return jax.tree.map(lambda x: x[place_of], by_place)
        return jax.tree.map(lambda x: x[self._row_order], by_place)

    def _seated(
        self, seating: Seating | tuple[()], timestep: TimeStep
    ) -> tuple[Seating | tuple[()], TimeStep]:
        """Returns a step of all rows by place, after the places of games that begin were dealt."""
        if not isinstance(seating, Seating):
            return seating, jax.tree.map(lambda x: x[self._order], timestep)
        next_key, key = jax.random.split(seating.rng_key)
        games = self.num_envs // self._num_seats
        dealt = jax.vmap(lambda key: jax.random.permutation(key, self._num_seats))(
            jax.random.split(key, games)
        )  # [games, S]: the seat of each place that the game's rows have if seats are fixed
        dealt = dealt + self._num_seats * jnp.arange(games)[:, None]
        begins = self._begins(timestep)[jnp.asarray(self._games)]
        rows = jnp.where(begins, dealt.reshape(-1)[self._order].astype(jnp.int32), seating.rows)
        return Seating(rows, next_key), jax.tree.map(lambda x: x[rows], timestep)

    def _begins(self, timestep: TimeStep) -> Array:
        """Returns the games that begin, ``[games]`` bool: all of their seats are at FIRST."""
        return timestep.first().reshape((-1, self._num_seats)).all(axis=1)

    def _judged(
        self, agent: dict[str, AgentState], timestep: TimeStep, final: Array
    ) -> dict[str, AgentState]:
        """Returns the states; where versions play, they count the results of episodes that end.

        Args:
          agent: the states.
          timestep: ``[B, ...]`` of each place, just received.
          final: ``[B]`` the returns of the places in their games, with that step.
        """
        judged = dict(agent)
        for name, player in self._players.items():
            if not isinstance(player, HistoryActors):
                continue
            own, theirs = self.places[name], self.places[player.of]
            # Places of a policy are by game, and as many in each game.
            means = final[theirs].reshape((self.num_envs // self._num_seats, -1)).mean(axis=1)
            margin = means[self._games[own]] - final[own]
            first, last = timestep.first()[own], timestep.last()[own]
            judged[name] = player.judged(agent[name], first, last, margin)
        return judged
