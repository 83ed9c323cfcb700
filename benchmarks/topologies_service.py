"""The inference service against bare calls; a part of `benchmarks.topologies`.

One process serves both; other processes are clients, instead of actors. All use the same
network on observations like CartPole's, without environments. The bare server, of the same
transport (`benchmarks.bare`), acts at once on a pickled request: one environment per call ("each",
with the calls of all environments in flight together), or all environments of a client per call
("all"). The latency of a call is the time from its start to its answer.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import bare
from benchmarks.children import Child, answer, children, requests
from benchmarks.report import Comparison, alternate
from rlstack.agent import Agent
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import Setup
from rlstack.programs.program.inference import InferenceNode
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import RemoteObject, codec, serve, transports
from rlstack.types import AgentOut, Array, EnvSpec, Params, TimeStep

MODULE = "benchmarks.topologies_service"


class Setting(NamedTuple):
    """One comparison."""

    clients: int
    num_envs: int  # of each client
    seconds: float  # length of a measurement
    repeats: int


class Found(NamedTuple):
    """The throughput and latency of both sides."""

    comparison: Comparison
    latency_ms: dict[str, dict[str, float]]  # by side: "p50" and "p99" of a call


def measure(setting: Setting, way: str) -> Found:
    """Compares the service to one way of using bare calls, "each" or "all"."""
    sizes = [str(setting.clients), str(setting.num_envs)]
    with children(Child(MODULE, "serve", *sizes)) as (server,):
        addresses = server.hear()
        started = [
            Child(MODULE, "call", *sizes, str(rank), *addresses) for rank in range(setting.clients)
        ]
        with children(*started) as clients:
            for client in clients:
                client.hear()
            latencies: dict[str, list[float]] = {"ours": [], "reference": []}

            def rate(side: str, which: str, seconds: float) -> float:
                for client in clients:
                    client.tell([which, seconds])
                found = [client.hear() for client in clients]
                latencies[side].extend(x for _, times in found for x in times)
                return sum(per_second for per_second, _ in found)

            rate("ours", "service", 1.0)
            rate("reference", way, 0.5)
            for times in latencies.values():
                times.clear()  # these included compilation
            comparison = alternate(
                lambda: rate("ours", "service", setting.seconds),
                lambda: rate("reference", way, setting.seconds),
                setting.repeats,
            )
    latency_ms = {
        side: {f"p{p}": round(1e3 * float(np.percentile(times, p)), 3) for p in (50, 99)}
        for side, times in latencies.items()
    }
    return Found(comparison, latency_ms)


def experiment(clients: int, num_envs: int) -> Experiment:
    """Returns PPO with its default network, with one actor per client."""
    chosen = preset("cartpole-ppo")
    return Experiment(
        preset="benchmark-service",
        agent=chosen.agent,
        env=EnvConfig("CartPole-v1", num_envs=num_envs),
        replay=chosen.replay,
        frames=1,
        topology="light_env",
        program=ProgramConfig(num_actors=clients, launch="threads"),
    )


def _spec() -> EnvSpec:
    with make_env(EnvConfig("CartPole-v1", num_envs=1), 0) as env:
        return env.spec


def _timestep(num_envs: int) -> TimeStep:
    rng = np.random.default_rng(0)
    ones = np.ones(num_envs, np.float32)
    return TimeStep(ones.astype(np.int32), ones, ones, rng.random((num_envs, 4), np.float32))


class _FixedParams:
    """A learner node whose params never change."""

    def __init__(self, params: Params) -> None:
        self._encoded = codec.encode(params)

    def replay_name(self) -> str:
        """Says that this node is ready."""
        return ""

    def get_params(self, newer_than: int = -1) -> tuple[int, bytes] | None:
        """Returns version 0, once."""
        return (0, self._encoded) if newer_than < 0 else None

    def close(self) -> None:
        """Has nothing to close."""


class _NoCoordinator:
    """A coordinator that does nothing."""

    def report(self, *news: object) -> dict[str, object]:
        """Ignores the report."""
        del news
        return {}


class _Bare:
    """A handler that acts on the timestep of one call."""

    def __init__(self, agent: Agent, params: Params) -> None:
        def act(rng_key: Array, params: Params, timestep: TimeStep) -> tuple[Array, AgentOut]:
            rng_key, step_key = jax.random.split(rng_key)
            return rng_key, agent.actor_step(step_key, params, timestep, ())[0]

        self._act, self._params = jax.jit(act), params
        self._rng_key = jax.random.PRNGKey(0)
        self._lock = threading.Lock()

    def act(self, payload: bytes) -> bytes:
        """Takes a pickled timestep; returns the pickled agent output."""
        timestep = TimeStep(*pickle.loads(payload))
        with self._lock:
            self._rng_key, output = self._act(self._rng_key, self._params, timestep)
            arrays = tuple(np.asarray(leaf) for leaf in output)
        return pickle.dumps(arrays, protocol=5)


def _serve(clients: int, num_envs: int) -> None:
    """Runs in the server's process."""
    setup = Setup(experiment(clients, num_envs), RunDir(Path("/nonexistent")), _spec())
    setup.configure_jax(single_thread=True)
    agent = make_agent(setup.experiment, setup.spec)
    params = jax.jit(agent.initial_params)(jax.random.PRNGKey(0))
    stop = threading.Event()
    learner: Any = _FixedParams(params)
    coordinator: Any = _NoCoordinator()
    node = InferenceNode(setup, 0, learner, coordinator, stop)
    runs = threading.Thread(target=node.run)
    own = _Bare(agent, params)
    with serve(node) as server, bare.serve(transports.current(), own.act) as address:
        runs.start()
        answer([server.address, address])
        sys.stdin.read()
        stop.set()
        runs.join()


def _call(clients: int, num_envs: int, rank: int, service: str, bare_server: str) -> None:
    """Runs in a client's process."""
    with bare.connect(transports.current(), bare_server) as client:
        _measure_calls(clients, num_envs, rank, service, client)


def _measure_calls(
    clients: int, num_envs: int, rank: int, service: str, client: bare.Client
) -> None:
    setup = Setup(experiment(clients, num_envs), RunDir(Path("/nonexistent")), _spec())
    setup.register_records(make_agent(setup.experiment, setup.spec))
    timestep = _timestep(num_envs)
    remote = RemoteObject(service, InferenceNode, name="inferencer/0")

    def payload(rows: slice) -> bytes:
        return pickle.dumps(tuple(leaf[rows] for leaf in timestep), protocol=5)

    def use_service() -> list[float]:
        begun = time.perf_counter()
        remote.inference(rank, 0, None, timestep)
        return [time.perf_counter() - begun]

    def use_all() -> list[float]:
        begun = time.perf_counter()
        client.send(payload(slice(None)))
        pickle.loads(client.receive())
        return [time.perf_counter() - begun]

    def use_each() -> list[float]:
        begun = [0.0] * num_envs
        for env in range(num_envs):
            begun[env] = time.perf_counter()
            client.send(payload(slice(env, env + 1)))
        times = []
        for env in range(num_envs):
            pickle.loads(client.receive())
            times.append(time.perf_counter() - begun[env])
        return times

    ways: dict[str, Callable[[], list[float]]] = {
        "service": use_service,
        "all": use_all,
        "each": use_each,
    }
    for way in ways.values():
        way()
    answer("ready")
    for which, seconds in requests():
        times: list[float] = []
        rounds, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds:
            times.extend(ways[which]())
            rounds += 1
        answer([rounds * num_envs / passed, times])
    remote.close()


if __name__ == "__main__":
    role, *rest = sys.argv[1:]
    if role == "serve":
        _serve(*map(int, rest))
    else:
        _call(*map(int, rest[:3]), *rest[3:])  # type: ignore[arg-type]
