"""Callbacks: the user's objects whose methods are called at the events of a run.

In every topology they are called in the process that calls `rlstack.programs.run.train.run`, so
they need not be picklable. In a topology of several nodes the coordinator collects the events, and
the calls are made up to a second later.
"""

from __future__ import annotations

import collections
import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlstack.acting.evaluator import Evaluation
from rlstack.checks import WrongKindError, no_exits
from rlstack.programs.session import errors
from rlstack.types import Logs

MAX_WAITING = 20_000  # events that the calling process may be behind

Answer = bool | str | None


class Callback:
    """The base of callbacks, which does nothing; override what you need.

    A method that returns True, or a reason, ends training as a stop rule does: the run is saved,
    evaluated, and has a result.
    """

    def on_update(self, update: int, logs: Mapping[str, float]) -> Answer:
        """Called after each update of the learner, with its number and the logs of the agent."""

    def on_episode(self, frames: int, episode_return: float, length: int) -> Answer:
        """Called after each episode of training; ``frames`` are those of the run so far."""

    def on_evaluation(self, frames: int, evaluation: Evaluation) -> Answer:
        """Called after each evaluation, also after the last one, which gives the result."""

    def on_checkpoint(self, frames: int, path: Path) -> Answer:
        """Called after a checkpoint was written to ``path``."""


_METHODS = {
    "update": "on_update",
    "episode": "on_episode",
    "evaluation": "on_evaluation",
    "checkpoint": "on_checkpoint",
}


class Callbacks:
    """Passes the events of a run on to callbacks.

    Attributes:
      reason: why training must end; empty until a callback says so.
      end: called with the reason, as soon as there is one.
    """

    def __init__(self, callbacks: Sequence[Any], tell: Callable[[str], None]) -> None:
        """Checks the callbacks.

        Args:
          callbacks: objects with some of the methods of `Callback`.
          tell: shows the user a line. If a callback raises an exception, the user is told once for
            each method, and the run continues.

        Raises:
          WrongKindError: an object has none of the methods, or one whose name is misspelt.
        """
        for callback in callbacks:
            check_callback(callback)
        self._callbacks, self._tell = list(callbacks), tell
        self._failed: set[tuple[int, str]] = set()
        self.reason = ""
        self.end: Callable[[str], None] = lambda reason: None

    def __call__(self, kind: str, number: int, content: Any) -> None:
        """Passes an event on; see `Events` for its parts."""
        arguments = (number, *content) if kind == "episode" else (number, content)
        for i, callback in enumerate(self._callbacks):
            method = getattr(callback, _METHODS[kind], None)
            if method is None:
                continue
            name = f"{type(callback).__name__}.{_METHODS[kind]}"
            try:
                with no_exits():
                    answer = method(*arguments)
            except Exception as error:
                if (i, kind) not in self._failed:
                    self._failed.add((i, kind))
                    self._tell(
                        f"the callback {name} raised {errors.described(error)}; the run goes on."
                    )
                continue
            if answer and not self.reason:
                self.reason = f"{name}: {answer}" if isinstance(answer, str) else name
                self.end(self.reason)


def check_callback(callback: Any) -> None:
    """Checks that an object is a callback.

    Raises:
      WrongKindError: the object has none of the methods, or one whose name is misspelt.
    """
    known = list(_METHODS.values())
    own = [name for name in dir(callback) if name.startswith("on_")]
    rule = f"callbacks must have some of the methods {', '.join(known)}"
    if isinstance(callback, type) or not own:
        raise WrongKindError(
            f"{rule}; got {callback!r:.80}. Subclass rlstack.programs.session.callbacks.Callback."
        )
    for name in own:
        close = difflib.get_close_matches(name, known, n=1)
        if name not in known and close:
            raise WrongKindError(
                f"{rule}; {type(callback).__name__} has {name}. Did you mean {close[0]}?"
            )


class Events(NamedTuple):
    """The receiver of a run's events, and the run's current position."""

    # Takes the kind of an event ("update", "episode", "evaluation" or "checkpoint"), the update or
    # the frames, and its content: what the method of `Callback` receives.
    send: Callable[[str, int, Any], None]
    position: Callable[[], tuple[int, int]]  # frames and updates so far

    def log(self, logs: Logs | Mapping[str, Any]) -> None:
        """Sends the updates and the episodes in some logs; each has one value of an array."""
        frames, updates = self.position()
        arrays = {name: np.atleast_1d(np.asarray(value)) for name, value in logs.items()}
        learned = {k.removeprefix("learner/"): v for k, v in arrays.items() if "learner/" in k}
        count = max((len(values) for values in learned.values()), default=0)
        for i in range(count):
            found = {name: float(v[i]) for name, v in learned.items() if len(v) == count}
            self.send("update", updates - count + 1 + i, found)
        returns = arrays.get("actor/episode_return", ())
        for total, length in zip(returns, arrays.get("actor/episode_length", ()), strict=False):
            self.send("episode", frames, (float(total), int(length)))

    def evaluated(self, frames: int, evaluation: Evaluation) -> None:
        """Sends an evaluation."""
        self.send("evaluation", frames, evaluation)


class EventLog:
    """The newest events of a program, for the process that started it."""

    def __init__(self) -> None:
        self._events: collections.deque[list[Any]] = collections.deque(maxlen=MAX_WAITING)
        self._number = 0

    def send(self, kind: str, number: int, content: Any) -> None:
        """Adds an event; the oldest are lost if nobody reads them."""
        self._number += 1
        if isinstance(content, Evaluation):
            content = {**content._asdict(), "metrics": dict(content.metrics)}
        self._events.append([self._number, kind, int(number), content])

    def after(self, number: int) -> list[list[Any]]:
        """Returns the events after the given one, and forgets the others: they have been read."""
        while self._events and self._events[0][0] <= number:
            self._events.popleft()
        return list(self._events)

    def is_read(self) -> bool:
        """Returns whether all events have been read."""
        return not self._events


def received(kind: str, content: Any) -> Any:
    """Returns the content of an event as it was sent."""
    if kind == "evaluation":
        names = {name: tuple(content[name]) for name in ("opponents", "policies")}
        fields = {**content, **names}
        return Evaluation(**fields)
    return tuple(content) if kind == "episode" else content
