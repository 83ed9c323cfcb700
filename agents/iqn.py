"""Implicit quantile networks, Dabney et al. (2018b), https://arxiv.org/abs/1806.06923.

The network's output is the value of each action's return at any quantile asked for. Which are asked
for is drawn from the key at hand: K to act and to choose actions with (the same for all rows of a
batch that acts, so that a row's action does not depend on the others), N and N' an item to learn.
By config: double learning (not in the paper), n-step targets, prioritized replay, duelling and
noisy networks, as `rlstack.families.q_learning` says. Acting is risk-neutral.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from agents.registry import register
from rlstack.families.q_learning import (
    ItemLosses,
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
)
from rlstack.math.n_step import NStep
from rlstack.math.value_distributions import quantile_huber_loss
from rlstack.networks import AtFractions, implicit_q_network
from rlstack.types import Array, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class IQNConfig(QLearningConfig):
    """Hyperparameters of IQN."""

    num_acting_fractions: int = 32
    """Quantiles whose mean is an action's value (K, the paper's 32)."""
    num_fractions: int = 64
    """Quantiles learned of each item (N, the paper's 64)."""
    num_target_fractions: int = 64
    """Quantiles of the target of each item (N', the paper's 64)."""
    huber_delta: float = 1.0
    """Error beyond which the loss is linear (kappa, the paper's 1); 0 makes it so throughout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "num_acting_fractions", "num_fractions", "num_target_fractions")
        self.require_at_least(0, "huber_delta")


@register(IQNConfig, network=implicit_q_network, policy=behaviour_policy, older_runtime=False)
class IQN(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says.

    Its network answers `rlstack.networks.AtFractions` in place of an observation, with values
    ``[B, A, N]``.
    """

    cfg: IQNConfig

    def values(self, outputs: Array) -> Array:
        """Returns the means over quantiles ``[..., N]``, ``[...]``."""
        return outputs.mean(axis=-1)

    def outputs(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns values at K fractions drawn for the whole batch, ``[B, A, K]``."""
        fractions_key, noise_key = jax.random.split(rng_key)
        num_rows, num_fractions = timestep.step_type.shape[0], self.cfg.num_acting_fractions
        fractions = jax.random.uniform(fractions_key, (num_fractions,))
        fractions = jnp.broadcast_to(fractions, (num_rows, num_fractions))
        return self.quantiles(noise_key if noisy else None, params, timestep, fractions)

    def quantiles(
        self, rng_key: PRNGKey | None, params: Params, timestep: TimeStep, fractions: Array
    ) -> Array:
        """Returns values at the fractions ``[B, N]`` given, ``[B, A, N]``; without key no noise."""
        asked = timestep._replace(observation=AtFractions(timestep.observation, fractions))
        return self.network.apply(rng_key, params, asked, ())[0]

    def bootstrap(
        self, rng_key: PRNGKey, params: Params, target_params: Params, end: TimeStep
    ) -> Array:
        """Returns the target network's values of the best action at N' fractions, ``[B, N']``.

        The action is chosen by the mean at K other fractions (the paper's equation 5).
        """
        choosing_key, target_key = jax.random.split(rng_key)
        choosing_params = params if self.cfg.double else target_params
        best = self.best_actions(self.outputs(choosing_key, choosing_params, end), end)
        quantiles, _ = self._drawn(target_key, target_params, end, self.cfg.num_target_fractions)
        return jax.lax.stop_gradient(of_actions(quantiles, best))

    def item_losses(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> ItemLosses:
        """Returns quantile losses; priorities are the absolute TD errors of the means."""
        online_key, target_key = jax.random.split(rng_key)
        outputs, fractions = self._drawn(
            online_key, params, transition.timestep, self.cfg.num_fractions
        )
        quantiles = of_actions(outputs, transition.action)
        after = self.bootstrap(target_key, params, target_params, transition.end)
        targets = transition.reward[:, None] + transition.discount[:, None] * after
        losses = quantile_huber_loss(quantiles, fractions, targets, self.cfg.huber_delta)
        values = quantiles.mean(axis=-1)
        return ItemLosses(losses, jnp.abs(targets.mean(axis=-1) - values), values)

    def _drawn(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, num_fractions: int
    ) -> tuple[Array, Array]:
        """Values ``[B, A, N]`` at fractions ``[B, N]`` drawn for each item, and these."""
        fractions_key, noise_key = jax.random.split(rng_key)
        fractions = jax.random.uniform(fractions_key, (timestep.step_type.shape[0], num_fractions))
        return self.quantiles(noise_key, params, timestep, fractions), fractions
