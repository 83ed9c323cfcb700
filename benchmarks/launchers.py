"""Frames/s of whole programs: `python -m benchmarks.launchers [--quick] [--only TEXT]`.

PRESET/LAUNCH/TRANSPORT runs the preset in `distributed` with two actors, one inference service and
the stack's own table, with that launcher and that transport. Its ratio is relative to the same
program with `processes` and `zmq`, which every Python has. Pairs that are not installed are left
out.

PRESET/heavy_env runs the preset in `heavy_env` with one actor and `--launch threads`, relative to a
single process.

Each program runs in a separate process. A measurement starts two seconds after the first update.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
import sys
from typing import NamedTuple

from benchmarks.report import Result, alternate
from benchmarks.topologies import running
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import Experiment, ProgramConfig, Topology
from rlstack.programs.config.presets import preset
from rlstack.rpc import transports

NAME = "launchers"
THREADS_TARGET = 0.9  # of PRESET/heavy_env
# Every valid pair; threads and direct are one process, Ray starts on this machine.
PAIRS = (
    ("processes", "courier"),
    ("threads", "direct"),
    ("threads", "zmq"),
    ("threads", "courier"),
    ("launchpad", "zmq"),
    ("launchpad", "courier"),
    ("ray", "zmq"),
    ("ray", "courier"),
)
_NEVER = 10**9  # frames
_SETTLE = 2.0  # seconds for which a program runs after its first update before it is measured


class Setting(NamedTuple):
    """One program."""

    preset: str
    launch: str  # "" for heavy_env in threads against a single process
    transport: str
    seconds: float  # length of a measurement
    repeats: int

    @property
    def name(self) -> str:
        """The setting's name in results."""
        pair = f"{self.launch}/{self.transport}" if self.launch else "heavy_env"
        return f"{self.preset.removeprefix('cartpole-')}/{pair}"


def _settings(presets: tuple[str, ...], seconds: float, repeats: int) -> tuple[Setting, ...]:
    found = []
    for name in presets:
        found.append(Setting(name, "", "direct", seconds, repeats))
        for launch, transport in PAIRS:
            needs = launch if launch in ("launchpad", "ray") else "rlstack"
            if transports.is_installed(transport) and importlib.util.find_spec(needs):
                found.append(Setting(name, launch, transport, seconds, repeats))
    return tuple(found)


FULL = _settings(("cartpole-ppo", "cartpole-dqn"), 10.0, 5)
QUICK = tuple(
    setting for setting in _settings(("cartpole-ppo",), 2.0, 1) if setting.transport != "courier"
)


def experiment(name: str, topology: Topology, program: ProgramConfig) -> Experiment:
    """Returns a preset that trains until it is interrupted, without evaluation."""
    chosen = preset(name)
    served = topology == "distributed"
    return dataclasses.replace(
        chosen,
        topology=topology,
        frames=_NEVER,
        program=program,
        replay=dataclasses.replace(chosen.replay, service="table") if served else chosen.replay,
        evaluator=EvaluatorConfig(period=_NEVER, episodes=1, num_envs=1),
        log_period=500,
        checkpoint_period=_NEVER,
    )


def frames_per_second(cfg: Experiment, seconds: float) -> float:
    """Returns the frames/s of a program while it learns."""
    with running(cfg) as (program, _):
        first = program.wait(lambda: program.first(lambda row: row.get("learner/steps", 0) >= 1))
        start = first["wall_time"] + _SETTLE
        last = program.wait(lambda: program.first(lambda r: r["wall_time"] > start + seconds))
        first = program.wait(lambda: program.first(lambda row: row["wall_time"] > start))
        return (last["env_frames"] - first["env_frames"]) / (last["wall_time"] - first["wall_time"])


def measure(setting: Setting, result: Result) -> None:
    """Compares a program with the one that its ratio is relative to, and adds the result."""
    if setting.launch:
        ours, reference = (
            experiment(
                setting.preset,
                "distributed",
                ProgramConfig(launch=launch, transport=transport),  # type: ignore[arg-type]
            )
            for launch, transport in (
                (setting.launch, setting.transport),
                ("processes", "zmq"),
            )
        )
    else:
        alone = ProgramConfig(num_actors=1, launch="threads")
        ours, reference = (
            experiment(setting.preset, "heavy_env", alone),
            experiment(setting.preset, "single_process", ProgramConfig()),
        )
    comparison = alternate(
        lambda: frames_per_second(ours, setting.seconds),
        lambda: frames_per_second(reference, setting.seconds),
        setting.repeats,
    )
    result.add(setting.name, comparison, {})


def main(arguments: list[str] | None = None) -> None:
    """Measures; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launchers")
    parser.add_argument("--quick", action="store_true", help="PPO only, once, without Courier")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    parser.add_argument("--repeats", type=int, help="number of measurements of each program")
    args = parser.parse_args(arguments)
    settings = [s for s in (QUICK if args.quick else FULL) if args.only in s.name]
    if not settings:
        parser.error(f"--only: no setting has a name that contains {args.only!r}")
    if args.repeats is not None:
        settings = [s._replace(repeats=args.repeats) for s in settings]
    result = Result.empty(NAME)
    for setting in settings:
        load = os.getloadavg()[0]
        print(f"{setting.name} (load {load:.1f}) ...", file=sys.stderr, flush=True)
        measure(setting, result)
    print(result.table(0.0))
    for name in result.ratios:
        if name.endswith("/heavy_env"):
            print(result.verdict(name, THREADS_TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
