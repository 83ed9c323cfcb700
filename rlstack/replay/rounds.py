"""Rounds: batches of items from several actors at the same params version.

The learner of a synchronous run needs data of its newest params from many actors, but must not stop
because one of them is slow or has ended. So a round is ready when ``min_actors`` have reported and
``grace_seconds`` have passed for the others. An actor that has reported waits for newer params,
because what it would add until then belongs to no round. An actor that reports too late does not
wait, and its items belong to the next round. So no item is lost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.types import StepType, Transition

_LAST = int(StepType.LAST)


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

    Attributes:
      reported: the environments of the actors that had reported at the last decision, [num_envs]
        bool.
    """

    def __init__(self, min_actors: int, grace_seconds: float, num_actors: int, num_envs: int):
        """Checks that the actors share the environments evenly.

        Raises:
          ValueError: ``num_envs`` is no multiple of ``num_actors``, or ``min_actors`` exceeds
            ``num_actors``.
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
        self.reported = np.zeros(num_envs, bool)

    def decide(
        self,
        env_ids: np.ndarray,
        versions: np.ndarray,
        newest: int,
        now: float,
        *,
        full: bool = False,
    ) -> Round | None:
        """Returns the round to take now, or None if it must wait.

        Args:
          env_ids: [n] environments of the queued items, oldest first.
          versions: [n] params versions that produced them.
          newest: the newest params version.
          now: seconds of a monotonic clock.
          full: whether no actor can add items before a round is taken. Then the round takes all
            items, whoever has reported.
        """
        fresh = versions >= newest
        has_fresh = np.zeros(self._num_envs, bool)
        has_fresh[env_ids[fresh]] = True
        reported = has_fresh.reshape(self._num_actors, self._size).all(1)
        actors = int(np.count_nonzero(reported))
        self.reported = np.repeat(reported, self._size)
        if full and len(env_ids):
            take = self._cut(np.ones(len(env_ids), bool), env_ids, fresh)
            return Round(take, actors, int(np.count_nonzero(~fresh[take])))
        if actors < self._min_actors or newest != self._version:
            self._since, self._version = None, newest
        if actors < self._min_actors:
            return None
        if self._since is None:
            self._since = now
        if actors < self._num_actors and now - self._since < self._grace_seconds:
            return None
        take = self._cut(reported[env_ids // self._size] | ~fresh, env_ids, fresh)
        return Round(take, actors, int(np.count_nonzero(~fresh[take])))

    def _cut(self, eligible: np.ndarray, env_ids: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        """Returns the items of a round, [k] increasing: the eligible ones, cut to a full size."""
        over = np.count_nonzero(eligible) % self._size
        if 0 < over < np.count_nonzero(eligible):
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


class Reports:
    """Tells an actor when it has reported, from the steps that it adds; see `Rounds`.

    It knows what the actor itself has added, so it asks neither the replay nor the learner.

    Attributes:
      version: the params version that the actor has reported: the smallest, among its environments,
        of the versions of their newest items. -1 while an environment has no item.
    """

    def __init__(self, cfg: ReplayConfig, num_envs: int) -> None:
        """Starts without steps.

        Args:
          cfg: the rules of the table.
          num_envs: environments of the actor.
        """
        self._length, self._period, self._context = cfg.unroll_length, cfg.step_period, cfg.context
        self._refuses_last = cfg.starts == "not_last"
        rows = cfg.unroll_length + 1
        self._all = np.arange(num_envs)
        self._steps = np.zeros(num_envs, np.int64)
        self._versions = np.zeros((rows, num_envs), np.int64)  # params versions of the last steps
        self._is_last = np.zeros((rows, num_envs), bool)
        self._newest = np.full(num_envs, -1, np.int64)
        self._complete = np.zeros(num_envs, bool)
        self.version = -1

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> bool:
        """Counts one step of some environments, as the replay does.

        Args:
          env_ids: [n] ints, counted from 0 in this actor; None for all in order.
          transition: the transition that was added to the replay.

        Returns:
          Whether the step has completed a report: every environment has completed an item since the
          last call that returned True.
        """
        ids = self._all if env_ids is None else env_ids
        steps = self._steps[ids]
        rows = len(self._versions)
        self._versions[steps % rows, ids] = transition.params_version
        if self._refuses_last:
            self._is_last[steps % rows, ids] = transition.timestep.step_type == _LAST
        self._steps[ids] = steps + 1
        starts = steps - self._length
        due = (starts >= 0) & (starts % self._period == 0)
        if not np.count_nonzero(due):
            return False
        ids, starts = ids[due], (starts + self._context)[due]
        valid = ~self._is_last[starts % rows, ids]
        ids, starts = ids[valid], starts[valid]
        self._newest[ids] = self._versions[(starts + 1) % rows, ids]
        self._complete[ids] = True
        self.version = int(self._newest.min())
        if not self._complete.all():
            return False
        self._complete[:] = False
        return True
