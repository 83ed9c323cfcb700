"""Replay on the device against the host's: `python -m benchmarks.device_replay [--only TEXT]`.

Each preset trains in one process with the replay in the host's memory, with the replay in the
device's, and in a hand-written loop with the second: a jitted function that acts, and one that
writes the steps of all environments, draws a batch and learns from it. That loop has the stack's
agent, networks and environments. It has no logs, no checks for NaN and no counters, its draws are
uniform, and it makes the updates of a step one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import Comparison, alternate, rate
from benchmarks.single_process import Ours
from rlstack.acting.actor import transition_spec
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.storage import allocator
from rlstack.types import Batch, Transition

_NEVER = 10**12  # frames


class Setting(NamedTuple):
    """A preset with other numbers of environments and updates."""

    name: str
    preset: str
    num_envs: int
    batch_size: int
    updates_per_frame: float
    steps: int  # of all environments, in one measurement
    rows: int = 20_000  # steps of each environment in replay


SETTINGS = (
    Setting("cartpole-dqn", "cartpole-dqn", 8, 128, 0.125, 1500),
    Setting("pendulum-sac", "pendulum-sac", 4, 128, 0.25, 1500),
    Setting("halfcheetah-sac", "halfcheetah-sac", 1, 256, 1.0, 400),
    Setting("hopper-crossq", "hopper-crossq", 4, 256, 1.0, 12),
    Setting("pendulum-redq", "pendulum-redq", 4, 64, 20.0, 12),
    Setting("breakout-dqn", "breakout-dqn", 8, 32, 0.25, 100, rows=2_000),
)


def experiment(setting: Setting, place: Any = "host") -> Experiment:
    """Returns the setting's experiment, with the replay in this place."""
    base = preset(setting.preset)
    replay = dataclasses.replace(
        base.replay,
        batch_size=setting.batch_size,
        max_size=setting.rows * setting.num_envs,
        min_size=500,
        samples_per_insert=setting.updates_per_frame * setting.batch_size,
        place=place,
    )
    env = dataclasses.replace(base.env, num_envs=setting.num_envs)
    base = dataclasses.replace(base, env=env, replay=replay)
    return dataclasses.replace(base, frames=_NEVER, checkpoint_period=_NEVER)


class Bare:
    """The hand-written loop."""

    def __init__(self, cfg: Experiment) -> None:
        self._env = cast("Any", make_env(cfg.env, seed=1))
        self._agent = agent = make_agent(cfg, self._env.spec)
        self._size, self._length = cfg.replay.batch_size, cfg.replay.unroll_length
        self._num_envs = cfg.env.num_envs
        self._rows = cfg.replay.max_size // self._num_envs
        per_insert = Fraction(cfg.replay.samples_per_insert or 0).limit_denominator(1000)
        self._per_step = per_insert * cfg.env.num_envs / self._size
        self._due = Fraction(0)
        key = jax.random.PRNGKey(0)
        self._params = agent.initial_params(key)
        self._learner_state = jax.tree.map(jnp.copy, agent.initial_learner_state(key, self._params))
        spec = transition_spec(agent, self._env.spec)
        self._steps = jax.tree.map(
            lambda x: jnp.zeros((self._rows, self._num_envs, *x.shape), x.dtype), spec
        )
        self._act = jax.jit(self._acted)
        self._write = jax.jit(self._written, donate_argnums=0)
        self._learn = jax.jit(self._learned, donate_argnums=1)
        self._key, self._state = key, agent.initial_state(self._num_envs)
        self._timestep, self._count = self._env.reset(), 0

    def train(self, steps: int) -> None:
        """Acts and learns for some steps."""
        for _ in range(steps):
            timestep = self._timestep
            self._key, output, before, self._state = self._act(
                self._key, self._params, timestep, self._state
            )
            self._env.send(jax.tree.map(np.asarray, output.action))
            step = Transition(timestep, output, before, np.zeros(self._num_envs, np.int32))
            self._steps = self._write(self._steps, step, self._count % self._rows)
            self._count += 1
            self._timestep = self._env.recv()
            if self._count * self._num_envs > 500:
                self._due += self._per_step
            while self._due >= 1:
                self._due -= 1
                self._params, self._learner_state, self._key = self._learn(
                    self._params, self._learner_state, self._steps, self._key, self._count
                )
        jax.block_until_ready(self._params)

    def close(self) -> None:
        """Closes the environments."""
        self._env.close()

    def _acted(self, key: Any, params: Any, timestep: Any, state: Any) -> Any:
        key, step_key = jax.random.split(key)
        state = self._agent.reset_state(state, timestep.first())
        output, after = self._agent.actor_step(step_key, params, timestep, state)
        return key, output, state, after

    def _written(self, steps: Any, step: Any, row: Any) -> Any:
        return jax.tree.map(lambda all_steps, x: all_steps.at[row].set(x), steps, step)

    def _learned(self, params: Any, learner_state: Any, steps: Any, key: Any, count: Any) -> Any:
        key, row_key, env_key = jax.random.split(key, 3)
        held = jnp.minimum(count, self._rows) - self._length
        ago = jax.random.randint(row_key, (self._size,), 0, held)
        rows = (count - 1 - self._length - ago + jnp.arange(self._length + 1)[:, None]) % self._rows
        envs = jax.random.randint(env_key, (self._size,), 0, self._num_envs)
        trajectory = jax.tree.map(lambda x: x[rows, envs], steps)
        batch = Batch(trajectory, jnp.ones(self._size))
        params, learner_state, _ = self._agent.learner_step(params, learner_state, batch)
        return params, learner_state, key


def compare(setting: Setting, repeats: int) -> dict[str, Comparison]:
    """Measures the replay on the device against the other two, in alternation."""
    sides: dict[str, Any] = {
        "host": Ours(experiment(setting)),
        "device": Ours(experiment(setting, "device")),
        "bare": Bare(experiment(setting)),
    }
    rates = {
        name: (lambda side=side: rate(setting.steps, lambda: side.train(setting.steps)))
        for name, side in sides.items()
    }
    try:
        for side in sides.values():  # compiles, and fills the replays
            side.train(max(setting.steps, 600 // setting.num_envs + 2))
        return {name: alternate(rates["device"], rates[name], repeats) for name in ("host", "bare")}
    finally:
        for side in sides.values():
            (side if isinstance(side, Bare) else side.program).close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the ratios of frames/s."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="measure the settings with this in their name")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(arguments)
    chosen = [s for s in SETTINGS if args.only in s.name]
    convolutions = any(experiment(s).may_convolve for s in chosen)
    xla.configure(convolutions=convolutions)
    allocator.keep_freed_memory()
    for setting in chosen:
        for name, found in compare(setting, args.repeats).items():
            low, high = found.spread
            speeds = ", ".join(f"{k} {v * setting.num_envs:,.0f}" for k, v in found.medians.items())
            print(
                f"{setting.name:18} device / {name:5} {found.ratio:.2f} [{low:.2f}, {high:.2f}]"
                f"  frames/s: {speeds}",
                flush=True,
            )


if __name__ == "__main__":
    main()
