"""Quick compilation of functions of random keys that are called once or a few times.

XLA compiles nine kernels for each draw and each split of a key. In a function that initialises
params or resets environments, these are most of the kernels. Here the host draws the random bits
with numpy, and XLA compiles the rest of the function. The results are those of `jax.jit`, bit for
bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.random import threefry
from rlstack.types import PyTree

_IMPLEMENTATION = "threefry2x32"
_OPTIONS = {"xla_backend_optimization_level": 1}
_CALLS = "jit", "pjit"  # primitives that call a function; JAX 0.5 has the second


class CompiledQuickly:
    """A pure function of random keys and other arrays, which is compiled in little time.

    It is optimised less than `jax.jit` does, so it runs longer. Its results share no memory with
    each other or with its arguments, so that they can be donated. It must be called outside of
    jitted functions.
    """

    def __init__(self, function: Callable[..., PyTree]) -> None:
        """Stores the function; it is traced when arguments of new shapes are given."""
        self._function = function
        self._parts: dict[Any, _Parts] = {}

    def __call__(self, *arguments: PyTree) -> PyTree:
        """Returns the function's result."""
        return self._of(arguments).call(jax.tree.leaves(arguments))

    def eval_shape(self, *arguments: PyTree) -> PyTree:
        """Returns the shapes and dtypes of the result (``jax.ShapeDtypeStruct``)."""
        return self._of(arguments).shapes

    def _of(self, arguments: tuple[PyTree, ...]) -> _Parts:
        leaves, structure = jax.tree.flatten(arguments)
        shapes = structure, tuple((x.shape, x.dtype) for x in leaves)
        if shapes not in self._parts:
            self._parts[shapes] = _Parts(self._function, arguments)
        return self._parts[shapes]


@dataclasses.dataclass(eq=False)
class _Value:
    """A value in a function, which is equal to itself only."""

    aval: Any  # shape and dtype
    on_host: bool = False  # whether the host has it, and not the compiled rest
    constant: Any = None


class _Step(NamedTuple):
    """An equation of a function's jaxpr, with its own values."""

    equation: Any
    inputs: Sequence[_Value]
    outputs: Sequence[_Value]
    on_host: bool


class _Parts:
    """The part of a function that runs on the host, and the compiled rest, for some shapes.

    Attributes:
      shapes: shapes and dtypes of the result, ``jax.ShapeDtypeStruct``.
    """

    def __init__(self, function: Callable[..., PyTree], arguments: tuple[PyTree, ...]) -> None:
        """Traces the function."""
        traced, self.shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        self._arguments = [_Value(x, on_host=not _is_key(x)) for x in traced.in_avals]
        steps: list[_Step] = []
        self._results = _flatten(traced, self._arguments, steps)
        self._draws = [step for step in steps if step.on_host]
        self._rest = [step for step in steps if not step.on_host]
        used = [x for step in self._rest for x in step.inputs] + self._results
        made = {x for step in self._rest for x in step.outputs}
        # The inputs of the compiled rest: arguments, and what the host draws.
        self._crossing = [x for x in dict.fromkeys(used) if x not in made and x.constant is None]
        self._compiled = jax.jit(self._compute, compiler_options=_OPTIONS)

    def call(self, arguments: Sequence[Any]) -> PyTree:
        """Returns the result."""
        values = dict(zip(self._arguments, arguments, strict=True))
        for equation, (value,), outputs, _ in self._draws:
            rule = _RULES[equation.primitive.name]
            results = rule(np.asarray(values[value]), equation.params)
            values |= zip(outputs, results, strict=True)
        return self._compiled([values[x] for x in self._crossing])

    def _compute(self, crossing: Sequence[Any]) -> PyTree:
        values = dict(zip(self._crossing, map(_restored, self._crossing, crossing), strict=True))

        def read(value: _Value) -> Any:
            return values[value] if value.constant is None else value.constant

        for equation, inputs, outputs, _ in self._rest:
            primitive = equation.primitive
            bound = primitive.get_bind_params(equation.params)
            # JAX 0.5 returns functions too.
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            result = primitive.bind(*functions, *map(read, inputs), **params)
            values |= zip(outputs, result if primitive.multiple_results else [result], strict=True)
        # Copies, because callers may donate results, and XLA returns arguments as they are.
        results = [jnp.copy(read(x)) for x in self._results]
        return jax.tree.unflatten(jax.tree.structure(self.shapes), results)


def _flatten(traced: Any, inputs: Sequence[_Value], steps: list[_Step]) -> list[_Value]:
    """Appends the equations of a closed jaxpr to the steps; returns its results.

    A function that it calls with values of the host is replaced by the equations of that function.
    """
    values = {
        variable: _Value(variable.aval, constant=x)
        for variable, x in zip(traced.jaxpr.constvars, traced.consts, strict=True)
    }
    values |= zip(traced.jaxpr.invars, inputs, strict=True)

    def read(atom: Any) -> _Value:
        is_literal = hasattr(atom, "val")
        return _Value(atom.aval, constant=atom.val) if is_literal else values[atom]

    for equation in traced.jaxpr.eqns:
        arguments = [read(x) for x in equation.invars]
        on_host = any(x.on_host for x in arguments)
        if on_host and equation.primitive.name in _CALLS:
            outputs = _flatten(equation.params["jaxpr"], arguments, steps)
        else:
            on_host = on_host and _can_draw(equation)
            outputs = [_Value(x.aval, on_host) for x in equation.outvars]
            steps.append(_Step(equation, arguments, outputs, on_host))
        values |= zip(equation.outvars, outputs, strict=True)
    return [read(x) for x in traced.jaxpr.outvars]


def _is_key(aval: Any) -> bool:
    return jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _restored(value: _Value, crossing: Any) -> Any:
    """Returns a value as the rest takes it: the host has keys as arrays of words."""
    if value.on_host and _is_key(value.aval):
        return jax.random.wrap_key_data(crossing, impl=_IMPLEMENTATION)
    return crossing


def _can_draw(equation: Any) -> bool:
    """Whether the host computes an equation, if its input is a value of the host."""
    name, params = equation.primitive.name, equation.params
    if name == "random_wrap":
        return params["impl"].name == _IMPLEMENTATION
    if name in ("random_split", "random_bits"):
        usual = getattr(jax.config, "jax_threefry_partitionable", False)
        return usual and params.get("bit_width", 32) == 32
    return name in _RULES


def _slice(x: np.ndarray, params: Mapping[str, Any]) -> list[np.ndarray]:
    strides = params["strides"] or (1,) * x.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return [x[tuple(slice(*of) for of in bounds)]]


# How the host computes each primitive. All of them have one input. A function gets its value and
# the params of the equation, and returns the outputs.
_RULES: dict[str, Callable[[np.ndarray, Mapping[str, Any]], list[np.ndarray]]] = {
    "random_wrap": lambda x, _: [x],
    "random_unwrap": lambda x, _: [x],
    "random_split": lambda x, params: [threefry.split(x, params["shape"])],
    "random_bits": lambda x, params: [threefry.bits(x, params["shape"])],
    "slice": _slice,
    "squeeze": lambda x, params: [np.squeeze(x, params["dimensions"])],
    "unstack": lambda x, params: list(np.moveaxis(x, params["axis"], 0)),
}
