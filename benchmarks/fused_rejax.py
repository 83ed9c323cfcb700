"""The topology fused against rejax (https://github.com/keraJLi/rejax), on gymnax's environments.

Both compile acting, environment, replay and learning into one program, with the same sizes of
networks, batches and unrolls, and as many updates for each frame. Only training is measured,
without evaluations. rejax takes time limits for terminations. Ours keeps the time rules, which
makes one step more in each episode; such steps do not count as frames. Each comparison has a
process of its own, in which XLA has as many threads as `rlstack train` gives it
(`rlstack.programs.build.xla`).

    pip install rejax 'gymnax<1'
    python -m benchmarks.fused_rejax [--quick]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from benchmarks.children import in_new_process
from benchmarks.fused import UNROLL, Ours
from benchmarks.report import Comparison, Result, alternate
from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.agents.sac import SACConfig
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build import xla
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy_replay, transitions
from rlstack.replay import ReplayConfig

TARGET = 1.2
_BATCH, _CAPACITY, _FILL = 128, 50_000, 1_000  # of the replay, in transitions
_RATE = 3e-4


class Setting(NamedTuple):
    """One comparison."""

    algorithm: str  # its name in rejax, and that of the agent
    env: str
    num_envs: int
    iterations: int  # of one measurement; ours and rejax's have the same frames
    repeats: int

    @property
    def name(self) -> str:
        """The setting's name in the result."""
        return f"{self.algorithm.lower()}/{self.env}x{self.num_envs}"


FULL = (
    Setting("PPO", "CartPole-v1", 8, 300, 7),
    Setting("PPO", "CartPole-v1", 64, 60, 7),
    Setting("PPO", "CartPole-v1", 512, 8, 7),
    Setting("DQN", "CartPole-v1", 8, 10_000, 7),
    Setting("SAC", "Pendulum-v1", 8, 2_000, 7),
)
QUICK = tuple(
    setting._replace(iterations=max(2, setting.iterations // 10), repeats=3) for setting in FULL
)


def experiment(setting: Setting) -> Experiment:
    """Returns our side of a setting."""
    optimizer = OptimizerConfig(learning_rate=_RATE)
    agents: Mapping[str, Any] = {
        "PPO": PPOConfig(optimizer=optimizer),
        "DQN": DQNConfig(optimizer=optimizer, target_rate=0.01),
        "SAC": SACConfig(optimizer=optimizer, target_rate=0.01),
    }
    replay: ReplayConfig
    if setting.algorithm == "PPO":
        replay = on_policy_replay(setting.num_envs, UNROLL)
    else:
        replay = transitions(_BATCH, _CAPACITY, _FILL, updates_per_frame=1 / setting.num_envs)
    return Experiment(
        preset="benchmark",
        agent=agents[setting.algorithm],
        env=EnvConfig(setting.env, setting.num_envs, "jax"),
        replay=replay,
        network=NetworkConfig(hidden_sizes=(64, 64)),
        frames=10**12,
        topology="fused",
    )


class Rejax:
    """rejax's compiled iterations."""

    def __init__(self, setting: Setting) -> None:
        """Compiles them.

        Raises:
          ImportError: rejax is not installed.
        """
        import rejax

        options: Mapping[str, Any] = {
            "PPO": {"num_steps": UNROLL, "num_epochs": 4, "num_minibatches": 4},
            "DQN": {"num_epochs": 1, "polyak": 0.99},
            "SAC": {"num_epochs": 1, "polyak": 0.99},
        }
        more = dict(options[setting.algorithm])
        if setting.algorithm != "PPO":
            more |= {"buffer_size": _CAPACITY, "fill_buffer": _FILL, "batch_size": _BATCH}
        if setting.algorithm != "DQN":  # rejax's DQN always has two layers of 64 units
            more["agent_kwargs"] = {"activation": "tanh", "hidden_layer_sizes": (64, 64)}
        algorithm = getattr(rejax, setting.algorithm).create(
            env=setting.env, num_envs=setting.num_envs, learning_rate=_RATE, **more
        )
        unroll = UNROLL if setting.algorithm == "PPO" else 1
        self._frames = setting.num_envs * unroll  # of one iteration

        def run(state: Any, iterations: jax.Array) -> Any:
            return jax.lax.fori_loop(
                0, iterations, lambda _, state: algorithm.train_iteration(state), state
            )

        self._run = jax.jit(run)
        self._state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(1))
        start = time.perf_counter()
        self.measure(1)
        self.compile_seconds = time.perf_counter() - start

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""
        start = time.perf_counter()
        self._state = jax.block_until_ready(self._run(self._state, iterations))
        return iterations * self._frames / (time.perf_counter() - start)


def measure(setting: Setting) -> tuple[Comparison, dict[str, float]]:
    """Returns the comparison, and the seconds that each side took to compile."""
    cfg = experiment(setting)
    xla.configure_runs([cfg])
    ours, rejax = Ours(cfg), Rejax(setting)
    if setting.algorithm != "PPO":  # until the replay is full enough to learn
        for side in (ours, rejax):
            side.measure(2 * _FILL // setting.num_envs)
    comparison = alternate(
        lambda: ours.measure(setting.iterations),
        lambda: rejax.measure(setting.iterations),
        setting.repeats,
    )
    return comparison, {
        "ours_compile_seconds": round(ours.compile_seconds, 1),
        "reference_compile_seconds": round(rejax.compile_seconds, 1),
    }


def main() -> None:
    """Measures every setting; prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    chosen = parser.parse_args()
    result = Result.empty("fused_rejax")
    for setting in QUICK if chosen.quick else FULL:
        comparison, seconds = in_new_process(measure, setting)
        result.add(setting.name, comparison, {})
        result.medians[setting.name] |= seconds
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
