"""What agents of a policy and critics, learning from transitions, have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from rlstack.agent import Agent
from rlstack.checks import Checked
from rlstack.exploration import Counts, initial_counts
from rlstack.networks import CriticInput, PolicyAndCritic, ensemble
from rlstack.optimizers import OptimizerConfig
from rlstack.types import Array, Params, TimeStep


@dataclasses.dataclass(frozen=True)
class PolicyAndCriticsConfig(Checked):
    """Hyperparameters that these agents share."""

    discount: float = 0.99
    """Discount of future rewards, per step."""
    num_critics: int = 2
    """Critics, of whose values the least counts."""
    target_rate: float = 0.005
    """Share of the params that the target takes over when it moves."""
    random_frames: int = 5_000
    """Frames, of all environments together, of random actions at the start."""
    max_grad_norm: float = 0.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer of the critics, and of what has none of its own."""
    policy_optimizer: OptimizerConfig | None = None
    """Optimizer of the policy; None is the critics'."""

    def __post_init__(self) -> None:
        self.require("discount", 0 <= self.discount <= 1, "in [0, 1]")
        self.require_at_least(1, "num_critics")
        self.require("target_rate", 0 < self.target_rate <= 1, "in (0, 1]")
        self.require_at_least(0, "random_frames", "max_grad_norm")


class PolicyAndCriticsAgent(Agent):
    """Acts by a policy that an ensemble of critics judges; feed-forward networks only.

    It remembers how far each environment has come, by which
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
