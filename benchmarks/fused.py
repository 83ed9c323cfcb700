"""The topology fused against hand-written compiled loops, on gymnax's environments.

Both compile acting, environment, replay and learning into one program, with the same network,
hyperparameters, and unrolls and minibatches or batches from replay. A hand-written loop is as users
write it: gymnax's own ``step``, which resets in the step that ends an episode and takes time limits
for terminations; no checks for NaN, no agent states, logs of the loss and of returns only. Ours
keeps the time rules, which makes one step more in each episode; such steps do not count as frames.
The loops of DQN and SAC are in `benchmarks.fused_off_policy`. Each comparison has a process of its
own, in which XLA has as many threads as `rlstack train` gives it
(`rlstack.programs.build.xla`).

The last line's `medians` have the seconds of compilation too, with the first update.

    python -m benchmarks.fused [--quick]
"""

from __future__ import annotations

import argparse
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.children import in_new_process
from benchmarks.fused_off_policy import DQNLoop, SACLoop
from benchmarks.reference_ppo import gae
from benchmarks.report import Result, alternate
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.fused.loop import Limits
from rlstack.jax_envs.libraries.from_gymnax import make_gymnax
from rlstack.networks import NetworkConfig, actor_critic
from rlstack.networks.layers import forms
from rlstack.programs.build import xla
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.member_config import AgentConfig
from rlstack.programs.config.presets.registry import on_policy_replay, transitions
from rlstack.programs.run.fused import Fused
from rlstack.replay import ReplayConfig
from rlstack.types import Array, Params, PRNGKey, TimeStep

TARGET = 0.9
UNROLL = 128
_FILL = 1_000  # transitions in replay before the first update
MINATAR = NetworkConfig(torso="minatar", hidden_sizes=(128,), shared=True)


class Setting(NamedTuple):
    """One comparison."""

    env: str
    num_envs: int
    iterations: int  # of one measurement: updates of PPO, steps of DQN and SAC
    repeats: int
    network: NetworkConfig = NetworkConfig()
    agent: AgentConfig = PPOConfig()

    @property
    def name(self) -> str:
        """The setting's name in the result."""
        algorithm = type(self.agent).__name__.removesuffix("Config").lower()
        return f"{algorithm}/{self.env}x{self.num_envs}"

    @property
    def on_policy(self) -> bool:
        """Whether an iteration is an unroll and its update, and not one step and an update."""
        return isinstance(self.agent, PPOConfig)


FULL = (
    Setting("CartPole-v1", 8, 400, 9),
    Setting("CartPole-v1", 64, 60, 9),
    Setting("CartPole-v1", 512, 8, 9),
    Setting("Breakout-MinAtar", 64, 4, 7, MINATAR),
    Setting("CartPole-v1", 8, 10_000, 9, agent=DQNConfig(target_rate=0.01)),
    Setting("Pendulum-v1", 8, 2_000, 9, agent=SACConfig(random_frames=0)),
)
QUICK = tuple(
    setting._replace(iterations=max(2, setting.iterations // 10), repeats=3) for setting in FULL
)


def experiment(setting: Setting) -> Experiment:
    """Returns the agent with its default hyperparameters; DQN and SAC update once in each step."""
    replay: ReplayConfig
    if setting.on_policy:
        replay = on_policy_replay(setting.num_envs, UNROLL)
    else:
        replay = transitions(128, 50_000, _FILL, updates_per_frame=1 / setting.num_envs)
    return Experiment(
        preset="benchmark",
        agent=setting.agent,
        env=EnvConfig(setting.env, setting.num_envs, "jax"),
        replay=replay,
        network=setting.network,
        frames=10**12,
        topology="fused",
    )


class Ours:
    """The stack's compiled loop."""

    def __init__(self, cfg: Experiment) -> None:
        """Compiles it."""
        self._loop = Fused(cfg)
        start = time.perf_counter()
        self.measure(1)
        self.compile_seconds = time.perf_counter() - start

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""
        before, start = self._loop.env_frames, time.perf_counter()
        self._loop.call(Limits(iterations))
        return (self._loop.env_frames - before) / (time.perf_counter() - start)


class Rows(NamedTuple):
    """Steps to learn from, ``[N, ...]``."""

    observation: Array
    action: Array
    log_prob: Array
    advantage: Array
    target: Array


class Reference:
    """A compiled loop written for PPO with discrete actions on gymnax."""

    def __init__(self, cfg: Experiment) -> None:
        """Compiles it."""
        assert isinstance(cfg.agent, PPOConfig)
        import gymnax

        self._cfg, self._num_envs = cfg.agent, cfg.env.num_envs
        adapter = make_gymnax(cfg.env.name, {})
        specs = adapter.observation_spec(), adapter.action_spec()
        self._env, self._env_params = gymnax.make(cfg.env.name)
        self._network = actor_critic(*specs, cfg.network)
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(self._cfg.max_grad_norm),
            optax.adam(self._cfg.optimizer.learning_rate, eps=1e-5),
        )
        key = jax.random.PRNGKey(1)
        params = jax.jit(self._network.init)(key)
        keys = jax.random.split(key, self._num_envs)
        observation, env = jax.jit(jax.vmap(self._env.reset, (0, None)))(keys, self._env_params)
        opt_state = jax.jit(self._optimizer.init)(params)
        self._state = (params, opt_state, env, observation, jnp.zeros(self._num_envs), key)
        self._run = jax.jit(self._train, donate_argnums=0)
        start = time.perf_counter()
        with forms.in_loop():  # as for our loop, so that both convolve in the same form
            self.measure(1)
        self.compile_seconds = time.perf_counter() - start

    def measure(self, updates: int) -> float:
        """Returns frames per second of some updates."""
        start = time.perf_counter()
        self._state, logs = jax.block_until_ready(self._run(self._state, updates))
        np.asarray(logs)
        return updates * UNROLL * self._num_envs / (time.perf_counter() - start)

    def _train(self, state: Any, updates: Array) -> Any:
        def body(_: Any, carry: Any) -> Any:
            state, logs = carry
            state, new = self._update(state)
            return state, logs + new

        return jax.lax.fori_loop(0, updates, body, (state, jnp.zeros(3)))

    def _forward(self, params: Params, observation: Array) -> tuple[Array, Array]:
        timestep = TimeStep(None, None, None, observation)  # type: ignore[arg-type]
        output, _ = self._network.apply(None, params, timestep, ())
        return output.policy, output.value

    def _update(self, state: Any) -> Any:
        params, opt_state, env, observation, returns, key = state
        step = jax.vmap(self._env.step, (0, 0, 0, None))

        def act(carry: Any, _: None) -> Any:
            env, observation, returns, key = carry
            key, action_key, step_key = jax.random.split(key, 3)
            logits, value = self._forward(params, observation)
            action = jax.random.categorical(action_key, logits)
            log_prob = _log_prob(logits, action)
            keys = jax.random.split(step_key, self._num_envs)
            after, env, reward, done, _ = step(keys, env, action, self._env_params)
            returns = returns + reward
            ended = jnp.where(done, returns, 0.0)
            row = observation, action, log_prob, value, reward, done, ended
            return (env, after, jnp.where(done, 0.0, returns), key), row

        carry = (env, observation, returns, key)
        (env, observation, returns, key), steps = jax.lax.scan(act, carry, None, length=UNROLL)
        observations, actions, log_probs, values, rewards, done, ended = steps
        values = jnp.concatenate([values, self._forward(params, observation)[1][None]])
        discounts = self._cfg.discount * (1.0 - done)
        advantage, target = gae(
            rewards, discounts, values, self._cfg.gae_lambda, jnp.ones_like(discounts)
        )
        rows = Rows(observations, actions, log_probs, advantage, target)
        rows = jax.tree.map(lambda x: x.reshape((-1, *x.shape[2:])), rows)
        key, shuffle_key = jax.random.split(key)
        params, opt_state, loss = self._learn(params, opt_state, rows, shuffle_key)
        state = params, opt_state, env, observation, returns, key
        return state, jnp.array([loss, ended.sum(), done.sum()])

    def _learn(self, params: Params, opt_state: Any, rows: Rows, key: PRNGKey) -> Any:
        cfg, num_rows = self._cfg, rows.action.shape[0]
        keys = jax.random.split(key, cfg.num_epochs)
        orders = jax.vmap(lambda k: jax.random.permutation(k, num_rows))(keys)

        def descend(carry: Any, indices: Array) -> Any:
            params, opt_state = carry
            minibatch = jax.tree.map(lambda x: x[indices], rows)
            loss, grads = jax.value_and_grad(self._loss)(params, minibatch)
            changes, opt_state = self._optimizer.update(grads, opt_state)
            return (optax.apply_updates(params, changes), opt_state), loss

        schedule = orders.reshape((cfg.num_epochs * cfg.num_minibatches, -1))
        (params, opt_state), losses = jax.lax.scan(descend, (params, opt_state), schedule)
        return params, opt_state, losses.mean()

    def _loss(self, params: Params, rows: Rows) -> Array:
        cfg = self._cfg
        logits, value = self._forward(params, rows.observation)
        advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
        ratio = jnp.exp(_log_prob(logits, rows.action) - rows.log_prob)
        clipped = jnp.clip(ratio, 1 - cfg.clip_ratio, 1 + cfg.clip_ratio)
        policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage)
        value_loss = cfg.value_cost * 0.5 * (value - rows.target) ** 2
        log_probs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1)
        return (policy_loss + value_loss - cfg.entropy_cost * entropy).mean()


def _log_prob(logits: Array, action: Array) -> Array:
    log_probs = jax.nn.log_softmax(logits)
    return (log_probs * jax.nn.one_hot(action, logits.shape[-1])).sum(-1)


def measure(setting: Setting) -> tuple[Any, dict[str, dict[str, float]]]:
    """Returns the comparison, and the seconds that each side took to compile."""
    cfg = experiment(setting)
    xla.configure_runs([cfg])
    loops: dict[type, Any] = {PPOConfig: Reference, DQNConfig: DQNLoop, SACConfig: SACLoop}
    ours, reference = Ours(cfg), loops[type(setting.agent)](cfg)
    if not setting.on_policy:  # until the replay is full enough to learn
        for side in (ours, reference):
            side.measure(2 * _FILL // setting.num_envs)
    comparison = alternate(
        lambda: ours.measure(setting.iterations),
        lambda: reference.measure(setting.iterations),
        setting.repeats,
    )
    seconds = {
        "ours": {"compile_seconds": ours.compile_seconds},
        "reference": {"compile_seconds": reference.compile_seconds},
    }
    return comparison, seconds


def main() -> None:
    """Measures every setting; prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    chosen = parser.parse_args()
    result = Result.empty("fused")
    for setting in QUICK if chosen.quick else FULL:
        comparison, seconds = in_new_process(measure, setting)
        result.add(setting.name, comparison, {})
        for side, values in seconds.items():
            result.medians[setting.name] |= {
                f"{side}_{name}": round(value, 1) for name, value in values.items()
            }
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
