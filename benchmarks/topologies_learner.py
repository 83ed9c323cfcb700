"""A learner with samples from a replay server against samples from memory; see `topologies`.

The server, Reverb's or the stack's own, is a separate process, as in the distributed topology. Its
items are inserted before the clock starts, so the speed of sampling is compared, not that of
actors.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.children import Child, answer, children
from benchmarks.report import Comparison, Timed, Timers, alternate, rate
from rlstack.acting.actor import transition_spec
from rlstack.learning.learner import Learner
from rlstack.programs.build import xla
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.programs.program.replay import leave_one_core
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from rlstack.replay.served import ReplayService, ServedReplayBuffer
from rlstack.rpc import RemoteObject, serve
from rlstack.types import Transition

MODULE = "benchmarks.topologies_learner"
_ITEMS = 2048


class Setting(NamedTuple):
    """One comparison."""

    agent: str  # the preset is cartpole-AGENT
    batch_size: int
    updates: int  # per measurement
    repeats: int
    service: str = "reverb"  # or "table"


def measure(setting: Setting) -> tuple[Comparison, dict[str, dict[str, float]]]:
    """Compares updates per second from a server and from memory; also returns where time goes."""
    xla.configure(convolutions=False)
    cfg, spec = _experiment(setting), _step_spec(setting)
    child = Child(MODULE, setting.agent, str(setting.batch_size), setting.service)
    with children(child) as (server,):
        far = _client(setting.service, cfg, server.hear(), spec)
        near = InProcessReplay(cfg.replay, cfg.env.num_envs, seed=0, spec=spec)
        _fill(cfg, spec, far, near)
        sides = [_Side(cfg, replay) for replay in (far, near)]
        for side in sides:
            side.learn(3)
        comparison = alternate(
            lambda: rate(setting.updates, lambda: sides[0].learn(setting.updates)),
            lambda: rate(setting.updates, lambda: sides[1].learn(setting.updates)),
            setting.repeats,
        )
        names = ("ours", "reference")
        where = {n: s.where(setting.updates) for n, s in zip(names, sides, strict=True)}
        far.close()
        near.close()
    return comparison, where


def _client(service: str, cfg: Experiment, address: str, spec: Transition) -> Any:
    if service == "reverb":
        return ReverbReplayBuffer(cfg.replay, cfg.env.num_envs, address, spec)
    client = RemoteObject(address, ReplayService, name="replay")
    return ServedReplayBuffer(cfg.replay, cfg.env.num_envs, client, spec)


class _Side:
    """A learner and its replay."""

    def __init__(self, cfg: Experiment, replay: Any) -> None:
        with make_env(dataclasses.replace(cfg.env, num_envs=1), 0) as env:
            agent = make_agent(cfg, env.spec)
        self._replay = replay
        self._learner = Learner(cfg.learner, agent, replay, jax.random.PRNGKey(0))

    def learn(self, updates: int) -> None:
        """Makes updates like a learner node."""
        for _ in range(updates):
            self._learner.step(self._replay.sample())
            self._replay.set_params_version(self._learner.version)

    def where(self, updates: int) -> dict[str, float]:
        """Returns the fractions of the time for sampling and learning."""
        timers, methods = Timers(), [Timed(self._replay, "sample", "sample")]
        with timers.on(*methods, Timed(self._learner, "step", "learn")):
            seconds = updates / rate(updates, lambda: self.learn(updates))
        return timers.shares(seconds)


def _experiment(setting: Setting) -> Experiment:
    chosen = preset(f"cartpole-{setting.agent}")
    replay = dataclasses.replace(chosen.replay, batch_size=setting.batch_size)
    if setting.agent == "ppo":  # keeps its unrolls, because no actor inserts new ones here
        length = replay.unroll_length
        replay = ReplayConfig(
            sampler="uniform",
            batch_size=setting.batch_size,
            unroll_length=length,
            period=length,
            max_size=_ITEMS,
        )
    else:
        replay = dataclasses.replace(
            replay, max_size=_ITEMS, min_size=setting.batch_size, samples_per_insert=None
        )
    return dataclasses.replace(chosen, replay=replay)


def _step_spec(setting: Setting) -> Transition:
    cfg = _experiment(setting)
    with make_env(dataclasses.replace(cfg.env, num_envs=1), 0) as env:
        return transition_spec(make_agent(cfg, env.spec), env.spec)


def _fill(cfg: Experiment, spec: Transition, *replays: Any) -> None:
    num_envs, rng = cfg.env.num_envs, np.random.default_rng(0)
    steps = _ITEMS // num_envs * (cfg.replay.period or 1) + cfg.replay.unroll_length
    for _ in range(steps):
        step = jax.tree.map(lambda leaf: _random(rng, num_envs, leaf), spec)
        step = step._replace(timestep=step.timestep._replace(step_type=np.ones(num_envs, np.int32)))
        for replay in replays:
            replay.add(None, step)
    replays[0].flush()


def _random(rng: np.random.Generator, num_envs: int, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
    shape = (num_envs, *leaf.shape)
    if leaf.dtype.kind == "f":
        return rng.random(shape, np.float32).astype(leaf.dtype)
    return np.zeros(shape, leaf.dtype)


def _serve(setting: Setting) -> None:
    """Runs in the child: a server, set up as in the replay node."""
    cfg, spec = _experiment(setting), _step_spec(setting)
    if setting.service == "reverb":
        leave_one_core()
        server: Any = ReverbServer(cfg.replay, cfg.env.num_envs, spec)
    else:
        server = serve(ReplayService(cfg.replay, cfg.env.num_envs, seed=0, spec=spec))
    answer(server.address)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    _serve(Setting(sys.argv[1], int(sys.argv[2]), 0, 0, sys.argv[3]))
