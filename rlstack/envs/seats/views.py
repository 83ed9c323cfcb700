"""A pool of games that several policies share: each has a view of the rows that it plays.

The seats of one game are consecutive rows of a pool. `SharedPool` divides them among *views*, one
for each policy. A view has the methods of a `SyncEnv`, so each policy has an ordinary actor, and no
actor knows of the others. The pool steps when every view has sent its actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

from rlstack.envs.nest import Nest
from rlstack.envs.pool import SyncEnv
from rlstack.types import PyTree, StepType, TimeStep

Rows = slice | np.ndarray
Self = TypeVar("Self", bound="SharedPool")


class SharedPool:
    """Divides the rows of a pool among views.

    Each row belongs to one *place* of a view: place i of a view is row ``rows[i]``. With ``rng``,
    the places of each game are dealt to its seats anew in each episode, so that every policy plays
    every seat. The number of places that a policy has in a game stays the same.

    Attributes:
      views: the views, by name.
      num_seats: number of seats of one game.
    """

    def __init__(
        self,
        pool: SyncEnv,
        rows: Mapping[str, Sequence[int]],
        num_seats: int = 1,
        rng: np.random.Generator | None = None,
    ) -> None:
        """Divides a pool.

        Args:
          pool: a pool with one row for each seat; `close` closes it.
          rows: view name -> the view's rows in increasing order. Every row of the pool belongs to
            exactly one view.
          num_seats: number of seats of one game.
          rng: the generator that assigns places to seats; None leaves each place at its row.

        Raises:
          ValueError: a row has no view or several, or the rows are not whole games.
        """
        everyone = sorted(row for owned in rows.values() for row in owned)
        if everyone != list(range(pool.num_envs)) or not all(rows.values()):
            raise ValueError(
                f"SharedPool: rows must give each of the {pool.num_envs} rows to one view, and "
                f"each view some; got { ({name: list(owned) for name, owned in rows.items()}) }."
            )
        if pool.num_envs % num_seats:
            raise ValueError(
                f"SharedPool: the pool must have whole games of {num_seats} seats; got "
                f"{pool.num_envs} rows."
            )
        self._pool, self.num_seats, self._rng = pool, num_seats, rng
        self._nest = Nest(pool.spec.action)
        self._owned = {name: np.asarray(owned, np.int64) for name, owned in rows.items()}
        self._row_of = np.arange(pool.num_envs)  # the row of each place
        self._rows: dict[str, Rows] = {}
        self._sent: dict[str, list[np.ndarray]] = {}  # the leaves of the actions of this step
        self._unread: set[str] = set()  # views that have not received the newest step
        self._started: set[str] = set()  # views that have taken part in the newest reset
        self._newest: TimeStep | None = None
        self._find_rows()
        self.views = {name: View(self, name, len(owned)) for name, owned in rows.items()}

    @property
    def pool(self) -> SyncEnv:
        """The pool that is divided."""
        return self._pool

    @property
    def newest(self) -> TimeStep:
        """The newest step of all rows.

        Raises:
          RuntimeError: no view has been reset yet.
        """
        if self._newest is None:
            raise RuntimeError("SharedPool.newest: reset must come first.")
        return self._newest

    @property
    def begins(self) -> np.ndarray:
        """The games that begin in the newest step, bool ``[games]``: all their seats are FIRST."""
        first = np.asarray(self.newest.step_type) == StepType.FIRST
        return first.reshape(-1, self.num_seats).all(axis=1)

    def rows_of(self, name: str) -> np.ndarray:
        """Returns the row of each place of a view, in the episodes that are in progress."""
        return self._row_of[self._owned[name]]

    def reset(self, name: str) -> TimeStep:
        """Starts new episodes, once for all views, and returns the FIRST steps of one of them."""
        if not self._started or name in self._started:
            self._sent.clear()
            self._unread, self._started = set(), set()
            self._receive(self._pool.reset)
        self._started.add(name)
        self._unread.discard(name)
        return self._of(name)

    def send(self, name: str, actions: PyTree) -> None:
        """Takes the actions of one view; the last one to send starts the step.

        Raises:
          ValueError, TypeError: the actions have a wrong structure or number of rows.
          RuntimeError: ``reset`` was not called before, or ``recv`` was not called since the last
            send.
        """
        if name not in self._started or name in self._sent or name in self._unread:
            rule = "reset" if name not in self._started else "recv after a send"
            raise RuntimeError(f"View.send: {rule} must come first, for {name}.")
        leaves = [np.asarray(x) for x in self._nest.flatten(actions, "Env pool: action")]
        number = len(self._owned[name])
        for leaf, path in zip(leaves, self._nest.paths, strict=True):
            if leaf.shape[:1] != (number,):
                raise ValueError(
                    f"Env pool: action{path}: must have {number} rows, one for each place of "
                    f"{name}; got shape {leaf.shape}."
                )
        self._sent[name] = leaves
        if len(self._sent) == len(self._owned):
            self._pool.send(self._nest.unflatten(self._merged()))

    def recv(self, name: str) -> TimeStep:
        """Waits for the step of every game, and returns the rows of one view.

        Raises:
          RuntimeError: some view has not sent its actions.
        """
        if name not in self._unread:
            missing = [other for other in self._owned if other not in self._sent]
            if missing:
                raise RuntimeError(
                    f"View.recv: every view must send first; {', '.join(missing)} did not."
                )
            self._sent.clear()
            self._unread = set(self._owned)
            self._receive(self._pool.recv)
        self._unread.discard(name)
        return self._of(name)

    def close(self) -> None:
        """Closes the pool; safe to call twice."""
        self._pool.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receive(self, receive: Callable[[], TimeStep]) -> None:
        self._newest = receive()
        if self._rng is not None:
            self._deal(self._rng)

    def _deal(self, rng: np.random.Generator) -> None:
        """Assigns places to seats at random in the games that begin."""
        begins = self.begins
        if not begins.any():
            return
        places = np.arange(len(self._row_of)).reshape(-1, self.num_seats)[begins]
        self._row_of.reshape(-1, self.num_seats)[begins] = rng.permuted(places, axis=1)
        self._find_rows()

    def _find_rows(self) -> None:
        self._rows = {name: _as_slice(self.rows_of(name)) for name in self._owned}

    def _of(self, name: str) -> TimeStep:
        rows = self._rows[name]
        return jax.tree.map(lambda x: x[rows], self._newest)

    def _merged(self) -> list[np.ndarray]:
        """Returns the actions of all rows."""
        if len(self._sent) == 1 and self._rng is None:
            return next(iter(self._sent.values()))
        # Of a dtype that holds all, so that the pool refuses what it would refuse of one view.
        parts = list(zip(*self._sent.values(), strict=True))
        merged = [
            np.empty((len(self._row_of), *leaves[0].shape[1:]), np.result_type(*leaves))
            for leaves in parts
        ]
        for name, leaves in self._sent.items():
            for into, leaf in zip(merged, leaves, strict=True):
                into[self._rows[name]] = leaf
        return merged


class View:
    """The rows of one policy in a `SharedPool`; it has the methods of a `SyncEnv`.

    Attributes:
      spec: the spec of the pool.
      num_envs: number of rows.
      env_ids: ``[num_envs]`` int32, 0 to num_envs - 1.
      is_sync: True.
    """

    is_sync = True

    def __init__(self, shared: SharedPool, name: str, num_envs: int) -> None:
        self._shared, self._name = shared, name
        self.spec = shared.pool.spec
        self.num_envs = num_envs
        self.env_ids = np.arange(num_envs, dtype=np.int32)
        self.env_ids.setflags(write=False)

    def reset(self) -> TimeStep:
        """Starts a new episode of every game and returns the FIRST steps of these rows.

        All views must be reset; the pool is reset once for all of them.
        """
        return self._shared.reset(self._name)

    def send(self, actions: PyTree) -> None:
        """Takes the actions of these rows; see `SharedPool.send`."""
        self._shared.send(self._name, actions)

    def recv(self) -> TimeStep:
        """Returns the next step of these rows; see `SharedPool.recv`."""
        return self._shared.recv(self._name)

    def step(self, actions: PyTree) -> TimeStep:
        """Sends and receives; for the last view of a pool that sends."""
        self.send(actions)
        return self.recv()

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns numbers to log about the episodes that these rows ended last."""
        return self._shared.pool.episode_metrics(self._shared.rows_of(self._name)[env_ids])

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the numbers in the ``info`` of the last step of each of these rows."""
        return self._shared.pool.step_infos(self._shared.rows_of(self._name)[env_ids])

    def stats(self) -> dict[str, int]:
        """Returns the counters of the pool."""
        return self._shared.pool.stats()

    @property
    def last_restart(self) -> str:
        """Why a worker process of the pool was restarted last; empty if none was."""
        return self._shared.pool.last_restart

    def close(self) -> None:
        """Does nothing: the pool belongs to all its views."""


def _as_slice(rows: np.ndarray) -> Rows:
    """Returns rows of equal distances as a slice, which copies nothing."""
    if len(rows) == 1:
        return slice(int(rows[0]), int(rows[0]) + 1)
    distances = np.unique(np.diff(rows))
    if len(distances) == 1 and distances[0] > 0:
        return slice(int(rows[0]), int(rows[-1]) + 1, int(distances[0]))
    return rows
