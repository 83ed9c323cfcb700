"""Small programs for tests, and checks that they leave nothing behind."""

import contextlib
import dataclasses
import gc
import io
import json
import os
import re
import signal
import threading
import time
from typing import Any, NamedTuple

import jax
import numpy as np
import psutil

from rlstack.agents import AGENTS
from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.build.environments import make_env
from rlstack.programs.build.restored import read_params
from rlstack.programs.config.encoding import from_json
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.run import train
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint
from rlstack.storage.datasets import DatasetWriter
from rlstack.types import Transition

TOPOLOGIES = ("heavy_env", "light_env", "distributed")
SHARED_MEMORY = ("heavy_env", "light_env")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)  # pytest-timeout uses SIGALRM


def ppo(topology, *, frames=3000, **changes):
    """PPO on CartPole: an update is 256 frames."""
    experiment = preset("cartpole-ppo")
    agent = dataclasses.replace(experiment.agent, num_epochs=2)
    return small(experiment, topology, frames, agent=agent, **changes)


def dqn(topology, *, frames=2000, **changes):
    """DQN on CartPole, four environments."""
    experiment = preset("cartpole-dqn")
    replay = dataclasses.replace(
        experiment.replay, batch_size=32, max_size=4000, min_size=200, samples_per_insert=8.0
    )
    return small(experiment, topology, frames, replay=replay, **changes)


def r2d2(topology, *, frames=2000, **changes):
    """R2D2 on a task that needs memory, eight environments."""
    return small(preset("memorycue-r2d2"), topology, frames, **changes)


def recurrent(topology, *, frames=3000, **changes):
    """Recurrent PPO on a task that needs memory."""
    experiment = Experiment(
        preset="memory",
        agent=PPOConfig(num_epochs=2, num_minibatches=2),
        env=EnvConfig("rlstack.envs.toy:MemoryCue", num_envs=8),
        network=NetworkConfig(core="gru", hidden_sizes=(32,), core_size=32),
        replay=ReplayConfig(sampler="fifo", batch_size=8, unroll_length=16, max_size=16),
        frames=frames,
    )
    return small(experiment, topology, frames, **changes)


class Acted(NamedTuple):
    """What a recording has of an agent's output."""

    action: Any


def with_recorded(experiment, path, *, always=False):
    """The experiment with demonstrations of random actions, if its agent needs recorded steps."""
    if not (always or AGENTS[type(experiment.agent)].recorded):
        return experiment
    rng = np.random.default_rng(1)
    cfg = experiment.evaluation_env
    env_header = {"name": cfg.name, "type": cfg.type, "options": cfg.options}
    with (
        make_env(cfg, seed=5) as env,
        DatasetWriter(path, env.spec, env.num_envs, 300, env=env_header, source={}) as writer,
    ):
        action_spec, timestep = env.spec.action, env.reset()
        while not writer.done:
            shape = (env.num_envs, *action_spec.shape)
            low, high = action_spec.minimum, action_spec.maximum
            if np.issubdtype(action_spec.dtype, np.integer):
                action = rng.integers(low, high, shape, endpoint=True)
            else:
                action = rng.uniform(low, high, shape)
            action = action.astype(action_spec.dtype)
            version = np.zeros(env.num_envs, np.int32)
            writer.add(None, Transition(timestep, Acted(action), (), version))
            timestep = env.step(action)
        writer.finish()
    replay = dataclasses.replace(experiment.replay, demonstrations=str(path))
    return dataclasses.replace(experiment, replay=replay)


def small(experiment, topology, frames, *, program=None, env=None, replay=None, **changes):
    program = {"num_actors": 1, "launch": "threads", **(program or {})}
    if replay is None:
        replay = experiment.replay
    elif isinstance(replay, dict):
        replay = dataclasses.replace(experiment.replay, **replay)
    return dataclasses.replace(
        experiment,
        topology=topology,
        frames=frames,
        log_period=500,
        env=dataclasses.replace(experiment.env, **(env or {})),
        replay=replay,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        program=ProgramConfig(**program),
        **changes,
    )


def run(experiment, directory):
    """Runs to the end; returns the result."""
    return train.run(experiment, directory, stream=io.StringIO())


def params(directory):
    """The params of a run's newest checkpoint, as a list of arrays."""
    experiment = from_json((directory / "config.json").read_text())
    with make_env(dataclasses.replace(experiment.env, num_envs=1, wait_num=0), 0) as env:
        spec = env.spec
    path = checkpoint.latest(directory / "checkpoints")
    return jax.tree.leaves(read_params(path, experiment, spec))


def same(left, right):
    """Whether two lists of arrays are equal bit for bit."""
    return len(left) == len(right) and all(
        np.array_equal(a, b) for a, b in zip(left, right, strict=True)
    )


def metrics(directory):
    """The lines of logs."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").open()]


def series(directory, name):
    """The values of one log."""
    return [line[name] for line in metrics(directory) if name in line]


def failures(directory):
    """The records of failed nodes."""
    path = directory / "failures.jsonl"
    return [json.loads(line) for line in path.open()] if path.exists() else []


def blocks():
    """Shared memory blocks owned by this process, by a descendant, or by an ended process."""
    gc.collect()  # what keeps a block of this process mapped may be part of a circle
    files = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
    links = {os.readlink(fd) for fd in files if os.path.lexists(fd)}
    ours = {os.getpid()} | {child.pid for child in psutil.Process().children(recursive=True)}
    return {link for link in links if link.startswith("/dev/shm/#")} | {
        name
        for name in os.listdir("/dev/shm")
        if (owner := re.match(r"rlstack-(\d+)", name)) and not _is_anothers(int(owner[1]), ours)
    }


def _is_anothers(owner, ours):
    return owner not in ours and psutil.pid_exists(owner)


def threads():
    """Running Python threads, without threads that other languages started."""
    return {t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}


@contextlib.contextmanager
def nothing_left():
    """Checks that the body leaves no process, thread, memory block or signal handler behind."""
    before = threads(), blocks(), [signal.getsignal(number) for number in _SIGNALS]
    yield
    until = time.monotonic() + 10.0
    while (left := _left(*before)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left, f"left behind: {left}"


def _left(threads_before, blocks_before, handlers_before):
    left = [t.name for t in threads() - threads_before]
    left += sorted(blocks() - blocks_before)
    children = psutil.Process().children(recursive=True)
    left += [" ".join(child.cmdline()) for child in children]
    handlers = [signal.getsignal(number) for number in _SIGNALS]
    left += [
        f"handler of {number.name}: {handler}"
        for number, handler, before in zip(_SIGNALS, handlers, handlers_before, strict=True)
        if handler is not before
    ]
    return left
