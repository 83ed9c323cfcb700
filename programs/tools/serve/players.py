"""A policy that acts for several players: the state of each, and steps as JSON."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from dm_env import specs

from rlstack.envs.values import own_spec
from rlstack.programs.build.policies.policy import Policy, Prediction
from rlstack.types import PyTree

_FIELDS = ("observation", "player", "first", "reward")


class TooManyPlayersError(ValueError):
    """The state of a further player cannot be stored."""


class Players:
    """A policy for any number of players, each with a state of its own.

    Threads may share it: one step at a time is computed.
    """

    def __init__(self, policy: Policy, most: int = 1000) -> None:
        """Stores the policy.

        Args:
          policy: acts for all players.
          most: maximum number of players whose states are stored; none are stored for a policy
            without a state.
        """
        policy.pad_batches = True  # others choose the sizes, and each size is compiled
        self._policy, self._most = policy, most
        self._players: dict[str, Policy] = {}
        self._lock = threading.Lock()
        self._seed = 0  # seed of the newest player
        self.keeps_state = bool(jax.tree.leaves(policy.agent.initial_state(1)))

    def describe(self) -> dict[str, Any]:
        """Returns the description for clients: observations, actions, and if there is a state."""
        policy = self._policy
        return {
            "env": policy.experiment.env.name,
            "env_frames": policy.env_frames,
            "keeps_state": self.keeps_state,
            "observation": jax.tree.map(_described, policy.spec.observation),
            "action": jax.tree.map(_described, policy.spec.action),
        }

    def act(self, step: Any) -> dict[str, Any]:
        """Returns the action for a step.

        Args:
          step: a mapping. ``observation`` is in the structure of the spec, with lists for arrays
            and tuples; a batch has a leading axis. ``player`` names whose step it is. ``first`` is
            whether the step begins an episode, and ``reward`` that of the last action; both may be
            lists, for a batch.

        Returns:
          ``action``, in the structure of the spec.

        Raises:
          ValueError, TypeError: the step is no such mapping, or does not fit the policy.
          TooManyPlayersError: the player is new, and there are too many.
        """
        return {"action": self._take(step, Policy.act)}

    def predict(self, step: Any) -> dict[str, Any]:
        """Returns the action for a step as `act` does, with probabilities, values and value."""
        prediction: Prediction = self._take(step, Policy.predict)
        return dict(prediction._asdict())

    def forget(self, player: str) -> bool:
        """Removes a player's state; returns whether there was one."""
        with self._lock:
            return self._players.pop(player, None) is not None

    def _take(self, step: Any, function: Callable[..., Any]) -> Any:
        fields = _checked(step)
        observation = _as_spec(self._policy.spec.observation, fields["observation"])
        first, reward = np.asarray(fields.get("first", False)), np.asarray(fields.get("reward", 0))
        if first.dtype != bool or first.ndim > 1:
            raise ValueError(f"first must be true or false, or a list of these; got {first!r:.80}.")
        if reward.dtype.kind not in "if":
            raise ValueError(f"reward must be a number, or a list of numbers; got {reward!r:.80}.")
        with self._lock:
            policy, is_new = self._player(fields.get("player", ""))
            if first.ndim and not is_new:
                policy.reset(first)
            elif first.any():
                policy.reset()
            answer = function(policy, observation, reward)
            if self.keeps_state and is_new:  # a step that was refused leaves nothing behind
                self._players[fields["player"]] = policy
        return jax.tree.map(_as_json, answer)

    def _player(self, name: str) -> tuple[Policy, bool]:
        """Returns the policy with the state of a player, and whether no step of it is known."""
        if not self.keeps_state:
            self._policy.reset()
            return self._policy, True
        if not name:
            raise ValueError(
                "player must name whose step it is, because this policy keeps a state from step to "
                "step."
            )
        if name in self._players:
            return self._players[name], False
        if len(self._players) >= self._most:
            raise TooManyPlayersError(
                f"there must be at most {self._most} players; forget those that are over."
            )
        self._seed += 1
        return self._policy.twin(self._seed), True


def _checked(step: Any) -> Mapping[str, Any]:
    if not isinstance(step, Mapping):
        raise ValueError(f"a step must be an object with {', '.join(_FIELDS)}; got {step!r:.80}.")
    if unknown := sorted(set(step) - set(_FIELDS)):
        raise ValueError(
            f"a step must have no other fields than {', '.join(_FIELDS)}; got "
            f"{', '.join(unknown):.80}."
        )
    if "observation" not in step:
        raise ValueError("a step must have an observation; it has none.")
    if not isinstance(step.get("player", ""), str):
        raise ValueError(f"player must be a text; got {step['player']!r:.80}.")
    return step


def _as_spec(spec: PyTree, value: Any) -> PyTree:
    """Converts a JSON value to the mappings and tuples of a spec, as far as it fits."""
    if isinstance(spec, Mapping) and isinstance(value, Mapping):
        return {name: _as_spec(spec.get(name), part) for name, part in value.items()}
    if isinstance(spec, tuple) and isinstance(value, list) and len(spec) == len(value):
        parts = [_as_spec(*pair) for pair in zip(spec, value, strict=True)]
        return type(spec)(*parts) if hasattr(spec, "_fields") else tuple(parts)
    return value


def _described(spec: specs.Array) -> dict[str, Any]:
    """Returns a spec for JSON, which has no infinity: an infinite bound is null."""
    choices, spec = spec, own_spec(spec)
    described: dict[str, Any] = {"shape": list(spec.shape), "dtype": np.dtype(spec.dtype).name}
    if isinstance(choices, specs.DiscreteArray):
        start = {"start": int(spec.minimum)} if spec.minimum else {}
        return {**described, "num_values": int(choices.num_values), **start}
    if isinstance(spec, specs.BoundedArray):
        for name in ("minimum", "maximum"):
            bound = np.unique(getattr(spec, name))
            value = bound[0] if len(bound) == 1 else getattr(spec, name)
            described[name] = _finite(np.asarray(value).tolist())
    return described


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return value if np.isfinite(value) else None


def _as_json(leaf: Any) -> Any:
    return leaf if leaf is None else np.asarray(leaf).tolist()
