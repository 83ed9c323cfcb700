"""More entries in the observations of JAX games; see `rlstack.envs.seats.showing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.envs.seats.showing import SHOWN, CriticState
from rlstack.jax_envs.game import GameOutcome, JaxGame
from rlstack.specs import ACTION_MASK, CRITIC_STATE, SEAT
from rlstack.types import PRNGKey, PyTree

__all__ = ["SHOWN", "showing"]


def showing(game: JaxGame, seat_index: bool = False, critic_state: CriticState = "none") -> JaxGame:
    """Adds entries to the observations of a game's seats; without entries, returns the game itself.

    Args:
      game: the game.
      seat_index: whether a seat observes its own number, in an entry ``seat``.
      critic_state: what the critic sees in an entry ``critic_state``: nothing more than the seat;
          the observations of all seats, in a dict with an entry for each seat (joined); or the
          state that the game shows (game).

    Raises:
      ValueError: there is no such state, or the game already has an entry of this name.
    """
    name, shows_state = type(game).__name__, hasattr(game, "state_spec")
    if critic_state not in get_args(CriticState):
        raise ValueError(
            f"JAX game {name}: critic_state must be one of {', '.join(get_args(CriticState))}; got "
            f"{critic_state!r}."
        )
    if critic_state == "game" and not shows_state:
        raise ValueError(
            f"JAX game {name}: critic_state=game needs a game with state_spec() and "
            "critic_state(state); it has none. Use critic_state=joined, which shows the critic the "
            "observations of all seats."
        )
    if not seat_index and critic_state == "none":
        return game
    return _Showing(game, seat_index, critic_state)


class _Showing:
    """A game with more entries in its observations."""

    def __init__(self, game: JaxGame, seat_index: bool, critic_state: CriticState) -> None:
        self._game = cast(Any, game)
        self.seats = game.seats
        self._seat_index, self._critic_state = seat_index, critic_state
        shown, number = _entries(game.observation_spec()), len(game.seats)
        more: dict[str, PyTree] = {}
        if seat_index:
            more[SEAT] = specs.DiscreteArray(number, np.int32, SEAT)
        if critic_state == "game":
            more[CRITIC_STATE] = self._game.state_spec()
        elif critic_state == "joined":
            joined = _without_mask(game.observation_spec())
            more[CRITIC_STATE] = {str(seat): joined for seat in range(number)}
        if twice := sorted(shown.keys() & more.keys()):
            raise ValueError(
                f"JAX game {type(game).__name__}: its observations already have an entry "
                f"{', '.join(twice)}. Rename it in the game, or leave out seat_index and "
                "critic_state."
            )
        self._spec = {**shown, **more}

    def observation_spec(self) -> PyTree:
        """Returns the specs of the entries."""
        return self._spec

    def action_spec(self) -> PyTree:
        """Returns the specs of the game."""
        return self._game.action_spec()

    def extras_spec(self) -> PyTree:
        """Returns the specs of the game's extras; () if it has none."""
        return getattr(self._game, "extras_spec", tuple)()

    def extras(self, state: PyTree) -> PyTree:
        """Returns the game's extras of all seats."""
        return self._game.extras(state)

    @property
    def render_fps(self) -> float | None:
        """The game's frames per second; None if the game has none."""
        return getattr(self._game, "render_fps", None)

    def render(self, state: PyTree) -> np.ndarray | str | None:
        """Returns the game's picture, if it draws one."""
        draw = getattr(self._game, "render", None)
        return None if draw is None else draw(state)

    def reset(self, rng_key: PRNGKey) -> tuple[PyTree, PyTree]:
        """Starts a game."""
        state, observation = self._game.reset(rng_key)
        return state, self._observe(state, observation)

    def step(self, rng_key: PRNGKey, state: PyTree, action: PyTree) -> GameOutcome:
        """Takes the actions of all seats."""
        outcome = self._game.step(rng_key, state, action)
        return outcome._replace(observation=self._observe(outcome.state, outcome.observation))

    def _observe(self, state: PyTree, observation: PyTree) -> PyTree:
        """Adds the entries to observations ``[S, ...]``."""
        number = len(self.seats)

        def for_all(x: Any) -> jax.Array:
            return jnp.broadcast_to(x, (number, *jnp.shape(x)))

        shown = dict(_entries(observation))
        if self._seat_index:
            shown[SEAT] = jnp.arange(number, dtype=jnp.int32)
        if self._critic_state == "game":
            shown[CRITIC_STATE] = jax.tree.map(for_all, self._game.critic_state(state))
        elif self._critic_state == "joined":
            seen = _without_mask(observation)
            shown[CRITIC_STATE] = {
                str(seat): jax.tree.map(lambda x, seat=seat: for_all(x[seat]), seen)
                for seat in range(number)
            }
        return shown


def _entries(observation: PyTree) -> Mapping[str, PyTree]:
    return observation if isinstance(observation, Mapping) else {"observation": observation}


def _without_mask(observation: PyTree) -> PyTree:
    if isinstance(observation, Mapping) and ACTION_MASK in observation:
        return {name: seen for name, seen in observation.items() if name != ACTION_MASK}
    return observation
