"""EnvPool's C++ environments as a backend. The only file that imports EnvPool.

Two ways lead to EnvPool's data. Its public Python layer builds a nested dict at each call and hides
the step types, which must then be worked out again: that costs more than stepping eight CartPoles.
The *direct* way calls the two bound methods beneath it and picks the fields by positions worked out
once. It is not a public API: ``_direct_works`` looks at construction whether the methods and fields
are as expected, and the public way is used where they are not.

What is put right here (EnvPool 0.8.4 and 1.2):

* the discount is 0 at every end; at a time limit it becomes 1;
* an Atari game over on the very step of the time limit is a termination, and an end without a game
  over is a truncation, whether EnvPool flags it or not;
* with ``episodic_life`` the time limit counts frames since the game began but is reported by frames
  since the last life, so such an end comes as neither game over nor truncated: it is a truncation.

EnvPool ends the process on short action arrays and wild ids, so ``rlstack.envs.base`` checks first.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from rlstack.envs.base import PoolConfig
from rlstack.envs.cpp_fields import is_discrete, nested, offset, to_spec
from rlstack.envs.nest import Nest
from rlstack.types import EnvSpec, StepType, TimeStep

_OWN_OPTIONS = ("num_envs", "batch_size", "seed", "num_threads", "env_type", "max_num_players")
_FEW_TINY = 64
_CORE_FIELDS = ("info:env_id", "elapsed_step", "done", "reward", "discount", "step_type", "trunc")


def load() -> Any | None:
    """Returns the EnvPool module, or None where it is not installed."""
    with contextlib.suppress(ImportError):
        # Older EnvPools import the old gym, which prints a notice about itself on stderr.
        from gym_notices import notices

        notices.notices.clear()
    try:
        import envpool
    except ModuleNotFoundError as error:
        if error.name == "envpool":
            return None
        raise
    return envpool


def names() -> list[str]:
    """Returns the names of the environments that EnvPool has here."""
    envpool = load()
    return [] if envpool is None else list(envpool.list_all_envs())


class CppBackend:
    """One EnvPool pool; see ``rlstack.envs.base.Backend``.

    Returned arrays are fresh at each step and belong to the caller.
    """

    def __init__(self, name: str, config: PoolConfig, direct: bool = True):
        """Makes the pool.

        Args:
          name: an EnvPool id.
          config: size, wait_num, seed, threads and options for ``envpool.make``.
          direct: whether to try the fast way to the data.

        Raises:
          ValueError: EnvPool is missing, does not know the name, or refuses an option.
        """
        self._size, self._wait = config.size, config.wait_num
        self._pool = pool = _make(name, config)
        fields = pool.spec.state_array_spec
        if missing := [f for f in _CORE_FIELDS if f not in fields]:
            raise ValueError(
                f"CppBackend: {name} must give the fields {_CORE_FIELDS}; no {missing}"
            )
        self._position = {field: i for i, field in enumerate(fields)}
        self._observed = Nest(nested({f: f for f in fields if f.split(":")[0] == "obs"}, "obs"))
        obs_fields = [fields[f] for f in self._observed.leaves]
        observation = [
            to_spec(f, leaf) for f, leaf in zip(self._observed.leaves, obs_fields, strict=True)
        ]
        acted = pool.spec.action_array_spec
        self._acted = Nest(
            nested({f: f for f in acted if f not in ("env_id", "players.env_id")}, "action")
        )
        act_fields = [acted[f] for f in self._acted.leaves]
        action = [
            to_spec(f, leaf, True) for f, leaf in zip(self._acted.leaves, act_fields, strict=True)
        ]
        self.spec = EnvSpec(self._observed.unflatten(observation), self._acted.unflatten(action))
        self.action_dtypes = [np.dtype(f.dtype) for f in act_fields]
        self.action_offsets = [offset(f) for f in act_fields]
        self._shifts = [
            (i, offset(f)) for i, f in enumerate(obs_fields) if is_discrete(f) and offset(f)
        ]
        self._narrow = [i for i, f in enumerate(obs_fields) if f.dtype == np.float64]
        self._obs_at = [self._position[f] for f in self._observed.leaves]
        self._action_order = list(acted)
        self._ids = np.arange(self._size, dtype=np.int32)
        self._over_at = self._position.get("info:terminated")
        self._lives_at = self._position.get("info:lives", -1)
        self._episodic = bool(pool.config.get("episodic_life")) and self._lives_at >= 0
        self._lives = np.zeros(self._size, np.int32)  # as last received, by id
        self._firsts_due = 0
        self._waiting: list[tuple[np.ndarray, list[np.ndarray]]] = []
        self.direct = direct and _direct_works(pool, fields, acted)
        (self._done_at, self._trunc_at, self._type_at, self._reward_at, self._discount_at) = (
            self._position[f] for f in ("done", "trunc", "step_type", "reward", "discount")
        )
        self._id_at = self._position["info:env_id"]

    def reset(self) -> None:
        """Starts a new episode everywhere."""
        self._firsts_due = self._size
        self._pool.async_reset()

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps some or (None) all environments."""
        if env_ids is None:
            env_ids = self._ids
        elif self._wait == self._size and (env_ids.size < self._size or self._waiting):
            # A pool that waits for everybody writes rows where the *call* says, so that two
            # partial calls would overwrite each other: gather them into one.
            self._waiting.append((env_ids, actions))
            if sum(ids.size for ids, _ in self._waiting) < self._size:
                return
            env_ids = np.concatenate([ids for ids, _ in self._waiting])
            actions = [np.concatenate(a) for a in zip(*(a for _, a in self._waiting), strict=True)]
            self._waiting = []
        if self.direct:
            if self._acted.bare:
                self._pool._send([env_ids, env_ids, actions[0]])
            else:
                self._pool._send(self._in_order(env_ids, actions))
        elif self._acted.bare:
            self._pool.send(actions[0], env_ids)
        else:
            named = dict(zip(self._acted.leaves, actions, strict=True))
            self._pool.send(nested(named, "", keep_root=True), env_ids)

    def _in_order(self, env_ids: np.ndarray, actions: list[np.ndarray]) -> list[np.ndarray]:
        named = dict(zip(self._acted.leaves, actions, strict=True))
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
            moved = step_type.astype(np.bool_)  # everywhere but at FIRST, which is 0
            self._firsts_due -= self._wait - int(np.count_nonzero(moved))
            reward = reward * moved
        # Ends are rare, so the repair waits for one; a search for a byte is the cheapest test.
        if b"\1" in rows[self._done_at].tobytes():
            truncated = self._truncated(rows, ids)
            if b"\1" in truncated.tobytes():
                discount = np.maximum(discount, truncated)
            self._firsts_due += int(np.count_nonzero(rows[self._done_at]))
        if self._episodic:
            self._lives[ids] = rows[self._lives_at]
        if self._observed.bare and not self._narrow and not self._shifts:
            return ids, TimeStep(step_type, reward, discount, rows[self._obs_at[0]])
        leaves = [rows[i] for i in self._obs_at]
        for i in self._narrow:
            leaves[i] = leaves[i].astype(np.float32)
        for i, shift in self._shifts:
            leaves[i] = leaves[i] - leaves[i].dtype.type(shift)
        return ids, TimeStep(step_type, reward, discount, self._observed.unflatten(leaves))

    def _truncated(self, rows: list, ids: np.ndarray) -> np.ndarray:
        """Where an episode was cut off by its time limit instead of coming to an end."""
        cut = rows[self._trunc_at]
        if self._over_at is None:
            return cut
        not_over = rows[self._done_at] & (rows[self._over_at] == 0)
        if not self._episodic:
            return not_over
        # An end with lives as before is neither a lost life nor a lost game.
        return not_over & (cut | (rows[self._lives_at] >= self._lives[ids]))

    def _public_recv(self) -> list:
        """The same fields by EnvPool's public interface; what is not needed stays None."""
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
        leaves = self._observed.flatten(observation, "EnvPool's observation")
        found.update(zip(self._observed.leaves, leaves, strict=True))
        return [found.get(field) for field in self._position]

    def stats(self) -> dict[str, int]:
        """Returns no counters: EnvPool keeps none."""
        return {}

    def close(self) -> None:
        """Lets EnvPool end its threads, which it does when the pool object goes."""
        self._pool = None
        self._waiting = []


def _make(name: str, config: PoolConfig) -> Any:
    envpool = load()
    if envpool is None:
        raise ValueError(
            f"CppBackend: {name!r} needs EnvPool, which is not installed. Install it "
            "or use type='process'."
        )
    if clash := sorted(set(config.options) & set(_OWN_OPTIONS)):
        raise ValueError(f"CppBackend: options must not hold {clash}; the pool sets them.")
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
            f"CppBackend: EnvPool must know {name!r} and take its options {config.options}; "
            f"it says: {error}"
        ) from error


def _default_threads(envpool: Any, name: str, size: int) -> int:
    """One thread where waking a second costs more than its environments; 0 is one for each core."""
    family = type(envpool.make_spec(name)).__mro__[1].__module__
    tiny = "classic_control" in family or "toy_text" in family
    return 1 if tiny and size <= _FEW_TINY else 0


def _direct_works(pool: Any, fields: dict[str, Any], acted: dict[str, Any]) -> bool:
    """Whether the bound methods are there and carry the fields that the spec announces."""
    if not all(callable(getattr(pool, m, None)) for m in ("_send", "_recv", "_reset")):
        return False
    announced = (getattr(pool, "_state_keys", None), getattr(pool, "_action_keys", None))
    return (
        announced[0] is not None
        and announced[1] is not None
        and list(announced[0]) == list(fields)
        and list(announced[1]) == list(acted)
        and list(acted)[:2] == ["env_id", "players.env_id"]
    )
