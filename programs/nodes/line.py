"""A node's line to the coordinator, and what all nodes are given."""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from programs.build import xla
from programs.build.components import make_agent
from programs.experiment import Experiment
from programs.nodes.coordination import OVER, REPORT_SECONDS, RUNNING
from programs.nodes.supervise import INCARNATION
from programs.tracking.run_dir import RunDir
from rlstack.acting.actor import transition_spec
from rlstack.rpc import UnavailableError
from rlstack.types import EnvSpec, Transition

_PERIOD = REPORT_SECONDS
_GIVE_UP = 5.0  # seconds without a coordinator after which a program counts as over

_thread = threading.local()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What every node of a program knows."""

    experiment: Experiment
    directory: RunDir
    spec: EnvSpec  # of one environment
    restored: Path | None = None  # the checkpoint to go on from

    @functools.cached_property
    def step(self) -> Transition:
        """The `transition_spec`; who asks before the setup is pickled saves the nodes the work."""
        return transition_spec(make_agent(self.experiment, self.spec), self.spec)

    def configure_jax(self, *, single_thread: bool) -> None:
        """Suits XLA to this node, before JAX computes anything here."""
        older = self.experiment.older_runtime
        xla.configure(convolutions=not older, single_thread=single_thread)


class Orders(NamedTuple):
    """What the coordinator last said."""

    phase: str = RUNNING
    env_frames: int = 0
    checkpoints: int = 0
    evaluations: int = 0


class Coordinates(Protocol):
    """The coordinator's side of the line, near or far."""

    def report(
        self,
        node: str,
        incarnation: int,
        pid: int,
        counts: Mapping[str, float],
        gauges: Mapping[str, float],
        logs: Mapping[str, Any],
    ) -> Mapping[str, Any]:
        """Takes a node's news and returns what is due."""


class Line:
    """Reports a few times a second and knows the newest orders; used by one thread."""

    def __init__(self, coordinator: Coordinates, node: str, stop: threading.Event) -> None:
        """Takes the coordinator, this node's name, and the event by which a launcher ends it.

        Attributes:
          gauges: gives the numbers that a report is to hold; called at each.
        """
        self._coordinator, self._node, self._stop = coordinator, node, stop
        self.gauges: Callable[[], Mapping[str, Any]] = dict
        self.incarnation = incarnation()
        self._counts: dict[str, float] = {}
        self._logs: dict[str, list[np.ndarray]] = {}
        self._orders = Orders()
        self._next = 0.0
        self._heard = time.monotonic()

    def count(self, **totals: float) -> None:
        """Sets totals since this incarnation began."""
        self._counts.update(totals)

    def log(self, logs: Mapping[str, Any] | None, prefix: str = "") -> None:
        """Adds values to average: numbers, or vectors whose entries count one each."""
        for name, value in (logs or {}).items():
            self._logs.setdefault(prefix + name, []).append(np.atleast_1d(np.asarray(value)))

    def ask(self, *, now: bool = False) -> Orders:
        """Returns the newest orders; reports first if it is time, or told to do so now."""
        if self._stop.is_set():
            return self._orders._replace(phase=OVER)
        clock = time.monotonic()
        if now or clock >= self._next:
            self._next = clock + _PERIOD
            self._report(clock)
        return self._orders

    def end(self) -> None:
        """Reports for the last time; the coordinator waits for this node no longer."""
        self.count(ended=1)
        self.ask(now=True)

    def _report(self, clock: float) -> None:
        logs = {name: np.concatenate(values) for name, values in self._logs.items()}
        self._logs = {}
        try:
            gauges = {name: float(value) for name, value in self.gauges().items()}
            orders = self._coordinator.report(
                self._node, self.incarnation, os.getpid(), self._counts, gauges, logs
            )
        except UnavailableError:
            # The coordinator is the last to leave, so its silence is the end.
            give_up = getattr(_thread, "give_up", _GIVE_UP)
            if time.monotonic() - self._heard > give_up:  # the call itself may have waited
                self._orders = self._orders._replace(phase=OVER)
            return
        self._heard = clock
        self._orders = Orders(**orders)


def incarnation() -> int:
    """How often this node has been started before."""
    return getattr(_thread, "incarnation", None) or int(os.environ.get(INCARNATION, "0"))


def set_incarnation(number: int) -> None:
    """Says so for the node in this thread, which shares its environment variables with others."""
    _thread.incarnation = number


def set_give_up(seconds: float) -> None:
    """Has the node in this thread wait longer for a coordinator, which may be cut off."""
    _thread.give_up = seconds
