"""The message ROWS: the newest steps of several environments, as columns of fixed size."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from dm_env import specs

from rlstack.entity.inverted.wire import WireError
from rlstack.entity.padded import PaddedCodec
from rlstack.entity.spaces import GLOBAL, ActionSpace, ObsSpace
from rlstack.envs.auto_reset import FIRST, LAST
from rlstack.envs.nest import Nest


class Rows(NamedTuple):
    """The steps of some environments; row i belongs to environment ``ids[i]``."""

    ids: np.ndarray  # [n] int32
    step_type: np.ndarray  # [n] int32
    reward: np.ndarray  # [n] float32
    discount: np.ndarray  # [n] float32
    leaves: list[np.ndarray]  # leaves of the observation, each [n, ...]

    def take(self, rows: np.ndarray | slice) -> Rows:
        """Returns some of the rows."""
        return Rows(
            self.ids[rows],
            self.step_type[rows],
            self.reward[rows],
            self.discount[rows],
            [leaf[rows] for leaf in self.leaves],
        )


def joined(parts: list[Rows]) -> Rows:
    """Returns the rows of all parts."""
    if len(parts) == 1:
        return parts[0]
    ids, step_type, reward, discount = (
        np.concatenate([part[i] for part in parts]) for i in range(4)
    )
    leaves = [np.concatenate(x) for x in zip(*(part.leaves for part in parts), strict=True)]
    return Rows(ids, step_type, reward, discount, leaves)


class _Column(NamedTuple):
    entry: str  # entry of the observation, or field of TimeStep
    name: str  # the entity type or action type
    dtype: str
    shape: tuple[int, ...]  # shape of one row
    bounds: tuple[int, int] = (0, 0)  # limits of integer values

    @property
    def size(self) -> int:
        """The number of values in one row."""
        return int(np.prod(self.shape))


_INT, _REAL, _FLAG = "<i4", "<f4", "|b1"


class RowsLayout:
    """Reads the columns of ROWS without a copy, and checks them.

    Attributes:
      observation: the structure and specs of one observation.
      action: the structure and specs of one action.
      row_size: bytes of one row.
      num_choices: number of values in the actions of one environment.
    """

    def __init__(self, obs_space: ObsSpace, action_space: ActionSpace, name: str):
        """Computes the layout.

        Raises:
          ValueError: the spaces have no action type, or one that no entity can take.
        """
        codec = PaddedCodec(obs_space, action_space, name)
        self.observation = Nest(codec.observation_spec)
        self.action = Nest(codec.action_spec)
        self.num_choices = sum(kind.capacity for kind in action_space.values())
        # The leaves of actions are sorted by name; messages have them in the order of the space.
        by_name = sorted(action_space)
        self._action_leaves = [by_name.index(action) for action in action_space]
        self._columns = _columns(codec.observation_spec, obs_space, action_space)
        sizes = [column.size * np.dtype(column.dtype).itemsize for column in self._columns]
        self.row_size = sum(sizes)
        self._starts = np.cumsum([0, *sizes]).tolist()[:-1]
        place = {(column.entry, column.name): i for i, column in enumerate(self._columns)}
        self._leaves = self.observation.flatten(
            {
                entry: {leaf: place[entry, leaf] for leaf in leaves}
                for entry, leaves in codec.observation_spec.items()
            },
            name,
        )
        self._reward, self._discount = place["reward", ""], place["discount", ""]
        flags = [i for i, column in enumerate(self._columns) if column.dtype == _FLAG]
        self._flags_from = self._starts[flags[0]]
        self._masks = [
            (place["action_mask", action], kind.capacity) for action, kind in action_space.items()
        ]
        self._limits: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by number of rows

    def write_actions(self, actions: list[np.ndarray]) -> bytes:
        """Returns the actions in STEP, of the leaves of the action spec, ``[n, capacity]`` each."""
        in_order = [actions[i] for i in self._action_leaves]
        both = in_order[0] if len(in_order) == 1 else np.concatenate(in_order, axis=1)
        return np.ascontiguousarray(both, _INT).tobytes()

    def read(self, data: np.ndarray, ids: np.ndarray, first: np.ndarray) -> Rows:
        """Returns rows that share the memory of ``data``.

        Args:
          data: uint8, the columns, aligned to 4 bytes.
          ids: [n] the environments.
          first: bool [n], where an episode must begin.

        Raises:
          WireError: a value is not possible.
        """
        n = len(ids)
        self._check_bytes(data, n)
        arrays: list[np.ndarray] = [
            np.ndarray((n, *column.shape), column.dtype, data, n * start)
            for column, start in zip(self._columns, self._starts, strict=True)
        ]
        step_type, reward, discount = arrays[0], arrays[self._reward], arrays[self._discount]
        if not np.array_equal(step_type == FIRST, first):
            raise WireError(
                "ROWS: a first step must come after a reset and after the end of an episode, and "
                "nowhere else"
            )
        if first.any() and reward[first].any():
            raise WireError("ROWS: the reward of a first step must be 0")
        if not np.array_equal(discount == 1, ~((discount == 0) & (step_type == LAST))):
            raise WireError("ROWS: a discount must be 1, or 0 at the end of an episode")
        for i, capacity in self._masks:
            if not arrays[i].reshape(n * capacity, -1).any(axis=1).all():
                name = self._columns[i].name
                raise WireError(f"ROWS: action {name!r}: each actor must have a legal choice")
        return Rows(ids, step_type, reward, discount, [arrays[i] for i in self._leaves])

    def _check_bytes(self, data: np.ndarray, n: int) -> None:
        """Checks that integers are within their bounds, and flags 0 or 1."""
        if n not in self._limits:
            ints = [column for column in self._columns if column.dtype == _INT]
            sizes = [n * column.size for column in ints]
            low, high = (np.repeat([c.bounds[i] for c in ints], sizes) for i in range(2))
            self._limits[n] = low.astype(np.int32), high.astype(np.int32)
        low, high = self._limits[n]
        values: np.ndarray = np.ndarray((len(low),), _INT, data)
        wrong = (values < low) | (values > high)
        if wrong.any():
            i = int(wrong.argmax())
            raise WireError(
                "ROWS: a step type, number of entities or actor must be in "
                f"{low[i]}..{high[i]}; got {values[i]}"
            )
        flag = data[n * self._flags_from :].max(initial=0)
        if flag > 1:
            raise WireError(f"ROWS: a flag must be 0 or 1; got {flag}")


def _columns(
    spec: dict[str, dict[str, specs.Array]], obs_space: ObsSpace, action_space: ActionSpace
) -> list[_Column]:
    """Returns the columns in the order of the message: integers, real numbers, flags."""
    types, actions = list(obs_space.entities), list(action_space)

    def of(entry: str, names: list[str], dtype: str) -> list[_Column]:
        leaves = [(name, spec[entry][name]) for name in names if name in spec[entry]]
        return [
            _Column(
                entry,
                name,
                dtype,
                tuple(leaf.shape),
                (int(leaf.minimum), int(leaf.maximum))
                if isinstance(leaf, specs.BoundedArray)
                else (0, 0),
            )
            for name, leaf in leaves
        ]

    return [
        _Column("step_type", "", _INT, (), (FIRST, LAST)),
        *of("count", types, _INT),
        *of("actors", actions, _INT),
        _Column("reward", "", _REAL, ()),
        _Column("discount", "", _REAL, ()),
        *of("features", [*types, GLOBAL], _REAL),
        *of("visible", types, _FLAG),
        *of("action_mask", actions, _FLAG),
    ]
