"""An update that several devices make together, with few collectives.

A collective takes the time of a message, however small it is: tens of microseconds between GPUs,
hundreds between processes on CPUs. An update of a small network takes no longer than a few of them.
If XLA divides an update, it adds one for almost each array that depends on the batch: a gradient, a
mean that is logged, an array of a minibatch. Here they are fewer:

- For an agent that `averages`, each device computes the gradient of its shard of the batch. One
  collective carries all gradients and logs.
- For any other, one collective carries the whole batch to all devices. Then all compute the same,
  but each runs the networks on its shard of the rows (`rlstack.learning.by_shard`), unless they
  are so small that this takes less time than the collectives.

XLA still divides the updates of networks with state, of networks that are no
`rlstack.networks.Network`, and of large batches of agents without epochs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rlstack.agent import Agent, EpochAgent, gradient_step, is_finite
from rlstack.devices import by_device
from rlstack.devices.packing import Layout
from rlstack.devices.placement import AXIS, Placement
from rlstack.learning.by_shard import by_shard, own_rows, summed_over_devices
from rlstack.learning.update import (
    OneCall,
    Updated,
    fetch,
    layer_forms,
    mean_logs,
    select,
)
from rlstack.types import Array, Batch, LearnerOutput, LearnerState, Logs, Params, PyTree

NUM_VOTES = 4
# A batch of fewer bytes is carried whole, however small the params are.
_SMALL_BATCH = 1 << 20
# A pass of a network below this, in params times rows, is no shorter on a shard of the rows: each
# multiply-add takes a nanosecond or less, and a collective the time of some millions (accelerators:
# of a hundred million). These are estimates, on the side of fewer collectives.
_LEAST_WORK, _LEAST_WORK_OF_ACCELERATORS = 1 << 23, 1 << 27

A = TypeVar("A", bound=Agent)
Placed = tuple[Layout, jax.Array, jax.Array] | Batch


class ShardedUpdate:
    """``learner_step`` as one jitted function, in which each device has a shard of the rows.

    It also carries votes of all devices, and changes nothing unless the first vote of each is true.
    So several processes agree on an update without a collective of its own.
    """

    def __init__(
        self, agent: Agent, params: Params, placement: Placement, *, check_finite: bool
    ) -> None:
        """Prepares the jitted update; the first use compiles it.

        Args:
          agent: an agent whose networks `can_be_sharded`.
          params: the agent's params; only their size is used.
          placement: the devices.
          check_finite: whether an update that is not finite changes nothing.
        """
        self._placement, self._check_finite = placement, check_finite
        self._devices = placement.mesh.size
        self._averages = averages(agent)
        self._agent = agent if self._averages else sharded_over(agent, placement)
        self._by_xla = OneCall(agent, placement, check_finite=check_finite)
        # A batch that is carried whole should take no longer than the gradients. That of an agent
        # that averages is not carried, and one with epochs takes each minibatch from all rows.
        always = self._averages or isinstance(agent, EpochAgent)
        self._most_bytes = None if always else _SMALL_BATCH + _nbytes(params)
        self._names: list[str] = []
        where = placement.of_sharded_update()
        self._jitted = jax.jit(
            self._update, static_argnums=3, donate_argnums=1, out_shardings=where
        )

    def place(self, batch: Batch, votes: Sequence[int] = (1,)) -> Placed:
        """Moves a batch of this process, and its votes, to its devices.

        Raises:
          ValueError: the size of the batch is no multiple of the number of devices.
        """
        most, processes = self._most_bytes, self._placement.processes
        if most is not None and processes * _nbytes(batch) > most:
            return self._by_xla.place(batch)
        return self._placement.packed(batch, given_votes(votes))

    def __call__(self, params: Params, learner_state: LearnerState, placed: Any) -> Updated:
        """Returns at once where JAX dispatches asynchronously, as on an accelerator."""
        if isinstance(placed, Batch):
            return self._by_xla(params, learner_state, placed)
        layout, words, octets = placed
        result = self._jitted(params, learner_state, (words, octets), layout)
        after, learner_state, (logs, votes), priorities = result
        return Updated(
            after,
            learner_state,
            (params, learner_state),
            functools.partial(fetch, self._names, logs),
            priorities,
            votes,
        )

    def compiled(self, params: Params, learner_state: LearnerState, placed: Any) -> dict[str, int]:
        """Returns the compiled function, as XLA's HLO, which an update calls once."""
        if isinstance(placed, Batch):
            return self._by_xla.compiled(params, learner_state, placed)
        layout, *packed = placed
        lowered = self._jitted.lower(params, learner_state, tuple(packed), layout)
        return {lowered.compile().as_text() or "": 1}

    def _update(
        self, params: Params, learner_state: LearnerState, packed: PyTree, layout: Layout
    ) -> Any:
        everywhere, by_row = PartitionSpec(), PartitionSpec(AXIS)
        return by_device(
            functools.partial(self._on_device, layout),
            self._placement.mesh,
            in_specs=(everywhere, everywhere, by_row),
            out_specs=(everywhere, everywhere, everywhere, by_row),
        )(params, learner_state, packed)

    def _on_device(
        self, layout: Layout, params: Params, learner_state: LearnerState, packed: PyTree
    ) -> Any:
        """Makes the update; runs on each device, with its own shard."""
        step = self._averaging_step if self._averages else self._whole_step
        with layer_forms(self._agent):
            *after, output, votes = step(layout, params, learner_state, packed)
        self._names[:] = output.logs  # runs during tracing: the names of the compiled function
        finite = is_finite(output.logs, after[0])
        logs = mean_logs(output.logs, finite)
        keep = jnp.all(votes[:, 0] != 0)
        if self._check_finite:
            keep &= finite
        params, learner_state = select(keep, tuple(after), (params, learner_state))
        return params, learner_state, (logs, votes), output.priorities

    def _whole_step(
        self, layout: Layout, params: Params, learner_state: LearnerState, packed: PyTree
    ) -> tuple[Params, LearnerState, LearnerOutput, Array]:
        """Makes the step on one device with the whole batch; networks run on this device's rows."""
        batch, votes = whole_batch(layout, packed, self._devices)
        after, learner_state, output = self._agent.learner_step(params, learner_state, batch)
        if output.priorities is not None:
            own = own_rows(output.priorities, self._devices)
            output = output._replace(priorities=own)
        return after, learner_state, output, votes

    def _averaging_step(
        self, layout: Layout, params: Params, learner_state: LearnerState, packed: PyTree
    ) -> tuple[Params, LearnerState, LearnerOutput, Array]:
        """Makes the step with the mean of the gradients of all shards."""
        batch, own_votes = layout.unpack(*packed)
        all_votes = []

        def average(grads: PyTree, output: LearnerOutput) -> tuple[PyTree, LearnerOutput]:
            # Floats hold integers below 2^24. Only this device has a row that is not 0.
            own_row = jnp.arange(self._devices) == jax.lax.axis_index(AXIS)
            votes = jnp.where(own_row[:, None], own_votes.astype(jnp.float32), 0.0)
            grads, logs, votes = summed_over_devices((grads, mean_logs(output.logs), votes))
            all_votes.append(votes.astype(jnp.int32))
            grads, logs = jax.tree.map(lambda x: x / self._devices, (grads, logs))
            named: Logs = dict(zip(output.logs, logs, strict=True))
            return grads, output._replace(logs=named)

        after, learner_state, output = gradient_step(
            self._agent, params, learner_state, batch, average
        )
        return after, learner_state, output, all_votes[0]


def sharded_over(agent: A, placement: Placement) -> A:
    """Returns the agent with networks that each device runs on its shard of the rows.

    It must be traced within `rlstack.devices.by_device`.
    """
    least = _LEAST_WORK if placement.on_cpu else _LEAST_WORK_OF_ACCELERATORS
    divided: Any = agent.with_network(lambda network: by_shard(network, placement.mesh.size, least))
    if isinstance(divided, EpochAgent) and divided.may_stop:
        # Devices of other kinds may round differently; all must leave out the same minibatches.
        vars(divided)["stops_at"] = functools.partial(_on_any_device, divided.stops_at)
    return divided


def given_votes(votes: Sequence[int]) -> np.ndarray:
    """Returns votes as `Placement.packed` takes them; those that are not given are 0."""
    given = np.zeros(NUM_VOTES, np.int32)
    given[: len(votes)] = votes
    return given


def whole_batch(layout: Layout, packed: PyTree, devices: int) -> tuple[Batch, Array]:
    """Returns the batch of all devices and their votes ``[devices, n]``, by one collective."""
    whole = [jax.lax.all_gather(x[0], AXIS) if x.size else x for x in packed]
    batch, votes = layout.unpack(*whole)
    return batch, votes.reshape((devices, -1))


def _on_any_device(condition: Callable[[Logs], Array], logs: Logs) -> Array:
    return jax.lax.pmax(jnp.asarray(condition(logs), jnp.int32), AXIS) > 0


def averages(agent: Agent) -> bool:
    """Returns whether the class of an agent says that it ``averages``.

    A subclass must say it again, because it may have another loss.
    """
    kind = type(agent)
    return bool(vars(kind).get("averages")) and kind.learner_step is Agent.learner_step


def _nbytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
