"""`rlstack train --profile 20..30`: where the time of some updates goes, by node.

Each node measures itself from the first of these updates to the last. It replaces methods of its
parts, such as the ``recv`` of its environments, by ones that count seconds; a run without
``--profile`` keeps the methods that it has. Some nodes also write a trace of JAX's profiler, which
Perfetto (https://ui.perfetto.dev) and TensorBoard show. `summary` is the text that a profiled run
prints: the shares of each node, and what limits the speed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_dir import RunDir

ACTING, ENVIRONMENTS = "computing actions", "waiting for environments"
WRITING, DRAWING, LEARNING = "writing to the replay", "drawing batches", "updates"
COMPILED, SERVING = "the compiled program", "waiting for requests"
EVALUATING, SAVING = "evaluations", "writing checkpoints"
OTHER = "other"
# Traces of one program: JAX has one profiler in a process, and many actors do the same.
_TRACED = re.compile(r"(learner|\w+/0|single_process|fused)")
_tracing = threading.Lock()
_log = logging.getLogger(__name__)


class Updates(NamedTuple):
    """Which updates are profiled; the first update of a run is 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Updates:
        """Reads ``FIRST..LAST``, or the number of one update.

        Raises:
          ValueError: the text has neither form, or the last update comes before the first.
        """
        found = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text)
        made = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if not 1 <= made.first <= made.last:
            raise ValueError(
                "--profile must be two numbers of updates, the first update being 1, such as "
                f"20..30; got {text!r}."
            )
        return made

    def __str__(self) -> str:
        return f"{self.first}..{self.last}"


class Profile:
    """Measures one node while it makes some updates, or acts with params of these."""

    def __init__(
        self, updates: Updates | None, directory: RunDir, node: str, other: str = OTHER
    ) -> None:
        """Creates a profile; measuring begins when `observe` sees the first update.

        Args:
          updates: the updates to measure; None disables the profile, so all methods do nothing.
          directory: the run's directory; the results are written to ``profile/`` in it.
          node: the name of the node, such as ``actor/0``.
          other: label for the time that no other label covers.
        """
        self._updates, self._node, self._other = updates, node, other
        self._path = directory.profile / node.replace("/", "-")
        self._seconds: dict[str, float] = defaultdict(float)
        self._counters: dict[str, Callable[[], float]] = {}
        self._began: float | None = None  # while it measures
        self._ended = updates is None
        self._trace = contextlib.ExitStack()
        self._changing = threading.Lock()
        self._traces = updates is not None and bool(_TRACED.fullmatch(node))
        if self._traces:
            _prepare_tracing()

    def time(self, part: Any, **methods: str) -> None:
        """Measures the seconds spent in methods of an object.

        Args:
          part: the object; None is skipped.
          **methods: a label for the measured time, by the name of the method. Methods that the
            object lacks are skipped.
        """
        if self._updates is None:
            return
        for name, label in methods.items():
            method = getattr(part, name, None)
            if method is not None:
                setattr(part, name, self._timed(method, label))

    def read(self, label: str, counter: Callable[[], float]) -> None:
        """Measures how much a counter of seconds grows, under the given label."""
        self._counters[label] = counter

    def time_acting(self, env: Any, inferencer: Any, replay: Any) -> None:
        """Measures the seconds spent in the parts of an actor."""
        self.time(env, recv=ENVIRONMENTS)
        self.time(inferencer, inference=ACTING)
        self.time(replay, add=WRITING)

    def time_engine(self, engine: Any) -> None:
        """Measures the seconds spent in the parts of a loop in this process."""
        for player in getattr(engine, "players", {}).values():
            self.time_acting(None, player.inferencer, player.replay)
            self.time(player.replay, sample=DRAWING)
            self.time(player.learner, step=LEARNING, start_updates=LEARNING)
        self.time(getattr(engine, "env", None), recv=ENVIRONMENTS)
        if windows := getattr(engine, "windows", None):  # of recorded data
            self.time(windows, sample=DRAWING)
            self.time(engine.learner, step=LEARNING)
        self.time(engine, call=COMPILED, evaluate=EVALUATING)

    def time_saving(self, best: Any, periodic: Any) -> None:
        """Measures the seconds in which a loop in this process writes checkpoints."""
        self.time(best, offer=SAVING)
        self.time(periodic, save=SAVING)

    def _timed(self, method: Callable[..., Any], label: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._began is None:
                return method(*args, **kwargs)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[label] += time.perf_counter() - start

        return timed

    def observe(self, version: int) -> None:
        """Starts or stops measuring as updates pass; call it between steps, in any thread.

        Args:
          version: number of updates so far; in an actor, the number in the params that act.
        """
        if self._ended or self._updates is None:
            return
        with self._changing:
            if self._began is None and version >= self._updates.first - 1:
                self._begin()
            elif version >= self._updates.last:
                self._end()

    def _begin(self) -> None:
        if self._traces and _tracing.acquire(blocking=False):
            self._trace.callback(_tracing.release)
            try:
                jax.profiler.start_trace(str(self._path))
                self._trace.callback(jax.profiler.stop_trace)
            except (OSError, RuntimeError) as error:  # another profiler is in this process
                _log.warning("no trace of %s: %s", self._node, error)
        for label, counter in self._counters.items():
            self._seconds[label] -= counter()
        self._began = time.perf_counter()

    def close(self) -> None:
        """Ends the measurement, also before its last update, and writes its results."""
        with self._changing:
            self._end()

    def _end(self) -> None:
        if self._ended or self._began is None:
            return
        total = time.perf_counter() - self._began
        for label, counter in self._counters.items():
            self._seconds[label] += counter()
        self._ended, self._began = True, None
        parts = {**self._seconds, self._other: max(0.0, total - sum(self._seconds.values()))}
        found = {"node": self._node, "updates": str(self._updates), "seconds": total}
        try:
            self._trace.close()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({**found, "parts": parts}, indent=2)
            self._path.with_suffix(".json").write_text(text + "\n")
        except OSError as error:  # a full disk ends no run for a profile
            _log.warning("no profile of %s: %s", self._node, error)


def _prepare_tracing() -> None:
    """Makes an empty trace, if no node of this process traces.

    JAX's first trace imports TensorFlow where it is installed, which takes seconds.
    """
    with contextlib.suppress(OSError, RuntimeError), tempfile.TemporaryDirectory() as folder:
        if _tracing.acquire(blocking=False):
            try:
                with jax.profiler.trace(folder):
                    pass
            finally:
                _tracing.release()


def chosen_updates(text: str, experiment: Experiment) -> Updates | None:
    """Returns the updates to profile, None for "".

    Raises:
      ValueError: the text names no updates, or the run cannot be profiled.
    """
    if not text:
        return None
    if experiment.policies:
        raise ValueError("--profile measures runs of one policy; got an experiment with policies.")
    return Updates.parse(text)


def summary(directory: RunDir) -> str:
    """Returns a table of what all nodes of a run measured, and what limits the speed."""
    found = [json.loads(path.read_text()) for path in sorted(directory.profile.glob("*.json"))]
    if not found:
        return "there is no profile: the run ended before the first of the updates."
    lines = [f"profile of the updates {found[0]['updates']}:"]
    for node in found:
        shares = sorted(node["parts"].items(), key=lambda part: -part[1])
        text = ", ".join(f"{name} {share / node['seconds']:.0%}" for name, share in shares)
        lines.append(f"  {node['node']}: {node['seconds']:.2f} s; {text}")
    lines.append(bottleneck({node["node"]: _shares(node) for node in found}))
    if any(path.is_dir() for path in directory.profile.iterdir()):
        lines.append(f"Traces for Perfetto or TensorBoard are in {directory.profile}.")
    return "\n".join(lines)


def _shares(node: Mapping[str, Any]) -> dict[str, float]:
    return {name: seconds / node["seconds"] for name, seconds in node["parts"].items()}


_ADVICE = {
    ENVIRONMENTS: "Use more --env.num-envs, EnvPool (--env.type cpp), or several actors "
    "(--topology heavy_env --program.num-actors).",
    ACTING: "Use more --env.num-envs, so that one call computes more actions, or several actors.",
    LEARNING: "Use a smaller network, fewer epochs, or an accelerator (docs/devices.md).",
    DRAWING: "The learner waits for data: use more actors or environments.",
    WRITING: "Actors wait for space in the replay: the learner is slower than they are. Use a "
    "smaller network, fewer epochs, or an accelerator (docs/devices.md).",
    SERVING: "The service waits: actors or the learner limit the speed.",
    COMPILED: "Acting, environments and updates are one function; the trace shows its operations.",
    EVALUATING: "Profile other updates, or evaluate less often (--evaluator.period).",
    SAVING: "Profile other updates, or save less often (--checkpoint-period, --evaluator.period).",
    OTHER: "The trace shows it.",
}


def bottleneck(nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Returns one sentence on what takes most of the time, and one on what to change.

    Args:
      nodes: the share of each part in the time of a node, by the names of nodes.
    """
    # A learner makes the updates that are counted; a single process is its own learner.
    learners = sorted(node for node in nodes if node.split("/")[0] == "learner")
    chosen = learners[0] if learners else min(nodes)
    parts = nodes[chosen]
    name = max(parts, key=lambda part: parts[part])
    advice = _ADVICE[name]
    if learners and name == DRAWING:
        actors = [shares for node, shares in nodes.items() if node.startswith("actor/")]
        if actors:
            total = {part: sum(shares.get(part, 0.0) for shares in actors) for part in _ADVICE}
            slowest = max(total, key=lambda part: total[part])
            return (
                f"Acting limits the speed: the learner waits {parts[name]:.0%} of its time, and "
                f"actors spend most of theirs on {slowest}. {_ADVICE[slowest]}"
            )
    return f"Most of the time of {chosen} is {name}, {parts[name]:.0%}. {advice}"
