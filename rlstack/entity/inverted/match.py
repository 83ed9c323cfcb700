"""One run of a game's loop, in a thread, and the seats at which its agents are decided for.

Between game and environment stands, for each agent, a channel of one observation and a channel of
one answer, all under one lock: so it is known exactly who waits for whom.
"""

from __future__ import annotations

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from rlstack.entity.environment import Observation
from rlstack.entity.errors import refuse
from rlstack.entity.inverted.agents import Actions, Game, ScoredObservation, TeamAgent
from rlstack.entity.inverted.errors import GameClosed, GameTimeout
from rlstack.envs.adapters import EnvError

_PLAIN = [field.name for field in dataclasses.fields(Observation)]


class _Seat:
    """Where one agent is decided for."""

    shown: Observation | None = None  # not yet taken by the environment
    answer: Actions | None = None  # not yet taken by the game
    score: float | None = None  # of the latest observation; None between games
    last: Observation | None = None  # taken by the environment, of the game under way


class Watched(NamedTuple):
    """What an agent sees."""

    observation: Observation
    is_asked: bool  # whether the game waits for an answer


class Match:
    """Runs a game's loop until it returns, fails, or is stopped.

    Attributes:
      failure: what the loop raised, None if it has not.
      answers: how many have been given.
      has_asked: whether the game has shown anything.
    """

    def __init__(
        self,
        game: Game,
        num_agents: int,
        check: Callable[[Observation], None],
        name: str,
        patience: float,
    ):
        """Starts the loop.

        Args:
          game: whose.
          num_agents: how many it is given.
          check: raises for a wrong observation; called in the game's thread, so that the error
            shows where the observation was made.
          name: how messages call the game.
          patience: seconds that the game waits for an answer.
        """
        self.failure: BaseException | None = None
        self.answers, self.has_asked = 0, False
        self._game, self._check, self._name, self._patience = game, check, name, patience
        self._seats = [_Seat() for _ in range(num_agents)]
        self._changed = threading.Condition()
        self._stopping = self._over = False
        self._asked: frozenset[int] = frozenset()  # whose answers the game waits for
        self._alone = False
        self._inside: int | None = None  # the thread that talks to agents now
        self._thread = threading.Thread(
            target=self._run, name=f"rlstack-env-game-{name}", daemon=True
        )
        self._thread.start()

    # The game's side.

    def ask(
        self, observations: Mapping[int, ScoredObservation], alone: bool
    ) -> dict[int, Actions] | None:
        """Shows observations and waits for the answers; None when the game is to end.

        Raises:
          EnvError: an observation is wrong.
          GameTimeout: nobody answered.
        """
        shown = {i: self._plain(i, o, over=False) for i, o in observations.items()}
        seats = [self._seats[i] for i in shown]
        with self._talking():
            if not self._wait(lambda: all(s.shown is None for s in seats)):
                return None
            for i, observation in shown.items():
                self._seats[i].shown = observation
            self._asked, self._alone, self.has_asked = frozenset(shown), alone, True
            self._changed.notify_all()
            if not self._wait(lambda: all(s.answer is not None for s in seats)):
                return None
            answers = {}
            for i in shown:
                answers[i], self._seats[i].answer = self._seats[i].answer, None
            return answers  # type: ignore[return-value]  # none is None: see the wait

    def end(self, number: int, observation: ScoredObservation) -> None:
        """Shows an agent's last observation.

        Raises:
          EnvError: the observation is wrong.
          GameTimeout: nobody looked.
        """
        shown = self._plain(number, observation, over=True)
        seat = self._seats[number]
        with self._talking():
            if self._wait(lambda: seat.shown is None):
                seat.shown, self.has_asked = shown, True
                self._changed.notify_all()

    def _plain(self, number: int, observation: Any, over: bool) -> Observation:
        """Returns the observation with its reward, as environments show it."""
        what, seat = f"agent {number}", self._seats[number]
        if not isinstance(observation, ScoredObservation):
            rule, came = "must be shown a ScoredObservation", type(observation).__name__
            refuse(self._name, what, rule, came, "Give the running score; rewards follow.")
        score = observation.score
        if not math.isfinite(score):
            refuse(self._name, what, "its score must be finite", score, "Find where it is kept.")
        if observation.reward or observation.done or (observation.truncated and not over):
            rule = "an observation has a score and no reward, and ends nothing by itself"
            came = f"reward {observation.reward}, done {observation.done}"
            way = "Give the running score; end a game by game_over, perhaps truncated."
            refuse(self._name, what, rule, came, way)
        fields = {name: getattr(observation, name) for name in _PLAIN}
        fields["reward"] = 0.0 if seat.score is None else score - seat.score
        fields["done"] = over
        plain = Observation(**fields)
        self._check(plain)
        seat.score = None if over else score
        return plain

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """Holds the lock, for one thread of the game at a time."""
        with self._changed:
            if self._inside is not None:
                raise EnvError(
                    f"{self._name}: agents must be used by one thread at a time; got a second "
                    "while one waits for an answer. Ask for several agents' actions by act_all."
                )
            self._inside = threading.get_ident()
            try:
                yield
            finally:
                self._inside, self._asked = None, frozenset()

    def _wait(self, until: Callable[[], bool]) -> bool:
        """Waits in the game's thread; False when the game is to end."""
        self._changed.wait_for(lambda: self._stopping or until(), self._patience)
        if self._stopping:
            return False
        if not until():
            raise GameTimeout(
                f"{self._name}: nobody decided for its agents for {self._patience:g} s. Raise "
                "'patience' if learning or evaluation takes that long."
            )
        return True

    def _run(self) -> None:
        try:
            self._game.play([TeamAgent(self, i) for i in range(len(self._seats))])
            under_way = [i for i, seat in enumerate(self._seats) if seat.score is not None]
            if under_way and not self._stopping:
                rule = "must not return in the middle of a game"
                came = f"a return without game_over for agent(s) {under_way}"
                way = "Call game_over first; return at once only when an agent answers None."
                refuse(self._name, "play", rule, came, way)
        except BaseException as error:  # SystemExit from a game must not hang the caller
            self.failure = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    # The environment's side.

    def answer(self, number: int, actions: Actions) -> None:
        """Answers what was taken from `watch`."""
        with self._changed:
            self._seats[number].answer = actions
            self.answers += 1
            self._changed.notify_all()

    def watch(self, number: int, together: bool, timeout: float) -> Watched | None:
        """Waits for an agent's next observation.

        Args:
          number: of the agent.
          together: whether nobody is answered before every agent has observed.
          timeout: in seconds.

        Returns:
          The observation; where ``together``, one without actors if the agent is not asked at this
          tick; None when the loop has ended.

        Raises:
          EnvError: the game asks one agent after the other, but all must observe first.
          GameTimeout: nothing came.
          GameClosed: stopped meanwhile.
        """
        seat, deadline = self._seats[number], time.monotonic() + timeout
        with self._changed:
            while True:
                if self._stopping:
                    raise GameClosed(f"{self._name}: was closed while agent {number} waited.")
                if seat.shown is not None:
                    shown, seat.shown = seat.shown, None
                    seat.last = None if shown.done else shown
                    self._changed.notify_all()
                    return Watched(shown, not shown.done)
                if self._over:
                    return None
                if together and self._is_stuck():
                    return Watched(self._idle(number), False)
                left = deadline - time.monotonic()
                if left <= 0:
                    raise GameTimeout(self._why(number, timeout))
                self._changed.wait(left)

    def _is_stuck(self) -> bool:
        """Whether the game waits for an answer that only the next round of steps will bring.

        All that is known of this round has been answered before its first step, and a game talks
        in one thread at a time.
        """
        return any(self._seats[i].answer is None for i in self._asked)

    def _idle(self, number: int) -> Observation:
        if self._alone:
            asked = sorted(self._asked)
            raise EnvError(
                f"{self._name}: dead-lock: agent {number} has not observed yet, while the game "
                f"waits for the action of agent {asked[0]}, and a synchronous pool answers nobody "
                "before all have observed. Let the game ask for all agents' actions at once "
                "(act_all, None for those that do not act at this tick), or use an asynchronous "
                "pool (AsyncEnv, wait_num below the number of agents that observe at once)."
            )
        last = self._seats[number].last
        if last is None:  # it has not observed since its game began
            blank = [0.0] * len(self._game.obs_space.global_features)
            return Observation(features={}, global_features=blank)
        return dataclasses.replace(last, actions={}, reward=0.0, metrics={})

    def _why(self, number: int, timeout: float) -> str:
        start = f"{self._name}: agent {number} has not observed for {timeout:g} s: "
        if self._asked:
            return (
                f"{start}the game waits for the actions of agent(s) {sorted(self._asked)}. Step "
                "these, in another thread or by a pool (an asynchronous one with a smaller "
                "wait_num, where the game asks one agent after the other)."
            )
        return (
            f"{start}the game is busy, or hangs. Raise 'step_timeout' if a step takes that long; "
            "else see what it does."
        )

    # Both.

    @property
    def interrupted(self) -> bool:
        """Whether the game was told to end."""
        return self._stopping

    def interrupt(self) -> None:
        """Tells the game to end, and wakes whoever waits."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        getattr(self._game, "interrupt", lambda: None)()

    def stop(self, timeout: float) -> bool:
        """Ends the loop; returns whether its thread is gone."""
        self.interrupt()
        self._thread.join(timeout)
        return not self._thread.is_alive()
