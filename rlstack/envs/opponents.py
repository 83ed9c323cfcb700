"""Pools of games in which others play some of the places: frozen opponents of the one who learns.

The agents of one game are consecutive environments of a pool, its *seats*. A pool here wraps such a
pool and shows only the seats of the learner, as environments 0 to ``num_envs - 1``; to the others'
it sends what the opponents choose. So actors, replay and evaluation see an ordinary pool, and what
opponents do is neither counted nor remembered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.envs.async_pool import AsyncEnv
from rlstack.envs.base import rows_of
from rlstack.envs.nest import Nest
from rlstack.envs.pool import SyncEnv
from rlstack.types import PyTree, TimeStep

# Chooses the actions [n, ...] of some of an opponent's seats, int [n] (None for all in order), at
# the rows [n, ...] that these show.
Opponent = Callable[[np.ndarray | None, TimeStep], PyTree]

LEARNER = -1
ITSELF = "itself"


class Seating(NamedTuple):
    """Who plays where."""

    players: np.ndarray  # int32 [seats], the opponent's number or LEARNER
    against: np.ndarray  # int32 [num_envs], whom each of the learner's seats meets, or LEARNER


def seat(num_envs: int, agents: int, num_opponents: int, share: float) -> Seating:
    """Returns who plays where, so that the learner has ``num_envs`` seats.

    First come games among the learner's own, then games with one seat of the learner's each.
    Opponents take turns from game to game, and once all have had one the learner's seat moves on.

    Args:
      num_envs: the learner's seats.
      agents: seats of one game.
      num_opponents: how many there are.
      share: of the learner's seats that are to meet an opponent; where the others would not make
        whole games, a few more do.
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


class _Opposed:
    """What both kinds share.

    Attributes:
      spec: as of the pool within.
      num_envs: the learner's seats.
      env_ids: ``[num_envs]`` int32, 0 to num_envs - 1.
      opponents: by environment, the name of whom it plays against.
    """

    def __init__(
        self, pool: Any, seating: Seating, opponents: Sequence[Opponent], names: Sequence[str]
    ):
        """Takes over the pool.

        Args:
          pool: with one environment a seat; closed with this one.
          seating: who plays where.
          opponents: by their number in ``seating``.
          names: theirs.
        """
        self._pool, self._players = pool, list(opponents)
        self.spec = pool.spec
        self._seats = np.flatnonzero(seating.players == LEARNER).astype(np.int32)
        self.num_envs = len(self._seats)
        self.env_ids = np.arange(self.num_envs, dtype=np.int32)
        self.env_ids.setflags(write=False)
        self.opponents = tuple(ITSELF if i < 0 else names[i] for i in seating.against.tolist())

    def stats(self) -> dict[str, int]:
        """Returns the counters of the pool within."""
        return self._pool.stats()

    def close(self) -> None:
        """Closes the pool within; safe to call twice."""
        self._pool.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _rows(timestep: TimeStep, seats: np.ndarray) -> TimeStep:
    return jax.tree.map(lambda x: x[seats], timestep)


class OpposedSyncEnv(_Opposed):
    """A `SyncEnv` with opponents; its methods are a `SyncEnv`'s."""

    is_sync = True

    def __init__(
        self, pool: SyncEnv, seating: Seating, opponents: Sequence[Opponent], names: Sequence[str]
    ):
        super().__init__(pool, seating, opponents, names)
        self._nest = Nest(self.spec.action)
        self._theirs = [np.flatnonzero(seating.players == i) for i in range(len(opponents))]
        self._shown: TimeStep | None = None  # to all seats; None once it is answered

    def reset(self) -> TimeStep:
        """Starts a new game everywhere and returns the learner's FIRST steps."""
        self._shown = self._pool.reset()
        return _rows(self._shown, self._seats)

    def step(self, actions: PyTree) -> TimeStep:
        """Steps every game and returns the learner's rows."""
        self.send(actions)
        return self.recv()

    def send(self, actions: PyTree) -> None:
        """Lets the opponents choose, and steps every game.

        Raises:
          ValueError, TypeError: actions of a wrong structure, shape, dtype or range.
          RuntimeError: before ``reset``, or twice without ``recv``.
        """
        if self._shown is None:
            raise RuntimeError("SyncEnv.step: reset, or recv after a send, must come first.")
        leaves = [np.asarray(x) for x in self._nest.flatten(actions, "Env pool: action")]
        for leaf, path in zip(leaves, self._nest.paths, strict=True):
            if leaf.shape[:1] != (self.num_envs,):
                raise ValueError(
                    f"Env pool: action{path}: must have {self.num_envs} rows, one per environment "
                    f"of the learner's; got shape {leaf.shape}."
                )
        merged = [np.empty((len(self._shown.reward), *x.shape[1:]), x.dtype) for x in leaves]
        for into, leaf in zip(merged, leaves, strict=True):
            into[self._seats] = leaf
        for player, seats in zip(self._players, self._theirs, strict=True):
            if len(seats):
                chosen = player(None, _rows(self._shown, seats))
                for into, leaf in zip(merged, jax.tree.leaves(chosen), strict=True):
                    into[seats] = leaf
        self._pool.send(self._nest.unflatten(merged))
        self._shown = None

    def recv(self) -> TimeStep:
        """Waits for every game and returns the learner's rows."""
        self._shown = self._pool.recv()
        return _rows(self._shown, self._seats)


class OpposedAsyncEnv(_Opposed):
    """An `AsyncEnv` with opponents; its methods are an `AsyncEnv`'s."""

    is_sync = False

    def __init__(
        self,
        pool: AsyncEnv,
        seating: Seating,
        opponents: Sequence[Opponent],
        names: Sequence[str],
        wait_num: int,
    ):
        """Takes over the pool, which gives one row at a time: opponents answer at once."""
        super().__init__(pool, seating, opponents, names)
        self.wait_num = wait_num
        self._who = seating.players.tolist()
        self._place = np.zeros(len(self._who), np.int32)  # of a seat, among its player's own
        for player in range(LEARNER, len(opponents)):
            mine = np.flatnonzero(seating.players == player)
            self._place[mine] = np.arange(len(mine))
        self._started = False
        self._awaited = 0  # the learner's rows that are yet to be returned
        self._ready: list[tuple[int, TimeStep]] = []

    def async_reset(self) -> None:
        """Starts the games, without waiting for them.

        Raises:
          RuntimeError: they were started before: opponents have answered since, and are in flight.
        """
        if self._started:
            raise RuntimeError(
                "AsyncEnv.async_reset: a pool with opponents is reset once, because theirs are in "
                "flight by then. Close it and make a new one."
            )
        self._pool.async_reset()
        self._started, self._awaited = True, self.num_envs

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Waits for ``wait_num`` of the learner's environments; opponents play on meanwhile.

        Raises:
          RuntimeError: fewer than ``wait_num`` are in flight.
        """
        if self._awaited < self.wait_num:
            raise RuntimeError(
                f"AsyncEnv.recv: at least wait_num={self.wait_num} environments must be in flight; "
                f"{self._awaited} are. Way out: send more, or call async_reset first."
            )
        while len(self._ready) < self.wait_num:
            self._take()
        found, self._ready = self._ready, []
        self._awaited -= len(found)
        ids = np.array([i for i, _ in found], np.int32)
        return ids, jax.tree.map(lambda *rows: np.concatenate(rows), *(row for _, row in found))

    def send(self, env_ids: np.ndarray, actions: PyTree) -> None:
        """Steps received environments; row i of ``actions`` goes to ``env_ids[i]``."""
        ids = rows_of(env_ids, self.num_envs)
        self._pool.send(self._seats[ids], actions)
        self._awaited += len(ids)

    def _take(self) -> None:
        """Receives one row: the learner's is kept, an opponent's is answered."""
        seats, row = self._pool.recv()
        player, place = self._who[seats[0]], self._place[seats]
        if player == LEARNER:
            self._ready.append((int(place[0]), row))
        else:
            self._pool.send(seats, self._players[player](place, row))
