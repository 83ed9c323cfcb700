"""One process against hand-written loops: `python -m benchmarks.single_process [--quick]`.

Acting (`Actor.step`: inference, replay, environments) is compared with a loop of only ``env.step``
and a jitted apply; PPO training with `benchmarks.reference_ppo`. Both sides have the same networks,
batches, epochs, environments and XLA flags. A step is one row of one environment, including rows
that begin an episode. In settings named "plain" the hand-written loop has what a program gets by
default: XLA's own convolutions, and memory that glibc returns to the system when it is freed.

Settings with pixels need other XLA flags, so they run in a separate process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import jax

from benchmarks.reference_ppo import ReferencePPO
from benchmarks.report import Result, Timed, Timers, alternate, rate
from rlstack.agents.ppo import PPOConfig
from rlstack.networks import NetworkConfig
from rlstack.networks.layers import forms
from rlstack.programs.build import xla
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.run.run_session import drive
from rlstack.programs.run.single_process import SingleProcessRun
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.replay import ReplayConfig
from rlstack.storage import allocator

NAME = "single_process"
TARGET = 0.85  # minimum speed relative to the hand-written loops
UNROLL = 128
_NEVER = 10**12  # frames


class Setting(NamedTuple):
    """One pair of programs to compare."""

    job: str  # "act" or "ppo"
    env: str
    num_envs: int
    seconds: float  # approximate length of one measurement
    repeats: int
    plain: bool = False  # whether the hand-written loop has default convolutions and memory

    @property
    def name(self) -> str:
        """The setting's name in results."""
        return f"{self.job}/{self.env}x{self.num_envs}{'/plain' * self.plain}"

    @property
    def pixels(self) -> bool:
        """Whether observations are images."""
        return self.env == "Pong-v5"


FULL = (
    Setting("act", "CartPole-v1", 64, 1.5, 9),
    Setting("act", "HalfCheetah-v4", 32, 1.5, 9),
    Setting("ppo", "CartPole-v1", 8, 2.0, 9),
    Setting("ppo", "CartPole-v1", 64, 2.0, 9),
    Setting("ppo", "HalfCheetah-v4", 8, 2.0, 9),
    Setting("act", "Pong-v5", 32, 3.0, 7),
    Setting("ppo", "Pong-v5", 8, 8.0, 7),
    Setting("ppo", "Pong-v5", 8, 8.0, 7, plain=True),
)
QUICK = tuple(s._replace(seconds=0.3, repeats=3) for s in FULL if not s.pixels)


class NoLogger:
    """A logger that writes nowhere."""

    def write(self, step: int, logs: Mapping[str, object]) -> None:
        """Discards the logs."""

    def close(self) -> None:
        """Does nothing."""


def experiment(setting: Setting) -> Experiment:
    """Returns PPO with its default hyperparameters on the setting's environments."""
    options: dict[str, Any] = {}
    network = NetworkConfig()
    if setting.pixels:
        options = {"episodic_life": True, "reward_clip": True}
        network = NetworkConfig(torso="nature", hidden_sizes=(512,), shared=True)
    return Experiment(
        preset=f"benchmark-{setting.name}",
        agent=PPOConfig(),
        env=EnvConfig(setting.env, num_envs=setting.num_envs, options=options),
        network=network,
        replay=ReplayConfig(
            sampler="fifo",
            batch_size=setting.num_envs,
            unroll_length=UNROLL,
            max_size=2 * setting.num_envs,
        ),
        frames=_NEVER,
        checkpoint_period=_NEVER,
    )


class Ours:
    """The stack's loop in one process, driven step by step."""

    def __init__(self, cfg: Experiment) -> None:
        self.program = SingleProcessRun(cfg)
        self.periodic = PeriodicActions(
            cfg, NoLogger(), evaluate=lambda frames: None, checkpoint=lambda frames: None
        )

    def act(self, steps: int) -> None:
        """Acts, without learning."""
        actor = self.program.player.actor
        for _ in range(steps):
            actor.step()

    def train(self, steps: int) -> None:
        """Acts and learns, as a run does."""
        left = steps + 1

        def stop() -> bool:
            nonlocal left
            left -= 1  # called once before each step
            return not left

        drive(self.program, self.periodic, stop)

    def methods(self) -> list[Timed]:
        """Returns what `Timers` should time."""
        program = self.program
        return [
            Timed(program.env, "send", "env"),
            Timed(program.env, "recv", "env"),
            Timed(program.player.inferencer, "inference", "inference"),
            Timed(program.player.replay, "add", "replay"),
            Timed(program.player.replay, "can_sample", "replay"),
            Timed(program.player.replay, "sample", "replay"),
            Timed(program.learner, "step", "learn"),
            Timed(self.periodic, "log", "logs"),
            Timed(self.periodic, "tick", "logs"),
        ]


class Reference:
    """The hand-written loop, driven step by step."""

    def __init__(self, cfg: Experiment) -> None:
        assert isinstance(cfg.agent, PPOConfig)
        self.program = ReferencePPO(cfg.agent, cfg.env, cfg.network, UNROLL, cfg.seed)

    def act(self, steps: int) -> None:
        """Acts, without learning."""
        self.program.act_only(steps)

    def train(self, steps: int) -> None:
        """Acts and learns for whole rollouts."""
        assert steps % UNROLL == 0
        self.program.train(steps // UNROLL)

    def methods(self) -> list[Timed]:
        """Returns what `Timers` should time."""
        program = self.program
        return [
            Timed(program.env, "step", "env"),
            Timed(program, "act", "inference", jax.block_until_ready),
            Timed(program, "update", "learn"),
        ]

    def close(self) -> None:
        """Closes the environments."""
        self.program.close()


class PlainReference:
    """The hand-written loop in a process of its own, in which nothing is configured but XLA."""

    def __init__(self, cfg: Experiment) -> None:
        # A forked process would inherit the memory settings of this one.
        spawn = multiprocessing.get_context("spawn")
        self._process = ProcessPoolExecutor(1, spawn, _begin_plain, (cfg,))

    def train(self, steps: int) -> None:
        """Acts and learns for whole rollouts."""
        self._process.submit(_train_plain, steps).result()

    def methods(self) -> list[Timed]:
        """Returns nothing, because methods of another process cannot be timed here."""
        return []

    def close(self) -> None:
        """Ends the process."""
        self._process.shutdown()


_plain: list[Reference] = []  # in the process of `PlainReference`


def _begin_plain(cfg: Experiment) -> None:
    xla.configure(convolutions=True)
    _plain.append(Reference(cfg))


def _train_plain(steps: int) -> None:
    with forms.form("plain"):
        _plain[0].train(steps)


def measure(setting: Setting, result: Result) -> None:
    """Compares the programs of one setting and adds the result."""
    cfg = experiment(setting)
    ours, reference = Ours(cfg), (PlainReference if setting.plain else Reference)(cfg)
    try:
        job = "act" if setting.job == "act" else "train"
        run_ours, run_reference = getattr(ours, job), getattr(reference, job)
        steps = _warm_up(setting, run_ours, run_reference)
        rows = steps * setting.num_envs
        comparison = alternate(
            lambda: rate(rows, lambda: run_ours(steps)),
            lambda: rate(rows, lambda: run_reference(steps)),
            setting.repeats,
        )
        # A separate pass, so that the timers do not slow down the comparison.
        where = {
            "ours": _where(ours, lambda: run_ours(steps)),
            "reference": _where(reference, lambda: run_reference(steps)),
        }
        result.add(setting.name, comparison, where)
    finally:
        ours.program.close()
        reference.close()


def _warm_up(
    setting: Setting, ours: Callable[[int], None], reference: Callable[[int], None]
) -> int:
    """Compiles everything; returns the number of steps in a measurement of the set length."""
    ours(UNROLL + 1)  # the program learns on the step after an unroll
    reference(UNROLL)
    start = time.perf_counter()
    reference(UNROLL)
    ours(UNROLL)
    seconds = (time.perf_counter() - start) / 2
    return max(1, round(setting.seconds / seconds)) * UNROLL


def _where(side: Ours | Reference | PlainReference, work: Callable[[], None]) -> dict[str, float]:
    if not (methods := side.methods()):
        return {}
    timers = Timers()
    with timers.on(*methods):
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    return {label: share for label, share in timers.shares(total).items() if share > 0}


def _measure_kind(settings: list[Setting]) -> None:
    """Runs in the child: measures settings that share their XLA flags."""
    xla.configure(convolutions=settings[0].pixels)
    allocator.keep_freed_memory()
    result = Result.empty(NAME)
    for setting in settings:
        print(f"{setting.name} ...", file=sys.stderr, flush=True)
        measure(setting, result)
    print(result.line())


def _in_child(kind: str, arguments: list[str]) -> dict[str, Any]:
    """Measures the settings of one kind in a child process."""
    command = [sys.executable, "-m", "benchmarks.single_process", "--kind", kind, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.single_process")
    parser.add_argument("--quick", action="store_true", help="under a minute, without Pong")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    parser.add_argument("--kind", choices=("dense", "pixels"), help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    settings = [s for s in (QUICK if args.quick else FULL) if args.only in s.name]
    if not settings:
        parser.error(f"--only: no setting has a name that contains {args.only!r}")
    kinds = {
        "dense": [s for s in settings if not s.pixels],
        "pixels": [s for s in settings if s.pixels],
    }
    if args.kind:
        _measure_kind(kinds[args.kind])
        return
    result = Result.empty(NAME)
    passed_on = ["--quick"] * args.quick + ["--only", args.only] * bool(args.only)
    for kind, chosen in kinds.items():
        if chosen:
            result.update(_in_child(kind, passed_on))
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
