"""Builders of published environments that need a wrapper or a registration."""

from __future__ import annotations

from typing import Any

import gymnasium


def minatar(name: str, steps: int = 500) -> gymnasium.Env:
    """Builds a MinAtar game with a time limit, because a good policy never loses some of them."""
    from minatar.gym import register_envs

    register_envs()
    return gymnasium.make(name, max_episode_steps=steps)


def minigrid(name: str) -> gymnasium.Env:
    """Builds a MiniGrid environment without its ``mission``, which is a text."""
    from gymnasium.wrappers import FilterObservation
    from minigrid import register_minigrid_envs  # noqa: F401 (importing it registers them)

    return FilterObservation(gymnasium.make(name), ["direction", "image"])


def catch(seed: int) -> Any:
    """Builds bsuite's Catch with a seed; `bsuite.load_from_id` takes none."""
    from bsuite.environments.catch import Catch

    return Catch(seed=seed)


def control(domain: str, task: str, seed: int, seconds: float = 2.5) -> Any:
    """Builds an environment of dm_control's suite with a seed and a time limit."""
    from dm_control import suite

    return suite.load(domain, task, task_kwargs={"random": seed, "time_limit": seconds})
