"""The compiled loop of a policy set: all policies act in the same games, and some learn.

It is the loop of one agent with parts that are dicts by policy. In an iteration all policies act
for some steps, and then each one that learns does so from its own replay, in the order of the set.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.agent import Agent
from rlstack.configs.replay import ReplayConfig
from rlstack.fused.acting import Actors, EpisodeStats
from rlstack.fused.devices import Devices
from rlstack.fused.learning import Learning, Updater, Updates
from rlstack.fused.loop import NO_LIMIT, CompiledLoop
from rlstack.fused.queue import StepQueue
from rlstack.fused.ring import Ring
from rlstack.fused.seats import Player, SetActing, SetActors
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.types import Array, Batch, PRNGKey

ByName = dict[str, Any]


class Learns(NamedTuple):
    """The agent and the rules with which a policy of a set learns."""

    agent: Agent  # acts and learns
    replay: ReplayConfig
    check_updates: bool = True  # see `rlstack.fused.loop.FusedLoop`


class SetUpdater:
    """The updaters of several policies."""

    def __init__(self, updaters: Mapping[str, Updater]) -> None:
        self.by_name = dict(updaters)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """The names of the logs of each policy, once the updates have been traced."""
        return {name: one.names for name, one in self.by_name.items()}

    def none(self, learning: Mapping[str, Learning], batch: Mapping[str, Batch]) -> ByName:
        """Returns the result of no updates."""
        return {name: one.none(learning[name], batch[name]) for name, one in self.by_name.items()}

    def version(self, learning: Mapping[str, Learning]) -> Array:
        """Returns the smallest number of updates that a policy has made, [] int32."""
        return functools.reduce(jnp.minimum, [one.version for one in learning.values()])

    def failed(self, updates: Mapping[str, Updates]) -> Array:
        """Returns whether an update was dropped, [] bool."""
        return functools.reduce(jnp.logical_or, [one.failed for one in updates.values()])


class SetReplay:
    """The replays of the policies that learn, each with its own rules; the methods are pure.

    Attributes:
      steps: environment steps, per environment, in one iteration.
      most_updates: the largest number of updates of a policy in one iteration.
    """

    def __init__(
        self, stores: Mapping[str, StepQueue | Ring], actors: SetActors, updater: SetUpdater
    ) -> None:
        """Stores the parts."""
        self._stores, self._actors, self._updater = dict(stores), actors, updater
        self.steps = math.gcd(*(store.steps for store in stores.values()))
        self.most_updates = max(store.most_updates for store in stores.values())
        # Unrolls of T + 1 steps begin with the last one of those before: the first have one more.
        self._one_more = any(isinstance(store, StepQueue) for store in stores.values())

    def start(
        self, learning: Mapping[str, Learning], acting: SetActing, rng_keys: Mapping[str, PRNGKey]
    ) -> tuple[SetActing, ByName]:
        """Returns empty replays, which draw with these keys."""
        tally = self._actors.tally()
        step = jax.eval_shape(lambda: self._step(learning, acting, tally)[2])
        replay = {
            name: store.empty(step[name], rng_keys[name]) for name, store in self._stores.items()
        }
        return self._begun(learning, acting, replay)

    def restart(
        self, learning: Mapping[str, Learning], acting: SetActing, replay: ByName
    ) -> tuple[SetActing, ByName]:
        """Marks a break of all streams: no item spans it."""
        broken = {name: store.broken(replay[name]) for name, store in self._stores.items()}
        return self._begun(learning, acting, broken)

    def env_axes(self, replay: ByName) -> ByName:
        """Returns the state, because it is on one device."""
        return replay

    def batch_spec(self, replay: ByName) -> ByName:
        """Returns shapes and dtypes of the batches of each policy."""
        return {name: store.batch_spec(replay[name]) for name, store in self._stores.items()}

    def iterate(
        self,
        learning: Mapping[str, Learning],
        acting: SetActing,
        replay: ByName,
        tally: EpisodeStats,
        updates: Mapping[str, Updates],
        most: Array,
    ) -> tuple[ByName, SetActing, ByName, EpisodeStats, ByName]:
        """Acts, then learns with each policy; see `rlstack.fused.queue.Queue.iterate`."""

        def act(_: Any, carry: Any) -> Any:
            acting, replay, tally = carry
            good = ~tally.bad.any()
            acting, tally, steps = self._step(learning, acting, tally)
            return acting, self._taken(learning, replay, steps, good, most), tally

        acting, replay, tally = jax.lax.fori_loop(0, self.steps, act, (acting, replay, tally))
        good = ~tally.bad.any()
        learned, replay, updates = dict(learning), dict(replay), dict(updates)
        for name, store in self._stores.items():
            may = good & ~self._updater.failed(updates)
            learned[name], replay[name], updates[name] = store.learn(
                learned[name], replay[name], updates[name], may, most
            )
        return learned, acting, replay, tally, updates

    def _begun(
        self, learning: Mapping[str, Learning], acting: SetActing, replay: ByName
    ) -> tuple[SetActing, ByName]:
        if not self._one_more:
            return acting, replay
        acting, _, steps = self._step(learning, acting, self._actors.tally())
        good, most = jnp.ones((), bool), jnp.asarray(NO_LIMIT, jnp.int32)
        return acting, self._taken(learning, replay, steps, good, most)

    def _step(
        self, learning: Mapping[str, Learning], acting: SetActing, tally: EpisodeStats
    ) -> Any:
        params = {name: one.params for name, one in learning.items()}
        version = {name: one.version for name, one in learning.items()}
        return self._actors.step(params, version, acting, tally)

    def _taken(
        self,
        learning: Mapping[str, Learning],
        replay: ByName,
        steps: ByName,
        good: Array,
        most: Array,
    ) -> ByName:
        return {
            name: store.take(replay[name], steps[name], good, learning[name].version >= most)
            for name, store in self._stores.items()
        }


class SetLoop(CompiledLoop):
    """The loop of several policies. Its state, reports and logs have dicts by policy.

    An iteration has as many steps as divide the unrolls of all on-policy policies, and the
    ``steps_per_update`` of the others.
    """

    def __init__(
        self,
        learns: Mapping[str, Learns],
        others: Mapping[str, Player],
        rows: Mapping[str, Sequence[int]],
        env: BatchedEnv,
        *,
        num_seats: int,
        steps_per_update: int = 1,
        check_steps: bool = True,
    ) -> None:
        """Stores the parts.

        Args:
          learns: the policies that learn, in the order in which they make their updates.
          others: the players of the policies that do not learn.
          rows: the rows of each policy, see `SetActors`; the policies are in this order.
          env: the environments.
          num_seats: seats of one game.
          steps_per_update: environment steps, per environment, between two attempts to learn (not
            fifo).
          check_steps: whether rewards or observations that are not finite end a call.

        Raises:
          ValueError: a replay's rules do not fit the number of places of its policy.
        """
        devices = Devices()
        acting = {name: Actors(one.agent, env, len(rows[name])) for name, one in learns.items()}
        updaters = {
            name: Updater(one.agent, check_finite=one.check_updates, devices=devices)
            for name, one in learns.items()
        }
        stores: dict[str, StepQueue | Ring] = {}
        for name, one in learns.items():
            if one.replay.sampler == "fifo":
                stores[name] = StepQueue(one.replay, acting[name], updaters[name])
            else:
                stores[name] = Ring(one.replay, acting[name], updaters[name], steps_per_update)
        players = {**acting, **others}
        actors = SetActors(
            {name: players[name] for name in rows},
            rows,
            env,
            num_seats=num_seats,
            learning=tuple(learns),
            check_finite=check_steps,
        )
        updater = SetUpdater(updaters)
        super().__init__(actors, updater, SetReplay(stores, actors, updater), devices)
        self._stores = stores

    @property
    def stores(self) -> dict[str, StepQueue | Ring]:
        """The replay of each policy that learns."""
        return self._stores
