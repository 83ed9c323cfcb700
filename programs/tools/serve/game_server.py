"""The policy of a run for games that connect by the game protocol; see docs/game_protocol.md."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from rlstack.checks import EnvError
from rlstack.entity.environment import Actions
from rlstack.entity.inverted.game import GameLost, ScoredObservation
from rlstack.entity.inverted.hellos import Caller
from rlstack.entity.inverted.listener import Listener
from rlstack.entity.inverted.messages import Hello, MessageCodec, read_hello
from rlstack.entity.inverted.remote_game import check_size, refuse, relay, shut_down, welcome
from rlstack.entity.inverted.wire import Reader, WireError, printable, shown
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.programs.build.restored import Which, chosen_checkpoint
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.game_agent import RunAgent, team_from_run

_POLL = 0.5  # seconds between checks of whether to go on accepting games
_END = 5.0  # seconds for all games together to be told that the server ends
_SILENCE = 3600.0  # seconds between two messages of a game, which a person may play too


class GameServer:
    """Lets any number of games that connect be played by the policy of a run.

    Attributes:
      address: ``host:port`` or ``unix:path``, for games to connect to.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        address: str,
        *,
        params: Which = "last",
        greedy: bool = True,
        most: int = 64,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Starts to listen at the address.

        Args:
          run_dir: the directory of a run with a checkpoint.
          address: ``host:port`` or ``unix:path``; port 0 takes a free one.
          params: "last" for the newest params, "best" for those with the best return in an
            evaluation.
          greedy: True if players take the best action; False to explore.
          most: maximum number of players at the same time, over all games with the same spaces.
          tell: called with a line when a game connects or disconnects.

        Raises:
          ValueError: there is no run or no checkpoint, or listening is not possible.
        """
        directory = RunDir.open(run_dir)
        chosen_checkpoint(directory, read_config(directory), params)  # before a game connects
        self._make: Callable[[ObsSpace, ActionSpace], list[RunAgent]] = lambda seen, actions: (
            team_from_run(run_dir, seen, actions, most, params=params, greedy=greedy)
        )
        self._tell = tell
        self._lock = threading.Lock()  # guards the fields below and the players' computations
        self._idle: list[tuple[ObsSpace, ActionSpace, list[RunAgent]]] = []
        self._games = 0
        self._threads: set[threading.Thread] = set()
        self._over = threading.Event()
        self._listener = Listener(address)
        self._listener.hellos.expect("")
        self.address = self._listener.address

    def serve_forever(self) -> None:
        """Accepts games until `shutdown`."""
        while not self._over.is_set():
            caller = self._listener.accept("", _POLL, lambda: not self._over.is_set())
            if caller is not None:
                self._games += 1
                thread = threading.Thread(
                    target=self._serve, args=(caller, self._games), daemon=True
                )
                self._threads.add(thread)
                thread.start()

    def shutdown(self) -> None:
        """Makes `serve_forever` return, and tells all games to end."""
        self._over.set()
        until = time.monotonic() + _END
        for thread in list(self._threads):
            thread.join(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def _serve(self, caller: Caller, number: int) -> None:
        """Plays a game until it ends; runs in a thread of its own."""
        try:
            with caller.connection:
                self._play(caller, number)
        finally:
            self._threads.discard(threading.current_thread())

    def _play(self, caller: Caller, number: int) -> None:
        connection, name = caller.connection, f"game {number}"
        try:
            hello = read_hello(Reader(caller.hello))
            name = f"{name} ({shown(hello.name)})"
            check_size(hello)
            with self._players(hello) as players:
                welcome(connection, number)
                self._tell(f"{name}: connected, {hello.num_agents} agents")
                codec = MessageCodec(hello.obs_space, hello.action_space)
                relay(
                    connection, codec, players, name, _SILENCE,
                    alive=lambda: not self._over.is_set(),
                )  # fmt: skip
        except (WireError, EnvError, ValueError) as error:
            reason = printable(str(error))  # names of the game, of which it may have thousands
            refuse(connection, reason)
            self._tell(f"{name}: refused: {reason}")
        except GameLost as error:
            self._tell(str(error))
        except OSError as error:
            self._tell(f"{name}: lost: {error}")
        else:
            shut_down(connection)
            self._tell(f"{name}: over")

    @contextlib.contextmanager
    def _players(self, hello: Hello) -> Iterator[list[_Shared]]:
        """Lends players to a game.

        Raises:
          ValueError: the run was trained on other spaces, or too many players play.
        """
        with self._lock:
            if self._over.is_set():
                raise ValueError("the server ends")
            idle = self._idle_for(hello)
            if hello.num_agents > len(idle):
                raise ValueError(
                    f"there must be a player for each agent; got {hello.num_agents} agents, and "
                    f"{len(idle)} players are free"
                )
            lent = [idle.pop() for _ in range(hello.num_agents)]
        try:
            yield [_Shared(player, self._lock) for player in lent]
        finally:
            with self._lock:
                for player in lent:
                    player.forget()
                idle.extend(lent)

    def _idle_for(self, hello: Hello) -> list[RunAgent]:
        """Returns the idle players of games with these spaces; loads them for the first game."""
        for seen, actions, idle in self._idle:
            if (seen, actions) == (hello.obs_space, hello.action_space):
                return idle
        try:
            idle = self._make(hello.obs_space, hello.action_space)
        except ValueError as error:
            raise ValueError(
                f"a game must have the spaces of the game that the run was trained on; {error}"
            ) from error
        self._idle.append((hello.obs_space, hello.action_space, idle))
        return idle


class _Shared:
    """A player whose computations are those of no other thread at the same time."""

    def __init__(self, player: RunAgent, lock: threading.Lock) -> None:
        self._player, self._lock = player, lock

    def act(self, observation: ScoredObservation) -> Actions:
        with self._lock:
            return self._player.act(observation)

    def idle(self) -> None:
        with self._lock:
            self._player.idle()

    def game_over(self, observation: ScoredObservation) -> None:
        self._player.game_over(observation)
