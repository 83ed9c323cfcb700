"""Runs a network on one part of its batch after another, to need the memory of one part only.

The loss of an agent is not a sum over parts of the batch: it may divide by the number of
transitions, standardise advantages, or draw random numbers for the whole batch. So the network is
divided instead of the loss. The loss sees the outputs of the whole batch. Its gradient runs the
network again for one part after the other, and adds the gradients of the parts. The result is that
of the whole batch, except for the order of sums.
"""

from __future__ import annotations

from typing import Any

import jax

from rlstack.checks import WrongKindError
from rlstack.networks.base import Apply, Network
from rlstack.networks.layers import forms
from rlstack.networks.policy_and_critic import PolicyAndCritic
from rlstack.types import AgentState, Array, Params, PRNGKey, PyTree, TimeStep


def in_parts(network: Any, parts: int) -> Any:
    """Returns a `Network`, or a `PolicyAndCritic` of two, that runs in ``parts`` of its batch.

    Each part has every ``parts``-th row, so that a batch which is split over devices stays on them.

    Raises:
      WrongKindError: the network is of another kind.
      ValueError: the network has state. The network's functions raise it too if the rows of a batch
        do not divide into parts.
    """
    if isinstance(network, PolicyAndCritic):
        return PolicyAndCritic(in_parts(network.policy, parts), in_parts(network.critic, parts))
    if not isinstance(network, Network):
        raise WrongKindError(
            "LearnerConfig: micro_batches must be 1 for networks that are no "
            f"rlstack.networks.Network; got {parts} and a {type(network).__name__}."
        )
    if network.new_state is not None:
        raise ValueError(
            f"LearnerConfig: micro_batches must be 1 for networks with state; got {parts}. Batch "
            "norm and dropout concern the whole batch. Remove them, or --learner.micro-batches."
        )
    # How rows are packed refers to the whole batch, and is computed for each part instead.
    return network._replace(
        apply=_by_part(network.apply, parts, time=0),
        unroll=_by_part(network.unroll, parts, time=1),
        lay_out=None,
    )


def _by_part(run: Apply, parts: int, time: int) -> Apply:
    """Divides the rows: axis ``time`` of timesteps and outputs, and axis 0 of states."""

    def run_all(
        rng_key: PRNGKey | None, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[PyTree, AgentState]:
        rows = timestep.step_type.shape[time]
        if rows % parts:
            raise ValueError(
                f"LearnerConfig: micro_batches must divide the {rows} rows that the network learns "
                f"from at once; got {parts}. Change --learner.micro-batches, or the size of batch "
                "or minibatch."
            )
        # Without saved activations: the gradient computes those of one part at a time.
        part = jax.checkpoint(lambda steps, states: run(rng_key, params, steps, states))
        inputs = (_split(timestep, parts, time), _split(state, parts, 0))
        with forms.in_loop():
            outputs, states = jax.lax.map(lambda inputs: part(*inputs), inputs)
        return _join(outputs, time), _join(states, 0)

    return run_all


def _split(tree: PyTree, parts: int, axis: int) -> PyTree:
    """Maps rows ``[..., B, ...]`` to ``[parts, ..., B / parts, ...]``."""

    def split(x: Array) -> Array:
        shape = (*x.shape[:axis], x.shape[axis] // parts, parts, *x.shape[axis + 1 :])
        return jax.numpy.moveaxis(jax.numpy.reshape(x, shape), axis + 1, 0)

    return jax.tree.map(split, tree)


def _join(tree: PyTree, axis: int) -> PyTree:
    """Inverts `_split`."""

    def join(x: Array) -> Array:
        moved = jax.numpy.moveaxis(x, 0, axis + 1)
        return moved.reshape((*moved.shape[:axis], -1, *moved.shape[axis + 2 :]))

    return jax.tree.map(join, tree)
