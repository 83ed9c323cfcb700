"""Rounds: batches for which several actors report together.

The learner of a synchronous run wants data of its newest params from many actors, but must not
stand still because one of them is slow or gone. So a round may go once ``min_actors`` have
reported and the others have had their time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Round(NamedTuple):
    """What is in a round."""

    take: np.ndarray  # [k] indices of waiting items, increasing
    actors: int  # who reported
    late: int  # items of older versions among them


class Rounds:
    """Decides when a round may go, and what is in it; knows no clock and no storage.

    Environment ``e`` belongs to actor ``e // (num_envs // num_actors)``. An actor has *reported*
    when each of its environments has a waiting item of the newest version. A round may go when all
    actors have, or ``grace_seconds`` after at least ``min_actors`` had. It takes all items of the
    actors that reported and whatever older ones the others have waiting, as many as make a multiple
    of an actor's environments: few sizes, so that a learner compiles few programs. What is over
    waits for the next round.
    """

    def __init__(self, min_actors: int, grace_seconds: float, num_actors: int, num_envs: int):
        """Checks that the actors share the environments evenly.

        Raises:
          ValueError: they do not, or ``min_actors`` is more than there are.
        """
        if num_actors < 1 or num_envs % num_actors:
            raise ValueError(
                f"ReplayBuffer: num_envs must be a multiple of num_actors; got {num_envs} and "
                f"{num_actors}. Give every actor as many environments."
            )
        if min_actors > num_actors:
            raise ValueError(
                f"ReplayConfig: min_actors must be at most num_actors ({num_actors}), or no round "
                f"would ever go; got {min_actors}. Lower it, or start more actors."
            )
        self._min_actors, self._grace_seconds = min_actors, grace_seconds
        self._num_actors, self._num_envs = num_actors, num_envs
        self._size = num_envs // num_actors
        self._since: float | None = None  # when min_actors had reported
        self._version = -1

    def decide(
        self, env_ids: np.ndarray, versions: np.ndarray, newest: int, now: float
    ) -> Round | None:
        """Returns the round to be taken now, or None to go on waiting.

        Args:
          env_ids: [n] environments of the waiting items, oldest first.
          versions: [n] params versions that made them.
          newest: the newest params version.
          now: seconds on any clock that does not go back.
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
        """Returns what goes, [k] increasing: all that may, but for the last ones left over."""
        may = reported[env_ids // self._size] | ~fresh
        over = np.count_nonzero(may) % self._size
        if over:
            # The first fresh item of an environment stands for its actor's report and stays in.
            first = np.zeros(len(env_ids), bool)
            at = np.flatnonzero(may & fresh)
            first[at[np.unique(env_ids[at], return_index=True)[1]]] = True
            may[np.flatnonzero(may & ~first)[-over:]] = False
        return np.flatnonzero(may)

    def start_over(self) -> None:
        """Says that a round went: the next one's grace begins anew."""
        self._since = None

    @property
    def waits_for_time(self) -> bool:
        """Whether a round will go by and by even if nothing more comes."""
        return self._since is not None
