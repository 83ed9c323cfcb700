"""Pools of games in which frozen opponents play against the learner.

The agents of one game are consecutive environments of a pool, called *seats*. The pools of this
module wrap such a pool. They show only the learner's seats, as environments 0 to ``num_envs - 1``,
and send the opponents' actions to the other seats themselves. Actors, replay and evaluation
therefore use an ordinary pool, and the opponents' steps are neither counted nor stored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np

from rlstack.envs.backend import check_ids
from rlstack.envs.nest import Nest
from rlstack.envs.pool import AsyncEnv, SyncEnv
from rlstack.types import PyTree, TimeStep

# (seats, timesteps [n, ...]) -> actions [n, ...]. Seats, int [n], are numbered among the opponent's
# own seats; None means all of them in order.
Opponent = Callable[[np.ndarray | None, TimeStep], PyTree]
AnyPool = TypeVar("AnyPool", SyncEnv, AsyncEnv)

Self = TypeVar("Self", bound="_WithOpponents")

LEARNER = -1
ITSELF = "itself"


class Seating(NamedTuple):
    """The player of each seat."""

    players: np.ndarray  # int32 [seats], the opponent's number or LEARNER
    against: np.ndarray  # int32 [num_envs], the opponent of each of the learner's seats, or LEARNER


def assign_seats(num_envs: int, agents: int, num_opponents: int, share: float) -> Seating:
    """Returns a seating in which the learner has ``num_envs`` seats.

    In the first games the learner plays every seat; in the remaining games it plays one seat. These
    remaining games alternate between the opponents. After one game with each opponent, the learner
    moves to the next seat.

    Args:
      num_envs: number of the learner's seats.
      agents: number of seats of one game.
      num_opponents: number of opponents.
      share: fraction of the learner's seats that play against an opponent. It is rounded up so that
        the learner's other seats fill whole games.
    """
    own_games = int((1.0 - share) * num_envs / agents + 1e-9)
    opposed = num_envs - own_games * agents
    games = np.arange(opposed)
    against = games % num_opponents
    players = np.repeat(against[:, None], agents, axis=1)
    players[games, games // num_opponents % agents] = LEARNER
    own = np.full(own_games * agents, LEARNER)
    return Seating(
        np.concatenate([own, players.ravel()]).astype(np.int32),
        np.concatenate([own, against]).astype(np.int32),
    )


class _WithOpponents(Generic[AnyPool]):
    """The common part of both pools.

    Attributes:
      spec: the spec of the wrapped pool.
      num_envs: number of the learner's seats.
      env_ids: ``[num_envs]`` int32, 0 to num_envs - 1.
      opponents: names of the opponents, one for each environment.
    """

    def __init__(
        self, pool: AnyPool, seating: Seating, opponents: Sequence[Opponent], names: Sequence[str]
    ):
        """Wraps a pool.

        Args:
          pool: a pool with one environment per seat; closing this pool closes it.
          seating: the player of each seat.
          opponents: the opponents, in the order of their numbers in ``seating``.
          names: the names of the opponents.
        """
        self._pool: AnyPool = pool
        self._players = list(opponents)
        self.spec = pool.spec
        self._seats = np.flatnonzero(seating.players == LEARNER).astype(np.int32)
        self.num_envs = len(self._seats)
        self.env_ids = np.arange(self.num_envs, dtype=np.int32)
        self.env_ids.setflags(write=False)
        self.opponents = tuple(ITSELF if i < 0 else names[i] for i in seating.against.tolist())

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns numbers to log about the episodes that these environments ended last."""
        return self._pool.episode_metrics(self._seats[env_ids])

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the ``info`` of the last step of each of these environments."""
        return self._pool.step_infos(self._seats[env_ids])

    def stats(self) -> dict[str, int]:
        """Returns the counters of the wrapped pool."""
        return self._pool.stats()

    @property
    def last_restart(self) -> str:
        """Why a worker process of the wrapped pool was restarted last; empty if none was."""
        return self._pool.last_restart

    def close(self) -> None:
        """Closes the wrapped pool; safe to call twice."""
        self._pool.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rows(timestep: TimeStep, seats: np.ndarray) -> TimeStep:
    return jax.tree.map(lambda x: x[seats], timestep)


class SyncEnvWithOpponents(_WithOpponents[SyncEnv]):
    """A `SyncEnv` with opponents; it has the methods of a `SyncEnv`."""

    is_sync = True

    def __init__(
        self, pool: SyncEnv, seating: Seating, opponents: Sequence[Opponent], names: Sequence[str]
    ):
        super().__init__(pool, seating, opponents, names)
        self._nest = Nest(self.spec.action)
        self._seats_of = [np.flatnonzero(seating.players == i) for i in range(len(opponents))]
        self._last: TimeStep | None = None  # last steps of all seats; None between send and recv

    def reset(self) -> TimeStep:
        """Starts a new episode of every game and returns the learner's FIRST steps."""
        self._last = self._pool.reset()
        return _rows(self._last, self._seats)

    def step(self, actions: PyTree) -> TimeStep:
        """Steps every game and returns the learner's rows."""
        self.send(actions)
        return self.recv()

    def send(self, actions: PyTree) -> None:
        """Gets the opponents' actions and starts a step of every game.

        Raises:
          ValueError, TypeError: the actions have a wrong structure, shape, dtype or range.
          RuntimeError: called before ``reset``, or twice without ``recv``.
        """
        if self._last is None:
            raise RuntimeError("SyncEnv.step: reset, or recv after a send, must come first.")
        leaves = [np.asarray(x) for x in self._nest.flatten(actions, "Env pool: action")]
        for leaf, path in zip(leaves, self._nest.paths, strict=True):
            if leaf.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"Env pool: action{path}: must have {self.num_envs} rows, one per seat of the "
                    f"learner; got shape {leaf.shape}."
                )
        merged = [np.empty((len(self._last.reward), *x.shape[1:]), x.dtype) for x in leaves]
        for into, leaf in zip(merged, leaves, strict=True):
            into[self._seats] = leaf
        for player, seats in zip(self._players, self._seats_of, strict=True):
            if len(seats):
                chosen = player(None, _rows(self._last, seats))
                for into, leaf in zip(merged, jax.tree.leaves(chosen), strict=True):
                    into[seats] = leaf
        self._pool.send(self._nest.unflatten(merged))
        self._last = None

    def recv(self) -> TimeStep:
        """Waits for every game and returns the learner's rows."""
        self._last = self._pool.recv()
        return _rows(self._last, self._seats)


class AsyncEnvWithOpponents(_WithOpponents[AsyncEnv]):
    """An `AsyncEnv` with opponents; it has the methods of an `AsyncEnv`."""

    is_sync = False

    def __init__(
        self,
        pool: AsyncEnv,
        seating: Seating,
        opponents: Sequence[Opponent],
        names: Sequence[str],
        wait_num: int,
    ):
        """Wraps a pool with ``wait_num`` 1, so that opponents answer without delay."""
        super().__init__(pool, seating, opponents, names)
        self.wait_num = wait_num
        self._player_of = seating.players.tolist()
        # The number of each seat among the seats of its player.
        self._number = np.zeros(len(self._player_of), np.int32)
        for player in range(LEARNER, len(opponents)):
            mine = np.flatnonzero(seating.players == player)
            self._number[mine] = np.arange(len(mine))
        self._started = False
        self._awaited = 0  # rows of the learner that recv has not returned yet
        self._ready: list[tuple[int, TimeStep]] = []

    def async_reset(self) -> None:
        """Starts the games, without waiting for the first steps.

        Raises:
          RuntimeError: called a second time; the opponents' seats are in flight by then.
        """
        if self._started:
            raise RuntimeError(
                "AsyncEnv.async_reset: a pool with opponents can be reset only once, because the "
                "opponents' seats are in flight afterwards. Close it and make a new one."
            )
        self._pool.async_reset()
        self._started, self._awaited = True, self.num_envs

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for ``wait_num`` rows of the learner, and answers the opponents' rows in between.

        Raises:
          RuntimeError: fewer than ``wait_num`` of the learner's environments are in flight.
        """
        if self._awaited < self.wait_num:
            raise RuntimeError(
                f"AsyncEnv.recv: at least wait_num={self.wait_num} environments must be in flight; "
                f"{self._awaited} are. Send more, or call async_reset first."
            )
        while len(self._ready) < self.wait_num:
            self._take()
        found, self._ready = self._ready, []
        self._awaited -= len(found)
        ids = np.array([i for i, _ in found], np.int32)
        return ids, jax.tree.map(lambda *rows: np.concatenate(rows), *(row for _, row in found))

    def send(self, env_ids: np.ndarray, actions: PyTree) -> None:
        """Steps received environments; row i of ``actions`` goes to ``env_ids[i]``."""
        ids = check_ids(env_ids, self.num_envs)
        self._pool.send(self._seats[ids], actions)
        self._awaited += len(ids)

    def _take(self) -> None:
        """Receives one row; keeps a row of the learner, and answers a row of an opponent."""
        seats, row = self._pool.recv()
        player, number = self._player_of[seats[0]], self._number[seats]
        if player == LEARNER:
            self._ready.append((int(number[0]), row))
        else:
            self._pool.send(seats, self._players[player](number, row))
