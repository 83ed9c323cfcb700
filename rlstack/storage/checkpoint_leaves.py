"""The leaves of a checkpointed pytree: described, compared and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.storage import checkpoint_arrays

PYTHON_KINDS = {"bool": bool, "int": int, "float": float, "str": str}


# In a target: an array of any shape and dtype, restored as numpy.
ANY_ARRAY = jax.ShapeDtypeStruct((-1,), np.bool_)


class CheckpointError(ValueError):
    """A checkpoint cannot be read or does not fit its target, or a tree cannot be saved."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing or differs from what was written."""


class Leaf(NamedTuple):
    """One leaf, or one empty part of the structure."""

    path: str
    kind: str  # array, key (a typed JAX key), empty, or one of PYTHON_KINDS
    shape: tuple[int, ...] = ()
    dtype: str = ""  # the key implementation for a key
    value: Any = None  # the value of an empty or Python leaf
    digest: str = ""  # digest of an array or key with elements; empty in checkpoints of format 1

    @property
    def has_file(self) -> bool:
        """Whether the leaf is an array on disk, not a value or nothing."""
        return self.kind in ("array", "key") and 0 not in self.shape

    @property
    def num_bytes(self) -> int:
        """An estimate of the bytes of an array."""
        size = np.dtype(self.dtype).itemsize if self.kind == "array" else 16
        return int(np.prod(self.shape, dtype=np.int64)) * size

    def describe(self) -> str:
        """Returns a description for error messages."""
        if self.kind == "array":
            return f"an array {self.dtype}{list(self.shape)}"
        if self.kind == "key":
            return f"a key {self.dtype}{list(self.shape)}"
        return f"{self.value}" if self.kind == "empty" else f"a Python {self.kind}"

    def form(self) -> tuple[Any, ...]:
        """Returns the properties that must be equal in a checkpoint and its target."""
        return self.kind, self.shape, self.dtype, self.value if self.kind == "empty" else None


def is_empty(node: Any) -> bool:
    """Whether `node` is a part of the structure without leaves."""
    return node is None or (isinstance(node, tuple | list | dict) and len(node) == 0)


def flatten(
    where: str, tree: Any, with_arrays: bool = True
) -> tuple[list[Leaf], dict[int, np.ndarray]]:
    """Returns a description of each leaf of `tree`, and the non-empty arrays by leaf number.

    Raises:
      CheckpointError: a leaf is of a kind that cannot be saved.
    """
    leaves: list[Leaf] = []
    arrays: dict[int, np.ndarray] = {}
    for path, value in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
        name, check = jax.tree_util.keystr(path) or "(the tree)", ""
        if is_empty(value):
            named = type(value).__name__ if value is not None else "None"
            leaves.append(Leaf(name, "empty", value=named))
        elif type(value) in PYTHON_KINDS.values():
            held = repr(value) if isinstance(value, float) else value  # repr keeps NaN and inf
            leaves.append(Leaf(name, type(value).__name__, value=held))
        elif _is_key(value):
            if isinstance(value, jax.Array):
                impl = str(jax.random.key_impl(value))
                if with_arrays:
                    array = arrays[len(leaves)] = np.asarray(jax.random.key_data(value))
                    check = checkpoint_arrays.digest(array)
            else:
                impl = str(value.dtype)[len("key<") : -1]
            leaves.append(Leaf(name, "key", tuple(value.shape), impl, digest=check))
        elif hasattr(value, "dtype") and hasattr(value, "shape"):
            dtype = np.dtype(value.dtype)
            if dtype.hasobject or dtype.fields is not None or dtype.kind in "USmM":
                raise CheckpointError(
                    f"checkpoint.{where}: arrays must be of numbers or booleans; {name} has dtype "
                    f"{dtype}. Split it into arrays of plain dtypes."
                )
            if with_arrays and value.size:
                array = arrays[len(leaves)] = np.asarray(value)
                check = checkpoint_arrays.digest(array)
            leaves.append(Leaf(name, "array", tuple(value.shape), dtype.name, digest=check))
        else:
            raise CheckpointError(
                f"checkpoint.{where}: a leaf must be an array or a Python number, boolean or "
                f"string; {name} is a {type(value).__name__}."
            )
    return leaves, arrays


def _is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def check_same(path: Path, wanted: list[Leaf], saved: list[Leaf]) -> None:
    """Compares a target (`wanted`) with the checkpoint at `path`.

    Raises:
      CheckpointError: a leaf differs; the message describes the first one in both.
    """
    for want, have in zip(wanted, saved, strict=False):
        if want.path != have.path:
            extra = want.path not in {leaf.path for leaf in saved}
            leaf, expected, found = (
                (want, want.describe(), "no such leaf")
                if extra
                else (have, "no such leaf", have.describe())
            )
        elif want.shape == ANY_ARRAY.shape and have.kind == "array":
            continue
        elif want.form() != have.form():
            leaf, expected, found = want, want.describe(), have.describe()
        else:
            continue
        raise _differs(path, leaf, expected, found)
    if len(wanted) > len(saved):
        raise _differs(path, wanted[len(saved)], wanted[len(saved)].describe(), "no such leaf")
    if len(saved) > len(wanted):
        raise _differs(path, saved[len(wanted)], "no such leaf", saved[len(wanted)].describe())


def _differs(path: Path, leaf: Leaf, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint.restore: the checkpoint must have the structure, shapes and dtypes of what it "
        f"is restored into; at {leaf.path} expected {expected}, found {found} in {path}. "
        "Restore with the config that the run was made with, or start a new run."
    )


def as_target(leaf: Leaf, array: np.ndarray | None, like: Any) -> Any:
    """Returns a restored leaf in the form that it has in the target."""
    if leaf.kind == "empty":
        return like
    if leaf.kind in PYTHON_KINDS:
        return PYTHON_KINDS[leaf.kind](leaf.value)
    if leaf.kind == "key":
        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=leaf.dtype)
    if array is None:
        array = np.zeros(leaf.shape, np.dtype(leaf.dtype))
    if like is ANY_ARRAY:
        return array
    if isinstance(like, np.generic):
        return array[()]
    if isinstance(like, jax.Array):
        return jax.device_put(array, like.sharding)
    if isinstance(like, jax.ShapeDtypeStruct):
        return jax.device_put(array, like.sharding)
    return array
