"""Searches per second of MuZero in the topology fused, against a bare loop of mctx, on Catch.

Both are one compiled program that acts in the same environment, with models of the same weights, so
that their trees are as deep, and with no learning. Ours also keeps the time rules, checks numbers,
and writes each step with its policy and value to replay. The bare loop has dense layers of plain
JAX, and no legal actions.

    python -m benchmarks.fused_planning [--quick]

With ``--topologies`` it prints the searches per second of whole programs instead, that act and do
not learn: one compiled program, one actor, and one actor with an inference service.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.children import in_new_process
from benchmarks.report import Result, alternate
from benchmarks.topologies import running
from rlstack.agents.muzero import MuZeroConfig
from rlstack.fused.loop import Limits
from rlstack.jax_envs.toy import Catch
from rlstack.math import returns
from rlstack.networks import NetworkConfig
from rlstack.programs.build import xla
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.layouts import Topology
from rlstack.programs.config.presets import preset
from rlstack.programs.run.fused import Fused
from rlstack.types import Array, Params, PRNGKey

TARGET = 0.9
SIZE, ATOMS, ACTIONS, PIXELS = 64, 21, 3, 50
LAYERS = {
    "represent": ("representation/linear", "representation/linear_1", "first_state"),
    "dynamics": ("dynamics/linear", "dynamics/linear_1"),
    "next": ("next_state",),
    "reward": ("reward_head",),
    "predict": ("prediction/linear", "prediction/linear_1"),
    "policy": ("policy_head",),
    "value": ("value_head",),
}
SETTINGS = ((32, 12), (128, 32))  # environments, simulations
TOPOLOGIES: tuple[Topology, ...] = ("fused", "heavy_env", "light_env")


def experiment(num_envs: int, simulations: int) -> Experiment:
    """Returns MuZero whose replay is never full enough to learn."""
    cfg = preset("catch-muzero")
    assert isinstance(cfg.agent, MuZeroConfig)
    return dataclasses.replace(
        cfg,
        agent=dataclasses.replace(cfg.agent, num_simulations=simulations),
        env=EnvConfig(cfg.env.name, num_envs, "jax"),
        network=NetworkConfig(hidden_sizes=(SIZE, SIZE), activation="relu", num_atoms=ATOMS),
        replay=dataclasses.replace(cfg.replay, max_size=20_000, min_size=10**8),
        frames=10**12,
    )


class Ours:
    """The stack's compiled loop."""

    def __init__(self, cfg: Experiment) -> None:
        """Compiles it."""
        self._loop, self._num_envs = Fused(cfg), cfg.env.num_envs
        self.measure(1)
        (learned,) = self._loop.learners.values()
        self.params = jax.tree.map(jnp.array, learned.params)

    def measure(self, steps: int) -> float:
        """Returns searches per second of some steps of all environments."""
        start = time.perf_counter()
        self._loop.call(Limits(steps))
        return steps * self._num_envs / (time.perf_counter() - start)


class Bare:
    """A loop of mctx and the environment, and nothing else."""

    def __init__(self, cfg: Experiment, params: Params) -> None:
        """Compiles it, with the params of a `LearnedModel`."""
        assert isinstance(cfg.agent, MuZeroConfig)
        self._cfg, self._num_envs, self._env = cfg.agent, cfg.env.num_envs, Catch()
        key = jax.random.PRNGKey(1)
        self._params = {
            name: [(params[layer]["w"], params[layer]["b"]) for layer in layers]
            for name, layers in LAYERS.items()
        }
        most = returns.signed_hyperbolic(jnp.float32(cfg.agent.max_value))
        self._atoms = jnp.linspace(-most, most, ATOMS)
        keys = jax.random.split(key, self._num_envs)
        env, observation = jax.jit(jax.vmap(self._env.reset))(keys)
        self._state = (env, observation, key, jnp.zeros(self._num_envs))
        self._run = jax.jit(self._act, donate_argnums=1)
        self.measure(1)

    def measure(self, steps: int) -> float:
        """Returns searches per second of some steps of all environments."""
        start = time.perf_counter()
        self._state = jax.block_until_ready(self._run(self._params, self._state, steps))
        return steps * self._num_envs / (time.perf_counter() - start)

    def _predict(self, params: Any, state: Array) -> tuple[Array, Array]:
        hidden = _dense(params["predict"], state, last=True)
        return _dense(params["policy"], hidden), self._number(_dense(params["value"], hidden))

    def _number(self, logits: Array) -> Array:
        x = jax.nn.softmax(logits) @ self._atoms
        return jnp.sign(x) * (((jnp.sqrt(1 + 0.004 * (jnp.abs(x) + 1.001)) - 1) / 0.002) ** 2 - 1)

    def _act(self, params: Any, state: Any, steps: Array) -> Any:
        import mctx

        def expand(params: Any, key: PRNGKey, action: Array, state: Array) -> Any:
            inputs = jnp.concatenate([state, jax.nn.one_hot(action, ACTIONS)], axis=-1)
            hidden = _dense(params["dynamics"], inputs, last=True)
            after = _scaled(state + _dense(params["next"], hidden))
            logits, value = self._predict(params, after)
            reward = self._number(_dense(params["reward"], hidden))
            discount = jnp.full_like(value, self._cfg.discount)
            return mctx.RecurrentFnOutput(
                reward=reward, discount=discount, prior_logits=logits, value=value
            ), after

        def step(_: Any, carry: Any) -> Any:
            env, observation, key, returns = carry
            key, search_key, step_key = jax.random.split(key, 3)
            state = _scaled(_dense(params["represent"], observation.reshape((-1, PIXELS))))
            logits, value = self._predict(params, state)
            found = mctx.gumbel_muzero_policy(
                params,
                search_key,
                mctx.RootFnOutput(prior_logits=logits, value=value, embedding=state),
                expand,
                self._cfg.num_simulations,
                max_num_considered_actions=self._cfg.max_considered_actions,
            )
            keys = jax.random.split(step_key, self._num_envs)
            outcome = jax.vmap(self._env.step)(keys, env, found.action)
            fresh = jax.vmap(self._env.reset)(keys)
            over, later = outcome.terminated, (outcome.state, outcome.observation)
            choose = jax.vmap(jnp.where)
            env, observation = jax.tree.map(lambda x, y: choose(over, x, y), fresh, later)
            return env, observation, key, returns + outcome.reward

        return jax.lax.fori_loop(0, steps, step, state)


def _dense(layers: Any, x: Array, last: bool = False) -> Array:
    """Applies dense layers, with relu between them, and after the last one if it says so."""
    for i, (w, b) in enumerate(layers):
        x = x @ w + b
        if last or i + 1 < len(layers):
            x = jax.nn.relu(x)
    return x


def _scaled(x: Array) -> Array:
    least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    return (x - least) / jnp.maximum(most - least, 1e-5)


def measure(num_envs: int, simulations: int, seconds: float, repeats: int) -> Any:
    """Returns the comparison of both loops, each measured for about these seconds at a time."""
    cfg = experiment(num_envs, simulations)
    xla.configure_runs([cfg])
    ours = Ours(cfg)
    bare = Bare(cfg, ours.params)
    steps = max(2, int(seconds * bare.measure(20) / num_envs))
    return alternate(lambda: ours.measure(steps), lambda: bare.measure(steps), repeats)


def program(topology: Topology, num_envs: int, simulations: int, seconds: float) -> float:
    """Returns the searches per second of a program with one actor, measured for some seconds."""
    cfg = dataclasses.replace(
        experiment(num_envs, simulations),
        topology=topology,
        program=ProgramConfig(num_actors=1),
        log_period=8 * num_envs,
        checkpoint_period=10**12,
    )
    with running(cfg) as (child, _):
        start = child.wait(lambda: child.first(_acted))["wall_time"] + 2.0  # all is compiled
        last = child.wait(lambda: child.first(lambda row: row["wall_time"] > start + seconds))
        first = child.first(lambda row: row["wall_time"] > start)
        assert first is not None
        frames: float = last["env_frames"] - first["env_frames"]
        return frames / (last["wall_time"] - first["wall_time"])


def _acted(row: dict[str, Any]) -> bool:
    return bool(row["env_frames"] > 0)


def print_programs(seconds: float, repeats: int) -> None:
    """Prints a table of the medians of programs that run by turns, one row for each setting."""
    print(f"| environments, simulations | {' | '.join(TOPOLOGIES)} |\n| {'--- | ' * 4}")
    for sizes in SETTINGS:
        found = [[program(x, *sizes, seconds) for x in TOPOLOGIES] for _ in range(repeats)]
        medians = [f"{statistics.median(rates):,.0f}" for rates in zip(*found, strict=True)]
        print(f"| {sizes[0]}, {sizes[1]} | {' | '.join(medians)} |", flush=True)


def main() -> None:
    """Measures every setting; prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--topologies", action="store_true", help="measure whole programs")
    arguments = parser.parse_args()
    quick = arguments.quick
    if arguments.topologies:
        print_programs(*((4.0, 1) if quick else (10.0, 3)))
        return
    result = Result.empty("fused_planning")
    for num_envs, simulations in SETTINGS:
        found = in_new_process(measure, num_envs, simulations, *((0.5, 3) if quick else (2.0, 9)))
        result.add(f"{num_envs} environments, {simulations} simulations", found, {})
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
