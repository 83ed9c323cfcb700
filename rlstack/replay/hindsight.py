"""Hindsight experience replay, Andrychowicz et al. (2017), https://arxiv.org/abs/1707.01495.

An item processor (see `rlstack.replay.episodes`) for environments with goals, whose observations
are dicts with the entries ``achieved_goal`` and ``desired_goal``, as those of Gymnasium-Robotics.
A share of the items get another goal, which their episode has reached, with the rewards and the end
that this goal gives (section 3.3; the strategies of section 4.5).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlstack.checks import WrongKindError
from rlstack.references import Hook, check_callable, load_hook, name_of
from rlstack.replay.episodes import Episode, Rng
from rlstack.types import Array, StepType, TimeStep, Trajectory, merge_leading_dims

STRATEGIES = ("future", "final", "episode")
_WHERE = "Hindsight"
_WANTED = "(achieved_goal, desired_goal, info) -> [N]"


class Hindsight:
    """Gives items goals that their episodes have reached.

    Goals, rewards and ends change at the steps of the episode in which the item begins. Agents of
    transitions and of n steps can learn from such items; a sequence may have an end in its middle
    that no first step follows.
    """

    def __init__(
        self,
        reward: Hook,
        terminated: Hook = "",
        strategy: Literal["future", "final", "episode"] = "future",
        share: float = 0.8,
    ):
        """Loads the environment's functions.

        Args:
          reward: "module:callable" of a function ``(achieved_goal, desired_goal, info) -> reward``,
            of goals ``[N, ...]`` after actions, such as ``compute_reward`` of Gymnasium's goal
            environments. ``info`` has the entries of the steps' extras, ``{}`` without any.
          terminated: likewise of a function that returns where an episode ends because of its goal,
            [N] bool. Empty for environments whose episodes go on at the goal. An episode that ended
            for its first goal's sake then does not end for the other goal's.
          strategy: where the goal is from: a later step of the episode (future), the last one that
            is stored (final), or any (episode).
          share: the share of items with another goal: k / (k + 1) for the paper's k. It is 0.8 for
            the paper's k of 4.

        Raises:
          ValueError: a function cannot be imported, or an argument is out of range.
          WrongKindError: a function does not take three arguments.
        """
        if strategy not in STRATEGIES:
            raise ValueError(
                f"{_WHERE}: strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}."
            )
        if not 0 <= share <= 1:
            raise ValueError(f"{_WHERE}: share must be in [0, 1]; got {share}.")
        self._reward = _loaded("reward", reward)
        self._terminated = _loaded("terminated", terminated) if terminated else None
        self._strategy, self._share = strategy, share

    def __call__(self, rng: Rng, item: Trajectory, episode: Episode) -> Trajectory:
        """Returns the items, some of them with other goals."""
        xp, step = episode.xp, item.timestep
        seen = _goals(step.observation)
        chosen = (rng.random(episode.after.shape) < self._share) & (episode.after > 0)
        reached = episode.at(self._offset(rng, episode)).observation["achieved_goal"]
        first = step.step_type == StepType.FIRST
        number = xp.cumsum(first, axis=0)
        changed = chosen & (number == number[0])  # [T+1, B], not in a later episode of the item
        old = seen["desired_goal"]
        axes = (..., *(None,) * (old.ndim - 2))
        goal = xp.where(changed[axes], reached, old)
        after = changed & ~first  # FIRST has no reward
        rewarded = self._ask(self._reward, step, goal)
        made = step._replace(
            observation={**seen, "desired_goal": goal},
            reward=xp.where(after, rewarded, step.reward),
        )
        if self._terminated is None:
            return item._replace(timestep=made)
        # The item begins at its first step, also where that step has reached the new goal.
        after = after & (xp.arange(len(first))[:, None] > 0)
        ended, ends = (self._ask(self._terminated, step, x).astype(bool) for x in (old, goal))
        discount = xp.where(after & ended, 1.0, step.discount)
        made = made._replace(
            step_type=xp.where(after & ends, int(StepType.LAST), step.step_type),
            discount=xp.where(after & ends, 0.0, discount),
        )
        return item._replace(timestep=made)

    def _offset(self, rng: Rng, episode: Episode) -> Array:
        """Returns the distance of the step whose goal each item gets from its first step, [B]."""
        xp, after = episode.xp, episode.after
        if self._strategy == "final":
            return after
        least = xp.ones_like(after) if self._strategy == "future" else -episode.before
        count = after - least + 1
        drawn = (rng.random(after.shape) * count).astype(after.dtype)
        return least + xp.minimum(drawn, count - 1)  # in float32 a product may be rounded up

    def _ask(self, function: Callable[..., Any], step: TimeStep, goal: Array) -> Any:
        """Returns what a function says of all steps with these goals, ``[T+1, B]``."""
        shape = step.step_type.shape
        info = dict(step.extras) if isinstance(step.extras, Mapping) else {}
        of_steps = step.observation["achieved_goal"], goal, info
        return function(*merge_leading_dims(of_steps)).reshape(shape)


def _loaded(name: str, hook: Hook) -> Callable[..., Any]:
    function = load_hook(f"{_WHERE}: {name}", hook)
    check_callable(
        f"{_WHERE}: {name} {name_of(hook)} must be a function {_WANTED}", function, *(None,) * 3
    )
    return function


def _goals(observation: Any) -> Mapping[str, Any]:
    """Returns an observation that has goals.

    Raises:
      WrongKindError: it has none.
    """
    entries = sorted(observation) if isinstance(observation, Mapping) else None
    if entries is None or not {"achieved_goal", "desired_goal"} <= set(entries):
        raise WrongKindError(
            f"{_WHERE}: observations must be dicts with the entries achieved_goal and "
            f"desired_goal; got {'no dict' if entries is None else ', '.join(entries)}."
        )
    return observation
