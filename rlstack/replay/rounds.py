"""Rounds: batches of items from several actors at the same params version.

The learner of a synchronous run needs data of its newest params from many actors, but must not stop
because one of them is slow or has ended. So a round is ready when ``min_actors`` have reported and
``grace_seconds`` have passed for the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """The items of a round."""

    take: np.ndarray  # [k] indices of queued items, increasing
    actors: int  # number of actors that had reported
    late: int  # number of items of older versions


class Rounds:
    """Decides when a round is ready and which items it contains; reads no clock and no storage.

    Environment ``e`` belongs to actor ``e // (num_envs // num_actors)``. An actor has *reported*
    when each of its environments has a queued item of the newest version. A round is ready when all
    actors have reported, or ``grace_seconds`` after at least ``min_actors`` had. It takes all items
    of the actors that reported, and the other actors' queued items of older versions. The number of
    items is reduced to a multiple of an actor's environments, so that few batch sizes are compiled.
    The remaining items stay for the next round.
    """

    def __init__(self, min_actors: int, grace_seconds: float, num_actors: int, num_envs: int):
        """Checks that the actors share the environments evenly.

        Raises:
          ValueError: they do not share them evenly, or ``min_actors`` exceeds ``num_actors``.
        """
        if num_actors < 1 or num_envs % num_actors:
            raise ValueError(
                f"ReplayBuffer: num_envs must be a multiple of num_actors; got {num_envs} and "
                f"{num_actors}. Give every actor the same number of environments."
            )
        if min_actors > num_actors:
            raise ValueError(
                f"ReplayConfig: min_actors must be at most num_actors ({num_actors}); otherwise "
                f"no round is ever ready; got {min_actors}. Lower it, or start more actors."
            )
        self._min_actors, self._grace_seconds = min_actors, grace_seconds
        self._num_actors, self._num_envs = num_actors, num_envs
        self._size = num_envs // num_actors
        self._since: float | None = None  # time at which min_actors had reported
        self._version = -1

    def decide(
        self, env_ids: np.ndarray, versions: np.ndarray, newest: int, now: float
    ) -> Round | None:
        """Returns the round to take now, or None if it must wait.

        Args:
          env_ids: [n] environments of the queued items, oldest first.
          versions: [n] params versions that produced them.
          newest: the newest params version.
          now: seconds of a monotonic clock.
        """
        fresh = versions >= newest
        has_fresh = np.zeros(self._num_envs, bool)
        has_fresh[env_ids[fresh]] = True
        reported = has_fresh.reshape(self._num_actors, self._size).all(1)
        actors = int(np.count_nonzero(reported))
        if actors < self._min_actors or newest != self._version:
            self._since, self._version = None, newest
        if actors < self._min_actors:
            return None
        if self._since is None:
            self._since = now
        if actors < self._num_actors and now - self._since < self._grace_seconds:
            return None
        take = self._choose(env_ids, fresh, reported)
        return Round(take, actors, int(np.count_nonzero(~fresh[take])))

    def _choose(self, env_ids: np.ndarray, fresh: np.ndarray, reported: np.ndarray) -> np.ndarray:
        """Returns the items of a round, [k] increasing: all eligible ones, cut to a full size."""
        eligible = reported[env_ids // self._size] | ~fresh
        over = np.count_nonzero(eligible) % self._size
        if over:
            # The first item of the newest version of an environment is part of its actor's report:
            # keep it.
            first = np.zeros(len(env_ids), bool)
            at = np.flatnonzero(eligible & fresh)
            first[at[np.unique(env_ids[at], return_index=True)[1]]] = True
            eligible[np.flatnonzero(eligible & ~first)[-over:]] = False
        return np.flatnonzero(eligible)

    def start_over(self) -> None:
        """Marks a round as taken; the grace period of the next round starts from the beginning."""
        self._since = None

    @property
    def waits_for_time(self) -> bool:
        """Whether a grace period is running, so that a round becomes ready without new items."""
        return self._since is not None
