"""The actor's node: one pool of environments, acting locally or through a service."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from programs.build.components import make_agent
from programs.build.environments import make_env
from programs.build.seeds import acting_key, role_seed
from programs.nodes.coordination import RUNNING
from programs.nodes.line import Coordinates, Line, Setup
from programs.nodes.meeting import ACT, ATTEND
from programs.nodes.params import know_records, pull_params
from rlstack.acting.actor import Actor
from rlstack.acting.inferencer import Inference, Inferencer
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import RemoteError, UnavailableError
from rlstack.types import Array, TimeStep, Transition

# What a service raises that ends, or has too much to do; another, or it later, may answer.
_PASSING = ("ServiceClosedError", "TimeoutError")
_PATIENCE = 1.0  # seconds in a wait before asking whether the program still runs


class _Stopped(Exception):  # noqa: N818, it is no error
    """The program has ended while this actor waited."""


class Writes(Protocol):
    """One actor's side of a replay buffer; ids are those of the whole program."""

    def add(
        self, env_ids: np.ndarray | None, transition: Transition, timeout: float | None = None
    ) -> None:
        """Stores one step of some environments."""

    def flush(self) -> None:
        """Waits until what was added can be sampled."""

    def close(self) -> None:
        """Leaves."""


class _PatientReplay:
    """Waits for room as long as the program runs; knows how long that was."""

    def __init__(self, writer: Writes, env_ids: range, line: Line, timeout: float) -> None:
        self._writer, self._line, self._timeout = writer, line, timeout
        self._all = np.arange(env_ids.start, env_ids.stop, dtype=np.int32)
        self._waited = 0.0
        self._versions: Array | None = None  # of the params that acted last

    def gauges(self) -> dict[str, float]:
        """Returns what a report says of the writing."""
        gauges = {"actor/add_wait_seconds": self._waited}
        if self._versions is not None:
            gauges["params/version"] = float(self._versions[0])
        return gauges

    def add(self, env_ids: np.ndarray | None, transition: Transition) -> None:
        ids = self._all if env_ids is None else self._all[env_ids]
        self._versions = transition.params_version
        begun = time.monotonic()
        while True:
            try:
                self._writer.add(ids, transition, timeout=_PATIENCE)
                self._waited += time.monotonic() - begun
                return
            except ReplayTimeoutError:
                if self._line.ask().phase != RUNNING:
                    raise _Stopped from None
                if time.monotonic() > begun + self._timeout:
                    raise


class _RemoteInferencer:
    """Acts through a service, and waits for it as long as the program runs."""

    def __init__(self, service: Any, rank: int, env_ids: range, line: Line, timeout: float) -> None:
        self._service, self._rank, self._line, self._timeout = service, rank, line, timeout
        self._all = np.arange(env_ids.start, env_ids.stop, dtype=np.int32)

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        ids = self._all if env_ids is None else self._all[env_ids]
        until = time.monotonic() + self._timeout
        while True:
            try:
                return self._service.inference(self._rank, self._line.incarnation, ids, timestep)
            except (UnavailableError, RemoteError) as error:
                if isinstance(error, RemoteError) and error.type_name not in _PASSING:
                    raise
                if self._line.ask().phase != RUNNING:
                    raise _Stopped from None
                if time.monotonic() > until:
                    raise


class FindsReplay(Protocol):
    """Where an actor writes."""

    def writer(self, rank: int, learner: Any) -> Writes:
        """Returns the writer of an actor."""


class ActorNode:
    """An Actor that goes on until the coordinator says otherwise."""

    def __init__(
        self,
        setup: Setup,
        rank: int,
        replay: FindsReplay,
        learner: Any,
        service: Any,
        coordinator: Coordinates,
        stop: threading.Event,
    ) -> None:
        """Remembers its parts; the environments are made by `run`.

        Args:
          setup: of the program.
          rank: of this actor.
          replay: where to write.
          learner: who publishes params and, in lock-step, says when to go on.
          service: the remote inference service; None to act locally.
          coordinator: told of frames and episodes.
          stop: set by the launcher to end this node.
        """
        self._setup, self._rank, self._replay = setup, rank, replay
        self._learner, self._service = learner, service
        self._line = Line(coordinator, f"actor/{rank}", stop)
        setup.configure_jax(single_thread=True)
        self._agent = make_agent(setup.experiment, setup.spec)
        know_records(self._agent, setup.step)
        self._attended = -1  # meetings with the learner, in its own count

    def run(self) -> None:
        """Acts until told to stop."""
        experiment, line = self._setup.experiment, self._line
        writer = self._replay.writer(self._rank, self._learner)
        with make_env(self._env_config(), self._env_seed()) as env:
            inferencer, close = self._inferencer()
            try:
                ids = experiment.env_ids(self._rank)
                replay = _PatientReplay(writer, ids, line, experiment.replay.timeout_seconds)
                line.gauges = replay.gauges
                self._act(Actor(env, inferencer, replay), writer)
            except (_Stopped, ReplayClosedError):
                pass  # the learner's end closes the replay, and is the program's
            finally:
                close()
                writer.close()
        line.end()

    def _act(self, actor: Actor, writer: Writes) -> None:
        line, experiment = self._line, self._setup.experiment
        lock_step = experiment.program.pacing == "lock_step"
        chunk = range(experiment.steps_per_update if lock_step else 1)
        go_on = True
        while line.ask().phase == RUNNING:
            for _ in chunk:
                line.log(actor.step())
            if lock_step:
                writer.flush()
                go_on = self._settle(actor.env_frames)
            # Told once they are learned from: the budget's last frames end the program.
            line.count(env_frames=actor.env_frames)
            if not go_on:
                return

    def _settle(self, env_frames: int) -> bool:
        """Lets the learner learn; says whether to go on."""
        rank, incarnation = self._rank, self._line.incarnation
        while self._line.ask().phase == RUNNING:
            with contextlib.suppress(UnavailableError):
                word, self._attended = self._learner.settle(
                    rank, incarnation, env_frames, self._attended
                )
                if word != ATTEND:
                    return word == ACT
        return False

    def _inferencer(self) -> tuple[Any, Callable[[], None]]:
        experiment, line = self._setup.experiment, self._line
        if self._service is not None:
            timeout = experiment.service.timeout_s
            num_envs = experiment.env.num_envs
            first = self._rank // experiment.program.num_inferencers * num_envs
            ids = range(first, first + num_envs)
            return _RemoteInferencer(self._service, self._rank, ids, line, timeout), lambda: None
        params, close = pull_params(experiment.program, self._learner)
        key = acting_key(experiment.seed, self._rank, line.incarnation)
        mine = np.asarray(experiment.env_ids(self._rank))
        return Inferencer(experiment.inferencer, self._agent, params, len(mine), key, mine), close

    def _env_config(self) -> Any:
        """The actors share the cores, unless the config says how many threads to take."""
        cfg = self._setup.experiment.env
        program = self._setup.experiment.program
        share = max(1, (os.cpu_count() or 1) // program.num_actors)
        if program.launch == "ray":
            share = max(1, int(program.ray.cpus_of("actor")))
        return dataclasses.replace(cfg, num_workers=cfg.num_workers or min(cfg.num_envs, share))

    def _env_seed(self) -> int:
        """The first actor's environments are those of a single process."""
        role = f"env/{self._rank}" if self._rank else "env"
        return role_seed(self._setup.experiment.seed, role, self._line.incarnation)
