"""Acting with earlier versions of a policy inside a compiled loop, a version for each episode.

The rules are those of ``rlstack.programs.build.policies.versions``; the random draws are JAX's.
Between two calls of the loop the host adds versions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.fused.acting import Acted, Actors
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


class VersionTable(NamedTuple):
    """The earlier versions of a policy, in V slots."""

    params: Params  # [V, ...]
    numbers: Array  # [V] int32, version numbers, increasing with time; 0 for a free slot


class HistoryState(NamedTuple):
    """The state of acting with versions of a policy."""

    agent: AgentState  # [places, ...]
    slots: Array  # [places] int32, the slot of the version that plays
    counts: Array  # [places] bool, whether the game's result counts
    games: Array  # [V] float32, games against each version; older games count less
    wins: Array  # [V] float32, games that the other policy won against each version


class HistoryActors:
    """Acts with a version that is drawn for each place when its episode begins; pure.

    Each place has params of its own, so a step reads the params of a version once for each place
    that plays it.

    Attributes:
      num_envs: number of places.
      of: the policy whose versions play.
    """

    def __init__(
        self,
        actors: Actors,
        of: str,
        draw: str,
        slots: int,
        *,
        forgetting: float,
        prior: float,
    ) -> None:
        """Stores the parts.

        Args:
          actors: the actors that act with the params of one version.
          of: the policy whose versions play.
          draw: the rule for drawing versions: latest, uniform or prioritised.
          slots: V, the largest number of versions.
          forgetting: factor on the number of a version's earlier games for each further game of it.
          prior: number of games that each version starts with, half of them won.
        """
        self._actors, self._draw, self._slots = actors, draw, slots
        self._forgetting, self._prior = forgetting, prior
        self.num_envs, self.of = actors.num_envs, of

    def initial_state(self) -> HistoryState:
        """Returns the state at the start of a run: no games, and no version has been drawn."""
        places, none = self.num_envs, jnp.zeros(self._slots)
        agent = self._actors.initial_state()
        return HistoryState(agent, jnp.zeros(places, jnp.int32), jnp.ones(places, bool), none, none)

    def restarted(self, state: HistoryState) -> HistoryState:
        """Returns the state after all environments were restarted: all games count."""
        return state._replace(counts=jnp.ones_like(state.counts))

    def act(
        self, params: VersionTable, timestep: TimeStep, state: HistoryState, rng_key: PRNGKey
    ) -> Acted:
        """Acts on one step of every place; see `Actors.act`."""
        next_key, draw_key, key = jax.random.split(rng_key, 3)
        logits = jnp.log(self._probabilities(params.numbers, state))
        drawn = jax.random.categorical(draw_key, logits, shape=(self.num_envs,))
        slots = jnp.where(timestep.first(), drawn.astype(jnp.int32), state.slots)
        agent = self._actors.agent
        before = agent.reset_state(state.agent, timestep.first())

        def act_one(key: PRNGKey, slot: Array, step: TimeStep, one: AgentState) -> Any:
            own = jax.tree.map(lambda x: x[slot], params.params)
            row = jax.tree.map(lambda x: x[None], (step, one))
            return jax.tree.map(lambda x: x[0], agent.actor_step(key, own, *row))

        keys = jax.random.split(key, self.num_envs)
        output, after = jax.vmap(act_one)(keys, slots, timestep, before)
        return Acted(output, before, state._replace(agent=after, slots=slots), next_key)

    def action(self, action: PyTree) -> PyTree:
        """Returns the action in the environment's dtypes and bounds."""
        return self._actors.action(action)

    def judged(self, state: HistoryState, first: Array, last: Array, margin: Array) -> HistoryState:
        """Records the results of the games that end; returns the new state.

        Args:
          state: the state.
          first: ``[places]`` bool, where a game begins.
          last: ``[places]`` bool, where a game ends.
          margin: ``[places]``, the return of the other policy minus the version's return.
        """
        counts = state.counts | first
        scores = (jnp.sign(margin) + 1.0) / 2.0  # a draw is half a win

        def record(tables: tuple[Array, Array]) -> tuple[Array, Array]:
            def one(tables: tuple[Array, Array], ended: Any) -> tuple[tuple[Array, Array], None]:
                slot, counted, score = ended
                games, wins = map(jnp.asarray, tables)
                keep = jnp.where(counted, self._forgetting, 1.0)
                games = games.at[slot].set(keep * games[slot] + counted)
                wins = wins.at[slot].set(keep * wins[slot] + counted * score)
                return (games, wins), None

            return jax.lax.scan(one, tables, (state.slots, last & counts, scores))[0]

        tables = state.games, state.wins
        games, wins = jax.lax.cond((last & counts).any(), record, lambda same: same, tables)
        return state._replace(counts=counts, games=games, wins=wins)

    def _probabilities(self, numbers: Array, state: HistoryState) -> Array:
        """Returns the probability of the version in each slot, ``[V]``."""
        if self._draw == "latest":
            return jax.nn.one_hot(jnp.argmax(numbers), self._slots)
        weights = (numbers > 0).astype(jnp.float32)
        if self._draw == "prioritised":
            rates = (state.wins + self._prior / 2) / (state.games + self._prior)
            weights *= (1.0 - rates) ** 2
        return weights / weights.sum()
