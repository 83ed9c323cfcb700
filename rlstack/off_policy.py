"""What agents of a policy and critics, learning from transitions, have in common."""

from __future__ import annotations

from typing import Any

import jax

from rlstack.agent import Agent
from rlstack.exploration import (
    Counts,
    GaussianNoise,
    Policy,
    UniformNoise,
    WarmUp,
    initial_counts,
)
from rlstack.networks import CriticInput, PolicyAndCritic, ensemble
from rlstack.types import Array, Params, TimeStep


class PolicyAndCriticsAgent(Agent):
    """Acts by a policy that an ensemble of critics judges; feed-forward networks only.

    Its config has ``num_critics``. It remembers how far each environment has come, by which
    exploration may change.
    """

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        """Checks the networks.

        Raises:
          TypeError: the factory gave something else than a `PolicyAndCritic`.
          ValueError: a network is recurrent.
        """
        super().__init__(cfg, *args, **kwargs)
        where = type(self).__name__
        if not isinstance(self.network, PolicyAndCritic):
            raise TypeError(
                f"{where}: the network factory must give a PolicyAndCritic; got "
                f"{type(self.network).__name__}. See rlstack.networks.policy_and_critic."
            )
        if any(jax.tree.leaves(network.initial_state(1)) for network in self.network):
            raise ValueError(
                f"{where}: the networks must be feed-forward, since transitions carry no recurrent "
                "state. Use an agent of sequences such as ppo."
            )
        self.critics = ensemble(self.network.critic, cfg.num_critics)

    def initial_state(self, batch_size: int) -> Counts:
        """Returns how many steps and episodes each environment has had, ``[B]``: none."""
        return initial_counts(batch_size)

    def reset_state(self, state: Counts, first: Array) -> Counts:
        """Keeps the counts, by which exploration changes, from one episode to the next."""
        del first
        return state

    def judge(self, critics: Params, timestep: TimeStep, action: Array) -> Array:
        """Returns what each critic thinks of continuous actions, ``[B, N]``.

        Args:
          critics: their params.
          timestep: ``[B, ...]``.
          action: ``[B, D]``, in [-1, 1].
        """
        seen = timestep._replace(observation=CriticInput(timestep.observation, action))
        return self.critics.apply(None, critics, seen, ())[0]


def behaviour_policy(cfg: Any, num_envs: int) -> Policy:
    """Returns a deterministic policy's actions with noise, after random ones at the start.

    Args:
      cfg: has ``noise``, ``noise_scale`` and ``random_frames``.
      num_envs: environments of the experiment.
    """
    kinds = {"gaussian": GaussianNoise, "uniform": UniformNoise}
    noise = kinds[cfg.noise](cfg.noise_scale, minimum=-1.0, maximum=1.0)
    return WarmUp(noise, cfg.random_frames, num_envs)
