"""What agents have in common whose network learns from targets of a slower copy of itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from rlstack.agent import Agent
from rlstack.optimizers import OneOptimizer, component_optimizer
from rlstack.types import Array, Params, PRNGKey


class TargetLearnerState(NamedTuple):
    """What the learner keeps."""

    opt_state: Any
    target_params: Params
    num_updates: Array  # [] int32
    rng_key: PRNGKey


class TargetNetworkAgent(OneOptimizer, Agent):
    """An agent of one network and its target; construct it as `rlstack.agent.Agent` says.

    Of its config it reads ``optimizer`` and ``max_grad_norm``, and ``target_rate``, the share of
    the params that the target takes over at each update (Polyak averaging), or, where that is 0,
    ``target_period``, the updates between two copies (Mnih et al. 2015).
    """

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._optimizer = component_optimizer(cfg.optimizer, {}, cfg.max_grad_norm)

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns fresh network parameters."""
        return self.network.init(rng_key)

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> TargetLearnerState:
        """Returns the optimizer's initial state, with the params as target."""
        return TargetLearnerState(
            self._optimizer.init(params), params, jnp.zeros((), jnp.int32), rng_key
        )

    def update_learner_state(
        self, params: Params, learner_state: TargetLearnerState, opt_state: Any
    ) -> TargetLearnerState:
        """Keeps the optimizer's state, counts the update, and moves the target params."""
        num_updates, target = learner_state.num_updates + 1, learner_state.target_params
        if self.cfg.target_rate:
            target = optax.incremental_update(params, target, self.cfg.target_rate)
        else:
            target = optax.periodic_update(params, target, num_updates, self.cfg.target_period)
        return learner_state._replace(
            opt_state=opt_state, target_params=target, num_updates=num_updates
        )
