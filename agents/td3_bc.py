"""TD3 with behaviour cloning, Fujimoto and Gu (2021), https://arxiv.org/abs/2106.06860.

The policy of TD3 maximises ``alpha * Q / mean |Q| - (policy - action)^2`` (equations 3 to 5), which
keeps it close to the actions of the data. The rest is TD3, with its deviations. The constants are
those of the authors' program,
https://github.com/sfujim/TD3_BC/blob/main/TD3_BC.py; the paper also standardises observations
(``normalisation.observations``), by statistics of the whole dataset; here they are running ones.
Actions are compared in [-1, 1].
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.agents.td3 import TD3, TD3Config
from rlstack.families.off_policy import behaviour_policy
from rlstack.networks import deterministic_policy_and_critic
from rlstack.types import Array, Batch, Params


@dataclasses.dataclass(frozen=True)
class TD3BCConfig(TD3Config):
    """Hyperparameters of TD3+BC: those of TD3, and the weight of the critic."""

    random_frames: int = 0
    """Number of frames with random actions at the start, in all environments together."""
    critic_weight: float = 2.5
    """Alpha: weight of the critic's values, scaled to a mean size of 1, relative to imitation. 0
    only imitates."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(0, "critic_weight")


@register(
    TD3BCConfig, network=deterministic_policy_and_critic, policy=behaviour_policy, recorded="any"
)
class TD3BC(TD3):
    """The agent; construct it with `deterministic_policy_and_critic` networks."""

    cfg: TD3BCConfig

    def policy_loss(self, policy: Params, critics: Params, batch: Batch) -> Array:
        """Returns the squared distance to the data less the scaled values, over transitions."""
        first = jax.tree.map(lambda x: x[0], batch.trajectory)
        valid = ~(first.timestep.last() | batch.trajectory.timestep.first()[1])

        def mean(x: Array) -> Array:
            return jnp.where(valid, x, 0.0).sum() / jnp.maximum(valid.sum(), 1)

        action = self.policy_action(policy, first.timestep)
        values = self.critic_values(critics, first.timestep, action)[:, 0]
        size = jax.lax.stop_gradient(mean(jnp.abs(values)))
        distance = jnp.square(action - self.bounds.to_unit(first.agent_output.action)).mean(-1)
        return mean(distance) - self.cfg.critic_weight / jnp.maximum(size, 1e-6) * mean(values)
