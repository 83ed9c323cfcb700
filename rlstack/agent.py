"""The contract between an algorithm and everything that runs it.

An ``Agent`` holds only configuration and pure functions: params and state are arguments and
results. It never calls ``jax.jit``, never names a device and never sets an attribute after
``__init__``, so any driver can jit, shard, pickle and share one object.

The argument order is ``rng_key, params, data, state``. Keys are *consumed*: a function uses its key
once, and the owner of the key splits it. The Inferencer owns the acting key. The learning key is
part of LearnerState, so a run can be resumed exactly from (params, learner_state).
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.optimizers import optimizer_step
from rlstack.stateful_params import has_state
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    Counts,
    LearnerOutput,
    LearnerState,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
    Trajectory,
)

# The logs that say whether an update may be kept. Others inform, and may overflow where these do
# not.
_DECISIVE = ("loss", "grad_norm")


class Agent(abc.ABC):
    """A stateless learner and actor.

    Subclasses provide the ``initial_*`` functions, ``actor_step``, and either the three hooks of
    the default ``learner_step`` or a ``learner_step`` of their own.
    """

    def __init__(
        self,
        cfg: Any,
        obs_spec: PyTree,
        action_spec: PyTree,
        net_factory: Callable[[PyTree, PyTree], Any],
        policy_factory: Callable[[], Any],
    ):
        """Stores the agent's parts.

        Args:
          cfg: the algorithm's own frozen dataclass.
          obs_spec: pytree of ``dm_env.specs`` of one environment's observation.
          action_spec: pytree of ``dm_env.specs`` of one environment's action.
          net_factory: ``(obs_spec, action_spec) -> rlstack.networks.Network``, or, for agents with
              a separate policy and critic, ``-> rlstack.networks.PolicyAndCritic``.
          policy_factory: ``() -> rlstack.exploration.Policy``, which turns a distribution into an
              action. Evaluation uses the same agent with the greedy policy.

        An agent can be pickled if these five arguments can; only they are pickled.

        Raises:
          ValueError: the network has state or dropout, and the agent has no `update_network_state`.
        """
        self._arguments = (cfg, obs_spec, action_spec, net_factory, policy_factory)
        self.cfg = cfg
        self.obs_spec = obs_spec
        self.action_spec = action_spec
        self.network = net_factory(obs_spec, action_spec)
        if has_state(self.network):
            self._require_updates_of_state()
        self.policy = policy_factory()

    def __reduce__(self) -> tuple[Any, ...]:
        # A network consists of closures, which cannot be pickled, so its factory is pickled
        # instead.
        return type(self), self._arguments

    def with_network(self, change: Callable[[Any], Any]) -> Agent:
        """Returns the same agent with ``change(network)`` in place of its network."""
        cfg, obs_spec, action_spec, net_factory, policy_factory = self._arguments

        def changed(*specs: PyTree) -> Any:
            return change(net_factory(*specs))

        return type(self)(cfg, obs_spec, action_spec, changed, policy_factory)

    # Whether the gradients and logs of a batch are the means of those of equal parts of the batch.
    # Several devices then exchange only these means. The loss must be a mean over items, without
    # random numbers for single items, and the priority of an item must not depend on other items.
    # It counts only in the class that states it, because a subclass may have another loss.
    averages: bool = False

    # The optimizer of all params, whose state is ``learner_state.opt_state``, for the default
    # `apply_gradients`.
    _optimizer: Any = None

    # Whether learning changes it; False for agents that follow a rule or act at random.
    learns: bool = True

    # Whether `learner_step` returns priorities of the batch's items. Without them a prioritized
    # sampler draws all items alike, so programs refuse it.
    has_priorities: bool = False

    # Whether it learns from the environment's rewards. Programs refuse to scale those that it
    # ignores.
    reads_rewards: bool = True

    # Whether `learner_step` returns new values of the steps in replay, `LearnerOutput.updates`.
    # Programs refuse such an agent where the replay cannot take them.
    writes_back: bool = False

    # Whether `learner_step` reads the acting state at the first step of an item only. Replay then
    # stores it at these steps only, and a batch may have it as [1, B, ...] instead of
    # [T+1, B, ...]. It counts only in the class that states it, because a subclass may read more.
    reads_first_state: bool = False

    # Whether `trajectory_values` is defined. `rlstack.families.levels` scores levels with it.
    has_values: bool = False

    def trajectory_values(self, params: Params, trajectory: Trajectory) -> Array:
        """Returns the value of the state of each step, ``[T+1, B]``, in units of the rewards.

        Args:
          params: the params before the update.
          trajectory: ``[T+1, B, ...]``, of the batch that the agent learns from.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no trajectory_values")

    def read_once(self, state: AgentState) -> PyTree:
        """Returns for each leaf of an acting state what `reads_first_state` says, [] bool."""
        once = bool(vars(type(self)).get("reads_first_state"))
        return jax.tree.map(lambda _: once, state)

    def check_extras(self, extras: PyTree) -> None:
        """Raises a ValueError if learning needs extras that ``EnvSpec.extras`` does not have."""
        del extras

    @abc.abstractmethod
    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns newly initialised parameters."""

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the acting state at the start of ``batch_size`` episodes, [B, ...]."""
        del batch_size
        return ()

    def reset_state(self, state: AgentState, first: Array) -> AgentState:
        """Returns ``state`` with the initial state in the rows where ``first`` ([B] bool) holds.

        `Counts` stay as they are, because exploration goes on from one episode to the next. Drivers
        call it before every ``actor_step``. Override it to keep something else.
        """
        fresh = self.initial_state(first.shape[0])

        def choose(new: PyTree, old: PyTree) -> PyTree:
            if isinstance(new, Counts):
                return old
            return jnp.where(first.reshape(first.shape + (1,) * (old.ndim - 1)), new, old)

        return jax.tree.map(choose, fresh, state, is_leaf=lambda x: isinstance(x, Counts))

    @abc.abstractmethod
    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> LearnerState:
        """Returns the learner's state (optimizer, targets, counters, its own rng_key)."""

    @abc.abstractmethod
    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Acts on one batch ``[B, ...]``; row i depends only on row i and on the key."""

    def action_distribution(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Returns the distribution that the policy takes actions from, ``[B, ...]``.

        It is for inspection, for example by `rlstack play`; acting does not call it. The arguments
        are those of ``actor_step``. Continuous actions may be in the agent's own units, such as
        [-1, 1]. For agents that learn action values, the logits are the values.

        Returns:
          A distribution of `rlstack.distributions`; None if the agent has none, which is the
          default.
        """
        del rng_key, params, timestep, state
        return None

    def lay_out(self, timestep: TimeStep) -> TimeStep:
        """Returns ``timestep`` with precomputed data for the network, such as how rows are packed.

        Drivers call it on the host, with numpy arrays ``[B, ...]``, before the jitted functions
        that run the network on these steps. It affects only speed, not results.
        """
        lay_out = getattr(self.network, "lay_out", None)
        if lay_out is None:
            return timestep
        return timestep._replace(observation=lay_out(timestep.observation))

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Learns from one batch; by default one `gradient_step`."""
        return gradient_step(self, params, learner_state, batch)

    def compute_gradients(
        self, params: Params, learner_state: LearnerState, batch: Any
    ) -> tuple[PyTree, LearnerOutput]:
        """Returns the gradient of the loss on ``batch``, and what to log."""
        raise NotImplementedError(f"{type(self).__name__} defines no compute_gradients")

    def update_network_state(
        self, params: Params, learner_state: LearnerState, batch: Any
    ) -> Params:
        """Returns the params with the state that a network has after the forward pass of the loss.

        It is called after `compute_gradients` with the same arguments. Only agents for networks
        with state (batch norm, spectral norm) or dropout define it; see `rlstack.stateful_params`.
        """
        del learner_state, batch
        return params

    def _require_updates_of_state(self) -> None:
        kind = type(self)
        if kind.update_network_state is Agent.update_network_state:
            raise ValueError(
                f"{kind.__name__}: the network must have no state and no dropout, because this "
                "agent has no method update_network_state; got a network with "
                "batch norm, spectral norm, dropout or another state. Turn these off, or add the "
                "method."
            )

    def apply_gradients(
        self, params: Params, learner_state: LearnerState, grads: PyTree
    ) -> tuple[Params, PyTree, Logs]:
        """Returns new params, the new optimizer state, and logs; by default after one step."""
        if self._optimizer is None:
            raise NotImplementedError(f"{type(self).__name__} defines no apply_gradients")
        return optimizer_step(self._optimizer, params, learner_state.opt_state, grads)

    def update_learner_state(
        self, params: Params, learner_state: LearnerState, opt_state: PyTree
    ) -> LearnerState:
        """Returns the learner state after an update: optimizer state, targets, counters, key."""
        raise NotImplementedError(f"{type(self).__name__} defines no update_learner_state")


def gradient_step(
    agent: Agent,
    params: Params,
    learner_state: LearnerState,
    data: PyTree,
    average: Callable[[PyTree, LearnerOutput], tuple[PyTree, LearnerOutput]] | None = None,
) -> tuple[Params, LearnerState, LearnerOutput]:
    """Makes one update from data by the agent's three hooks.

    The hooks compute the gradients, apply them to the params, and update the rest of the learner
    state. A network with state gets its new state before its new weights.

    Args:
      agent: the agent whose hooks are called.
      params: the params before the update.
      learner_state: the learner state before the update.
      data: the data to learn from, a batch or a part of one.
      average: replaces the gradients and the output by their means over all parts of a batch.
    """
    grads, output = agent.compute_gradients(params, learner_state, data)
    if average is not None:
        grads, output = average(grads, output)
    params = agent.update_network_state(params, learner_state, data)
    params, opt_state, logs = agent.apply_gradients(params, learner_state, grads)
    learner_state = agent.update_learner_state(params, learner_state, opt_state)
    return params, learner_state, output._replace(logs={**output.logs, **logs})


def is_finite(logs: Logs, params: Params) -> jax.Array:
    """Returns whether the losses and the norms of the gradients of an update are finite, [] bool.

    These are the logs whose names end with ``loss`` or ``grad_norm``. If the agent does not log
    both of these two names, the new params must be finite too. They are not checked otherwise,
    because that would take a few percent of an update of a small network.

    Args:
      logs: the logs of the update.
      params: the params after the update.
    """
    found = [value for name, value in logs.items() if name.endswith(_DECISIVE)]
    if not all(name in logs for name in _DECISIVE):
        leaves = jax.tree.leaves(params)
        found += [x for x in leaves if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    return jnp.array([jnp.isfinite(x).all() for x in found], bool).all()


class EpochAgent(Agent):
    """An agent that goes over one batch several times, in minibatches.

    ``learner_step`` is ``prepare``, one ``update`` per minibatch, and ``finish``. The parts are
    public so that a driver can choose how to run them, with equal results: as one jitted scan
    (accelerators, small networks), or as one jitted call per minibatch (convolutions on the CPU,
    where XLA's loops are many times slower).
    """

    @abc.abstractmethod
    def prepare(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[LearnerState, PyTree, Array]:
        """Converts a batch to rows to learn from, and chooses their order.

        Returns:
          The learner state, with a new key; the rows, a pytree of ``[N, ...]``; and the schedule,
          int32 ``[num_updates, minibatch_size]`` of indices into the rows.
        """

    def update(
        self, params: Params, learner_state: LearnerState, minibatch: PyTree
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Takes one `gradient_step` on rows ``[minibatch_size, ...]``."""
        return gradient_step(self, params, learner_state, minibatch)

    def batch_logs(self, rows: PyTree) -> Logs:
        """Returns what to log of a whole batch, from the rows of `prepare`; nothing by default.

        Logs of minibatches cannot be averaged to statistics of the batch, such as a variance.
        """
        del rows
        return {}

    may_stop: bool = False  # whether `stops_at` decides; drivers do not call it otherwise

    def stops_at(self, logs: Logs) -> Array:
        """Returns whether a minibatch with these logs and those after it are left out, [] bool.

        It is decided before the minibatch changes anything: its update is dropped.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no stops_at")

    def lay_out_rows(self, minibatch: PyTree) -> PyTree:
        """Applies `lay_out` to the steps in rows ``[minibatch_size, ...]``; runs on the host."""
        return minibatch

    def finish(self, params: Params, learner_state: LearnerState) -> tuple[Params, LearnerState]:
        """Ends the batch, for example by moving statistics frozen during it into the params."""
        return params, learner_state

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Runs all minibatches as one scan; logs are means over the minibatches it went over."""
        learner_state, rows, schedule = self.prepare(params, learner_state, batch)

        def update(carry: Any, indices: Any) -> tuple[Any, Logs]:
            minibatch = jax.tree.map(lambda x: jnp.asarray(x)[indices], rows)
            new_params, new_state, output = self.update(carry[0], carry[1], minibatch)
            return (new_params, new_state), output.logs

        def update_or_stop(carry: Any, indices: Any) -> tuple[Any, tuple[Logs, Array]]:
            before, stopped = carry
            shapes = jax.eval_shape(lambda: update(before, indices)[1])
            after, logs = jax.lax.cond(
                stopped,
                lambda: (before, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)),
                lambda: update(before, indices),
            )
            stops = stopped | self.stops_at(logs)
            kept = jax.tree.map(lambda old, new: jnp.where(stops, old, new), before, after)
            return (kept, stops), (logs, ~stopped)

        start = (params, learner_state)
        if self.may_stop:
            carry = (start, jnp.zeros((), bool))
            (after, _), (logs, seen) = jax.lax.scan(update_or_stop, carry, schedule)
            means = jax.tree.map(lambda x: jnp.mean(x, where=seen), logs)
            means["minibatches"] = seen.sum().astype(jnp.float32)
        else:
            after, logs = jax.lax.scan(update, start, schedule)
            means = jax.tree.map(jnp.mean, logs)
        params, learner_state = self.finish(*after)
        return params, learner_state, LearnerOutput({**means, **self.batch_logs(rows)})
