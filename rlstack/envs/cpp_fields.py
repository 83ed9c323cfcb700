"""EnvPool's flat, named fields as nests and dm_env specs."""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs


def nested(named: dict[str, Any], root: str, keep_root: bool = False) -> Any:
    """Nests ``{"obs:a.b": x}`` as ``{"a": {"b": x}}``, and ``{"obs": x}`` as ``x``."""
    if not keep_root and list(named) == [root]:
        return named[root]
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *parents, last = name.replace(":", ".").split(".")[0 if keep_root else 1 :] or [name]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def is_discrete(field: Any) -> bool:
    """Whether a field is one integer out of a known range."""
    whole = np.issubdtype(np.dtype(field.dtype), np.integer)
    known = np.ndim(field.minimum) == 0 and -(2**30) < field.minimum <= field.maximum < 2**30
    return bool(whole and known and list(field.shape) in ([], [-1]))


def offset(field: Any) -> int:
    """Returns EnvPool's number for what the spec calls 0."""
    return int(field.minimum) if is_discrete(field) else 0


def to_spec(name: str, field: Any, acting: bool = False) -> specs.Array:
    """Returns EnvPool's field as a dm_env spec of one environment, with float64 as float32."""
    dtype, shape = np.dtype(field.dtype), tuple(n for n in field.shape if n != -1)
    if is_discrete(field):
        return specs.DiscreteArray(int(field.maximum - field.minimum) + 1, dtype, name)
    if dtype == np.float64:
        dtype = np.dtype(np.float32)
    if np.issubdtype(dtype, np.floating):
        low, high = np.asarray(field.minimum, np.float64), np.asarray(field.maximum, np.float64)
        # Unset bounds come as the type's limits, the lower one as its smallest *positive* number.
        low = np.where((low < -3e38) | ((low > 0) & (low < 1e-37)), -np.inf, low)
        high = np.where(high > 3e38, np.inf, high)
        if np.isinf(low).all() and np.isinf(high).all():
            return specs.Array(shape, dtype, name)
        return specs.BoundedArray(shape, dtype, low.astype(dtype), high.astype(dtype), name)
    if dtype == np.bool_ and not acting:
        return specs.BoundedArray(shape, dtype, False, True, name)
    return specs.BoundedArray(shape, dtype, field.minimum, field.maximum, name)
