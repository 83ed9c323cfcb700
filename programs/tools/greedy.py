"""Greedy acting as one pure function of arrays with names, for runtimes without the stack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs
from jax.extend import core as jax_core

from rlstack.envs.values import own_spec, start_of
from rlstack.programs.build.policies.policy import Policy
from rlstack.types import Array, PRNGKey, PyTree, StepType, TimeStep

Arrays = Mapping[str, Any]


class Port(NamedTuple):
    """An array that goes in or out, for one environment."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype


class GreedyFunction(NamedTuple):
    """The greedy policy of a run."""

    observation: tuple[Port, ...]
    action: tuple[Port, ...]
    state: tuple[Port, ...]  # what it remembers; empty for most policies
    initial_state: dict[str, np.ndarray]  # at the start of an episode, without a batch axis
    # (observation, state) -> (action, state), each by name and ``[B, ...]``; pure
    call: Callable[[Arrays, Arrays], tuple[dict[str, Array], dict[str, Array]]]


def greedy_function(policy: Policy) -> GreedyFunction:
    """Returns what a policy computes, with its normalisation and the bounds of its actions.

    Discrete values are the environment's own, like those of `Policy.act`; they are not checked.

    The function has no argument for the start of an episode: an episode starts with the initial
    state. State that does not change actions, such as counts of steps, is left out, and so is what
    only a critic sees.

    Args:
      policy: a greedy policy from `rlstack.programs.build.policies.policy.load`.

    Raises:
      ValueError: the policy's actions depend on random numbers or on rewards, or int32 cannot hold
        the environment's own values.
    """
    spec, seen_spec = policy.spec, policy.seen_spec
    observed = _names("observation", seen_spec)
    acts = _names("action", spec.action)
    fresh = [np.asarray(leaf) for leaf in jax.tree.leaves(policy.agent.initial_state(1))]
    kept = _kept_state(policy, len(fresh))
    names = [f"state/{i}" for i in range(len(kept))]
    starts = _starts(observed, seen_spec)

    def call(observation: Arrays, state: Arrays) -> tuple[dict[str, Array], dict[str, Array]]:
        rows = observation[observed[0]].shape[0]
        leaves: list[Any] = [jnp.broadcast_to(x[0], (rows, *x.shape[1:])) for x in fresh]
        for place, name in zip(kept, names, strict=True):
            leaves[place] = state[name]
        seen = [
            (observation[name] - starts[name]).astype(leaf.dtype)
            if name in starts
            else observation[name]
            for name, leaf in zip(observed, _leaves(seen_spec), strict=True)
        ]
        # Greedy actions need no random numbers: `_kept_state` has checked it.
        key, reward = jax.random.PRNGKey(0), jax.lax.full((rows,), 0.0)
        action, after = _act(policy, key, reward, seen, leaves)
        return dict(zip(acts, _bounded(action, spec.action), strict=True)), {
            name: after[place] for place, name in zip(kept, names, strict=True)
        }

    inputs = [_port(name, leaf) for name, leaf in zip(observed, _leaves(seen_spec), strict=True)]
    state = [Port(n, fresh[p].shape[1:], fresh[p].dtype) for n, p in zip(names, kept, strict=True)]
    outputs = _outputs(call, inputs, state)
    return GreedyFunction(
        tuple(inputs),
        outputs,
        tuple(state),
        {name: fresh[place][0] for name, place in zip(names, kept, strict=True)},
        call,
    )


def row_by_row(function: GreedyFunction) -> GreedyFunction:
    """Returns the same function as a map over rows, for networks that need to know the batch size.

    Rows do not depend on one another, so the results are the same.
    """

    def one(observation: Arrays, state: Arrays) -> PyTree:
        batches = jax.tree.map(lambda x: x[None], (dict(observation), dict(state)))
        return jax.tree.map(lambda x: x[0], function.call(*batches))

    return function._replace(call=jax.vmap(one))


def without_unused(function: Callable[..., Any], *arguments: Array) -> list[Array]:
    """Returns a function's results as a list, computed without operations that do not affect them.

    XLA leaves these out by itself; other converters would need to know them, such as the split of a
    random key that a greedy policy does not use.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    needed = set(_variables(closed.jaxpr.outvars))
    kept = []
    for equation in reversed(closed.jaxpr.eqns):
        if needed.intersection(equation.outvars):
            kept.append(equation)
            needed.update(_variables(equation.invars))
    jaxpr = closed.jaxpr.replace(eqns=kept[::-1])
    return jax_core.jaxpr_as_fun(jax_core.ClosedJaxpr(jaxpr, closed.consts))(*arguments)


def path_name(path: Sequence[Any]) -> str:
    """Returns a path of JAX's in a tree as text, such as ``mlp/linear_0/w``."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _act(
    policy: Policy,
    key: PRNGKey,
    reward: Array,
    observation: Sequence[Array],
    state: Sequence[Array],
) -> tuple[list[Array], list[Array]]:
    """Acts on leaves ``[B, ...]`` of what a policy sees, in the middle of an episode."""
    rows = observation[0].shape[0]
    timestep = TimeStep(
        jax.lax.full((rows,), int(StepType.MID), jnp.int32),
        reward,
        jax.lax.full((rows,), 1.0),
        jax.tree.unflatten(jax.tree.structure(policy.seen_spec), observation),
    )
    agent = policy.agent
    structure = jax.tree.structure(jax.eval_shape(lambda: agent.initial_state(1)))
    before = jax.tree.unflatten(structure, state)
    output, after = agent.actor_step(key, policy.params, policy.completed(timestep), before)
    return jax.tree.leaves(output.action), jax.tree.leaves(after)


def _kept_state(policy: Policy, count: int) -> list[int]:
    """Returns which leaves of the agent's state actions depend on, now or later.

    Raises:
      ValueError: actions also depend on random numbers or on rewards.
    """
    state = jax.tree.leaves(policy.agent.initial_state(2))
    leaves = _leaves(policy.seen_spec)
    observation = [jnp.zeros((2, *leaf.shape), leaf.dtype) for leaf in leaves]
    shapes: list[int] = []

    def act(key: PRNGKey, reward: Array, state: Any, observation: Any) -> Any:
        action, after = _act(policy, key, reward, observation, state)
        shapes[:] = [len(action)]
        return action, after

    found = _dependencies(act, jax.random.PRNGKey(0), jnp.zeros(2), state, observation)
    actions, after = found[: shapes[0]], found[shapes[0] :]
    needed = set[int]().union(*actions)
    while (more := needed.union(*(after[i] for i in range(count) if i + 2 in needed))) != needed:
        needed = more
    for place, what in ((0, "random numbers"), (1, "the last reward")):
        if place in needed:
            raise ValueError(
                "export: the action must depend on observations only; the greedy policy of "
                f"{type(policy.agent).__name__} depends on {what}. Use rlstack.load, which has "
                "them."
            )
    return [i for i in range(count) if i + 2 in needed]


def _dependencies(function: Callable[..., Any], *arguments: Any) -> list[set[int]]:
    """Returns the flat inputs that each flat output of a function may depend on.

    The outputs of a loop or an inner function count as depending on all of its inputs.
    """
    jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
    known: dict[Any, set[int]] = {variable: {i} for i, variable in enumerate(jaxpr.invars)}

    def sources(variables: Sequence[Any]) -> set[int]:
        return set[int]().union(*(known.get(v, set()) for v in _variables(variables)))

    for equation in jaxpr.eqns:
        found = sources(equation.invars)
        for variable in equation.outvars:
            known[variable] = found
    return [sources([variable]) for variable in jaxpr.outvars]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    """Returns the variables among the arguments of an operation; literals have a value."""
    return [atom for atom in atoms if not hasattr(atom, "val")]


def _bounded(action: Sequence[Array], action_spec: PyTree) -> list[Array]:
    """Returns the environment's own actions within their bounds, as `Policy.act` does."""
    starts = _starts(_names("action", action_spec), action_spec)

    def bounded(name: str, leaf: Array, spec: specs.Array) -> Array:
        if isinstance(spec, specs.BoundedArray) and np.issubdtype(spec.dtype, np.floating):
            return jnp.clip(leaf, spec.minimum, spec.maximum)
        return leaf + starts[name] if name in starts else leaf

    named = zip(_names("action", action_spec), action, _leaves(action_spec), strict=True)
    return [bounded(*one) for one in named]


def _starts(names: Sequence[str], tree: PyTree) -> dict[str, np.ndarray]:
    """Returns the environment's own values of 0, by name, of leaves that do not count from 0.

    Raises:
      ValueError: a value does not fit the dtypes that JAX has.
    """
    found = {}
    for name, spec in zip(names, _leaves(tree), strict=True):
        if np.any(start := start_of(spec)):
            dtype = own_spec(spec).dtype
            if jax.dtypes.canonicalize_dtype(dtype) != dtype:
                raise ValueError(
                    f"export: int32 must hold the environment's own values, because JAX has "
                    f"integers of 32 bits; those of {name} are larger. Use rlstack.load."
                )
            found[name] = np.asarray(start, dtype)
    return found


def _outputs(call: Callable[..., Any], inputs: list[Port], state: list[Port]) -> tuple[Port, ...]:
    arguments = [
        {p.name: jnp.zeros((1, *p.shape), p.dtype) for p in ports} for ports in (inputs, state)
    ]
    action, _ = jax.eval_shape(call, *arguments)
    return tuple(Port(name, leaf.shape[1:], leaf.dtype) for name, leaf in action.items())


def _leaves(tree: PyTree) -> list[specs.Array]:
    return jax.tree.leaves(tree)


def _names(root: str, tree: PyTree) -> list[str]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    return ["/".join(filter(None, (root, path_name(path)))) for path, _ in paths]


def _port(name: str, spec: specs.Array) -> Port:
    return Port(name, tuple(spec.shape), jax.dtypes.canonicalize_dtype(own_spec(spec).dtype))
