"""Nested observations and actions as flat lists of leaves.

Environment workers must not import JAX, so this module has the few pytree functions that they need.
A tree is a leaf, or a dict (in the order of sorted keys, as in JAX), tuple, list or named tuple of
trees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Tree: TypeAlias = Any


class Nest:
    """The structure of a tree: flattens other trees of that structure and rebuilds them.

    Attributes:
      leaves: the leaves of the tree it was built from, in order.
      paths: a printable path to each leaf, such as ``["camera"][0]``; empty for a bare leaf.
      bare: whether the tree is a single leaf.
    """

    def __init__(self, tree: Tree):
        self.leaves: list[Tree] = []
        self.paths: list[str] = []
        self._tree = self._index(tree, "")
        self.bare = isinstance(self._tree, int)

    def _index(self, tree: Tree, path: str) -> Tree:
        """Returns ``tree`` with every leaf replaced by its position."""
        if isinstance(tree, Mapping):
            return {k: self._index(tree[k], f"{path}[{k!r}]") for k in sorted(tree)}
        if isinstance(tree, tuple | list):
            return _rebuild(tree, [self._index(v, f"{path}[{i}]") for i, v in enumerate(tree)])
        self.leaves.append(tree)
        self.paths.append(path)
        return len(self.leaves) - 1

    def flatten(self, value: Tree, where: str) -> list[Tree]:
        """Returns the leaves of ``value``, which must have this structure.

        Raises:
          TypeError: ``value`` has another structure; the message starts with ``where``.
        """
        if self.bare:
            return [value]
        found: list[Tree] = []
        _collect(self._tree, value, where, "", found)
        return found

    def unflatten(self, leaves: Sequence[Tree]) -> Tree:
        """Returns ``leaves`` in this structure."""
        return leaves[0] if self.bare else _fill(self._tree, leaves)


class StepNest:
    """The structure of what an environment shows in a step: its observation and its extras.

    Attributes:
      observation: the structure of observations.
      extras: the structure of extras; it has no leaves if the environment declares none.
      leaves: the leaves of the observation, then those of the extras.
      paths: the path to each leaf, such as ``observation["camera"]`` or ``extras["cost"]``.
    """

    def __init__(self, observation: Tree, extras: Tree = ()):
        self.observation, self.extras = Nest(observation), Nest(extras)
        self.leaves = [*self.observation.leaves, *self.extras.leaves]
        self.paths = [f"observation{path}" for path in self.observation.paths]
        self.paths += [f"extras{path}" for path in self.extras.paths]

    def unflatten(self, leaves: Sequence[Tree]) -> tuple[Tree, Tree]:
        """Returns the observation and the extras with these leaves."""
        if not self.extras.leaves:
            return self.observation.unflatten(leaves), ()
        number = len(self.observation.leaves)
        return self.observation.unflatten(leaves), self.extras.unflatten(leaves[number:])


def _rebuild(like: tuple | list, values: list[Tree]) -> Tree:
    if hasattr(like, "_fields"):
        return type(like)(*values)
    return values if isinstance(like, list) else tuple(values)


def _fill(tree: Tree, leaves: Sequence[Tree]) -> Tree:
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, dict):
        return {k: _fill(v, leaves) for k, v in tree.items()}
    return _rebuild(tree, [_fill(v, leaves) for v in tree])


def _collect(tree: Tree, value: Tree, where: str, path: str, found: list[Tree]) -> None:
    if isinstance(tree, int):
        found.append(value)
    elif isinstance(tree, dict):
        if not isinstance(value, Mapping) or value.keys() != tree.keys():
            came = sorted(value) if isinstance(value, Mapping) else type(value).__name__
            raise TypeError(f"{where}{path}: must be a dict with keys {list(tree)}; got {came}.")
        for key, child in tree.items():
            _collect(child, value[key], where, f"{path}[{key!r}]", found)
    else:
        if not isinstance(value, tuple | list) or len(value) != len(tree):
            came = f"{type(value).__name__}" + (
                f" of {len(value)}" if isinstance(value, tuple | list) else ""
            )
            raise TypeError(f"{where}{path}: must be a tuple of {len(tree)} parts; got {came}.")
        for i, child in enumerate(tree):
            _collect(child, value[i], where, f"{path}[{i}]", found)
