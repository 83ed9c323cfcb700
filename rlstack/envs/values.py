"""Values of a spec: checks of values from outside, and where the choices of a space start.

In rlstack, discrete values count from 0. The spaces of Gymnasium, PettingZoo and EnvPool may start
elsewhere, such as ``Discrete(3, start=5)``. Pools shift their values, and keep the start in their
specs. What people use outside of the stack, such as `rlstack.load`, exports and datasets, takes and
gives the environment's *own* values.

Worker processes import this module, so it must not import JAX.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlstack.checks import WrongKindError
from rlstack.envs.nest import Nest, Tree

# For at most this number of values, looking each up in a set is faster than a numpy reduction.
_FEW = 64
_LARGEST_SET = 1024  # values that an integer may have
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}  # by the number of bytes


class DiscreteFrom(specs.DiscreteArray):
    """Choices that count from 0 in rlstack, and from ``start`` in the environment."""

    def __init__(self, num_values: int, dtype: Any, start: int, name: str | None = None):
        super().__init__(num_values, dtype, name)
        self.start = int(start)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, start={self.start})"

    def __reduce__(self) -> tuple[Any, ...]:
        return DiscreteFrom, (self.num_values, self.dtype, self.start, self.name)


class BoundedFrom(specs.BoundedArray):
    """Integers in rlstack; in the environment they are larger by ``start``, as ``shape``."""

    def __init__(
        self,
        shape: Any,
        dtype: Any,
        minimum: Any,
        maximum: Any,
        start: Any,
        name: str | None = None,
    ):
        super().__init__(shape, dtype, minimum, maximum, name)
        self.start = np.broadcast_to(np.asarray(start, np.int64), self.shape)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, start={self.start.tolist()})"

    def __reduce__(self) -> tuple[Any, ...]:
        made = self.shape, self.dtype, self.minimum, self.maximum, self.start, self.name
        return BoundedFrom, made


def start_of(space: Any) -> int | np.ndarray:
    """Returns the environment's own value of 0, for a spec or for a space of Gymnasium."""
    return getattr(space, "start", 0)


def with_start(spec: specs.Array, start: int | np.ndarray) -> specs.Array:
    """Returns a spec of integers that count from 0 with the environment's own value of 0."""
    if not np.any(start):
        return _from_zero(spec)
    if isinstance(spec, specs.DiscreteArray):
        return DiscreteFrom(spec.num_values, spec.dtype, int(start), spec.name)
    assert isinstance(spec, specs.BoundedArray)
    bounds = spec.minimum, spec.maximum
    return BoundedFrom(spec.shape, spec.dtype, *bounds, start, spec.name)


def from_zero(tree: Tree) -> Tree:
    """Returns a tree of specs, also an `EnvSpec`, for values as pools have them: without starts."""
    nest = Nest(tree)
    return nest.unflatten([_from_zero(spec) for spec in nest.leaves])


def _from_zero(spec: specs.Array) -> specs.Array:
    if isinstance(spec, DiscreteFrom):
        return specs.DiscreteArray(spec.num_values, spec.dtype, spec.name)
    if isinstance(spec, BoundedFrom):
        return specs.BoundedArray(spec.shape, spec.dtype, spec.minimum, spec.maximum, spec.name)
    return spec


def own_spec(spec: specs.Array) -> specs.Array:
    """Returns the spec of the environment's own values: int64 where int32 cannot hold them."""
    if not np.any(start := start_of(spec)):
        return spec
    assert isinstance(spec, specs.BoundedArray)
    low, high = (np.add(x, start, dtype=np.int64) for x in (spec.minimum, spec.maximum))
    limits = np.iinfo(spec.dtype)
    fits = limits.min <= low.min(initial=0) and high.max(initial=0) <= limits.max
    return specs.BoundedArray(spec.shape, spec.dtype if fits else np.int64, low, high, spec.name)


def own(values: np.ndarray, spec: specs.Array) -> np.ndarray:
    """Returns values that count from 0, ``[..., *shape]``, as the environment's own."""
    if not np.any(start := start_of(spec)):
        return values
    return np.add(values, start, dtype=np.int64).astype(own_spec(spec).dtype)


def counted_from_zero(values: np.ndarray, spec_or_space: Any) -> np.ndarray:
    """Returns the environment's own values, ``[..., *shape]``, as values that count from 0.

    They are int64 if they are shifted, so that none is wrapped. Real numbers stay as they are: they
    are no choices, and who receives them says so.
    """
    if not np.any(start := start_of(spec_or_space)) or values.dtype.kind not in "iub":
        return values
    return np.subtract(values, start, dtype=np.int64, casting="unsafe")


def is_limited(spec: specs.Array) -> bool:
    """Returns whether a spec allows only some integers of its dtype, and so needs a check.

    Images do not, because their dtype has their bounds. Real numbers do not: environments often
    exceed the bounds of a Box a little, which no network minds.
    """
    if spec.dtype.kind not in "iu" or not isinstance(spec, specs.BoundedArray) or 0 in spec.shape:
        return False
    limits = np.iinfo(spec.dtype)
    return bool((spec.minimum > limits.min).any() or (spec.maximum < limits.max).any())


class Range:
    """The integers, or bools, that a spec allows: a check of batches that takes a microsecond.

    Attributes:
      low, high: the bounds; those of the dtype, if the spec has none.
    """

    def __init__(self, spec: specs.Array) -> None:
        """Prepares the check of arrays ``[..., *shape]``."""
        self.low, self.high = _bounds(spec)
        self._dtype = np.dtype(spec.dtype)
        self._uniform = np.ndim(self.low) == 0 and np.ndim(self.high) == 0
        self._from_zero = not np.any(self.low)
        span = np.asarray(self.high, object) - np.asarray(self.low, object)
        self._span = int(span) if self._uniform else span.astype(np.uint64)
        few = self._uniform and self._span < _LARGEST_SET
        self._values = frozenset(range(int(self.low), int(self.high) + 1) if few else ())

    def holds(self, array: np.ndarray) -> bool:
        """Returns whether all numbers of an array of integers or bools are allowed."""
        if self._values and array.size <= _FEW:
            flat = array.tolist() if array.ndim == 1 else array.ravel().tolist()
            return self._values.issuperset(flat)
        if array.dtype != self._dtype or not array.size:
            return not self.outside(array).any()
        if not self._from_zero:
            array = array - self.low
        # Read as unsigned, a number below the bounds is larger than all numbers within them.
        unsigned = array.view(_UNSIGNED[array.dtype.itemsize])
        if self._uniform:
            return int(np.maximum.reduce(unsigned, axis=None)) <= self._span
        return not (unsigned > self._span).any()

    def outside(self, array: np.ndarray) -> np.ndarray:
        """Returns which numbers of an array are not allowed, bool of its shape."""
        return (array > self.high) | (array < self.low)


def _bounds(spec: specs.Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns the smallest and largest integer or bool, in the dtype of the spec."""
    dtype = np.dtype(spec.dtype)
    if isinstance(spec, specs.BoundedArray):
        return spec.minimum, spec.maximum
    least, most = (False, True) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return np.array(least, dtype), np.array(most, dtype)


def brief(bound: Any) -> str:
    """Returns a bound for messages: one number if all its numbers are equal, and not too many."""
    bound = np.asarray(bound)
    bound = bound.astype(np.int8) if bound.dtype == np.bool_ else bound
    if bound.size and (bound == bound.flat[0]).all():
        bound = bound.flat[0]
    text = str(bound.tolist())
    return text if len(text) <= 80 else f"{text[:77]}..."


def fitted(array: np.ndarray, spec: specs.Array, where: str, *, finite: bool = True) -> np.ndarray:
    """Returns numbers from outside of the stack as values of a spec, or refuses them.

    It is the check of `rlstack.load` and of what serves a policy. Real numbers are no integers,
    although a cast would make them such: 0.7 is not a choice, and a picture divided by 255 is not
    one of bytes. Integers must be within the environment's own bounds.

    Args:
      array: ``[..., *shape]`` numbers or bools, the environment's own values.
      spec: the spec of the values.
      where: the beginning of messages.
      finite: whether to refuse NaN and infinity.

    Returns:
      An array of the same shape in the dtype of the spec, counted from 0.

    Raises:
      WrongKindError: real numbers instead of integers.
      ValueError: a number is outside of its bounds, or not finite.
    """
    if spec.dtype.kind not in "iub":
        with np.errstate(over="ignore"):  # it becomes infinite
            cast = array.astype(spec.dtype)
        if finite and not (good := np.isfinite(cast)).all():
            came = array[~good].flat[0]
            held = f"numbers that {spec.dtype} can hold" if np.isfinite(came) else "finite numbers"
            raise ValueError(f"{where} must hold {held}; got {came}.")
        return cast
    if not array.size:
        return array.astype(spec.dtype)
    own_range = Range(own_spec(spec))
    allowed = f"integers in [{brief(own_range.low)}, {brief(own_range.high)}]"
    advice = "Give it as the environment gives it, unscaled."
    if array.dtype.kind == "f":
        parts = array[array != np.floor(array)]  # NaN too
        came = parts.flat[0] if parts.size else array.flat[0]
        raise WrongKindError(
            f"{where} must hold {allowed}; got real numbers ({array.dtype}), such as {came:.6g}. "
            f"{advice}"
        )
    if array.shape[array.ndim - len(spec.shape) :] != spec.shape:
        return array  # the caller says which shape is right
    bad = own_range.outside(array)
    if bad.any():
        raise ValueError(f"{where} must hold {allowed}; got {array[bad].flat[0]}. {advice}")
    return np.asarray(counted_from_zero(array, spec)).astype(spec.dtype)
