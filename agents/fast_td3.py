"""FastTD3, Seo et al. (2025), https://arxiv.org/abs/2505.22642: TD3 for many parallel environments.

TD3 with two critics of distributions over fixed atoms, large batches, few updates for each step of
all environments, and a scale of the noise that each environment draws anew in each episode.
Critics learn the distribution of the one with the smaller mean, or each its own (``clipped``); the
policy maximises the smaller of their values, or the mean of both. As in the authors' program,
actions of targets are those of the policy that learns, and the critics' targets move at each
update.

The constants are those of the authors' program for HumanoidBench
(https://github.com/younggyoseo/FastTD3, fast_td3/hyperparams.py, ``BaseArgs``). The range of the
atoms is the task's: -250 and 250 there, -10 and 10 for MuJoCo Playground. The other constants of
that program belong to an experiment: 128 environments (1,024 in Playground), batches of 32,768,
two updates for each step of all environments, standardised observations, 101 atoms, and dense
layers of 512, 256 and 128 units for the policy and of 1,024, 512 and 256 for the critics. The
preset ``brax-halfcheetah-fasttd3`` has them.

Deviations: actions are clipped to their bounds before they are stored; the gradient is that of a
divergence instead of a cross-entropy, which is the same; means are compared before the projection
on the atoms.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from rlstack.agents.registry import register
from rlstack.agents.td3 import TD3, TD3Config, TD3LearnerState, TD3OptState
from rlstack.exploration import DrawnByEpisode, GaussianNoise, Policy, UniformNoise, WarmUp
from rlstack.families.off_policy import AtomsConfig, DeterministicParams, of_least
from rlstack.math.n_step import n_step
from rlstack.math.value_distributions import categorical_kl, categorical_mean, project
from rlstack.networks import deterministic_policy_and_distributional_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.stateful_params import moved_towards
from rlstack.types import Array, Batch, Logs, Params, PRNGKey


@dataclasses.dataclass(frozen=True)
class FastTD3Config(AtomsConfig, TD3Config):
    """Hyperparameters of FastTD3; ``num_atoms`` is the network's (the authors' 101)."""

    clipped: bool = True
    """Whether critics and policy take the smaller value (clipped double Q-learning). Otherwise each
    critic has its own target, and the policy takes the mean."""
    noise_scale: float = 0.4
    """Largest scale of the noise, in half-ranges: standard deviation (gaussian) or largest value
    (uniform)."""
    least_noise_scale: float = 1e-3
    """Smallest scale. Each environment draws its scale between both in each episode."""
    target_noise: float = 1e-3
    """Standard deviation of the noise on the action of a target, in half-ranges."""
    target_rate: float = 0.1
    """Fraction by which the critics' targets move towards the params at each update."""
    random_frames: int = 0
    """Number of frames with random actions at the start, in all environments together."""
    min_value: float = -250.0
    """The smallest atom, a discounted return. A return beyond the atoms counts as the outermost
    one, so choose both for the task, or scale its rewards."""
    max_value: float = 250.0
    """The largest atom."""
    optimizer: OptimizerConfig = OptimizerConfig("adamw", eps=1e-8, weight_decay=0.1)
    """Optimizer of all components without their own optimizer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least, largest = self.least_noise_scale, self.noise_scale
        self.require("least_noise_scale", 0 <= least <= largest, f"in [0, noise_scale ({largest})]")


def behaviour_policy(cfg: FastTD3Config, num_envs: int) -> Policy:
    """Returns a policy with noise of a scale that each environment draws in each episode."""
    kinds = {"gaussian": GaussianNoise, "uniform": UniformNoise}
    scale = DrawnByEpisode(cfg.least_noise_scale, cfg.noise_scale)
    return WarmUp(kinds[cfg.noise](scale, minimum=-1.0, maximum=1.0), cfg.random_frames, num_envs)


@register(
    FastTD3Config, network=deterministic_policy_and_distributional_critic, policy=behaviour_policy
)
class FastTD3(TD3):
    """The agent; construct it with `deterministic_policy_and_distributional_critic` networks."""

    cfg: FastTD3Config

    def means(self, outputs: Array) -> Array:
        """Returns the means of the distributions with logits ``[..., M]``, ``[...]``."""
        return categorical_mean(outputs, self.cfg.atoms(outputs))

    def loss(
        self, rng_key: PRNGKey, critics: Params, target_params: DeterministicParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the critics' weighted divergences from their targets, (logs, priorities [B])."""
        transition = n_step(batch.trajectory, self.cfg.discount)
        end_action = self.smoothed_action(rng_key, target_params.policy, transition.end)
        outputs = self.critic_outputs(target_params.critics, transition.end, end_action)
        if self.cfg.clipped:
            outputs = of_least(outputs, self.means(outputs))[:, None]
        atoms = self.cfg.atoms(outputs)
        moved = transition.reward[:, None] + transition.discount[:, None] * atoms
        target = project(moved[:, None], jax.nn.softmax(outputs), atoms)  # [B, N or 1, M]

        action = self.bounds.to_unit(transition.action)
        taken = self.critic_outputs(critics, transition.timestep, action)
        losses = categorical_kl(jax.lax.stop_gradient(target), taken)
        losses = jnp.where(transition.valid[:, None], losses, 0.0)
        loss = jnp.mean(batch.weights * losses.sum(-1))
        # Where prediction and target agree, rounding can make a divergence negative.
        errors = jnp.maximum(losses, 0.0).mean(-1)
        value = jnp.mean(self.means(taken))
        logs: Logs = {"loss": loss, "value": value, "divergence": jnp.mean(errors)}
        return loss, (logs, errors)

    def policy_loss(self, policy: Params, critics: Params, batch: Batch) -> Array:
        """Returns minus the mean over steps of the critics' smaller or mean value."""
        timestep = jax.tree.map(lambda x: x[0], batch.trajectory.timestep)
        values = self.critic_values(critics, timestep, self.policy_action(policy, timestep))
        valid = ~jnp.asarray(batch.trajectory.timestep.first())[1]  # else it is no transition
        value = values.min(1) if self.cfg.clipped else values.mean(1)
        return -jnp.where(valid, value, 0.0).mean()

    def update_learner_state(
        self, params: DeterministicParams, learner_state: TD3LearnerState, opt_state: TD3OptState
    ) -> TD3LearnerState:
        """Stores the optimizers' states, and moves the targets; the policy is its own target."""
        critics = moved_towards(
            params.critics, learner_state.target_params.critics, self.cfg.target_rate
        )
        state = super().update_learner_state(params, learner_state, opt_state)
        return state._replace(target_params=DeterministicParams(params.policy, critics))
