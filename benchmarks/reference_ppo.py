"""PPO written by hand for one experiment: the loop that rlstack is measured against.

It has no abstractions and no waste: EnvPool's public Gymnasium interface, one jitted call to act
(which splits the key), numpy rollout buffers, one jitted call to learn. It does the same work as
rlstack: networks are those of rlstack.networks, hyperparameters those of `rlstack.agents.ppo`.
  Episodes cut by a time limit are bootstrapped. The step on which EnvPool starts a new episode, and
  ignores the action, is left out of every mean.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from rlstack.agents.ppo import PPOConfig
from rlstack.envs.cpp import library
from rlstack.networks import NetworkConfig, actor_critic
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig
from rlstack.types import Array, Params, PyTree, TimeStep

Updated = tuple[Params, optax.OptState, Array]  # the array is the loss


class Minibatch(NamedTuple):
    """Rows [N, ...] to learn from; for a whole rollout, N = T * B."""

    observation: Array
    action: Array
    log_prob: Array  # of the behaviour policy
    advantage: Array
    target: Array  # of the value
    mask: Array  # False where there is no transition


class ReferencePPO:
    """Environments, params and buffers of one hand-written PPO."""

    def __init__(
        self,
        cfg: PPOConfig,
        env: EnvConfig,
        network: NetworkConfig,
        unroll_length: int,
        seed: int = 1,
    ) -> None:
        """Creates everything and resets the environments.

        Raises:
          ValueError: a hyperparameter has a value that this loop does not support.
        """
        _check(cfg)
        self.cfg, self.unroll_length, self.num_envs = cfg, unroll_length, env.num_envs
        self.env = _make_env(env, seed)
        obs_space, action_space = self.env.observation_space, self.env.action_space
        obs_dtype = np.dtype(np.float32 if obs_space.dtype == np.float64 else obs_space.dtype)
        self.discrete = isinstance(action_space, gymnasium.spaces.Discrete)
        if self.discrete:
            action_spec: specs.Array = specs.DiscreteArray(int(action_space.n), np.int32)
        else:
            action_spec = specs.Array(action_space.shape, np.float32)
            self._low, self._high = (
                x.astype(np.float32) for x in (action_space.low, action_space.high)
            )
        self.network = actor_critic(specs.Array(obs_space.shape, obs_dtype), action_spec, network)
        # A convolution inside a compiled loop is many times slower on the CPU.
        self._scans = network.torso == "mlp" or jax.default_backend() != "cpu"
        init_key, self.key = jax.random.split(jax.random.PRNGKey(seed))
        self.params = jax.jit(self.network.init)(init_key)
        self.optimizer = optax.chain(
            optax.clip_by_global_norm(cfg.max_grad_norm),
            optax.adam(cfg.optimizer.learning_rate, eps=cfg.optimizer.eps or 1e-5),
        )
        self.opt_state = jax.jit(self.optimizer.init)(self.params)
        self.rng = np.random.default_rng(seed)
        self.act = jax.jit(self._act_fn)
        self._learn = jax.jit(self._learn_fn)
        self._advantages = jax.jit(self._advantages_fn)
        self._descend = jax.jit(self._descend_fn)

        time, batch = unroll_length, env.num_envs
        self.observations = np.zeros((time + 1, batch, *obs_space.shape), obs_dtype)
        self.actions = np.zeros((time, batch, *action_spec.shape), action_spec.dtype)
        self.log_probs = np.zeros((time, batch), np.float32)
        self.values = np.zeros((time, batch), np.float32)
        self.rewards = np.zeros((time, batch), np.float32)
        self.discounts = np.zeros((time, batch), np.float32)
        self.mask = np.zeros((time, batch), np.bool_)
        self.episode_returns: list[float] = []
        self._running_returns = np.zeros(batch, np.float64)
        self._done = np.zeros(batch, np.bool_)
        self.observations[-1] = self.env.reset()[0]

    def train(self, num_updates: int) -> None:
        """Alternates rollouts and updates."""
        for _ in range(num_updates):
            self.rollout()
            self.update()

    def act_only(self, steps: int) -> None:
        """Acts without storing anything: the minimum cost of acting."""
        env, params, key = self.env, self.params, self.key
        dtype, obs = self.observations.dtype, self.observations[-1]
        for _ in range(steps):
            key, action, _, _ = self.act(params, key, obs)
            obs = env.step(self._to_env(np.asarray(action)))[0].astype(dtype, copy=False)
        self.key, self.observations[-1] = key, obs

    def rollout(self) -> None:
        """Fills the buffers with the next T steps."""
        env, params, key, done = self.env, self.params, self.key, self._done
        observations = self.observations
        observations[0] = observations[-1]
        for t in range(self.unroll_length):
            key, action, log_prob, value = self.act(params, key, observations[t])
            self.actions[t] = action = np.asarray(action)
            obs, reward, terminated, truncated, _ = env.step(self._to_env(action))
            observations[t + 1] = obs
            self.log_probs[t] = log_prob
            self.values[t] = value
            self.rewards[t] = reward
            self.discounts[t] = ~terminated
            self.mask[t] = ~done  # the step after a last one only resets
            done = terminated | truncated
            self._running_returns += reward
            if done.any():
                self.episode_returns.extend(self._running_returns[done].tolist())
                self._running_returns[done] = 0
        self.key, self._done = key, done

    def update(self) -> float:
        """Learns from the buffers; returns the mean loss."""
        cfg, num_rows = self.cfg, self.unroll_length * self.num_envs
        size = num_rows // cfg.num_minibatches
        orders = [self.rng.permutation(num_rows) for _ in range(cfg.num_epochs)]
        schedule = np.stack(orders).astype(np.int32)[:, : size * cfg.num_minibatches]
        schedule = schedule.reshape((-1, size))
        returns = (self.values, self.rewards, self.discounts, self.mask)
        if self._scans:
            rollout = (self.observations, self.actions, self.log_probs, returns)
            self.params, self.opt_state, loss = self._learn(
                self.params, self.opt_state, rollout, schedule
            )
            return float(loss)
        advantages = self._advantages(self.params, self.observations[-1], returns)
        rows = _rows(
            self.observations[:-1],
            self.actions,
            self.log_probs,
            *(np.asarray(x) for x in advantages),
            self.mask,
        )
        losses = []
        for indices in schedule:
            minibatch = Minibatch(*(np.take(x, indices, axis=0) for x in rows))
            self.params, self.opt_state, loss = self._descend(
                self.params, self.opt_state, minibatch
            )
            losses.append(loss)
        return float(np.mean([np.asarray(loss) for loss in losses]))

    def close(self) -> None:
        """Lets EnvPool end its threads."""
        self.env = None

    def _to_env(self, action: np.ndarray) -> np.ndarray:
        return action if self.discrete else np.clip(action, self._low, self._high)

    def _forward(self, params: Params, observation: Array) -> tuple[Array, Array]:
        timestep = TimeStep(None, None, None, observation)  # type: ignore[arg-type]
        output, _ = self.network.apply(None, params, timestep, ())
        return output.policy, output.value

    def _act_fn(self, params: Params, key: Array, observation: Array) -> tuple[Array, ...]:
        key, action_key = jax.random.split(key)
        policy, value = self._forward(params, observation)
        if self.discrete:
            action = jax.random.categorical(action_key, policy).astype(jnp.int32)
        else:
            mean, log_std = jnp.split(policy, 2, axis=-1)
            action = mean + jnp.exp(log_std) * jax.random.normal(action_key, mean.shape)
        return key, action, self._log_prob_and_entropy(policy, action)[0], value

    def _log_prob_and_entropy(self, policy: Array, action: Array) -> tuple[Array, Array]:
        if self.discrete:
            log_probs = jax.nn.log_softmax(policy)
            entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
            # Not take_along_axis: in large batches its gradient aborts jaxlib 0.5's older runtime.
            chosen = jax.nn.one_hot(action, log_probs.shape[-1])
            return (log_probs * chosen).sum(-1), entropy
        mean, log_std = jnp.split(policy, 2, axis=-1)
        log_2_pi = np.log(2 * np.pi)
        log_prob = -0.5 * ((action - mean) * jnp.exp(-log_std)) ** 2 - log_std - 0.5 * log_2_pi
        return log_prob.sum(-1), (log_std + 0.5 * (log_2_pi + 1)).sum(-1)

    def _advantages_fn(
        self, params: Params, last_observation: Array, returns: PyTree
    ) -> tuple[Array, Array]:
        values, rewards, discounts, mask = returns
        bootstrap = self._forward(params, last_observation)[1]
        values = jnp.concatenate([values, bootstrap[None]])
        discounts = discounts * self.cfg.discount
        return gae(rewards, discounts, values, self.cfg.gae_lambda, mask)

    def _learn_fn(
        self, params: Params, opt_state: optax.OptState, rollout: PyTree, schedule: Array
    ) -> Updated:
        observations, actions, log_probs, returns = rollout
        advantages = self._advantages_fn(params, observations[-1], returns)
        rows = _rows(observations[:-1], actions, log_probs, *advantages, returns[-1])

        def body(carry: Any, indices: Any) -> tuple[Any, Array]:
            minibatch = jax.tree.map(lambda x: x[indices], rows)
            *new, loss = self._descend_fn(carry[0], carry[1], minibatch)
            return tuple(new), loss

        (params, opt_state), losses = jax.lax.scan(body, (params, opt_state), schedule)
        return params, opt_state, jnp.mean(losses)

    def _descend_fn(
        self, params: Params, opt_state: optax.OptState, minibatch: Minibatch
    ) -> Updated:
        loss, grads = jax.value_and_grad(self.loss)(params, minibatch)
        updates, opt_state = self.optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    def loss(self, params: Params, rows: Minibatch) -> Array:
        """Returns PPO's loss on rows, as `rlstack.agents.ppo.PPO.loss`."""
        cfg = self.cfg
        weights = rows.mask / jnp.maximum(rows.mask.sum(), 1)
        policy, value = self._forward(params, rows.observation)
        log_prob, entropy = self._log_prob_and_entropy(policy, rows.action)
        advantage = rows.advantage
        if cfg.normalise_advantages:
            centred = advantage - (weights * advantage).sum()
            advantage = centred / (jnp.sqrt((weights * centred**2).sum()) + 1e-8)
        ratio = jnp.exp(log_prob - rows.log_prob)
        clipped = jnp.clip(ratio, 1 - cfg.clip_ratio, 1 + cfg.clip_ratio)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        value_loss = cfg.value_cost * 0.5 * (value - rows.target) ** 2
        each = policy_loss + value_loss - cfg.entropy_cost * entropy
        return jnp.sum(weights * each)


def gae(
    rewards: Array, discounts: Array, values: Array, gae_lambda: float, mask: Array
) -> tuple[Array, Array]:
    """Returns advantages and targets [T, B]; arguments as in `rlstack.math.returns.gae`."""
    deltas = (rewards + discounts * values[1:] - values[:-1]) * mask
    trace = discounts * gae_lambda * mask

    def body(following: Any, now: Any) -> Any:
        advantage = now[0] + now[1] * following
        return advantage, advantage

    _, advantages = jax.lax.scan(
        body, jnp.zeros_like(deltas[0]), (deltas, trace), reverse=True, unroll=8
    )
    return advantages, advantages + values[:-1]


def _rows(*arrays: Array) -> Minibatch:
    """Merges the axes T and B of a rollout."""
    return Minibatch(*(x.reshape((-1, *x.shape[2:])) for x in arrays))


def _make_env(env: EnvConfig, seed: int) -> Any:
    envpool = library.load()
    if envpool is None:
        raise ValueError("ReferencePPO: EnvPool must be installed.")
    # Waking a second thread costs more than stepping these; 0 is one thread for each core.
    threads = env.num_workers or (1 if env.name.startswith("CartPole") else 0)
    return envpool.make(
        env.name,
        env_type="gymnasium",
        num_envs=env.num_envs,
        seed=seed,
        num_threads=threads,
        **env.options,
    )


def _check(cfg: PPOConfig) -> None:
    """Raises an error for hyperparameters that the loop would ignore."""
    adam = OptimizerConfig("adam", cfg.optimizer.learning_rate, eps=cfg.optimizer.eps)
    plain = dataclasses.replace(
        cfg,
        value_clip=0.0,
        optimizer=adam,
        torso_optimizer=None,
        policy_head_optimizer=None,
        value_head_optimizer=None,
    )
    if cfg != plain or not cfg.max_grad_norm:
        raise ValueError(
            "ReferencePPO: the optimizer must be one Adam with a constant learning rate and "
            f"clipped gradients; got {cfg}."
        )
