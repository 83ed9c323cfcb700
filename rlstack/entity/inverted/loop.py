"""Runs a game's loop once in a thread, and exchanges observations and actions with it.

Each agent has a channel that holds at most one observation and one answer. One lock guards all
channels, so it is always clear which agents the game waits for.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from rlstack.checks import EnvError
from rlstack.entity.environment import Actions, Observation
from rlstack.entity.errors import refuse
from rlstack.entity.inverted.game import (
    Game,
    GameClosed,
    GameTimeout,
    GroupAgent,
    ScoredObservation,
)

_FIELDS = [field.name for field in dataclasses.fields(Observation)]


class _Channel:
    """The observation and the answer of one agent."""

    shown: Observation | None = None  # from the game; the environment has not taken it yet
    answer: Actions | None = None  # from the environment; the game has not taken it yet
    score: float | None = None  # score in the newest observation; None between games
    last: Observation | None = None  # the last one that the environment took in this game


class Shown(NamedTuple):
    """An observation for an agent's environment."""

    observation: Observation
    needs_answer: bool  # whether the game waits for the agent's actions


class GameLoop:
    """Runs a game's loop until it returns, fails, or is stopped; an `AgentGroup`.

    Attributes:
      failure: the exception that the loop raised, or None.
      num_answers: number of answers given to the game.
      has_shown: True once the game has shown an observation.
      worked: seconds from the start of the loop to the newest observation.
    """

    def __init__(
        self,
        game: Game,
        num_agents: int,
        check: Callable[[Observation], None],
        name: str,
        patience: float,
    ):
        """Starts the loop in a new thread.

        Args:
          game: the game to play.
          num_agents: number of its agents.
          check: a function that raises for an invalid observation. It is called in the game's
              thread, so that the traceback shows where the observation was made.
          name: name of the game in errors.
          patience: seconds that the game waits for an answer.
        """
        self.failure: BaseException | None = None
        self.num_answers, self.has_shown = 0, False
        self.worked, self._started = 0.0, time.monotonic()
        self._game, self._check, self._name, self._patience = game, check, name, patience
        self._channels = [_Channel() for _ in range(num_agents)]
        self._changed = threading.Condition()
        self._stopping = self._over = False
        self._asked: frozenset[int] = frozenset()  # agents that the game waits for
        self._sequential = False
        self._in_use = False  # whether a thread of the game is exchanging with agents now
        self._thread = threading.Thread(
            target=self._run, name=f"rlstack-env-game-{name}", daemon=True
        )
        self._thread.start()

    # Called in the game's thread.

    def ask(
        self, observations: Mapping[int, ScoredObservation], sequential: bool
    ) -> dict[int, Actions] | None:
        """Shows observations and waits for the answers; returns None when the loop has to end.

        Raises:
          EnvError: an observation is invalid, or a second thread uses the agents.
          GameTimeout: no answer came within ``patience``.
        """
        shown = {i: self._observation(i, o, over=False) for i, o in observations.items()}
        channels = {i: self._channels[i] for i in shown}
        with self._exclusive():
            if not self._wait(lambda: all(c.shown is None for c in channels.values())):
                return None
            for i, observation in shown.items():
                channels[i].shown = observation
            self._asked, self._sequential = frozenset(shown), sequential
            self.has_shown, self.worked = True, time.monotonic() - self._started
            self._changed.notify_all()
            if not self._wait(lambda: all(c.answer is not None for c in channels.values())):
                return None
            answers = {i: c.answer for i, c in channels.items() if c.answer is not None}
            for channel in channels.values():
                channel.answer = None
            return answers

    def game_over(self, number: int, observation: ScoredObservation) -> None:
        """Shows an agent the last observation of its game.

        Raises:
          EnvError: the observation is invalid, or a second thread uses the agents.
          GameTimeout: the environment did not take the previous observation within ``patience``.
        """
        shown = self._observation(number, observation, over=True)
        channel = self._channels[number]
        with self._exclusive():
            if self._wait(lambda: channel.shown is None):
                channel.shown, self.has_shown = shown, True
                self._changed.notify_all()

    def _observation(self, number: int, scored: ScoredObservation, over: bool) -> Observation:
        """Returns the observation with its reward, checked."""
        what, channel = f"agent {number}", self._channels[number]
        if not isinstance(scored, ScoredObservation):
            rule, got = "must be shown a ScoredObservation", type(scored).__name__
            refuse(self._name, what, rule, got, "Give the score; rewards are its differences.")
        score = scored.score
        if not math.isfinite(score):
            fix = "Find where it is computed."
            refuse(self._name, what, "its score must be finite", score, fix)
        if scored.reward or scored.done or (scored.truncated and not over):
            rule = "reward, done and (except in game_over) truncated must not be set"
            got = f"reward {scored.reward}, done {scored.done}, truncated {scored.truncated}"
            fix = "Give the score instead of rewards, and end a game by game_over."
            refuse(self._name, what, rule, got, fix)
        fields = {name: getattr(scored, name) for name in _FIELDS}
        fields["reward"] = 0.0 if channel.score is None else score - channel.score
        fields["done"] = over and not scored.truncated
        observation = Observation(**fields)
        self._check(observation)
        channel.score = None if over else score
        return observation

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Holds the lock; raises if another thread of the game is waiting for an answer."""
        with self._changed:
            if self._in_use:
                raise EnvError(
                    f"{self._name}: agents must be used by one thread at a time; got a second "
                    "while one waits for an answer. Ask for several agents' actions by act_all."
                )
            self._in_use = True
            try:
                yield
            finally:
                self._in_use, self._asked = False, frozenset()

    def _wait(self, until: Callable[[], bool]) -> bool:
        """Waits in the game's thread; returns False when the loop has to end."""
        self._changed.wait_for(lambda: self._stopping or until(), self._patience)
        if self._stopping:
            return False
        if not until():
            raise GameTimeout(
                f"{self._name}: its environments were not stepped for {self._patience:g} s. Raise "
                "'patience' if learning or evaluation takes that long."
            )
        return True

    def _run(self) -> None:
        try:
            self._game.play([GroupAgent(self, i) for i in range(len(self._channels))])
            playing = [i for i, c in enumerate(self._channels) if c.score is not None]
            if playing and not self._stopping:
                rule = "must not return in the middle of a game"
                got = f"a return without game_over for agent(s) {playing}"
                fix = "Call game_over first; return at once only when an agent answers None."
                refuse(self._name, "play", rule, got, fix)
        except BaseException as error:  # a SystemExit of the game must not hang the caller
            self.failure = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # Called by the environments.

    def answer(self, number: int, actions: Actions) -> None:
        """Gives the game an agent's actions."""
        with self._changed:
            self._channels[number].answer = actions
            self.num_answers += 1
            self._changed.notify_all()

    def next_observation(self, number: int, together: bool, timeout: float) -> Shown | None:
        """Waits for an agent's next observation.

        Args:
          number: the agent's number.
          together: True if every agent must observe before any agent is answered.
          timeout: maximum time to wait, in seconds.

        Returns:
          The observation. With ``together``, if the game does not ask the agent at this tick, its
          last observation without actors. None when the loop has ended.

        Raises:
          EnvError: the game asks one agent after the other, but all must observe first.
          GameTimeout: no observation came in time.
          GameClosed: the loop was interrupted during the wait.
        """
        channel, deadline = self._channels[number], time.monotonic() + timeout
        with self._changed:
            while True:
                if self._stopping:
                    raise GameClosed(f"{self._name}: was closed while agent {number} waited.")
                if channel.shown is not None:
                    shown, channel.shown = channel.shown, None
                    channel.last = None if shown.over else shown
                    self._changed.notify_all()
                    return Shown(shown, not shown.over)
                if self._over:
                    return None
                if together and self._waits_for_next_round():
                    return Shown(self._idle(number), False)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise GameTimeout(self._timeout_message(number, timeout))
                self._changed.wait(left)

    def _waits_for_next_round(self) -> bool:
        """Whether the game waits for an answer that only the pool's next round of steps can give.

        The pool gives all actions of a round before the first step of this round, and a game asks
        in one thread at a time.
        """
        return any(self._channels[i].answer is None for i in self._asked)

    def _idle(self, number: int) -> Observation:
        if self._sequential:
            asked = sorted(self._asked)
            raise EnvError(
                f"{self._name}: dead-lock: agent {number} has not observed yet, while the game "
                f"waits for the action of agent {asked[0]}. A synchronous pool gives no action "
                "before all agents have observed. Ask for all agents' actions at once (act_all, "
                "None for those that do not act at this tick), or use an asynchronous pool "
                "(AsyncEnv, wait_num below the number of agents that observe at once)."
            )
        last = self._channels[number].last
        if last is None:  # it has not observed since its game began
            blank = [0.0] * len(self._game.obs_space.global_features)
            return Observation(features={}, global_features=blank)
        return dataclasses.replace(last, actions={}, reward=0.0, metrics={})

    def _timeout_message(self, number: int, timeout: float) -> str:
        start = f"{self._name}: agent {number} has not observed for {timeout:g} s: "
        if self._asked:
            return (
                f"{start}the game waits for the actions of agent(s) {sorted(self._asked)}. Step "
                "their environments in another thread or by a pool (an asynchronous one with a "
                "smaller wait_num if the game asks one agent after the other)."
            )
        return (
            f"{start}the game is busy or hangs. Raise 'step_timeout' if a step takes that long; "
            "otherwise find out what the game is doing."
        )

    # Called by both.

    @property
    def interrupted(self) -> bool:
        """Whether the loop has to end."""
        return self._stopping

    def interrupt(self) -> None:
        """Tells the loop to end and wakes all waiting threads."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        getattr(self._game, "interrupt", lambda: None)()

    def stop(self, timeout: float) -> bool:
        """Ends the loop; returns whether its thread has ended within ``timeout`` seconds."""
        self.interrupt()
        self._thread.join(timeout)
        return not self._thread.is_alive()
