"""SAC with critics whose outputs are distributions of returns, as in SimBaV2.

The critics' outputs are logits of fixed atoms, as in C51 (Bellemare et al. 2017,
https://arxiv.org/abs/1707.06887). The target is the distribution of the critic with the smallest
mean, moved by reward, discount and entropy and projected on the atoms.

SimBaV2, Lee et al. (2025), https://arxiv.org/abs/2502.15280, is this agent with a network on the
hypersphere (``--network.torso sphere``), standardised observations, and rewards divided by the
standard deviation of returns, and by more where the largest return would exceed the last atom
(``--normalisation.rewards return --normalisation.return-limit 5``). So it is an experiment (the
presets ``hopper-simba`` and ``halfcheetah-simba``), not another agent. Deviations from SimBaV2:
those of SAC; the range of log standard deviations is SAC's, [-20, 2] by clipping, not [-10, 2] by
tanh; the mean and the standard deviation of the policy share the first layer of the head, where
SimBaV2 has one for each.

These constants of the presets are those of the authors' program
(https://github.com/DAVIAN-Robotics/SimbaV2, commit 86899c2): the learning rate, which falls from
1e-4 to half of it for policy, critics and temperature; two critics of 101 atoms from -5 to 5, of
which the one with the smaller mean counts (the DeepMind Control Suite, whose episodes never end
early, has one critic); a discount of 0.995 for episodes of 1,000 steps, 1 - 5 / length within
[0.95, 0.995]; a target rate of 0.005, a first temperature of 0.01, and a target entropy of -0.5 for
each number of an action; one update for each step of MuJoCo, where no action is repeated.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.agents.sac import SAC, SACConfig, SACParams
from rlstack.families.off_policy import AtomsConfig, CriticLosses, of_least, sampling_policy
from rlstack.math.n_step import NStep
from rlstack.math.value_distributions import categorical_kl, categorical_mean, project
from rlstack.networks import policy_and_distributional_critic
from rlstack.types import Array, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class CategoricalSACConfig(AtomsConfig, SACConfig):
    """Hyperparameters of SAC with distributional critics; ``num_atoms`` is the network's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_plain_targets("the target is the distribution of one critic")


@register(CategoricalSACConfig, network=policy_and_distributional_critic, policy=sampling_policy)
class CategoricalSAC(SAC):
    """The agent; construct it with `policy_and_distributional_critic` networks."""

    cfg: CategoricalSACConfig

    def means(self, outputs: Array) -> Array:
        """Returns the means of the distributions with logits ``[..., M]``, ``[...]``."""
        return categorical_mean(outputs, self.cfg.atoms(outputs))

    def critic_losses(
        self,
        rng_key: PRNGKey,
        critics: Params,
        fixed: SACParams,
        target_critics: Params,
        transition: NStep,
    ) -> CriticLosses:
        """Returns the KL divergences from the target to the critics' distributions.

        They have the gradient of the cross-entropy, and are 0 where prediction and target agree.
        """
        distribution = self.policy_distribution(fixed.policy, transition.end)
        if self._bounds is None:
            outputs = self.critics.apply(None, target_critics, transition.end, ())[0]
            of_actions = jax.nn.softmax(of_least(outputs, self.means(outputs)))  # [B, A, M]
            probs = (distribution.probs()[..., None] * of_actions).sum(1)
            entropy = distribution.entropy()
        else:
            action, log_prob = distribution.sample_and_log_prob(rng_key)
            outputs = self.critic_outputs(target_critics, transition.end, action)
            probs, entropy = jax.nn.softmax(of_least(outputs, self.means(outputs))), -log_prob
        atoms = self.cfg.atoms(probs)
        soft = atoms + self.entropy_weight(fixed) * entropy[:, None]
        moved = transition.reward[:, None] + transition.discount[:, None] * soft
        target = jax.lax.stop_gradient(project(moved, probs, atoms))

        taken = self.outputs_taken(critics, transition)  # [B, N, M]
        losses = categorical_kl(target[:, None], taken)
        losses = jnp.where(transition.valid[:, None], losses, 0.0)
        # Where prediction and target agree, rounding can make a divergence negative.
        errors = jnp.maximum(losses, 0.0).mean(-1)
        return CriticLosses(losses.sum(-1), errors, self.means(taken))
