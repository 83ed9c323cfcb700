"""A linear policy, a linear critic, and items for them, for values computed by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.networks import Network, PolicyAndCritic
from rlstack.optimizers import OptimizerConfig
from rlstack.types import Batch, TimeStep, Transition
from tests.agent_cases import FIRST, LAST, UNEVEN

DISCOUNT = 0.9
SGD = OptimizerConfig(name="sgd", learning_rate=0.5)
LOW, HIGH = UNEVEN.minimum, UNEVEN.maximum


def stateless(init, apply):
    return Network(
        init,
        lambda key, params, timestep, state: (apply(params, timestep.observation), state),
        lambda *_: None,
        lambda batch_size: (),
    )


def networks(num_outputs):
    """Observations [3] to ``num_outputs`` numbers; a critic ``o @ w + a @ v`` of two actions."""

    def critic_init(key):
        return {"w": jax.random.normal(key, (3,)), "v": jax.random.normal(key, (2,))}

    return PolicyAndCritic(
        stateless(lambda key: jax.random.normal(key, (3, num_outputs)), lambda w, x: x @ w),
        stateless(critic_init, lambda p, seen: seen.observation @ p["w"] + seen.action @ p["v"]),
    )


def make_batch(step_types, output, seed=0, weights=None, discounts=None):
    """One item per column; `step_types` is [B][T+1]; actions are inside the bounds."""
    rng = np.random.default_rng(seed)
    step_type = np.array(step_types, np.int32).T
    if discounts is None:
        discounts = np.where(step_type == LAST, 0, 1).astype(np.float32)
    timestep = TimeStep(
        step_type,
        np.where(step_type == FIRST, 0, rng.normal(size=step_type.shape)).astype(np.float32),
        discounts,
        rng.normal(size=(*step_type.shape, 3)).astype(np.float32),
    )
    action = rng.uniform(LOW, HIGH, (*step_type.shape, 2)).astype(np.float32)
    items = step_type.shape[1]
    weights = np.ones(items, np.float32) if weights is None else np.array(weights, np.float32)
    return Batch(Transition(timestep, output(action), (), np.zeros_like(step_type)), weights)


def unit(action):
    return (np.asarray(action) - LOW) / (HIGH - LOW) * 2 - 1


def values_of(critics, observation, action):
    """The values of each critic, [B, N], in plain numpy; actions in [-1, 1]."""
    return np.stack(
        [
            observation @ np.asarray(w) + np.asarray(action) @ np.asarray(v)
            for w, v in zip(critics["w"], critics["v"], strict=True)
        ],
        axis=-1,
    )


def moved(old, new, rate):
    return jax.tree.map(lambda x, y: (1 - rate) * np.asarray(x) + rate * np.asarray(y), old, new)


def scaled(tree, factor):
    return jax.tree.map(lambda x: jnp.asarray(x) * factor, tree)
