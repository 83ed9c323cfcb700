"""The Inferencer: the only place that holds acting params and agent states.

It keeps one row of agent state for each environment. A call gathers the rows of its batch, resets
those at FIRST, acts, and scatters the new rows back, all in one jitted function. The same object
serves one local actor or, behind an `InferenceService`, many remote ones.
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack import devices
from rlstack.acting.inference import Inference
from rlstack.acting.packing import ArgumentLayout, Packing, pack_arguments
from rlstack.acting.params import ParamsPuller, ParamsSource
from rlstack.agent import Agent
from rlstack.configs.acting import InferencerConfig
from rlstack.exploration import Counts, RunCounts, with_env_ids, with_run_counts
from rlstack.rpc import Node, Remote, Stop, client_of
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep, merge_leading_dims

if TYPE_CHECKING:
    from rlstack.acting.inference_service import InferenceService
    from rlstack.rpc import RemoteObject

_PATIENCE = 30.0  # seconds for which a learner in another node may be unreachable
_LINGER = 1.0  # seconds for which a stopping service still answers, because its callers stop too
_SCHEDULER = "xla_cpu_scheduler_type"
_LARGEST = 2**15  # entries of an array of params, such as the weights of 256 inputs for 128 units


class Inferencer(Node):
    """Acts with the newest params, and holds each environment's agent state.

    One thread at a time may call it. As a node of a Launchpad program
    (``lp.CourierNode(Inferencer, ...)``) it is served by an `InferenceService`, which collects the
    requests of many actors.

    Attributes:
      num_envs: environments served.
      obs_spec: the agent's observation spec.
      extras_spec: the spec of the extras of the steps.
    """

    def __init__(
        self,
        cfg: InferencerConfig,
        agent: Agent,
        learner: ParamsSource,
        num_envs: int,
        rng_key: PRNGKey,
        global_ids: np.ndarray | None = None,
        device: jax.Device | None = None,
        run_counts: RunCounts | Callable[[], RunCounts] = RunCounts(),  # noqa: B008  (immutable)
        extras_spec: PyTree = (),
    ) -> None:
        """Prepares to act.

        Args:
          cfg: options, such as how often to ask for newer params. A `ServiceConfig` also determines
              how a node collects requests.
          agent: the agent that acts, by its ``actor_step``.
          learner: the source of params, which is called at the first batch and every
              ``sync_interval`` batches. With the ``courier.Client`` of a Learner's node, params are
              pulled in the background, and the constructor waits for the first params.
          num_envs: environments served; ids are in ``[0, num_envs)``.
          rng_key: the acting key; this object owns and consumes it. With a key for each of A
              actors, ``[A, ...]``, the environments are theirs, in order and equally many. A batch
              then has all environments of some actors, and they act as with Inferencers of their
              own, up to rounding.
          global_ids: int ``[num_envs]``, the ids of these environments in the whole experiment, for
            exploration that depends on them; None for 0, 1, ...
          device: the device for acting; None for the first of ``cfg.devices`` or, if there are
            none, the device of the params.
          run_counts: the counts with which new agent state begins, or a function that returns the
            current counts. With them, exploration schedules continue when a run is resumed, and
            when this object or one of its actors restarts.
          extras_spec: the spec of the extras of the steps, for a service, which checks requests.

        Raises:
          ValueError: a device of ``cfg.devices`` does not exist.
        """
        self._cfg = cfg
        chosen = devices.local(cfg.devices[:1], f"{type(cfg).__name__}: devices")
        self._device = device or (chosen[0] if chosen else None)
        self._closes: list[ParamsPuller | RemoteObject] = []
        self._params_source = self._local_source(learner, agent)
        self._service: InferenceService | None = None
        self.num_envs, self.obs_spec = num_envs, agent.obs_spec
        self.extras_spec = extras_spec
        self._rng_key = self._placed(rng_key)
        self._initial_params, self._initial_state = agent.initial_params, agent.initial_state
        rows_each = _rows_each(num_envs, rng_key)
        self._lay_out = _unchanged if rows_each else agent.lay_out
        self._global_ids = np.arange(num_envs) if global_ids is None else global_ids
        self._run_counts = run_counts
        self._table = self._fresh_table()
        self._version = -1
        self._params: Params = None
        self._versions = np.zeros(num_envs, np.int32)
        self._calls_to_sync = 0
        self._packing = Packing()
        self._act_all, self._act_rows = _acting_functions(agent, self._packing, rows_each)
        self._packs = _gains_by_packing(self._device)

    def compile(self, timestep: TimeStep) -> None:
        """Compiles acting on batches of one size, before there are params.

        Args:
          timestep: any, ``[B, ...]`` in numpy: of all environments in order, or of fewer of them.
              For other sizes, and with a device that was chosen, acting is compiled at its first
              batch.
        """
        if self._device is not None:
            return
        key = jax.eval_shape(jax.random.PRNGKey, 0)
        params = jax.eval_shape(self._initial_params, key)
        size = len(timestep.step_type)
        rows = None if size == self.num_envs else np.arange(size, dtype=np.int32)
        function, batch = self._call(rows, timestep)
        function.lower(self._rng_key, params, self._table, *batch).compile()

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch.

        Args:
          env_ids: int ``[B]``, distinct ids in ``[0, num_envs)``; None for all in order. Rows with
              the id ``num_envs`` are padding; their agent state is not kept.
          timestep: ``[B, ...]``, row i of environment ``env_ids[i]``.

        Returns:
          numpy arrays ``[B, ...]``, which are read-only and never change.
        """
        self._pull()
        if env_ids is not None and _is_all_in_order(env_ids, self.num_envs):
            env_ids = None
        function, batch = self._call(env_ids, timestep)
        self._rng_key, self._table, packed = function(
            self._rng_key, self._params, self._table, *batch
        )
        batch_size = len(timestep.step_type)
        output, state = self._packing.unpack(batch_size, packed)
        return Inference(output, state, self._versions[:batch_size])

    __call__ = inference

    def _call(self, env_ids: np.ndarray | None, timestep: TimeStep) -> tuple[Any, tuple]:
        """Returns the function that acts on a batch, and its arguments that are the batch."""
        timestep = self._lay_out(timestep)
        function = self._act_all if env_ids is None else self._act_rows
        batch = timestep if env_ids is None else (env_ids, timestep)
        return function, pack_arguments(batch) if self._packs else (None, batch)

    def reset(self, rows: np.ndarray) -> None:
        """Resets the agent state of some environments.

        Their counts of steps and episodes stay, or become those of the run if these are larger.

        Args:
          rows: the environments, bool ``[num_envs]``. It is a mask and not a list of ids, so that
              only one shape is compiled.
        """

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(rows.reshape(rows.shape + (1,) * (old.ndim - 1)), new, old)

        def choose_node(new: PyTree, old: PyTree) -> PyTree:
            if isinstance(new, Counts):
                steps = jnp.maximum(new.env_steps, old.env_steps)
                episodes = jnp.maximum(new.episodes, old.episodes)
                new = new._replace(env_steps=steps, episodes=episodes)
            return jax.tree.map(choose, new, old)

        self._table = jax.tree.map(
            choose_node,
            self._fresh_table(),
            self._table,
            is_leaf=lambda node: isinstance(node, Counts),
        )

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs to continue acting exactly."""
        return {"rng_key": self._rng_key, "table": self._table}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned; the next batch asks for params of any version."""
        self._rng_key, self._table = self._placed((saved["rng_key"], saved["table"]))
        # A learner that was restored from a checkpoint may publish versions older than this one.
        self._version, self._calls_to_sync = -1, 0

    def run(self, stop: Stop = None) -> None:
        """Serves other nodes until told to stop, or until the Launchpad program stops."""
        with self._running(stop) as should_stop:
            while not should_stop():
                time.sleep(0.1)
            if self._service is not None:
                self._service.close()
                time.sleep(_LINGER)
        self.close()

    def close(self) -> None:
        """Stops pulling from a learner in another node; a second call does nothing."""
        while self._closes:
            self._closes.pop().close()

    def _served(self) -> InferenceService:
        from rlstack.acting.inference_service import InferenceService
        from rlstack.configs.acting import ServiceConfig

        cfg = self._cfg
        if not isinstance(cfg, ServiceConfig):
            cfg = ServiceConfig(sync_interval=cfg.sync_interval)
        self._service = InferenceService(cfg, self)
        return self._service

    def _local_source(self, learner: ParamsSource, agent: Agent) -> ParamsSource:
        client = client_of(learner, {"get_params": Remote(idempotent=True)}, name="learner")
        if client is learner:
            return learner
        from rlstack.rpc import codec

        key = jax.eval_shape(jax.random.PRNGKey, 0)
        codec.register_records((jax.eval_shape(agent.initial_params, key), agent.obs_spec))
        puller = ParamsPuller(client, patience=_PATIENCE)
        self._closes += [puller, client]  # the client first, so that a pull in progress ends
        return puller

    def _fresh_table(self) -> AgentState:
        begun = self._run_counts() if callable(self._run_counts) else self._run_counts
        table = with_env_ids(self._initial_state(self.num_envs), self._global_ids)
        return self._placed(with_run_counts(table, begun) if any(begun) else table)

    def _placed(self, tree: PyTree) -> PyTree:
        return tree if self._device is None else jax.device_put(tree, self._device)

    def _pull(self) -> None:
        """Takes newer params, if there are any; called between batches only."""
        if self._calls_to_sync:
            self._calls_to_sync -= 1
            return
        self._calls_to_sync = self._cfg.sync_interval - 1
        published = self._params_source.get_params(newer_than=self._version)
        if published is not None:
            self._version, self._params = published
            in_numpy = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(self._params))
            if in_numpy or self._device is not None:  # else they would move with each batch
                self._params = jax.device_put(self._params, self._device)
            # A new array, because transitions hold slices of the old one.
            self._versions = np.full(self.num_envs, self._version, np.int32)


def _rows_each(num_envs: int, rng_key: PRNGKey) -> int:
    """Returns the environments of each actor that has a key of its own; 0 for a single key."""
    single = np.ndim(rng_key) == len(jax.eval_shape(jax.random.PRNGKey, 0).shape)
    return 0 if single else num_envs // len(rng_key)


def _unchanged(timestep: TimeStep) -> TimeStep:
    """Takes the place of `Agent.lay_out`, which would join the rows of several actors."""
    return timestep


def _gains_by_packing(device: jax.Device | None) -> bool:
    """Whether the arrays of a batch reach the device faster as one.

    On a CPU they do not: a call on 8 CartPoles takes 28 us instead of 23.
    """
    return (jax.default_backend() if device is None else device.platform) != "cpu"


def acting_options(agent: Agent) -> dict[str, str] | None:
    """Returns the compiler options for acting with this agent; None for XLA's own.

    The newer CPU runtime passes operations that do not depend on one another, such as the layers of
    a policy and of a critic, to other threads. With small layers that costs several times as much
    as computing them. The option keeps them in the calling thread, in the same order of arithmetic,
    so no result changes. It gains nothing with larger layers, and XLA before JAX 0.10 does not have
    it. A choice of the user in XLA_FLAGS is kept.
    """
    if (
        jax.default_backend() != "cpu"
        or jax.__version_info__ < (0, 10)
        or _SCHEDULER in os.environ.get("XLA_FLAGS", "")
    ):
        return None
    params = jax.eval_shape(agent.initial_params, jax.eval_shape(jax.random.PRNGKey, 0))
    if any(math.prod(leaf.shape) > _LARGEST for leaf in jax.tree.leaves(params)):
        return None
    return {_SCHEDULER: "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def _acting_functions(agent: Agent, packing: Packing, rows_each: int) -> tuple[Any, Any]:
    """Returns the functions that act on all environments, and on some rows of the table.

    Args:
      agent: the agent.
      packing: packs the answers.
      rows_each: the environments of each of several actors with keys of their own; 0 for one key.
    """

    def act_once(
        rng_key: PRNGKey, params: Params, state: AgentState, timestep: TimeStep
    ) -> tuple[PRNGKey, AgentState, PyTree]:
        next_key, step_key = jax.random.split(rng_key)
        state = agent.reset_state(state, timestep.first())
        output, next_state = agent.actor_step(step_key, params, timestep, state)
        return next_key, next_state, (output, state)

    def act_for_each(
        rng_keys: PRNGKey, params: Params, state: AgentState, timestep: TimeStep
    ) -> tuple[PRNGKey, AgentState, PyTree]:
        divided = jax.tree.map(
            lambda x: x.reshape((len(rng_keys), -1, *x.shape[1:])), (state, timestep)
        )
        keys, *found = jax.vmap(act_once, (0, None, 0, 0))(rng_keys, params, *divided)
        state, made = merge_leading_dims(found)
        return keys, state, made

    step = act_for_each if rows_each else act_once

    def act(
        rng_key: PRNGKey,
        params: Params,
        table: AgentState,
        layout: ArgumentLayout | None,
        batch: PyTree,
    ) -> tuple[PRNGKey, AgentState, list[jax.Array]]:
        timestep = layout.unpack(batch) if layout else batch
        key, table, made = step(rng_key, params, table, timestep)
        return key, table, packing.pack(len(timestep.step_type), made)

    def act_rows(
        rng_key: jax.Array,
        params: Params,
        table: AgentState,
        layout: ArgumentLayout | None,
        batch: PyTree,
    ) -> tuple[PRNGKey, AgentState, list[jax.Array]]:
        rows, timestep = layout.unpack(batch) if layout else batch
        # Padding ids are out of range: JAX reads the last row for them and drops their writes.
        state = jax.tree.map(lambda x: x[rows], table)
        actors: Any = rows[::rows_each] // rows_each if rows_each else ...
        key, next_state, made = step(rng_key[actors], params, state, timestep)
        table = jax.tree.map(lambda old, new: old.at[rows].set(new), table, next_state)
        return rng_key.at[actors].set(key), table, packing.pack(len(rows), made)

    options = acting_options(agent)
    compiled = functools.partial(jax.jit, static_argnums=3, compiler_options=options)
    return compiled(act), compiled(act_rows)


def _is_all_in_order(env_ids: np.ndarray, num_envs: int) -> bool:
    return (
        len(env_ids) == num_envs
        and env_ids[-1] == num_envs - 1  # not padding
        and bool((env_ids[1:] > env_ids[:-1]).all())
    )
