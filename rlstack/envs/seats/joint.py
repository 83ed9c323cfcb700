"""Games of several seats as one row each: joint rows, for agents that learn to cooperate.

With the option ``joint`` of an environment, a row of a pool is a game of S seats instead of a seat:

- An observation has what all seats see, ``[S, ...]``, also their action masks. The entry
  ``critic_state`` belongs to the game, so it is there once.
- An action has those of all seats, ``[S]`` or ``[S, A]``. Those of absent seats are ignored.
- The reward is the mean of the seats' rewards, so a return is the mean return of a seat.
- The extras have ``alive`` and ``rewards`` of the seats, ``[S]``, and those that the game shows of
  its seats, ``[S, ...]``.

A game is LAST when it is over for all seats. Its discount then is 1 if the game is cut off for a
seat that could play on, and 0 otherwise.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs.backend import Backend, PoolConfig
from rlstack.envs.values import start_of, with_start
from rlstack.specs import ALIVE, CRITIC_STATE, REWARDS
from rlstack.types import Array, EnvSpec, PyTree, StepType, TimeStep


def joint_spec(spec: EnvSpec, num_seats: int, name: str) -> EnvSpec:
    """Returns the spec of joint rows, for the spec of one seat.

    Raises:
      ValueError: the observation or the action has more than choices and numbers, as that of
        entities has, or the extras of a seat have no names or those of joint rows.
    """
    observation, action = spec.observation, spec.action
    if not isinstance(action, specs.Array) or len(action.shape) > 1:
        raise ValueError(
            f"{name}: joint must be left out, because it needs a game whose seats have one choice "
            f"or one vector of numbers as their action; got {action}. Take the seats as rows."
        )
    extras = {
        ALIVE: specs.BoundedArray((num_seats,), np.int8, 0, 1, ALIVE),
        REWARDS: specs.Array((num_seats,), np.float32, REWARDS),
    }
    shown = spec.extras or {}
    if not isinstance(shown, Mapping) or shown.keys() & extras.keys():
        raise ValueError(
            f"{name}: with joint, the extras of a seat must be a dict without the entries "
            f"{', '.join(extras)}; got {shown}. Rename them in the game, or leave out joint."
        )

    def of_all(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _of_all(leaf, num_seats), tree)

    return EnvSpec(
        _by_entry(observation, lambda entry: entry, of_all),
        of_all(action),
        {**extras, **of_all(dict(shown))},
    )


def joined(rows: TimeStep, num_seats: int, begins: Array, xp: Any = np) -> TimeStep:
    """Returns the step of each game.

    Args:
      rows: the steps of the seats of G games, ``[G S, ...]``.
      num_seats: S.
      begins: whether this is the first step of a game, bool ``[G]``.
      xp: numpy, or jax.numpy within a compiled function.
    """

    def by_game(x: Array) -> Array:
        return x.reshape((-1, num_seats, *x.shape[1:]))

    kinds, rewards = by_game(rows.step_type), by_game(rows.reward)
    is_last, plays = kinds == int(StepType.LAST), kinds == int(StepType.MID)
    over = ~begins & is_last.any(axis=1) & ~plays.any(axis=1)
    cut_off = is_last & (by_game(rows.discount) > 0)
    alive = xp.where(over[:, None], cut_off, begins[:, None] | plays)
    later = xp.where(over, int(StepType.LAST), int(StepType.MID))
    # A seat that has left may still see an old state.
    at = xp.argmax(kinds != int(StepType.FIRST), axis=1)
    games = xp.arange(len(kinds))
    return TimeStep(
        xp.where(begins, int(StepType.FIRST), later).astype(np.int32),
        rewards.mean(axis=1).astype(np.float32),
        (~over | alive.any(axis=1)).astype(np.float32),
        _by_entry(
            rows.observation,
            lambda entry: jax.tree.map(lambda x: by_game(x)[games, at], entry),
            lambda entry: jax.tree.map(by_game, entry),
        ),
        {
            ALIVE: alive.astype(np.int8),
            REWARDS: rewards.astype(np.float32),
            **jax.tree.map(by_game, dict(rows.extras or {})),
        },
    )


def workers_of_games(type_: str, num_workers: int, games: int) -> int:
    """Returns a number of workers that splits no game between two processes."""
    if type_ != "process":
        return num_workers
    most = min(num_workers or os.cpu_count() or 1, games)
    return next(number for number in range(most, 0, -1) if games % number == 0)


class JointBackend:
    """A synchronous pool whose rows are games; see ``rlstack.envs.backend.Backend``.

    It works on the rows of the seats of another pool, of any type: row ``S i + j`` there is seat j
    of game i.
    """

    def __init__(
        self,
        make_rows: Callable[[PoolConfig], Backend],
        name: str,
        number: int,
        type_: str,
        config: PoolConfig,
    ) -> None:
        """Makes the pool of the seats.

        Args:
          make_rows: makes that pool from its options.
          name: the name of the game in errors.
          number: the number of its seats.
          type_: the type of the pool of seats.
          config: the options; ``size`` is the number of games, and game i has the seeds from
            ``config.seed + S i``.

        Raises:
          EnvError: the pool is not synchronous.
          ValueError: the environment has one seat, or its seats cannot be joined.
        """
        if number < 2:
            raise ValueError(
                f"{name}: joint needs a game of several seats; it has one. Leave joint out."
            )
        if config.wait_num != config.size:
            raise EnvError(
                f"{name}: with joint all games step together, so a batch must have all "
                f"{config.size} rows; got wait_num={config.wait_num}. Use wait_num 0."
            )
        self._name, self._seats, self._games = name, number, config.size
        index = config.first_index
        of_seats = dataclasses.replace(
            config,
            size=number * config.size,
            wait_num=number * config.size,
            num_workers=workers_of_games(type_, config.num_workers or 0, config.size) or None,
            first_index=None if index is None else number * index,
        )
        self._rows: Backend = make_rows(of_seats)
        try:
            self.spec = joint_spec(self._rows.spec, number, name)
        except BaseException:
            self._rows.close()
            raise
        self.action_dtypes = self._rows.action_dtypes
        self.action_offsets = self._rows.action_offsets
        self._ids = np.arange(config.size, dtype=np.int32)
        self._begins = np.ones(config.size, bool)

    def reset(self) -> None:
        """Starts a new game everywhere."""
        self._rows.reset()
        self._begins[:] = True

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps all games.

        Raises:
          EnvError: the actions of some games are missing.
        """
        if env_ids is not None:
            if len(env_ids) != self._games:
                raise EnvError(f"{self._name}: with joint all {self._games} games step together.")
            actions = [leaf[np.argsort(env_ids)] for leaf in actions]
        self._rows.send(None, [leaf.reshape((-1, *leaf.shape[2:])) for leaf in actions])

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns all games in order.

        Raises:
          EnvError: a seat joined a game that all others had left, or a game began for some only.
        """
        _, rows = self._rows.recv()
        goes_on = (rows.step_type != StepType.FIRST).reshape((-1, self._seats)).any(axis=1)
        if (wrong := np.flatnonzero(goes_on & self._begins)).size:
            raise EnvError(
                f"{self._name}: with joint a game must be over when all its seats have left; game "
                f"{wrong[0]} goes on. Take the seats as rows."
            )
        timestep = joined(rows, self._seats, self._begins)
        self._begins = np.asarray(timestep.last())
        return self._ids.copy(), timestep

    def _of_seats(self, env_ids: np.ndarray) -> np.ndarray:
        """Returns the rows of the seats of games, ``[n, S]``."""
        return np.asarray(env_ids)[:, None] * self._seats + np.arange(self._seats)

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers of the seats; see `rlstack.envs.pool.Pool.episode_metrics`."""
        return self._rows.episode_metrics(self._of_seats(env_ids).ravel())

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the means over the seats that give a number."""
        found = []
        for rows in self._of_seats(env_ids):
            infos = self._rows.step_infos(rows)
            names = dict.fromkeys(name for info in infos for name in info)
            found.append(
                {name: float(np.mean([i[name] for i in infos if name in i])) for name in names}
            )
        return found

    def stats(self) -> dict[str, int]:
        """Returns the counters of the pool of seats."""
        return self._rows.stats()

    @property
    def last_restart(self) -> str:
        """Why a worker process was restarted last; empty if none was."""
        return str(getattr(self._rows, "last_restart", ""))

    def close(self) -> None:
        """Closes the pool of seats."""
        self._rows.close()


def _by_entry(observation: PyTree, of_game: Any, of_seats: Any) -> PyTree:
    """Applies one function to the state of the game and another to the rest."""
    if not isinstance(observation, Mapping) or CRITIC_STATE not in observation:
        return of_seats(observation)
    return {
        name: of_game(entry) if name == CRITIC_STATE else of_seats(entry)
        for name, entry in observation.items()
    }


def _of_all(spec: specs.Array, number: int) -> specs.Array:
    shape = (number, *spec.shape)
    if not isinstance(spec, specs.BoundedArray):
        return specs.Array(shape, spec.dtype, spec.name)
    low, high = (np.broadcast_to(x, shape) for x in (spec.minimum, spec.maximum))
    start = start_of(spec)
    bounded = specs.BoundedArray(shape, spec.dtype, low, high, spec.name)
    return with_start(bounded, np.broadcast_to(start, shape) if np.any(start) else 0)
