"""The cost of the learner against the same loss and optimizer in a hand-written loop.

Ours is `rlstack.learning.learner.Learner.step`, as every program runs it: the agent's hooks, the
logs on the host, the check for NaN. The reference is a loop around one jitted function that takes
the gradient of the agent's public ``loss``, applies optax, updates the targets, and waits for the
loss. Networks, batch sizes and hyperparameters are those of the presets; batches are random.

Both sides take the same numpy batch and keep the params of one update for the next. The reference
does the minimum: it fetches no loss, logs nothing, computes no gradient norm except for clipping,
and returns no priorities, although most hand-written loops do some of this. So everything that the
learner adds counts against it.

With --cores, it compares memory cores with an LSTM of their size instead: the gradient of an unroll
of 128 steps, 32 rows, as a learner computes it.

    python -m benchmarks.learners [--quick] [--only PRESET] [--cores]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from dm_env import specs

from benchmarks.report import Comparison, Result, alternate, rate
from rlstack.acting.actor import transition_spec
from rlstack.agent import Agent
from rlstack.agents.bc import BC
from rlstack.agents.ddpg import DDPG
from rlstack.agents.ppo import PPO
from rlstack.agents.r2d2 import R2D2
from rlstack.agents.sac import SAC
from rlstack.agents.td3 import TD3
from rlstack.configs.network import Core, NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.families.policy_gradient import PolicyGradientAgent
from rlstack.families.q_learning import QLearning
from rlstack.learning.learner import Learner
from rlstack.networks.base import recurrent
from rlstack.networks.configured import core_of
from rlstack.optimizers import component_optimizer
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.types import Batch, EnvSpec, Params, PyTree, TimeStep, Transition

TARGET = 1 / 1.2
CORES: tuple[Core, ...] = ("gru", "mingru", "s5", "gtrxl")
CORES_TARGET = 3.0  # of those with a parallel scan
PRESETS = (
    "cartpole-ppo",
    "cartpole-impala",
    "cartpole-a2c",
    "cartpole-reinforce",
    "cartpole-dqn",
    "cartpole-c51",
    "cartpole-rainbow",
    "cartpole-qrdqn",
    "cartpole-iqn",
    "cartpole-munchausen",
    "memory-cartpole-r2d2",
    "pendulum-sac",
    "pendulum-td3",
    "pendulum-ddpg",
    "cartpole-bc",
)

Begin = Callable[[Params], PyTree]  # params -> the first state
# (params, state, batch) -> (params, state, loss)
Step = Callable[[Params, PyTree, Batch], tuple[Params, PyTree, jax.Array]]


class Sampled(NamedTuple):
    """A sample, as replay returns it."""

    batch: Batch
    keys: np.ndarray


class _Endless:
    """A replay that gives one sample again and again, as often as it is told to."""

    def __init__(self, sample: Sampled) -> None:
        self._sample, self.times = sample, 0

    def update_priorities(self, keys: np.ndarray, priorities: np.ndarray) -> None:
        """Takes them, and does nothing."""

    def set_params_version(self, version: int) -> None:
        """Does nothing."""

    def make_dataset(self, stop: Callable[[], bool] | None = None) -> Iterator[Sampled]:
        """Yields the sample."""
        del stop
        return itertools.repeat(self._sample, self.times)


def measure(name: str, repeats: int, seconds: float) -> tuple[Comparison, dict]:
    """Compares updates per second of the learner and of the inline loop."""
    experiment = dataclasses.replace(preset(name), normalisation=NormalisationConfig())
    with make_env(dataclasses.replace(experiment.env, num_envs=1), 0) as env:
        return compare(experiment, env.spec, repeats, seconds), {}


def compare(
    experiment: Experiment,
    env_spec: EnvSpec,
    repeats: int,
    seconds: float,
    *,
    runs: bool = False,
) -> Comparison:
    """Compares updates per second of an experiment's learner and of the inline loop.

    Args:
      experiment: whose learner it is; without normalisation.
      env_spec: of its environment.
      repeats: number of measurements of each side.
      seconds: length of each.
      runs: whether the learner runs as in a program, with each batch drawn ahead on an accelerator,
        against an inline loop that waits after its last update only.
    """
    agent = make_agent(experiment, env_spec)
    spec = transition_spec(agent, env_spec)
    sample = random_sample(spec, experiment.replay.unroll_length + 1, experiment.replay.batch_size)
    replay: Any = _Endless(sample)
    learner = Learner(experiment.learner, agent, replay, jax.random.PRNGKey(0))
    begin, step = _inline(agent, experiment.agent)
    step = jax.jit(step)
    held = [learner.params, begin(learner.params), None]

    def ours(updates: int) -> None:
        if runs:
            replay.times = updates
            learner.run(stop=lambda: False)
        else:
            for _ in range(updates):
                learner.step(sample)

    def inline(updates: int) -> None:
        for _ in range(updates):
            held[:] = step(held[0], held[1], sample.batch)
            if not runs:
                jax.block_until_ready(held[2])
        jax.block_until_ready(held)

    ours(2)
    inline(2)
    updates = max(3, int(seconds * rate(3, lambda: inline(3))))
    return alternate(
        lambda: rate(updates, lambda: ours(updates)),
        lambda: rate(updates, lambda: inline(updates)),
        repeats,
    )


def measure_core(core: Core, size: int, repeats: int, seconds: float) -> Comparison:
    """Compares gradients of unrolls per second of a core and of an LSTM of its size."""
    length, rows = 128, 32
    spec = specs.Array((size,), np.float32)
    mid = jnp.ones((length, rows), jnp.int32)
    seen = jax.random.normal(jax.random.PRNGKey(1), (length, rows, size))
    timestep = TimeStep(mid, jnp.zeros((length, rows)), jnp.ones((length, rows)), seen)

    def side(kind: Core) -> Callable[[int], None]:
        make = functools.partial(core_of, NetworkConfig(core=kind, core_size=size))
        network = recurrent(lambda x: x, make, lambda hidden, _: hidden, spec)
        params = network.init(jax.random.PRNGKey(0))

        def loss(params: Params) -> jax.Array:
            outputs, _ = network.unroll(None, params, timestep, network.initial_state(rows))
            return jnp.square(outputs).mean()

        gradient = jax.jit(jax.grad(loss))

        def run(times: int) -> None:
            for _ in range(times):
                jax.block_until_ready(gradient(params))

        run(2)
        return run

    ours, lstm = side(core), side("lstm")
    times = max(3, int(seconds * rate(3, lambda: lstm(3))))
    return alternate(
        lambda: rate(times, lambda: ours(times)), lambda: rate(times, lambda: lstm(times)), repeats
    )


def random_sample(spec: Transition, length: int, size: int) -> Sampled:
    """Returns a `random_batch` with keys."""
    return Sampled(random_batch(spec, length, size), np.arange(size, dtype=np.uint64))


def random_batch(spec: Transition, length: int, size: int) -> Batch:
    """Returns a batch from mid-episode with floats in [0, 1), random pixels, and else zeros."""
    rng = np.random.default_rng(0)

    def leaf(kind: jax.ShapeDtypeStruct) -> np.ndarray:
        shape = (length, size, *kind.shape)
        if np.issubdtype(kind.dtype, np.floating):
            return rng.random(shape, np.float32).astype(kind.dtype)
        if kind.dtype == np.uint8 and len(kind.shape) == 3:
            return rng.integers(0, 256, shape, np.uint8)
        return np.zeros(shape, kind.dtype)

    trajectory = jax.tree.map(leaf, spec)
    mid = np.ones((length, size), np.int32)
    timestep = trajectory.timestep._replace(step_type=mid)
    return Batch(trajectory._replace(timestep=timestep), np.ones(size, np.float32))


def random_timestep(spec: Transition, num_envs: int) -> TimeStep:
    """Returns one step of such a batch, ``[num_envs, ...]``."""
    timestep = random_batch(spec, 1, num_envs).trajectory.timestep
    return jax.tree.map(lambda x: np.ascontiguousarray(x[0]), timestep)


def _inline(agent: Agent, cfg: Any) -> tuple[Begin, Step]:
    """Returns (a function from params to the first state, the update) for this kind of agent."""
    for kind, make in _INLINE.items():
        if isinstance(agent, kind):
            return make(agent, cfg)
    raise ValueError(f"benchmarks.learners: there is no inline update of {type(agent).__name__}.")


def _optimizer(cfg: Any) -> optax.GradientTransformation:
    """Returns the optimizer of an agent that has the same one for all its components."""
    return component_optimizer(cfg.optimizer, {}, cfg.max_grad_norm)


def _plain(agent: Any, cfg: Any) -> tuple[Begin, Step]:
    """An update by a loss of params and a batch, with no state but the optimizer's."""
    optimizer = _optimizer(cfg)

    def step(
        params: Params, opt_state: optax.OptState, batch: Batch
    ) -> tuple[Params, PyTree, jax.Array]:
        (loss, _), grads = jax.value_and_grad(agent.loss, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return optimizer.init, step


def _ppo(agent: PPO, cfg: Any) -> tuple[Begin, Step]:
    optimizer, hooks = _optimizer(cfg), agent.initial_learner_state

    def begin(params: Params) -> PyTree:
        return optimizer.init(params), hooks(jax.random.PRNGKey(0), params)

    def step(params: Params, state: PyTree, batch: Batch) -> tuple[Params, PyTree, jax.Array]:
        opt_state, learner_state = state
        learner_state, rows, schedule = agent.prepare(params, learner_state, batch)

        def body(carry: Any, indices: Any) -> tuple[Any, jax.Array]:
            params, opt_state = carry
            minibatch = jax.tree.map(lambda x: jnp.asarray(x)[indices], rows)
            (loss, _), grads = jax.value_and_grad(agent.loss, has_aux=True)(params, minibatch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), loss

        (params, opt_state), losses = jax.lax.scan(body, (params, opt_state), schedule)
        return params, (opt_state, learner_state), losses.mean()

    return begin, step


def _with_target(
    agent: Any,
    cfg: Any,
    *,
    keyed: bool,
    target_of: Callable[[Params], PyTree] = lambda params: params,
) -> tuple[Begin, Step]:
    """An update by a loss of params, target params and a batch, with or without a key."""
    optimizer = _optimizer(cfg)

    def begin(params: Params) -> PyTree:
        return optimizer.init(params), target_of(params), jnp.zeros((), int), jax.random.PRNGKey(0)

    def step(params: Params, state: PyTree, batch: Batch) -> tuple[Params, PyTree, jax.Array]:
        opt_state, target, count, key = state
        key, used = jax.random.split(key) if keyed else (key, None)
        given = (used, params, target, batch) if keyed else (params, target, batch)
        gradient = jax.value_and_grad(agent.loss, argnums=int(keyed), has_aux=True)
        (loss, _), grads = gradient(*given)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if getattr(cfg, "target_rate", 0.0):
            target = optax.incremental_update(target_of(params), target, cfg.target_rate)
        else:
            target = optax.periodic_update(target_of(params), target, count + 1, cfg.target_period)
        return params, (opt_state, target, count + 1, key), loss

    return begin, step


def _td3(agent: TD3, cfg: Any) -> tuple[Begin, Step]:
    optimizer = _optimizer(cfg)

    def begin(params: Params) -> PyTree:
        states = optimizer.init(params.policy), optimizer.init(params.critics)
        return states, params, jnp.zeros((), int), jax.random.PRNGKey(0)

    def step(params: Params, state: PyTree, batch: Batch) -> tuple[Params, PyTree, jax.Array]:
        (policy_state, critics_state), target, count, key = state
        key, used = jax.random.split(key)
        gradient = jax.value_and_grad(agent.loss, argnums=1, has_aux=True)
        (loss, _), grads = gradient(used, params.critics, target, batch)
        updates, critics_state = optimizer.update(grads, critics_state, params.critics)
        critics = optax.apply_updates(params.critics, updates)

        def delayed() -> tuple[Params, optax.OptState, Params]:
            grads = jax.grad(agent.policy_loss)(params.policy, params.critics, batch)
            updates, state = optimizer.update(grads, policy_state, params.policy)
            new = params._replace(
                policy=optax.apply_updates(params.policy, updates), critics=critics
            )
            return new, state, optax.incremental_update(new, target, cfg.target_rate)

        params, policy_state, target = jax.lax.cond(
            (count + 1) % cfg.policy_period == 0,
            delayed,
            lambda: (params._replace(critics=critics), policy_state, target),
        )
        return params, ((policy_state, critics_state), target, count + 1, key), loss

    return begin, step


_INLINE: dict[type, Callable[[Any, Any], tuple[Begin, Step]]] = {
    PPO: _ppo,
    PolicyGradientAgent: _plain,
    BC: _plain,
    QLearning: lambda agent, cfg: _with_target(agent, cfg, keyed=True),
    R2D2: lambda agent, cfg: _with_target(agent, cfg, keyed=False),
    DDPG: lambda agent, cfg: _with_target(agent, cfg, keyed=False),
    SAC: lambda agent, cfg: _with_target(
        agent, cfg, keyed=True, target_of=lambda params: params.critics
    ),
    TD3: _td3,
}


def main() -> None:
    """Measures; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--only", choices=PRESETS, help="one preset instead of all")
    parser.add_argument("--cores", action="store_true", help="memory cores against the LSTM")
    arguments = parser.parse_args()
    xla.configure(convolutions=False)
    result = Result.empty("learners")
    repeats, seconds = (3, 0.2) if arguments.quick else (9, 1.0)
    if arguments.cores:
        for core, size in itertools.product(CORES, (64, 256)):
            result.add(f"{core}-{size}", measure_core(core, size, repeats, seconds), {})
        print(result.table(CORES_TARGET))
        print(result.line())
        return
    for name in [arguments.only] if arguments.only else PRESETS:
        result.add(name, *measure(name, repeats, seconds))
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
