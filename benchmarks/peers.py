"""The stack against other libraries, and loops as they write them, on the same device.

| peer | loop | ours |
| --- | --- | --- |
| `purejaxrl` | a compiled loop in one file, as in PureJaxRL: that of `benchmarks.fused` | `fused` |
| `rejax` | https://github.com/keraJLi/rejax | `fused` |
| `sbx` | https://github.com/araffin/sbx, with Gymnasium's environments in Python | one process |
| `leanrl` | a loop in Python with jitted functions and the replay on the device, as LeanRL's in \
PyTorch: that of `benchmarks.device_replay` | one process, `--replay.place device` |

Both sides have the same sizes of networks, batches and unrolls, and as many updates for each frame.
Only training is measured, without evaluations. Peers in JAX take time limits for terminations. Ours
keeps the time rules, which makes one step more in each episode; such steps do not count as frames.
Each comparison has a process of its own, in which XLA has as many threads as `rlstack train` gives
it (`rlstack.programs.build.xla`). A library that is not installed is named, and left out.

    pip install rejax sbx-rl
    python -m benchmarks.peers [--quick] [--only TEXT]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import jax

from benchmarks import device_replay, fused
from benchmarks.children import in_new_process
from benchmarks.fused import UNROLL
from benchmarks.report import Comparison, Result, alternate
from benchmarks.single_process import Ours
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

    peer: str
    algorithm: str  # its name in the library, and that of the agent
    env: str
    num_envs: int
    iterations: int  # of one measurement; both sides have the same frames
    repeats: int = 7

    @property
    def name(self) -> str:
        """The setting's name in the result."""
        return f"{self.peer}/{self.algorithm.lower()}/{self.env}x{self.num_envs}"

    @property
    def frames(self) -> int:
        """The frames of one iteration: an unroll of PPO, or one step."""
        return self.num_envs * (UNROLL if self.algorithm == "PPO" else 1)


class Side(Protocol):
    """A program that trains."""

    compile_seconds: float

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""


FULL = (
    Setting("purejaxrl", "PPO", "CartPole-v1", 8, 300),
    Setting("purejaxrl", "PPO", "CartPole-v1", 512, 8),
    Setting("rejax", "PPO", "CartPole-v1", 8, 300),
    Setting("rejax", "PPO", "CartPole-v1", 64, 60),
    Setting("rejax", "PPO", "CartPole-v1", 512, 8),
    Setting("rejax", "DQN", "CartPole-v1", 8, 10_000),
    Setting("rejax", "SAC", "Pendulum-v1", 8, 2_000),
    Setting("sbx", "PPO", "CartPole-v1", 8, 20),
    Setting("sbx", "SAC", "Pendulum-v1", 8, 500),
    Setting("leanrl", "DQN", "CartPole-v1", 8, 1_500),
    Setting("leanrl", "SAC", "Pendulum-v1", 4, 1_500),
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
    compiled = setting.peer != "sbx"
    return Experiment(
        preset="benchmark",
        agent=agents[setting.algorithm],
        env=EnvConfig(setting.env, setting.num_envs, "jax" if compiled else "for_loop"),
        replay=replay,
        network=NetworkConfig(hidden_sizes=(64, 64)),
        frames=10**12,
        checkpoint_period=10**12,
        topology="fused" if compiled else "single_process",
    )


class OneProcess:
    """The stack's loop in one process."""

    def __init__(self, cfg: Experiment, unroll: int) -> None:
        """Compiles it.

        Args:
          cfg: the experiment.
          unroll: steps of all environments in an iteration.
        """
        self._ours, self._unroll = Ours(cfg), unroll
        start = time.perf_counter()
        self.measure(2)
        self.compile_seconds = time.perf_counter() - start

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""
        actor, start = self._ours.program.player.actor, time.perf_counter()
        before = actor.env_frames
        self._ours.train(iterations * self._unroll)
        return (actor.env_frames - before) / (time.perf_counter() - start)


class SBX:
    """SBX's training, in its own loop."""

    def __init__(self, setting: Setting) -> None:
        """Compiles it.

        Raises:
          ImportError: SBX is not installed.
        """
        import sbx
        from stable_baselines3.common.env_util import make_vec_env

        more: dict[str, Any] = {"buffer_size": _CAPACITY, "learning_starts": _FILL, "tau": 0.01}
        more["batch_size"] = _BATCH
        if setting.algorithm == "PPO":
            more = {"n_steps": UNROLL, "n_epochs": 4, "batch_size": setting.frames // 4}
        self._model = getattr(sbx, setting.algorithm)(
            "MlpPolicy",
            make_vec_env(setting.env, setting.num_envs, seed=1),
            learning_rate=_RATE,
            policy_kwargs={"net_arch": [64, 64]},
            seed=1,
            **more,
        )
        self._frames = setting.frames
        start = time.perf_counter()
        self.measure(2)
        self.compile_seconds = time.perf_counter() - start

    def measure(self, iterations: int) -> float:
        """Returns frames per second of some iterations."""
        before, start = self._model.num_timesteps, time.perf_counter()
        self._model.learn(iterations * self._frames, reset_num_timesteps=False)
        return (self._model.num_timesteps - before) / (time.perf_counter() - start)


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
        self._frames = setting.frames

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


def _leanrl(setting: Setting) -> Comparison:
    """Measures a setting of `benchmarks.device_replay`, by the peer's sizes."""
    name = f"{setting.env.partition('-')[0]}-{setting.algorithm}".lower()
    (chosen,) = (one for one in device_replay.SETTINGS if one.name == name)
    chosen = chosen._replace(steps=setting.iterations)
    xla.configure_runs([device_replay.experiment(chosen, "device")])
    return device_replay.compare(chosen, setting.repeats)["bare"]


def measure(setting: Setting) -> tuple[Comparison, dict[str, float]]:
    """Returns the comparison, and the seconds that each side took to compile.

    Raises:
      ImportError: the peer is not installed.
    """
    if setting.peer == "leanrl":
        return _leanrl(setting), {}
    cfg = experiment(setting)
    xla.configure_runs([cfg])
    peer: Side
    if setting.peer == "purejaxrl":
        peer = fused.Reference(cfg)
    else:
        peer = Rejax(setting) if setting.peer == "rejax" else SBX(setting)
    ours: Side
    if setting.peer == "sbx":
        ours = OneProcess(cfg, setting.frames // setting.num_envs)
    else:
        ours = fused.Ours(cfg)
    if setting.algorithm != "PPO":  # until the replay is full enough to learn
        for side in (ours, peer):
            side.measure(2 * _FILL // setting.num_envs)
    comparison = alternate(
        lambda: ours.measure(setting.iterations),
        lambda: peer.measure(setting.iterations),
        setting.repeats,
    )
    return comparison, {
        "ours_compile_seconds": round(ours.compile_seconds, 1),
        "reference_compile_seconds": round(peer.compile_seconds, 1),
    }


def main() -> None:
    """Measures every setting; prints a table and one JSON line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter measurements")
    parser.add_argument("--only", default="", help="measure the settings with this in their name")
    args = parser.parse_args()
    result = Result.empty("peers")
    for setting in QUICK if args.quick else FULL:
        if args.only not in setting.name:
            continue
        try:
            comparison, seconds = in_new_process(measure, setting)
        except ImportError as error:
            print(f"{setting.name}: {error}. pip install rejax sbx-rl")
            continue
        result.add(setting.name, comparison, {})
        result.medians[setting.name] |= seconds
        print(f"{setting.name}: {comparison.ratio:.2f}", flush=True)
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
