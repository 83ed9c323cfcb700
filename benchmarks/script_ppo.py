"""PPO on gymnax's CartPole in one file, as a researcher writes it by hand; see `benchmarks.starts`.

It has the constants of the preset gymnax-cartpole-ppo, trains in one compiled function, and
evaluates 20 greedy episodes in another. It imports nothing of rlstack.

    python benchmarks/script_ppo.py RESULT.json SEED
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gymnax
import jax
import jax.numpy as jnp
import optax

FRAMES, NUM_ENVS, UNROLL, EPOCHS, EPISODES, MOST_STEPS = 150_000, 8, 32, 6, 20, 500
DISCOUNT, LAMBDA, CLIP, VALUE_COST, EPSILON = 0.98, 0.8, 0.2, 0.5, 0.1
UPDATES = FRAMES // (NUM_ENVS * UNROLL)
ENV, ENV_PARAMS = gymnax.make("CartPole-v1")
OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(0.5),
    optax.adam(optax.linear_schedule(2e-3, 0.0, UPDATES * EPOCHS), eps=1e-5),
)


def init(key: jax.Array) -> dict[str, list[Any]]:
    """Returns the params of a policy and of a critic, two layers of 64 units each."""
    params = {}
    for name, outputs, gain in ("policy", 2, 0.01), ("value", 1, 1.0):
        sizes, gains = (4, 64, 64, outputs), (2**0.5, 2**0.5, gain)
        key, *keys = jax.random.split(key, 4)
        params[name] = [
            (jax.nn.initializers.orthogonal(g)(k, (m, n)), jnp.zeros(n))
            for k, m, n, g in zip(keys, sizes, sizes[1:], gains, strict=False)
        ]
    return params


def forward(params: dict[str, Any], observation: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns logits and values."""

    def mlp(layers: list[Any]) -> jax.Array:
        x = observation
        for w, b in layers[:-1]:
            x = jnp.tanh(x @ w + b)
        w, b = layers[-1]
        return x @ w + b

    return mlp(params["policy"]), mlp(params["value"])[..., 0]


def log_prob_of(logits: jax.Array, action: jax.Array) -> jax.Array:
    """Returns the log-probability of each action."""
    return jnp.take_along_axis(jax.nn.log_softmax(logits), action[..., None], -1)[..., 0]


def loss(params: Any, rows: Any) -> jax.Array:
    """Returns PPO's loss, with normalised advantages."""
    observation, action, old_log_prob, advantage, target = rows
    logits, value = forward(params, observation)
    advantage = (advantage - advantage.mean()) / (advantage.std() + EPSILON)
    ratio = jnp.exp(log_prob_of(logits, action) - old_log_prob)
    policy_loss = -jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage)
    return (policy_loss + VALUE_COST * 0.5 * (value - target) ** 2).mean()


def update(state: Any, _: Any) -> tuple[Any, jax.Array]:
    """Acts for one unroll and learns from it."""
    params, opt_state, env, observation, key = state

    def act(carry: Any, key: Any) -> tuple[Any, Any]:
        env, observation = carry
        action_key, step_key = jax.random.split(key)
        logits, value = forward(params, observation)
        action = jax.random.categorical(action_key, logits)
        keys = jax.random.split(step_key, NUM_ENVS)
        after, env, reward, done, _ = STEP(keys, env, action, ENV_PARAMS)
        row = observation, action, log_prob_of(logits, action), value, reward, done
        return (env, after), row

    key, act_key = jax.random.split(key)
    (env, observation), steps = jax.lax.scan(
        act, (env, observation), jax.random.split(act_key, UNROLL)
    )
    observations, actions, log_probs, values, rewards, done = steps
    last_value = forward(params, observation)[1]

    def accumulate(carry: Any, step: Any) -> tuple[Any, jax.Array]:
        advantage, next_value = carry
        value, reward, done = step
        discount = DISCOUNT * (1.0 - done)
        advantage = reward + discount * next_value - value + discount * LAMBDA * advantage
        return (advantage, value), advantage

    _, advantages = jax.lax.scan(
        accumulate, (jnp.zeros(NUM_ENVS), last_value), (values, rewards, done), reverse=True
    )
    rows = observations, actions, log_probs, advantages, advantages + values
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)

    def descend(carry: Any, _: Any) -> tuple[Any, jax.Array]:
        params, opt_state = carry
        value, grads = jax.value_and_grad(loss)(params, rows)
        changes, opt_state = OPTIMIZER.update(grads, opt_state)
        return (optax.apply_updates(params, changes), opt_state), value

    (params, opt_state), losses = jax.lax.scan(descend, (params, opt_state), None, length=EPOCHS)
    return (params, opt_state, env, observation, key), losses.mean()


STEP = jax.vmap(ENV.step, (0, 0, 0, None))
RESET = jax.vmap(ENV.reset, (0, None))


@jax.jit
def train(key: jax.Array) -> tuple[Any, jax.Array]:
    """Returns trained params and the loss of each update."""
    key, params_key, env_key = jax.random.split(key, 3)
    params = init(params_key)
    observation, env = RESET(jax.random.split(env_key, NUM_ENVS), ENV_PARAMS)
    state = params, OPTIMIZER.init(params), env, observation, key
    state, losses = jax.lax.scan(update, state, None, length=UPDATES)
    return state[0], losses


@jax.jit
def evaluate(params: Any, key: jax.Array) -> jax.Array:
    """Returns the return of the first greedy episode of each environment."""
    observation, env = RESET(jax.random.split(key, EPISODES), ENV_PARAMS)

    def act(carry: Any, key: Any) -> tuple[Any, None]:
        env, observation, going, returns = carry
        action = forward(params, observation)[0].argmax(-1)
        keys = jax.random.split(key, EPISODES)
        observation, env, reward, done, _ = STEP(keys, env, action, ENV_PARAMS)
        return (env, observation, going & ~done, returns + going * reward), None

    carry = env, observation, jnp.ones(EPISODES, bool), jnp.zeros(EPISODES)
    (*_, returns), _ = jax.lax.scan(act, carry, jax.random.split(key, MOST_STEPS))
    return returns


if __name__ == "__main__":
    train_key, eval_key = jax.random.split(jax.random.PRNGKey(int(sys.argv[2])))
    trained, losses = train(train_key)
    mean = float(evaluate(trained, eval_key).mean())
    Path(sys.argv[1]).write_text(json.dumps({"return": mean, "loss": float(losses[-1])}))
