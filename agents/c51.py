"""Categorical Q-learning, Bellemare et al. (2017), https://arxiv.org/abs/1707.06887, and Rainbow.

The network's output is a distribution over fixed atoms of each action's return; the target is the
n-step distribution projected on the atoms. The config can add double learning, a duelling and noisy
network, prioritized replay and n-step targets. All of them together are Rainbow, Hessel et al.
(2018), https://arxiv.org/abs/1710.02298. So Rainbow is an experiment (the preset ``rainbow``), not
another agent.

Deviations: the loss is the KL divergence itself, so that priorities are the same as Rainbow's; its
gradient is that of the cross-entropy. The streams of the duelling network separate after the
torso's dense layer, not before it. The paper's own C51 does not use double learning
(``double=False``).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.families.q_learning import (
    QLearning,
    QLearningConfig,
    behaviour_policy,
    of_actions,
    preferences,
    td_loss,
)
from rlstack.math.n_step import NStep, n_step
from rlstack.math.value_distributions import categorical_kl, categorical_mean, project
from rlstack.networks import distributional_q_network
from rlstack.stateful_params import evaluating
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, TimeStep


@dataclasses.dataclass(frozen=True)
class C51Config(QLearningConfig):
    """Hyperparameters of C51; the number of atoms is the network's (``num_atoms``)."""

    min_value: float = -10.0
    """The smallest atom, a discounted return (the paper's -10 for clipped rewards)."""
    max_value: float = 10.0
    """The largest atom (the paper's 10)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        below = self.min_value < self.max_value
        self.require_finite("min_value", "max_value")
        self.require("min_value", below, f"below max_value ({self.max_value})")


@register(C51Config, network=distributional_q_network, policy=behaviour_policy)
class C51(QLearning):
    """The agent; construct it as `rlstack.agent.Agent` says.

    Its network returns the logits of the atoms of each action, ``[B, A, N]``.
    """

    cfg: C51Config
    averages = True

    def action_values(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, *, noisy: bool = True
    ) -> Array:
        """Returns the means of the predicted distributions, ``[B, A]``."""
        return self.means(self.outputs(rng_key if noisy else None, params, timestep))

    def loss(
        self, rng_key: PRNGKey, params: Params, target_params: Params, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the weighted mean of KL divergences from targets to predictions.

        Returns:
          The loss, (logs, the divergences as priorities ``[B]``).
        """
        online_key, target_key = jax.random.split(rng_key)
        transition = n_step(batch.trajectory, self.cfg.discount)
        outputs = self.outputs(online_key, params, transition.timestep)
        logits = of_actions(outputs, transition.action)
        target = self.target_probs(target_key, params, target_params, transition)
        losses = categorical_kl(target, logits)
        # Where prediction and target agree, rounding can make a divergence negative.
        priorities = jnp.maximum(losses, 0.0)
        return td_loss(losses, priorities, self.means(logits), transition, batch.weights)

    def target_probs(
        self, rng_key: PRNGKey, params: Params, target_params: Params, transition: NStep
    ) -> Array:
        """Returns the projected n-step distributions, ``[B, N]`` (the paper's algorithm 1).

        The online network chooses the best action with ``double``; otherwise the target network
        does.
        """
        target_key, choosing_key = jax.random.split(rng_key)
        outputs = choosing = self.outputs(target_key, target_params, transition.end)
        if self.cfg.double:
            choosing = self.outputs(choosing_key, evaluating(params), transition.end)
        best = preferences(self.means(choosing), transition.end).mode()
        probs = jax.nn.softmax(of_actions(outputs, best))
        atoms = self.atoms(probs.shape[-1])
        moved = transition.reward[:, None] + transition.discount[:, None] * atoms
        return jax.lax.stop_gradient(project(moved, probs, atoms))

    def means(self, logits: Array) -> Array:
        """Returns the means of the distributions with logits ``[..., N]``, ``[...]``."""
        return categorical_mean(logits, self.atoms(logits.shape[-1]))

    def atoms(self, num_atoms: int) -> Array:
        """Returns the return of each atom, ``[N]``, evenly spaced."""
        return jnp.linspace(self.cfg.min_value, self.cfg.max_value, num_atoms)
