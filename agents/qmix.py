"""QMIX and VDN: values of the seats of a game whose mix is the value of what all do together.

QMIX, Rashid et al. (2018), arXiv:1803.11485: a network mixes the values of the seats, with weights
that depend on the state of the game and are not negative. So the best action of each seat is its
part of the best joint action, and seats act without one another's observations. VDN, Sunehag et al.
(2017), arXiv:1706.05296, is the same with the sum in place of the network (``mixer`` sum).

It learns from joint rows (``env.options.joint``), with double Q-learning on sequences. The state of
the game is that of the option ``critic_state``; without it, all seats' observations. Seats share
one network, which sees the number of the seat. Seats that are out of the game have the value 0, and
illegal actions are never the best. The network may be recurrent, see `SequenceQLearning`.

Defaults are those of PyMARL (github.com/oxwhirl/pymarl, src/config/algs/qmix.yaml and
src/config/default.yaml), which has 32 whole episodes in a batch. Deviations: the network does not
see the seat's last action; items may span episodes, see `rlstack.agents.r2d2`; a truncated episode
is bootstrapped from its true last observation; a seat that is dead has no value, where PyMARL mixes
the value of its only legal action. Targets may have n steps, and target params may move at each
update.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from rlstack import distributions
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.exploration import next_counts
from rlstack.families.q_learning import (
    QOutput,
    SequenceQLearning,
    SequenceState,
    behaviour_policy,
    preferences,
    values_of,
)
from rlstack.math import returns
from rlstack.networks.base import dummy_timestep
from rlstack.networks.seats import (
    Mixer,
    monotonic_mixer,
    require_joint,
    seat_q_network,
    seat_specs,
    state_of_game,
    sum_mixer,
)
from rlstack.optimizers import OptimizerConfig
from rlstack.specs import ALIVE
from rlstack.types import Array, Batch, Logs, Params, PRNGKey, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class QMIXConfig(Checked):
    """Hyperparameters of QMIX and VDN; defaults are PyMARL's."""

    mixer: Literal["monotonic", "sum"] = "monotonic"
    """How the values of the seats make that of the game: QMIX's network, or VDN's sum."""
    mixer_size: int = 32
    """Units of the hidden layer of QMIX's network."""
    hyper_size: int = 64
    """Hidden units of the functions of the state that give its weights; 0 makes them linear, as in
    the paper."""
    discount: float = 0.99
    """Discount of future rewards, per step."""
    burn_in: int = 0
    """Steps at the beginning of a sequence that only bring the recurrent state up to date."""
    n_step: int = 1
    """Number of transitions before a target bootstraps."""
    double: bool = True
    """Whether the online network chooses the actions that the target network values."""
    target_period: int = 200
    """Updates between two copies of the params to the target. Ignored if target_rate is above 0.
    PyMARL copies after 200 episodes."""
    target_rate: float = 0.0
    """Fraction by which the target moves towards the params at each update. 0: copies every
    target_period."""
    max_grad_norm: float = 10.0
    """Global norm that gradients are clipped to; 0 does not clip."""
    optimizer: OptimizerConfig = OptimizerConfig("rmsprop", 5e-4, eps=1e-5, decay=0.99)
    """Optimizer of the network and the mixer."""
    epsilon_start: float = 1.0
    """Probability of a random action of a seat at the first frame."""
    epsilon_end: float = 0.05
    """Probability of a random action after epsilon_frames."""
    epsilon_frames: int = 50_000
    """Frames of all games together over which the probability falls linearly."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("discount", "target_rate", "epsilon_start", "epsilon_end"):
            self.require(field, 0 <= getattr(self, field) <= 1, "in [0, 1]")
        self.require_at_least(0, "burn_in", "hyper_size", "max_grad_norm")
        self.require_at_least(1, "n_step", "target_period", "epsilon_frames", "mixer_size")


class QMIXParams(NamedTuple):
    """The params that the learner publishes; acting needs only those of the seats."""

    seats: Params
    mixer: Params


@register(QMIXConfig, network=seat_q_network, policy=behaviour_policy)
class QMIX(SequenceQLearning):
    """The agent; construct it with a network of the values of all seats, ``[B, S, N]``."""

    cfg: QMIXConfig
    reads_first_state = True

    def __init__(self, cfg: QMIXConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        number = seat_specs(self.obs_spec, self.action_spec, "QMIX").number
        self._mixer: Mixer = (
            sum_mixer()
            if cfg.mixer == "sum"
            else monotonic_mixer(number, cfg.mixer_size, cfg.hyper_size)
        )

    def check_extras(self, extras: PyTree) -> None:
        """Raises a ValueError unless the extras are those of joint rows."""
        require_joint(extras, "QMIX")

    def initial_params(self, rng_key: PRNGKey) -> QMIXParams:
        """Returns newly initialised params of the network and the mixer."""
        network_key, mixer_key = jax.random.split(rng_key)
        state = state_of_game(self.obs_spec, dummy_timestep(self.obs_spec))
        return QMIXParams(
            self.network.init(network_key), self._mixer.init(mixer_key, state.shape[-1])
        )

    def of_network(self, params: QMIXParams) -> Params:
        """Returns the params of the seats."""
        return params.seats

    def actor_step(
        self, rng_key: PRNGKey, params: QMIXParams, timestep: TimeStep, state: SequenceState
    ) -> tuple[QOutput, SequenceState]:
        """Chooses the actions ``[B, S]``; each seat explores by itself."""
        values, core = self.network.apply(None, params.seats, timestep, state.core)
        logits = preferences(values, timestep).logits

        def choose(key: PRNGKey, logits: Array) -> Array:
            return self.policy(key, distributions.Categorical(logits), state.counts)

        keys = jax.random.split(rng_key, logits.shape[1])
        action = jax.vmap(choose, in_axes=(0, 1), out_axes=1)(keys, logits)
        return QOutput(action), SequenceState(next_counts(state.counts, timestep), core)

    def loss(
        self, params: QMIXParams, target_params: QMIXParams, batch: Batch
    ) -> tuple[Array, tuple[Logs, Array]]:
        """Returns the loss, (logs, mean ``|TD error|`` of each item ``[B]``).

        The loss is the mean of the squared TD errors of the valid transitions, times the weights of
        their items.
        """
        values = self.values(params, batch.trajectory)
        target_values = self.values(target_params, batch.trajectory)
        learned = jax.tree.map(lambda x: x[self.cfg.burn_in :], batch.trajectory)
        timestep = learned.timestep
        targets = self.targets(target_params, values, target_values, timestep)
        before = jax.tree.map(lambda x: x[:-1], timestep)
        chosen = self.mixed(
            params, values_of(values[:-1], learned.agent_output.action[:-1]), before
        )
        valid = ~timestep.first()[1:]  # LAST -> FIRST is no transition
        td_error = jnp.where(valid, jax.lax.stop_gradient(targets) - chosen, 0.0)
        number = jnp.maximum(valid.sum(), 1)
        loss = jnp.sum(batch.weights * jnp.square(td_error)) / number
        size = jnp.abs(td_error)
        priorities = size.sum(axis=0) / jnp.maximum(valid.sum(axis=0), 1)
        logs: Logs = {
            "loss": loss,
            "value": jnp.where(valid, chosen, 0.0).sum() / number,
            "td_error": size.sum() / number,
        }
        return loss, (logs, priorities)

    def targets(
        self, target_params: QMIXParams, values: Array, target_values: Array, timestep: TimeStep
    ) -> Array:
        """Returns the n-step targets of the values of the game, ``[T, B]``.

        Args:
          target_params: those of the target network and its mixer.
          values: ``[T + 1, B, S, N]``, of the online network.
          target_values: ``[T + 1, B, S, N]``, of the target network.
          timestep: ``[T + 1, B, ...]``.
        """
        best = preferences(values if self.cfg.double else target_values, timestep).mode()
        after = jax.tree.map(lambda x: x[1:], timestep)
        return returns.n_step_returns(
            rewards=after.reward,
            discounts=after.discount * self.cfg.discount,
            bootstrap_values=self.mixed(target_params, values_of(target_values, best), timestep),
            n=self.cfg.n_step,
            mask=~after.first(),
        )

    def mixed(self, params: QMIXParams, values: Array, timestep: TimeStep) -> Array:
        """Returns the values of games, ``[T, B]``, for those of their seats, ``[T, B, S]``."""
        alive = jnp.asarray(timestep.extras[ALIVE], jnp.float32)
        state = state_of_game(self.obs_spec, timestep)
        return self._mixer.apply(params.mixer, values * alive, state)
