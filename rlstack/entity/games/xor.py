"""Xor: compute the exclusive or of the bits of two entities and a global one."""

from __future__ import annotations

import numpy as np

from rlstack.entity.environment import Actions, GlobalCategoricalMask, Observation
from rlstack.entity.spaces import ActionSpace, EntityType, GlobalCategorical, ObsSpace

_OUTPUT = {"output": GlobalCategoricalMask()}


class Xor:
    """Three random bits: two Inputs (is_set) and the global feature ``negate``.

    Action: the global ``output``, 0 or 1. Reward: 1 if it is the exclusive or of the three bits,
    else 0. End: after one step. Best return: 1; random policy, and any policy that ignores one of
    the bits: 0.5.
    """

    def __init__(self, seed: int = 0):
        self.obs_space = ObsSpace({"Input": EntityType(("is_set",), capacity=2)}, ("negate",))
        self.action_space: ActionSpace = {"output": GlobalCategorical(("0", "1"))}
        self._rng = np.random.default_rng(seed)
        self._bits = [0, 0, 0]

    def __str__(self) -> str:
        first, second, negate = self._bits
        return f"{'not ' if negate else ''}({first} xor {second})"

    def reset(self) -> Observation:
        """Draws the bits."""
        drawn = int(self._rng.integers(8))
        self._bits = [drawn & 1, drawn >> 1 & 1, drawn >> 2]
        return self._observe(0.0, done=False)

    def act(self, actions: Actions) -> Observation:
        """Rewards the right answer."""
        return self._observe(float(actions["output"].indices[0] == sum(self._bits) % 2), done=True)

    def _observe(self, reward: float, done: bool) -> Observation:
        first, second, negate = self._bits
        return Observation(
            features={"Input": [(first,), (second,)]},
            actions=_OUTPUT,
            global_features=(negate,),
            reward=reward,
            done=done,
        )
