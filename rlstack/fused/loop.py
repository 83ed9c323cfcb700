"""The compiled loop: iterations of acting and learning until a limit is reached."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlstack.agent import Agent
from rlstack.configs.replay import ReplayConfig
from rlstack.fused.acting import Actors, EpisodeStats, strongly_typed
from rlstack.fused.devices import WHOLE, Devices
from rlstack.fused.learning import Updater, Updates
from rlstack.fused.queue import Queue
from rlstack.fused.ring import Ring
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.networks.layers import forms
from rlstack.types import Array, PRNGKey

NO_LIMIT = 2**31 - 1


class LoopState(NamedTuple):
    """The complete state of a loop; for a policy set see `rlstack.fused.multi_policy`."""

    learning: Any  # `Learning`
    acting: Any  # `Acting`
    replay: Any  # the state of the `Queue` or `Ring`


class Limits(NamedTuple):
    """Limits of a call, which ends with the first iteration that reaches one of them."""

    iterations: Array | int
    frames: Array | int = NO_LIMIT  # environment frames made in this call
    version: Array | int = NO_LIMIT  # the number of updates, ever


class Report(NamedTuple):
    """The results of one call of the loop."""

    iterations: Array  # [] int32
    tally: EpisodeStats  # the total
    updates: Updates


class CompiledLoop:
    """Acting, environments, replay and learning as one function; the methods are pure."""

    def __init__(self, actors: Any, updater: Any, replay: Any, devices: Devices) -> None:
        """Stores the parts.

        Args:
          actors: an object that acts and steps the environments, like `Actors`.
          updater: an object that makes updates, like an `Updater`.
          replay: an object that acts and learns for one iteration, like a `Queue` or `Ring`.
          devices: the devices that share the environments.
        """
        self.env, self.num_envs = actors.env, actors.num_envs
        self._actors, self._updater = actors, updater
        self._replay, self._devices = replay, devices

    @property
    def frames(self) -> int:
        """The largest number of frames in one iteration; an episode's first step is none."""
        return self._replay.steps * self.num_envs

    @property
    def most_updates(self) -> int:
        """The largest number of updates in one iteration."""
        return self._replay.most_updates

    @property
    def stores(self) -> Any:
        """The `Queue` or `Ring`; for several policies a dict of them by policy."""
        return self._replay

    @property
    def log_names(self) -> Any:
        """The names of the agent's logs, ``tuple[str, ...]``, once `run` has been traced."""
        return self._updater.names

    def start(
        self, learning: Any, env_keys: PRNGKey, acting_key: Any, replay_key: Any
    ) -> LoopState:
        """Returns the state at the start of a run.

        Args:
          learning: the initial params and learner state, a `Learning`.
          env_keys: ``[B, ...]``, from `BatchedEnv.keys`.
          acting_key: seeds action sampling, in the form that the actors' ``start`` expects.
          replay_key: seeds the draws from replay, in the form that the replay's ``start`` expects.
        """
        acting = self._actors.start(env_keys, acting_key)
        acting, replay = self._replay.start(learning, acting, replay_key)
        return strongly_typed(LoopState(learning, acting, replay))

    def restart(self, state: LoopState, env_keys: PRNGKey) -> LoopState:
        """Starts new episodes in all environments; no item spans the break."""
        acting = self._actors.restart(env_keys, state.acting)
        acting, replay = self._replay.restart(state.learning, acting, state.replay)
        return LoopState(state.learning, acting, replay)

    def placed(self, state: LoopState) -> LoopState:
        """Returns the state with each array on its devices."""
        return self._devices.placed(state, self._axes(state))

    def shardings(self, state: LoopState) -> LoopState | None:
        """Returns where `placed` puts the arrays, for ``jax.jit``; None for one device."""
        return self._devices.shardings(state, self._axes(state))

    def run(self, state: LoopState, limits: Limits) -> tuple[LoopState, Report]:
        """Acts and learns until a limit is reached, or something is not finite.

        Where calls end does not change what later ones compute.
        """
        limits = Limits(*(jnp.asarray(x, jnp.int32) for x in limits))

        def goes_on(carry: tuple[LoopState, Report]) -> Array:
            state, report = carry
            return (
                (report.iterations < limits.iterations)
                & (self._actors.frames(report.tally) < limits.frames)
                & (self._updater.version(state.learning) < limits.version)
                & ~self._updater.failed(report.updates)
                & ~report.tally.bad.any()
            )

        def iterate(carry: tuple[LoopState, Report]) -> tuple[LoopState, Report]:
            return self._iterate(*carry, jnp.asarray(limits.version))

        with forms.in_loop():
            return jax.lax.while_loop(goes_on, iterate, (state, self._nothing(state)))

    def run_all(
        self,
        state: LoopState,
        iterations: Array | int,
        version: Array | int,
        returns: Array | float = 0.0,
    ) -> tuple[LoopState, Report]:
        """Makes a fixed number of iterations; for several loops under vmap.

        `run` under vmap would copy the whole state in each iteration, because it may end for one
        loop and not for another. After something that is not finite, no update is made.

        Args:
          state: the state of the loop.
          iterations: number of iterations, the same for all loops.
          version: the number of updates, ever, after which no update is made.
          returns: a sum of returns, to which the returns of episodes that end are added one after
            the other. Pass the sum of the previous call, so that it does not depend on where calls
            end.
        """
        most = jnp.asarray(version, jnp.int32)

        def iterate(_: Any, carry: tuple[LoopState, Report]) -> tuple[LoopState, Report]:
            return self._iterate(*carry, most)

        with forms.in_loop():  # also the report: its shapes are those of a traced update
            report = self._nothing(state)
            report = report._replace(
                tally=report.tally._replace(returns=jnp.asarray(returns, jnp.float32))
            )
            return jax.lax.fori_loop(0, iterations, iterate, (state, report))

    def _nothing(self, state: LoopState) -> Report:
        """Returns the report of no iterations."""
        none = self._updater.none(state.learning, self._replay.batch_spec(state.replay))
        return Report(jnp.zeros((), jnp.int32), self._actors.total(self._actors.tally()), none)

    def _iterate(self, state: LoopState, report: Report, most: Array) -> tuple[LoopState, Report]:
        before = self._actors.tally()._replace(bad=report.tally.bad)
        *after, tally, updates = self._replay.iterate(*state, before, report.updates, most)
        state = LoopState(*after)
        state = self._devices.constrained(state, self._axes(state))
        total = self._actors.total(tally).after(report.tally)
        return state, Report(report.iterations + 1, total, updates)

    def _axes(self, state: LoopState) -> LoopState:
        """Returns the axis of environments of each array; see `Devices`."""

        def everywhere(axis: int, tree: Any) -> Any:
            return jax.tree.map(lambda _: axis, tree)

        acting = everywhere(0, state.acting)._replace(rng_key=WHOLE)
        replay = self._replay.env_axes(everywhere(WHOLE, state.replay))
        return LoopState(everywhere(WHOLE, state.learning), acting, replay)


class FusedLoop(CompiledLoop):
    """The loop of one agent.

    An iteration of an on-policy agent is one unroll of all environments and its update. For other
    agents it is ``steps_per_update`` steps and the updates that ``samples_per_insert`` then allows.
    """

    def __init__(
        self,
        cfg: ReplayConfig,
        agent: Agent,
        env: BatchedEnv,
        num_envs: int,
        *,
        steps_per_update: int = 1,
        check_updates: bool = True,
        check_steps: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        """Stores the parts.

        Args:
          cfg: the rules of the replay.
          agent: the agent that acts and learns.
          env: the environments.
          num_envs: number of environments.
          steps_per_update: environment steps, per environment, between two attempts to learn (not
            fifo).
          check_updates: whether an update with logs that are not finite is dropped and ends a call.
          check_steps: whether rewards or observations that are not finite end a call.
          mesh: a mesh with one axis, of the devices that share the environments and each batch.
            None for one device.

        Raises:
          ValueError: the replay's rules do not fit the number of environments.
        """
        devices = Devices(mesh)
        if mesh is not None:
            agent = agent.with_network(devices.network)
        actors = Actors(agent, env, num_envs, check_finite=check_steps)
        updater = Updater(agent, check_finite=check_updates, devices=devices)
        replay: Queue | Ring
        if cfg.sampler == "fifo":
            replay = Queue(cfg, actors, updater)
        else:
            replay = Ring(cfg, actors, updater, steps_per_update)
        super().__init__(actors, updater, replay, devices)
