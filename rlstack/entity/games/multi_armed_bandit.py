"""MultiArmedBandit: find the arm that pays."""

from __future__ import annotations

from rlstack.entity.environment import Actions, GlobalCategoricalMask, Observation
from rlstack.entity.errors import require_in_range
from rlstack.entity.spaces import ActionSpace, GlobalCategorical, ObsSpace

_PULL = {"pull": GlobalCategoricalMask()}


class MultiArmedBandit:
    """Five arms, of which arm A pays.

    Observation: no entities; the global feature ``step``. Action: the global ``pull`` of one of
    the arms. Reward: 1 / ``num_steps`` for arm A, else 0. End: after ``num_steps`` pulls. Best
    return: 1; random policy: 0.2.
    """

    def __init__(self, num_steps: int = 32, seed: int = 0):
        del seed  # nothing is random
        require_in_range("MultiArmedBandit", num_steps=(num_steps, 1))
        self.obs_space = ObsSpace(global_features=("step",))
        self.action_space: ActionSpace = {
            "pull": GlobalCategorical(("arm A", "arm B", "arm C", "arm D", "arm E"))
        }
        self._num_steps, self._step = num_steps, 0

    def __str__(self) -> str:
        return f"pull {self._step} of {self._num_steps}"

    def reset(self) -> Observation:
        """Begins at step 0."""
        self._step = 0
        return self._observe(0.0)

    def act(self, actions: Actions) -> Observation:
        """Pulls an arm."""
        self._step += 1
        return self._observe(1.0 / self._num_steps if actions["pull"].indices[0] == 0 else 0.0)

    def _observe(self, reward: float) -> Observation:
        return Observation(
            features={},
            actions=_PULL,
            global_features=(self._step,),
            reward=reward,
            done=self._step >= self._num_steps,
        )
