"""EnvPool's C++ environments as a backend.

There are two ways to read EnvPool's data. The *public* Python layer builds a nested dict at each
call and hides the step types, so they must be computed again; this takes longer than stepping eight
CartPoles. The *direct* way calls the two bound methods below that layer and reads fields by
position. These methods are not a public API. So ``_direct_works`` checks at construction that
methods and fields are as expected; if they are not, the backend uses the public layer.

The backend corrects these results of EnvPool 0.8.4 and 1.2:

* The discount is 0 at every end of an episode. At a time limit it becomes 1.
* If an environment ends by itself in the step of its limit, EnvPool says that it is truncated.
  Where `natural_end` tells such an end, it becomes a termination.
* If an Atari game is over at the step of the time limit, the end is a termination. If the game is
  not over, the end is a truncation, even if EnvPool does not mark it as one.
* With ``episodic_life``, EnvPool applies the time limit to the frames since the game began, but
  sets the flag from the frames since the last life. Such an end is marked neither as a game over
  nor as truncated; it becomes a truncation.

EnvPool aborts the process on action arrays that are too short and on unknown ids, so the pool
checks both first (``rlstack.envs.backend``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from dm_env import specs

from rlstack.envs.adapters import changed_by_cast, narrow, narrow_spec, too_wide
from rlstack.envs.backend import PoolConfig
from rlstack.envs.cpp.library import load
from rlstack.envs.nest import Nest, StepNest
from rlstack.envs.values import start_of, with_start
from rlstack.imports import versions
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep

_FIRST = int(StepType.FIRST)  # numpy compares with plain ints much faster than with enums
_INFO = "info:"  # the beginning of the names of these fields
_OWN_OPTIONS = ("num_envs", "batch_size", "seed", "num_threads", "env_type", "max_num_players")
_ONE_THREAD_MAX_ENVS = 64
_CORE_FIELDS = ("info:env_id", "elapsed_step", "done", "reward", "discount", "step_type", "trunc")
# Takes observations [B, ...] and rewards [B], and returns which environments have ended, [B].
Ended = Callable[[np.ndarray, np.ndarray], np.ndarray]

_HOLES = {"FrozenLake-v1": (5, 7, 11, 12, 15), "FrozenLake8x8-v1": (19, 29, 35, 41, 42, 46, 49, 52, 54, 59, 63)}  # fmt: skip # noqa: E501


# The option that names entries of EnvPool's info to show as extras; EnvPool does not see it.
EXTRAS = "extras"


class Field(Protocol):
    """EnvPool's description of one array of an observation or action."""

    dtype: np.dtype
    shape: list[int]  # -1 means the number of players
    minimum: Any
    maximum: Any


class CppBackend:
    """An EnvPool pool; see ``rlstack.envs.backend.Backend``.

    ``recv`` returns new arrays, which belong to the caller.
    """

    def __init__(self, name: str, config: PoolConfig, direct: bool = True):
        """Makes the pool.

        Args:
          name: an EnvPool id.
          config: size, wait_num, seed, threads and options for ``envpool.make``. The option
            ``extras`` names entries of EnvPool's info to show in `TimeStep.extras`.
          direct: whether to try the direct way to the data.

        Raises:
          ValueError: EnvPool is missing, does not know the name, or refuses an option.
        """
        self._size, self._wait = config.size, config.wait_num
        options = dict(config.options)
        extras = options.pop(EXTRAS, ())
        self._pool = pool = make(name, dataclasses.replace(config, options=options))
        fields = pool.spec.state_array_spec
        _check_fields(name, fields)
        self._position = {field: i for i, field in enumerate(fields)}
        observed = nested({f: f for f in fields if f.split(":")[0] == "obs"}, "obs")
        self._shown = StepNest(observed, _extras(name, extras, fields))
        shown = [to_spec(f, fields[f]) for f in self._shown.leaves]
        acted = pool.spec.action_array_spec
        self._action = Nest(
            nested({f: f for f in acted if f not in ("env_id", "players.env_id")}, "action")
        )
        act_fields = [acted[f] for f in self._action.leaves]
        action = [to_spec(f, acted[f], True) for f in self._action.leaves]
        observation, extras_spec = self._shown.unflatten(shown)
        self.spec = EnvSpec(observation, self._action.unflatten(action), extras_spec)
        self.action_dtypes = [np.dtype(f.dtype) for f in act_fields]
        self.action_offsets = [int(start_of(spec)) for spec in action]
        self._shifts = [
            (i, int(start)) for i, spec in enumerate(shown) if (start := start_of(spec))
        ]
        self._narrow = [
            (i, narrow(fields[f].dtype), f"CppBackend: {name}: {path}")
            for i, (f, path) in enumerate(zip(self._shown.leaves, self._shown.paths, strict=True))
            if narrow(fields[f].dtype) != fields[f].dtype
        ]
        self._shown_at = [self._position[f] for f in self._shown.leaves]
        bare = self._shown.observation.bare
        self._bare = bare and not self._shown.extras.leaves
        self._action_order = list(acted)
        self._ids = np.arange(self._size, dtype=np.int32)
        self._over_at = self._position.get("info:terminated")
        self._natural_end = natural_end(name, pool.config) if bare else None
        self._lives_at = self._position.get("info:lives", -1)
        self._episodic = bool(pool.config.get("episodic_life")) and self._lives_at >= 0
        self._lives = np.zeros(self._size, np.int32)  # by id, as last received
        self._metrics_at = {f: self._position[f] for f in fields if _is_metric(f, fields[f])}
        self._metrics = {f: np.zeros(self._size) for f in self._metrics_at}  # by id, at a LAST
        self._step_info = config.step_info
        self._firsts_due = 0
        self._unsent: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self.direct = direct and _direct_works(pool, fields, acted)
        (self._done_at, self._trunc_at, self._type_at, self._reward_at, self._discount_at) = (
            self._position[f] for f in ("done", "trunc", "step_type", "reward", "discount")
        )
        self._id_at = self._position["info:env_id"]

    def reset(self) -> None:
        """Starts a new episode in every environment."""
        self._firsts_due = self._size
        self._pool.async_reset()

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        if env_ids is None:
            env_ids = self._ids
        elif self._wait == self._size and (env_ids.size < self._size or self._unsent):
            # A synchronous EnvPool writes rows by their position in the call, so two partial calls
            # would overwrite each other. Join them into one call.
            self._unsent.append((env_ids, actions))
            if sum(ids.size for ids, _ in self._unsent) < self._size:
                return
            env_ids = np.concatenate([ids for ids, _ in self._unsent])
            actions = [np.concatenate(a) for a in zip(*(a for _, a in self._unsent), strict=True)]
            self._unsent = []
        if self.direct:
            if self._action.bare:
                self._pool._send([env_ids, env_ids, actions[0]])
            else:
                self._pool._send(self._in_order(env_ids, actions))
        elif self._action.bare:
            self._pool.send(actions[0], env_ids)
        else:
            named = dict(zip(self._action.leaves, actions, strict=True))
            self._pool.send(nested(named, "", keep_root=True), env_ids)

    def _in_order(self, env_ids: np.ndarray, actions: list[np.ndarray]) -> list[np.ndarray]:
        named = dict(zip(self._action.leaves, actions, strict=True))
        return [named.get(f, env_ids) for f in self._action_order]

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns the rows of ``wait_num`` environments."""
        rows = self._pool._recv() if self.direct else self._public_recv()
        reward, discount, step_type = (
            rows[self._reward_at],
            rows[self._discount_at],
            rows[self._type_at],
        )
        ids = rows[self._id_at]
        if self._firsts_due:
            first = (step_type == _FIRST).nonzero()[0]
            self._firsts_due -= len(first)
            reward[first] = 0.0  # EnvPool may leave any bytes there
        # Most batches have no end of an episode, and searching the bytes is the cheapest test.
        if b"\1" in rows[self._done_at].tobytes():
            truncated = self._truncated(rows, ids)
            if b"\1" in truncated.tobytes():
                discount = np.maximum(discount, truncated)
            done = rows[self._done_at]
            self._firsts_due += int(np.count_nonzero(done))
            for field, i in self._metrics_at.items():
                self._metrics[field][ids[done]] = rows[i][done]
        if self._step_info:
            for field, i in self._metrics_at.items():
                self._metrics[field][ids] = rows[i]
        if self._episodic:
            self._lives[ids] = rows[self._lives_at]
        if self._bare and not self._narrow and not self._shifts:
            return ids, TimeStep(step_type, reward, discount, rows[self._shown_at[0]])
        leaves = [rows[i] for i in self._shown_at]
        for i, shift in self._shifts:
            leaves[i] = leaves[i] - leaves[i].dtype.type(shift)
        for i, dtype, where in self._narrow:
            wide, leaves[i] = leaves[i], leaves[i].astype(dtype)
            if changed_by_cast(wide, leaves[i]):
                raise too_wide(where, dtype, wide)
        return ids, TimeStep(step_type, reward, discount, *self._shown.unflatten(leaves))

    def _truncated(self, rows: list[np.ndarray], ids: np.ndarray) -> np.ndarray:
        """Returns which rows end an episode by truncation, ``[B]`` bool."""
        cut = rows[self._trunc_at]
        if self._over_at is None:
            if not self._natural_end or not cut.any():
                return cut
            seen, reward = rows[self._shown_at[0]], rows[self._reward_at]
            return cut & ~self._natural_end(seen, reward)
        not_over = rows[self._done_at] & (rows[self._over_at] == 0)
        if not self._episodic:
            return not_over
        # If the number of lives has not changed, the end is neither a lost life nor a game over.
        return not_over & (cut | (rows[self._lives_at] >= self._lives[ids]))

    def _public_recv(self) -> list:
        """Returns the same fields from EnvPool's public layer; None for unused fields."""
        observation, reward, terminated, truncated, info = self._pool.recv(reset=False)
        done = terminated | truncated
        elapsed = info["elapsed_step"]
        step_type = np.where(done, StepType.LAST, StepType.MID).astype(np.int32)
        step_type[elapsed == 0] = StepType.FIRST
        found = {
            "info:env_id": info["env_id"],
            "elapsed_step": elapsed,
            "done": done,
            "trunc": truncated,
            "reward": reward,
            "discount": (~done).astype(np.float32),
            "step_type": step_type,
            "info:lives": info.get("lives"),
            "info:terminated": info.get("terminated"),
        }
        nest = self._shown.observation
        leaves = nest.flatten(observation, "EnvPool's observation")
        found.update(zip(nest.leaves, leaves, strict=True))
        for field in {*self._metrics_at, *self._shown.extras.leaves}:
            keys = field.removeprefix(_INFO).split(".")
            found[field] = functools.reduce(dict.__getitem__, keys, info)
        return [found.get(field) for field in self._position]

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the numbers in EnvPool's ``info`` at the last LAST of these environments."""
        found = {field: values[env_ids] for field, values in self._metrics.items()}
        finite = {field: values[np.isfinite(values)] for field, values in found.items()}
        return {field.removeprefix(_INFO): x for field, x in finite.items() if len(x)}

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns the finite numbers in EnvPool's ``info`` at the last step of each of these."""
        found = {f.removeprefix(_INFO): x[env_ids].tolist() for f, x in self._metrics.items()}
        rows = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
        finite = [{f: x for f, x in row.items() if math.isfinite(x)} for row in rows]
        return finite or [{} for _ in env_ids]

    def stats(self) -> dict[str, int]:
        """Returns an empty dict: EnvPool has no counters."""
        return {}

    def close(self) -> None:
        """Drops the pool object; EnvPool ends its threads in the object's destructor."""
        self._pool = None
        self._unsent = []


def _extras(name: str, chosen: Any, fields: Mapping[str, Field]) -> PyTree:
    """Returns the fields to show as extras, by the names of their entries of EnvPool's info.

    Raises:
      ValueError: EnvPool has no entry of such a name, or it is not about the environment alone.
    """
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    known = [f.removeprefix(_INFO) for f in fields if f.startswith(_INFO)]
    usable = [entry for entry in known if not entry.endswith("env_id") and "." not in entry]
    if unknown := [entry for entry in names if entry not in usable]:
        raise ValueError(
            f"CppBackend: {name}: the option extras must name entries of EnvPool's info, any of "
            f"{', '.join(usable) or 'none'}; got {', '.join(map(str, unknown))}."
        )
    return {entry: f"{_INFO}{entry}" for entry in names}


def _check_fields(name: str, fields: dict[str, Field]) -> None:
    if missing := [f for f in _CORE_FIELDS if f not in fields]:
        raise ValueError(
            f"CppBackend: {name} must have the fields {_CORE_FIELDS}; {missing} are missing. "
            "Use EnvPool 0.8.4 or 1.2."
        )


def make(name: str, config: PoolConfig) -> Any:
    """Makes EnvPool's object; arguments and errors are those of `CppBackend`."""
    envpool = load()
    if envpool is None:
        raise ValueError(
            f"CppBackend: {name!r} needs EnvPool, which is not installed. Install it, or use "
            "type='process'."
        )
    if wrong := versions.unknown("envpool"):
        raise ValueError(f"CppBackend: {name}: {wrong}")
    if clash := sorted(set(config.options) & set(_OWN_OPTIONS)):
        raise ValueError(
            f"CppBackend: options must not contain {clash}, which the pool sets itself."
        )
    try:
        threads = config.num_workers or _default_threads(envpool, name, config.size)
        return envpool.make(
            name,
            env_type="gymnasium",
            num_envs=config.size,
            batch_size=config.wait_num,
            seed=config.seed,
            num_threads=min(threads, config.size),
            **config.options,
        )
    except (TypeError, AssertionError, KeyError) as error:
        raise ValueError(
            f"CppBackend: EnvPool must have {name!r} with the options {config.options}; it raised: "
            f"{error}"
        ) from error


def _default_threads(envpool: Any, name: str, size: int) -> int:
    """Returns 1 if waking a second thread costs more than it saves, else 0 (one per core)."""
    family = type(envpool.make_spec(name)).__mro__[1].__module__
    tiny = "classic_control" in family or "toy_text" in family
    return 1 if tiny and size <= _ONE_THREAD_MAX_ENVS else 0


def _direct_works(pool: Any, fields: dict[str, Field], acted: dict[str, Field]) -> bool:
    """Returns whether the bound methods exist and have the fields that the spec lists."""
    if not all(callable(getattr(pool, m, None)) for m in ("_send", "_recv", "_reset")):
        return False
    state_keys, action_keys = (
        getattr(pool, "_state_keys", None),
        getattr(pool, "_action_keys", None),
    )
    return (
        state_keys is not None
        and action_keys is not None
        and list(state_keys) == list(fields)
        and list(action_keys) == list(acted)
        and list(acted)[:2] == ["env_id", "players.env_id"]
    )


def nested(named: dict[str, PyTree], root: str, keep_root: bool = False) -> PyTree:
    """Nests ``{"obs:a.b": x}`` as ``{"a": {"b": x}}``, and ``{"obs": x}`` as ``x``."""
    if not keep_root and list(named) == [root]:
        return named[root]
    tree: dict[str, PyTree] = {}
    for name, value in named.items():
        *parents, last = name.replace(":", ".").split(".")[0 if keep_root else 1 :] or [name]
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def _is_discrete(field: Field) -> bool:
    """Returns whether a field is one integer in a known range."""
    whole = np.issubdtype(np.dtype(field.dtype), np.integer)
    known = np.ndim(field.minimum) == 0 and -(2**30) < field.minimum <= field.maximum < 2**30
    return bool(whole and known and list(field.shape) in ([], [-1]))


def _is_metric(name: str, field: Field) -> bool:
    """Returns whether a field of EnvPool's ``info`` is one number about an environment."""
    one = list(field.shape) in ([], [-1]) and np.dtype(field.dtype).kind in "biuf"
    return name.startswith(_INFO) and not name.endswith("env_id") and one


def to_spec(name: str, field: Field, acting: bool = False) -> specs.Array:
    """Returns EnvPool's field as a dm_env spec of one environment, with dtypes of 32 bits."""
    dtype, shape = narrow(field.dtype), tuple(n for n in field.shape if n != -1)
    if _is_discrete(field):
        made = specs.DiscreteArray(int(field.maximum - field.minimum) + 1, dtype, name)
        return with_start(made, int(field.minimum))
    if np.issubdtype(dtype, np.floating):
        low, high = np.asarray(field.minimum, np.float64), np.asarray(field.maximum, np.float64)
        # EnvPool reports unset bounds as the type's limits, the lower one as its smallest
        # *positive* number.
        low = np.where((low > 0) & (low < 1e-37), -np.inf, low)
        wide = specs.BoundedArray(shape, np.float64, low, high, name)
        return narrow_spec(wide, name)
    if dtype == np.bool_ and not acting:
        return specs.BoundedArray(shape, dtype, False, True, name)
    spec = specs.BoundedArray(shape, field.dtype, field.minimum, field.maximum, name)
    return narrow_spec(spec, name)


def natural_end(name: str, config: Mapping[str, Any]) -> Ended | None:
    """Returns what tells the ends of an environment; None if only its limit is known.

    The observation or the reward of the last step shows an end, such as a fallen pole. The
    conditions are those of Gymnasium's environments, which EnvPool follows.

    Args:
      name: the environment's id in EnvPool.
      config: the environment's options, including defaults.
    """
    kind = name.rpartition("-v")[0]
    if kind in ("CartPole", "phys2d/CartPole"):
        return lambda seen, _: (abs(seen[:, 0]) > 2.4) | (abs(seen[:, 2]) > np.radians(12))
    if kind in ("MountainCar", "MountainCarContinuous"):
        goal = 0.5 if kind == "MountainCar" else 0.45
        return lambda seen, _: (seen[:, 0] >= goal) & (seen[:, 1] >= 0)
    if kind == "Acrobot":
        return lambda seen, _: -seen[:, 0] - _cos_of_sum(seen[:, 0:4]) > 1
    if name in _HOLES:
        return lambda seen, _: np.isin(seen.reshape(len(seen)), _HOLES[name])
    if kind == "Taxi":
        return lambda _, reward: reward == 20
    if kind in ("LunarLander", "LunarLanderContinuous"):
        return lambda _, reward: abs(reward) == 100
    return _of_mujoco(kind, config)


def _of_mujoco(kind: str, config: Mapping[str, Any]) -> Ended | None:
    if config.get("frame_stack", 1) != 1:
        return None
    if kind == "InvertedPendulum":
        return lambda seen, _: _outside(seen[:, 1], config, "z")
    if kind == "InvertedDoublePendulum":  # poles of 0.6 m; their sines come before their cosines
        most = config["healthy_z_max"]
        order = [3, 1, 4, 2]
        return lambda seen, _: 0.6 * (seen[:, 3] + _cos_of_sum(seen[:, order])) <= most
    if not config.get("terminate_when_unhealthy") or not config.get(
        "exclude_current_positions_from_observation"
    ):
        return None
    if kind == "Hopper":
        low = config["healthy_z_min"]
        return lambda seen, _: (seen[:, 0] <= low) | _outside(seen[:, 1], config, "angle")
    if kind == "Walker2d":
        return lambda seen, _: (
            _outside(seen[:, 0], config, "z") | _outside(seen[:, 1], config, "angle")
        )
    if kind in ("Ant", "Humanoid"):
        return lambda seen, _: _outside(seen[:, 0], config, "z")
    return None


def _outside(value: np.ndarray, config: Mapping[str, Any], what: str) -> np.ndarray:
    """Returns where a value is outside of the bounds in which a robot is healthy."""
    return ~((config[f"healthy_{what}_min"] <= value) & (value <= config[f"healthy_{what}_max"]))


def _cos_of_sum(parts: np.ndarray) -> np.ndarray:
    """Returns cos(a + b) of cos a, sin a, cos b and sin b, [B, 4]."""
    return parts[:, 0] * parts[:, 2] - parts[:, 1] * parts[:, 3]
