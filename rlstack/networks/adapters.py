"""Networks from models of Flax and Equinox.

Both functions make feed-forward networks. A model with state or dropout becomes a network with two
modes, as `rlstack.stateful_params` explains; any other model becomes a stateless network. Weights
and states are dicts of arrays, so a checkpoint holds no objects of the library.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

from rlstack.networks.base import Network, dummy_timestep, from_functions
from rlstack.networks.stateful import network_with_state
from rlstack.types import Params, PRNGKey, PyTree

_BATCH = "batch"  # the axis over which batch norm of Equinox computes statistics


def from_flax(module: Any, obs_spec: PyTree, training_argument: str = "") -> Network:
    """Makes a network from a Flax module; an NNX class goes through ``flax.nnx.bridge.to_linen``.

    The weights are the collection ``params``; the state is all other collections.

    Args:
      module: a ``flax.linen.Module`` whose ``__call__`` maps an observation ``[B, ...]`` to a
          pytree of ``[B, ...]``. All its streams of random numbers, such as ``dropout``, come from
          the learner's key.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
      training_argument: the argument of ``__call__`` that is True in a loss and False elsewhere,
          such as ``train``. A module with state or dropout needs one; its name may not be empty.

    Raises:
      ValueError: the module has state but no such argument, or no argument of this name.
    """
    name = type(module).__name__
    arguments = inspect.signature(type(module).__call__).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in arguments.values())
    if training_argument and training_argument not in arguments and not takes_any:
        raise ValueError(
            f"from_flax: training_argument must be an argument of {name}.__call__, one of "
            f"{', '.join(list(arguments)[1:])}; got {training_argument!r}."
        )
    mode = {training_argument: True} if training_argument else {}

    def init(rng_key: PRNGKey, observation: PyTree) -> tuple[Params, PyTree]:
        variables = dict(module.init(_streams(rng_key), observation, **mode))
        return variables.pop("params", {}), variables

    def apply(
        weights: Params,
        state: PyTree,
        rng_key: PRNGKey | None,
        observation: PyTree,
        is_training: bool,
    ) -> tuple[PyTree, PyTree]:
        variables = {"params": weights, **state}
        options = {} if rng_key is None else {"rngs": _streams(rng_key)}
        if not is_training:
            return module.apply(
                variables, observation, **dict.fromkeys(mode, False), **options
            ), state
        output, changed = module.apply(
            variables, observation, **mode, **options, mutable=list(state)
        )
        return output, {**state, **changed}

    if not mode:
        observation = dummy_timestep(obs_spec).observation
        state = jax.eval_shape(lambda: init(jax.random.PRNGKey(0), observation)[1])
        if state:
            raise ValueError(
                f"from_flax: a module with state must have an argument that is True in a loss; "
                f"{name} has the collections {', '.join(sorted(state))}. Give the argument's name "
                "as training_argument."
            )
    return _network(init, apply, obs_spec, bool(mode))


def from_equinox(make: Callable[[PRNGKey], Any], obs_spec: PyTree) -> Network:
    """Makes a network from an Equinox model.

    The weights are the model's arrays of floating point numbers, by their paths. Its other arrays
    are constants. Whether it is in training mode is set by ``equinox.nn.inference_mode``.

    Args:
      make: ``rng_key -> model``; for a model with state ``rng_key -> (model, state)``, as
          ``equinox.nn.make_with_state`` returns. The model maps one observation, without a batch
          axis, to its output: ``model(observation, key=key)``, or with state ``model(observation,
          state, key=key) -> (output, state)``. The key is None in evaluation mode. The batch axis
          has the name ``"batch"``; ``equinox.nn.BatchNorm`` needs it, and ``mode="batch"``, since
          agents act before they learn.
      obs_spec: pytree of ``dm_env.specs`` of one observation.
    """
    import equinox as eqx

    def parts(made: Any) -> tuple[Any, Any, PyTree]:
        """Returns the model's weights, the rest of the model, and its state."""
        model, state = made if isinstance(made, tuple) else (made, None)
        return *eqx.partition(model, eqx.is_inexact_array), state

    weights, constants, state = parts(make(jax.random.PRNGKey(0)))
    paths, structure = jax.tree_util.tree_flatten_with_path(weights)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
    state_structure = jax.tree.structure(state)

    def init(rng_key: PRNGKey, observation: PyTree) -> tuple[Params, PyTree]:
        del observation
        weights, _, state = parts(make(rng_key))
        return dict(zip(names, jax.tree.leaves(weights), strict=True)), _numbered(state)

    def apply(
        weights: Params,
        state: PyTree,
        rng_key: PRNGKey | None,
        observation: PyTree,
        is_training: bool,
    ) -> tuple[PyTree, PyTree]:
        model = eqx.combine(structure.unflatten(weights[name] for name in names), constants)
        model = eqx.nn.inference_mode(model, not is_training)
        keys = None
        if rng_key is not None and is_training:
            keys = jax.random.split(rng_key, len(jax.tree.leaves(observation)[0]))

        def run(observation: PyTree, state: PyTree, key: PRNGKey | None) -> tuple[PyTree, PyTree]:
            if state is None:
                return model(observation, key=key), None
            return model(observation, state, key=key)

        output, new_state = jax.vmap(
            run,
            in_axes=(0, None, None if keys is None else 0),
            out_axes=(0, None),
            axis_name=_BATCH,
        )(observation, state_structure.unflatten(_in_order(state)), keys)
        return output, _numbered(new_state)

    modes = [eqx.nn.inference_mode(constants, value) for value in (True, False)]
    return _network(init, apply, obs_spec, state is not None or not eqx.tree_equal(*modes))


def _network(
    init: Callable[[PRNGKey, PyTree], tuple[Params, PyTree]],
    apply: Callable[[Params, PyTree, PRNGKey | None, PyTree, bool], tuple[PyTree, PyTree]],
    obs_spec: PyTree,
    has_modes: bool,
) -> Network:
    """Makes a network of the functions that `network_with_state` takes, or a stateless one."""
    if has_modes:
        return network_with_state(init, apply, obs_spec)
    return from_functions(
        lambda rng_key, observation: init(rng_key, observation)[0],
        lambda params, rng_key, observation: apply(params, {}, rng_key, observation, False)[0],
        obs_spec,
    )


def _streams(rng_key: PRNGKey) -> dict[str, PRNGKey]:
    """Returns the keys of a Flax module; any other stream is ``params``, in NNX ``default``."""
    names = ("params", "dropout", "default")
    return dict(zip(names, jax.random.split(rng_key, len(names)), strict=True))


def _numbered(state: PyTree) -> dict[str, Any]:
    """Returns the arrays of a state by their numbers."""
    return {str(i): x for i, x in enumerate(jax.tree.leaves(state))}


def _in_order(numbered: dict[str, Any]) -> list[Any]:
    return [numbered[str(i)] for i in range(len(numbered))]
