"""EnvPool's games of several players, as rows of a pool.

EnvPool (1.2 and newer) steps whole games, and gives arrays of their players. Here row ``P i + j``
of a pool is player j of game i. There are two kinds of games:

* All players act in every step: MarlGrid, and the intersection of highway. A player that is done
  before its game is over is LAST then, with discount 0, and FIRST until the next game.
* One player acts in a step: board and card games. EnvPool gives its number and its legal actions
  (``ConnectFour-v1``, ``Go9x9-v1``, ``LeducHoldem-v1``). A player observes a dict with the entries
  ``observation`` and ``action_mask``. A player that waits has the first action as the only legal
  one, and it is ignored, as in a synchronous pool of `rlstack.envs.seats.turns`.

Games have the options of `rlstack.envs.seats.showing`, but ``critic_state`` is not ``game``,
because EnvPool shows no state. The option ``extras`` names entries of EnvPool's info to show in
`TimeStep.extras`: those of players are each seat's own, and all seats see any other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from dm_env import specs

from rlstack.checks import EnvError
from rlstack.envs.adapters import changed_by_cast, too_wide
from rlstack.envs.backend import PoolConfig
from rlstack.envs.cpp import backend, library
from rlstack.envs.seats.showing import SHOWN
from rlstack.envs.values import start_of
from rlstack.specs import ACTION_MASK, CRITIC_STATE, SEAT
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep

_INFO, _PLAYERS = "info:", "players."
_ENV_IDS, _PLAYERS_ENV_IDS = "env_id", "players.env_id"  # EnvPool's names of what all actions have


class CppGames:
    """A pool of EnvPool's games; see ``rlstack.envs.backend.Backend``.

    Game i has the seed ``config.seed + i``.
    """

    def __init__(self, name: str, config: PoolConfig):
        """Makes the pool.

        Args:
          name: an EnvPool id of a game of several players.
          config: the pool's options, as for `rlstack.envs.cpp.backend.CppBackend`.

        Raises:
          EnvError: the pool is not synchronous.
          ValueError: EnvPool refuses an option, ``critic_state`` is not none or joined, or a player
            observes or does several things.
        """
        self._name, self._rows = name, config.size
        options = dict(config.options)
        shown = {option: options.pop(option, default) for option, default in SHOWN.items()}
        chosen = options.pop(backend.EXTRAS, ())
        self._seat_index, self._joined = shown["seat_index"], shown["critic_state"] == "joined"
        if shown["critic_state"] not in ("none", "joined"):
            raise ValueError(
                f"EnvPool: {name}: critic_state must be none or joined, because EnvPool shows no "
                f"state of a game; got {shown['critic_state']!r}."
            )
        if config.wait_num != config.size:
            raise EnvError(
                f"EnvPool: {name}: all seats of a game step together, so a batch must have all "
                f"{config.size} rows; got wait_num={config.wait_num}. Use wait_num 0."
            )
        self._seats = library.seats(name, options)
        # A pool that is made for its specs may have fewer rows than a game has seats.
        self._games = -(-config.size // len(self._seats))
        config = dataclasses.replace(
            config, size=self._games, wait_num=self._games, options=options
        )
        self._pool = pool = backend.make(name, config)
        fields, acted = pool.spec.state_array_spec, pool.spec.action_array_spec
        observed = self._only([f for f in fields if f.partition(":")[0] == "obs"], "observes")
        self._acted = self._only(
            [f for f in acted if f not in (_ENV_IDS, _PLAYERS_ENV_IDS)], "does"
        )
        self._mask_spec = fields.get("info:legal_action_mask")
        self._observed = backend.to_spec("observation", fields[observed])
        action = acted[self._acted]
        self._extras = self._chosen(chosen, fields)
        self.spec = EnvSpec(
            self._observation_spec(),
            backend.to_spec("action", action, True),
            {entry: backend.to_spec(entry, fields[f]) for entry, f in self._extras.items()} or (),
        )
        self.action_dtypes = [np.dtype(action.dtype)]
        self.action_offsets = [int(start_of(self.spec.action))]
        self._ids = np.arange(self._games, dtype=np.int32)
        self._turn: np.ndarray | None = None  # the player that acts next, by game
        self._returns = np.zeros((self._games, len(self._seats)))
        self._left = np.zeros(
            (self._games, len(self._seats)), bool
        )  # players that were done before

    def _only(self, found: list[str], verb: str) -> str:
        if len(found) != 1:
            raise ValueError(
                f"EnvPool: {self._name} must be a game in which a player {verb} one array; it has "
                f"{', '.join(found) or 'none'}."
            )
        return found[0]

    def _chosen(self, chosen: Any, fields: Mapping[str, Any]) -> dict[str, str]:
        """Returns the fields to show as extras, by the names of their entries.

        Raises:
          ValueError: EnvPool has no entry of such a name.
        """
        names = [chosen] if isinstance(chosen, str) else list(chosen)
        known = {
            field.removeprefix(_INFO).removeprefix(_PLAYERS): field
            for field in fields
            if field.startswith(_INFO) and not field.endswith(_ENV_IDS)
        }
        if unknown := [entry for entry in names if entry not in known]:
            raise ValueError(
                f"EnvPool: {self._name}: the option extras must name entries of EnvPool's info, "
                f"any of {', '.join(known) or 'none'}; got {', '.join(map(str, unknown))}."
            )
        return {entry: known[entry] for entry in names}

    def _observation_spec(self) -> PyTree:
        more: dict[str, PyTree] = {}
        if self._mask_spec is not None:
            shape = tuple(self._mask_spec.shape)
            more[ACTION_MASK] = specs.BoundedArray(shape, np.int8, 0, 1, ACTION_MASK)
        if self._seat_index:
            more[SEAT] = specs.DiscreteArray(len(self._seats), np.int32, SEAT)
        if self._joined:
            more[CRITIC_STATE] = {str(i): self._observed for i in range(len(self._seats))}
        return {"observation": self._observed, **more} if more else self._observed

    def reset(self) -> None:
        """Starts a new game everywhere.

        Raises:
          EnvError: the rows are no whole games.
        """
        number = len(self._seats)
        if self._rows % number:
            raise EnvError(
                f"EnvPool: {self._name}: every {number} consecutive environments are the seats of "
                f"one game; got {self._rows} environments. Make their number a multiple of "
                f"{number}."
            )
        self._pool.async_reset()

    def send(self, env_ids: np.ndarray | None, actions: list[np.ndarray]) -> None:
        """Steps all games; ``env_ids`` is None, as in every synchronous pool."""
        del env_ids
        (action,) = actions
        players = np.repeat(self._ids, len(self._seats))
        if self._turn is not None:
            action = action.reshape(self._games, len(self._seats))[self._ids, self._turn]
            players = self._ids
        self._pool.send({self._acted: action, _PLAYERS_ENV_IDS: players}, self._ids)

    def recv(self) -> tuple[np.ndarray, TimeStep]:
        """Returns all rows in order.

        Raises:
          EnvError: a game has fewer players than its name says.
        """
        observation, reward, terminated, truncated, info = self._pool.recv(reset=False)
        if len(reward) != self._rows:
            raise EnvError(
                f"EnvPool: {self._name} must have {len(self._seats)} players in every step; "
                f"{self._games} games have {len(reward)}."
            )
        order = np.argsort(info["env_id"])  # games arrive as they finish
        first = (info["elapsed_step"] == 0)[order, None]
        ended = (terminated | truncated)[order, None]
        gone = np.zeros((self._games, len(self._seats)), bool)
        if "done" in info["players"]:
            gone |= self._by_player(info["players"]["done"], order)
        rewards = np.where(first, 0.0, self._by_player(reward, order)).astype(np.float32)
        self._returns = np.where(first, 0.0, self._returns + rewards)
        absent = first | self._left
        ends = (gone | ended) & ~absent
        kinds = np.where(absent, StepType.FIRST, np.where(ends, StepType.LAST, StepType.MID))
        self._left = (self._left | gone) & ~ended & ~first
        over = (gone | (ended & terminated[order, None])) & ~absent
        rewards = np.where(absent, np.float32(0.0), rewards)
        shown = self._show(self._by_player(observation, order), order, info)
        return np.arange(self._rows, dtype=np.int32), TimeStep(
            kinds.astype(np.int32).ravel(),
            rewards.ravel(),
            (~over).astype(np.float32).ravel(),
            jax.tree.map(lambda x: x.reshape(self._rows, *x.shape[2:]), shown),
            {entry: self._extra(entry, order, info) for entry in self._extras} or (),
        )

    def _extra(self, entry: str, order: np.ndarray, info: Mapping[str, Any]) -> np.ndarray:
        """Returns an entry of info for all rows, ``[rows, ...]``."""
        spec, field = self.spec.extras[entry], self._extras[entry].removeprefix(_INFO)
        name = field.removeprefix(_PLAYERS)
        if field == name:
            seen = np.repeat(info[name][order], len(self._seats), axis=0)
        else:
            seen = self._by_player(info["players"][name], order)
        seen = seen.reshape(self._rows, *spec.shape)
        if np.any(start := start_of(spec)):
            seen = seen - seen.dtype.type(start)
        cast = seen.astype(spec.dtype)
        if changed_by_cast(seen, cast):
            raise too_wide(f"EnvPool: {self._name}: extras[{entry!r}]", spec.dtype, seen)
        return cast

    def _by_player(self, rows: np.ndarray, order: np.ndarray) -> np.ndarray:
        """Turns ``[games * P, ...]``, as the games arrived, into ``[games, P, ...]``."""
        return rows.reshape(self._games, len(self._seats), *rows.shape[1:])[order]

    def _show(self, seen: np.ndarray, order: np.ndarray, info: Mapping[str, Any]) -> PyTree:
        """Returns observations ``[games, P, ...]`` with their entries."""
        cast = seen.astype(self._observed.dtype, copy=False)
        if cast.dtype != seen.dtype and changed_by_cast(seen, cast):
            raise too_wide(f"EnvPool: {self._name}: observation", cast.dtype, seen)
        more: dict[str, PyTree] = {}
        if self._mask_spec is not None:
            self._turn = info["current_player"][order]
            more[ACTION_MASK] = self._mask(self._turn, info["legal_action_mask"][order])
        if self._seat_index:
            numbers = np.arange(len(self._seats), dtype=np.int32)
            more[SEAT] = np.broadcast_to(numbers, (self._games, len(self._seats)))
        if self._joined:
            more[CRITIC_STATE] = {
                str(i): np.broadcast_to(cast[:, i, None], cast.shape)
                for i in range(len(self._seats))
            }
        return {"observation": cast, **more} if more else cast

    def _mask(self, turn: np.ndarray, legal: np.ndarray) -> np.ndarray:
        """Returns the legal actions of every player, int8 ``[games, P, A]``."""
        mask = np.zeros((self._games, len(self._seats), *legal.shape[1:]), np.int8)
        mask[..., 0] = 1
        mask[self._ids, turn] = legal
        mask[..., 0] |= ~mask.any(axis=-1)  # at least one, so that a policy can read it
        return mask

    def episode_metrics(self, env_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the sums of rewards: of the seat, and of all seats of its game."""
        game, seat = np.divmod(env_ids, len(self._seats))
        own = {
            f"return_of_{name}": self._returns[game[seat == i], i]
            for i, name in enumerate(self._seats)
        }
        found = {"team_return": self._returns[game].sum(axis=1), **own}
        return {name: values for name, values in found.items() if len(values)}

    def step_infos(self, env_ids: np.ndarray) -> list[dict[str, float]]:
        """Returns no numbers."""
        return [{} for _ in env_ids]

    def stats(self) -> dict[str, int]:
        """Returns an empty dict: EnvPool has no counters."""
        return {}

    def close(self) -> None:
        """Drops the pool object; EnvPool ends its threads in the object's destructor."""
        self._pool = None
