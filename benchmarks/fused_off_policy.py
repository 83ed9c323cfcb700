"""Hand-written compiled loops of DQN and SAC on gymnax's environments; for `benchmarks.fused`.

They are as users write them: one step of all environments, then one update from a batch that is
drawn uniformly from arrays with the last transitions. There are no checks and no time rules, and
of logs only the loss and the returns. The networks, optimizers and losses are those of ours.
"""

from __future__ import annotations

import abc
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlstack.jax_envs.libraries.from_gymnax import make_gymnax
from rlstack.networks import CriticInput, ensemble, policy_and_critic, q_network
from rlstack.programs.config.experiment import Experiment
from rlstack.types import Array, PRNGKey, PyTree, TimeStep


class Rows(NamedTuple):
    """Transitions, ``[N, ...]``."""

    observation: Array
    action: Array
    reward: Array
    discount: Array
    next_observation: Array


class State(NamedTuple):
    """The state of a loop."""

    params: PyTree
    target: PyTree
    opt_state: optax.OptState
    env: PyTree
    observation: Array  # [B, ...]
    returns: Array  # [B], of the episodes in progress
    rows: Rows  # the newest transitions, [capacity, ...]
    added: Array  # [] int32, the number of transitions so far
    key: PRNGKey


class OffPolicy(abc.ABC):
    """A compiled loop; a subclass has the algorithm."""

    _optimizer: optax.GradientTransformation

    def __init__(self, cfg: Experiment) -> None:
        """Compiles it."""
        import gymnax

        self._agent: Any = cfg.agent
        self._replay, self._num_envs = cfg.replay, cfg.env.num_envs
        adapter = make_gymnax(cfg.env.name, {})
        self._env, self._env_params = gymnax.make(cfg.env.name)
        self._make(cfg, adapter.observation_spec(), adapter.action_spec())
        self._state = jax.jit(self._start)(jax.random.PRNGKey(1))
        self._run = jax.jit(self._train, donate_argnums=0)
        start = time.perf_counter()
        self.measure(1)
        self.compile_seconds = time.perf_counter() - start

    @abc.abstractmethod
    def _make(self, cfg: Experiment, observation_spec: Any, action_spec: Any) -> None:
        """Makes the networks and ``self._optimizer``."""

    @abc.abstractmethod
    def _params(self, key: PRNGKey) -> PyTree:
        """Returns the initial params."""

    @abc.abstractmethod
    def _target(self, params: PyTree) -> PyTree:
        """Returns the part of the params that a target follows."""

    @abc.abstractmethod
    def _act(self, params: PyTree, observation: Array, added: Array, key: PRNGKey) -> Array:
        """Returns the actions."""

    @abc.abstractmethod
    def _loss(self, params: PyTree, target: PyTree, rows: Rows, key: PRNGKey) -> Array:
        """Returns the loss."""

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""
        start = time.perf_counter()
        self._state, logs = jax.block_until_ready(self._run(self._state, iterations))
        np.asarray(logs)
        return iterations * self._num_envs / (time.perf_counter() - start)

    def _start(self, key: PRNGKey) -> State:
        key, params_key, env_key = jax.random.split(key, 3)
        params = self._params(params_key)
        keys = jax.random.split(env_key, self._num_envs)
        observation, env = jax.vmap(self._env.reset, (0, None))(keys, self._env_params)
        action = self._act(params, observation, jnp.zeros((), jnp.int32), key)

        def zeros(x: Array) -> Array:
            return jnp.zeros((self._replay.max_size, *x.shape[1:]), x.dtype)

        numbers = jnp.zeros(self._replay.max_size)
        rows = Rows(zeros(observation), zeros(action), numbers, numbers, zeros(observation))
        returns, added = jnp.zeros(self._num_envs), jnp.zeros((), jnp.int32)
        target = jax.tree.map(jnp.copy, self._target(params))
        opt_state = self._optimizer.init(params)
        return State(params, target, opt_state, env, observation, returns, rows, added, key)

    def _train(self, state: State, iterations: Array) -> tuple[State, Array]:
        def body(_: Any, carry: tuple[State, Array]) -> tuple[State, Array]:
            state, logs = carry
            state, ended = self._step(state)
            full = state.added >= self._replay.min_size
            state, loss = jax.lax.cond(full, self._learn, lambda s: (s, jnp.zeros(())), state)
            return state, logs + jnp.stack([loss, *ended])

        return jax.lax.fori_loop(0, iterations, body, (state, jnp.zeros(3)))

    def _step(self, state: State) -> tuple[State, tuple[Array, Array]]:
        """Acts once and stores the transitions; returns the state and returns of episodes."""
        key, action_key, step_key = jax.random.split(state.key, 3)
        action = self._act(state.params, state.observation, state.added, action_key)
        keys = jax.random.split(step_key, self._num_envs)
        step = jax.vmap(self._env.step, (0, 0, 0, None))
        after, env, reward, done, _ = step(keys, state.env, action, self._env_params)
        discount = self._agent.discount * (1.0 - done)
        places = (state.added + jnp.arange(self._num_envs)) % self._replay.max_size
        new = Rows(state.observation, action, reward, discount, after)
        rows = jax.tree.map(lambda old, x: old.at[places].set(x), state.rows, new)
        returns = state.returns + reward
        ended = jnp.where(done, returns, 0.0).sum(), done.sum().astype(jnp.float32)
        state = state._replace(
            env=env,
            observation=after,
            returns=jnp.where(done, 0.0, returns),
            rows=rows,
            added=state.added + self._num_envs,
            key=key,
        )
        return state, ended

    def _learn(self, state: State) -> tuple[State, Array]:
        """Makes one update."""
        key, draw_key, loss_key = jax.random.split(state.key, 3)
        held = jnp.minimum(state.added, self._replay.max_size)
        indices = jax.random.randint(draw_key, (self._replay.batch_size,), 0, held)
        batch = jax.tree.map(lambda x: x[indices], state.rows)
        loss, grads = jax.value_and_grad(self._loss)(state.params, state.target, batch, loss_key)
        changes, opt_state = self._optimizer.update(grads, state.opt_state)
        params = optax.apply_updates(state.params, changes)
        rate = self._agent.target_rate
        target = optax.incremental_update(self._target(params), state.target, rate)
        state = state._replace(params=params, target=target, opt_state=opt_state, key=key)
        return state, loss


class DQNLoop(OffPolicy):
    """Double Q-learning with a Huber loss."""

    def _make(self, cfg: Experiment, observation_spec: Any, action_spec: Any) -> None:
        self._num_actions = action_spec.num_values
        self._network = q_network(observation_spec, action_spec, cfg.network)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(self._agent.max_grad_norm),
            optax.adam(self._agent.optimizer.learning_rate, eps=1e-5),
        )

    def _params(self, key: PRNGKey) -> PyTree:
        return self._network.init(key)

    def _target(self, params: PyTree) -> PyTree:
        return params

    def _values(self, params: PyTree, observation: Array) -> Array:
        return self._network.apply(None, params, _timestep(observation), ())[0]

    def _act(self, params: PyTree, observation: Array, added: Array, key: PRNGKey) -> Array:
        cfg, shape = self._agent, (self._num_envs,)
        chance_key, action_key = jax.random.split(key)
        epsilon = jnp.interp(
            added,
            jnp.array([0, cfg.epsilon_frames]),
            jnp.array([cfg.epsilon_start, cfg.epsilon_end]),
        )
        random = jax.random.randint(action_key, shape, 0, self._num_actions)
        greedy = self._values(params, observation).argmax(-1)
        return jnp.where(jax.random.uniform(chance_key, shape) < epsilon, random, greedy)

    def _loss(self, params: PyTree, target: PyTree, rows: Rows, key: PRNGKey) -> Array:
        del key
        taken = _of(self._values(params, rows.observation), rows.action)
        best = self._values(params, rows.next_observation).argmax(-1)
        end = _of(self._values(target, rows.next_observation), best)
        goal = jax.lax.stop_gradient(rows.reward + rows.discount * end)
        return optax.losses.huber_loss(taken, goal).mean()


class SACParams(NamedTuple):
    """What SAC learns."""

    policy: PyTree
    critics: PyTree  # [2, ...]
    log_temperature: Array  # [] float32


class SACLoop(OffPolicy):
    """SAC with two critics, a learned temperature, and actions of one bounded box."""

    def _make(self, cfg: Experiment, observation_spec: Any, action_spec: Any) -> None:
        network = policy_and_critic(observation_spec, action_spec, cfg.network)
        self._policy, self._critics = network.policy, ensemble(network.critic, 2)
        self._scale, self._size = float(action_spec.maximum.max()), action_spec.shape[0]
        self._optimizer = optax.adam(self._agent.optimizer.learning_rate)

    def _params(self, key: PRNGKey) -> PyTree:
        policy_key, critics_key = jax.random.split(key)
        critics = self._critics.init(critics_key)
        return SACParams(self._policy.init(policy_key), critics, jnp.zeros(()))

    def _target(self, params: PyTree) -> PyTree:
        return params.critics

    def _sample(self, policy: PyTree, observation: Array, key: PRNGKey) -> tuple[Array, Array]:
        """Returns actions in [-1, 1] and their log densities."""
        mean, log_std = jnp.split(
            self._policy.apply(None, policy, _timestep(observation), ())[0], 2, axis=-1
        )
        log_std = jnp.clip(log_std, -20.0, 2.0)
        noise = jax.random.normal(key, mean.shape)
        raw = mean + jnp.exp(log_std) * noise
        density = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2 * jnp.pi)
        squash = 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
        return jnp.tanh(raw), (density - squash).sum(-1)

    def _value(self, critics: PyTree, observation: Array, action: Array) -> Array:
        seen = _timestep(CriticInput(observation, action))
        return self._critics.apply(None, critics, seen, ())[0]  # [B, 2]

    def _act(self, params: PyTree, observation: Array, added: Array, key: PRNGKey) -> Array:
        del added
        return self._scale * self._sample(params.policy, observation, key)[0]

    def _loss(self, params: PyTree, target: PyTree, rows: Rows, key: PRNGKey) -> Array:
        now_key, end_key = jax.random.split(key)
        fixed = jax.lax.stop_gradient(params)
        temperature = jnp.exp(fixed.log_temperature)
        action, log_prob = self._sample(fixed.policy, rows.next_observation, end_key)
        end = self._value(target, rows.next_observation, action).min(-1) - temperature * log_prob
        goal = rows.reward + rows.discount * end
        taken = self._value(params.critics, rows.observation, rows.action / self._scale)
        critic_loss = 0.5 * ((goal[:, None] - taken) ** 2).sum(-1).mean()
        action, log_prob = self._sample(params.policy, rows.observation, now_key)
        value = self._value(fixed.critics, rows.observation, action).min(-1)
        policy_loss = (temperature * log_prob - value).mean()
        surplus = jax.lax.stop_gradient(-log_prob) + self._size
        temperature_loss = (jnp.exp(params.log_temperature) * surplus).mean()
        return critic_loss + policy_loss + temperature_loss


def _timestep(observation: Any) -> TimeStep:
    return TimeStep(None, None, None, observation)  # type: ignore[arg-type]


def _of(values: Array, action: Array) -> Array:
    return jnp.take_along_axis(values, action[:, None], axis=-1)[:, 0]
