"""Games that run elsewhere, in any language, as environments of a pool.

To the rest a game behind a socket is a game in a thread: the thread reads the game's frames and
asks the agents. docs/game_protocol.md says what travels.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
from collections.abc import Callable, Sequence

from rlstack.entity.inverted import wire
from rlstack.entity.inverted.agents import GameAgent, ScoredObservation, act_all
from rlstack.entity.inverted.door import close_door, end_process, launch, open_door
from rlstack.entity.inverted.environment import AgentEnv, seat
from rlstack.entity.inverted.errors import GameError, GameLost
from rlstack.entity.inverted.messages import Hello, Messages, read_hello
from rlstack.entity.inverted.session import Limits, Session
from rlstack.entity.inverted.wire import Kind, Reader, WireError, Writer
from rlstack.entity.spaces import Slots
from rlstack.entity.table_specs import action_spec, num_choices
from rlstack.envs.adapters import EnvError

_SEND_TIMEOUT = 10.0  # seconds
_START_TIMEOUT = 30.0


class RemoteGame:
    """A game behind a socket; a `rlstack.entity.inverted.Game`.

    Attributes:
      obs_space: what the game said when it connected first.
      action_space: the same.
      name: how messages call it.
    """

    def __init__(
        self,
        command: str,
        address: str,
        agents: int,
        seed: int,
        step_timeout: float,
        start_timeout: float,
    ):
        """Starts the game, if there is a command, and waits until it has introduced itself.

        Raises:
          EnvError: it speaks another version, or no game protocol at all, or has other agents.
          GameError: it did not come.
          ValueError: neither command nor address, or nobody can listen there.
        """
        if not command and not address:
            raise ValueError(
                "SocketGame: needs a command that starts the game, or an address where it will "
                "knock; got neither."
            )
        self.name = "SocketGame"
        self._command, self._address, self._agents, self._seed = command, address, agents, seed
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._token = secrets.token_hex(16) if command else ""
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._door = open_door(address)
        try:
            hello = self._open(lambda: True)
            self._check(hello)
        except BaseException as error:
            self.close()
            if isinstance(error, WireError):
                raise EnvError(f"{self.name}: {error}.") from None
            raise
        self.name = f"SocketGame {hello.name!r}"
        self.obs_space, self.action_space = hello.obs_space, hello.action_space
        self._hello = hello
        self._messages = Messages(hello.obs_space, hello.action_space)

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Relays between the game and its agents until either ends it.

        Raises:
          GameError: the game came back as another one.
          GameLost: it hung up in the middle of a game, was silent, or talked nonsense.
        """
        team = getattr(agents[0], "team", None)

        def alive() -> bool:
            return not getattr(team, "interrupted", False)

        try:
            if self._connection is None:
                hello = self._open(alive)
                if hello._replace(token="") != self._hello._replace(token=""):
                    raise GameError(
                        f"{self.name}: must come back as it was, with the same spaces; got "
                        f"{hello.obs_space} and {hello.action_space}."
                    )
            self._relay(agents, alive)
        except (WireError, EnvError) as error:
            self._complain(str(error))
            raise GameLost(f"{self.name}: {error}") from error
        except TimeoutError:
            text = f"{self.name}: was silent for {self._step_timeout:g} s."
            raise GameLost(text) from None
        except OSError as error:
            raise GameLost(f"{self.name}: {error}{self._fate()}") from error
        finally:
            self._hang_up()

    def _relay(self, agents: Sequence[GameAgent], alive: Callable[[], bool]) -> None:
        connection = self._connection
        under_way: set[int] = set()
        assert connection is not None
        while True:
            data = wire.receive(connection, self._step_timeout, alive=alive)
            if data is None:
                if under_way and alive():
                    text = f"{self.name}: hung up in the middle of a game{self._fate()}"
                    raise GameLost(text)
                return
            if data.kind is Kind.OBSERVE:
                alone, asked = data.flag(), self._read_asked(data)
                under_way |= set(asked)
                answers = _ask(agents, asked, alone)
                if answers is None:
                    return
                out = Writer(Kind.ACT)
                out.u32(len(asked))
                for number in asked:
                    out.u32(number)
                    self._messages.write_actions(out, answers[number])
                wire.send(connection, out, _SEND_TIMEOUT)
            elif data.kind is Kind.GAME_OVER:
                number = data.count("the agent's number", self._agents - 1)
                truncated = data.flag()
                observation = self._messages.read_observation(data, truncated)
                data.end()
                agents[number].game_over(observation)
                under_way.discard(number)
            elif data.kind is Kind.ERROR:
                raise GameLost(f"{self.name}: reports: {data.text()}")
            else:
                raise WireError(f"a game must not send {data.kind.name}")

    def _read_asked(self, data: Reader) -> dict[int, ScoredObservation]:
        asked = {}
        number = data.count("the number of agents", self._agents)
        for _ in range(number):
            agent = data.count("an agent's number", self._agents - 1)
            asked[agent] = self._messages.read_observation(data)
        data.end()
        if len(asked) < number or not asked:
            raise WireError("OBSERVE: must show one observation or more, each agent's once")
        return asked

    def _open(self, alive: Callable[[], bool]) -> Hello:
        """Waits for the game, having started it if it is to be started."""
        if self._command:
            try:
                self._process = launch(self._command, self._door.address, self._token)
            except OSError as error:
                raise GameError(f"{self.name}: {self._command!r}: {error}") from error
        while True:
            connection = self._door.admit(self._start_timeout, lambda: alive() and self._runs())
            if connection is None:
                raise GameLost(
                    f"{self.name}: the game did not connect to {self._door.address} within "
                    f"{self._start_timeout:g} s{self._fate()}"
                )
            self._connection = connection
            try:
                data = wire.receive(connection, self._start_timeout, alive=alive)
            except TimeoutError:
                data = None
            if data is None:
                raise WireError("a game must begin with HELLO; got nothing")
            hello = read_hello(data)
            if not secrets.compare_digest(hello.token.encode(), self._token.encode()):
                self._complain("the token must be that of RLSTACK_GAME_TOKEN")
                self._drop()
                continue
            out = Writer(Kind.WELCOME)
            out.u32(wire.VERSION)
            out.u64(self._seed)
            wire.send(connection, out, _SEND_TIMEOUT)
            return hello

    def _check(self, hello: Hello) -> None:
        """Refuses what cannot be an environment here."""
        if hello.num_agents != self._agents:
            raise WireError(
                f"the game has {hello.num_agents} agents; set the option 'agents' to it, which is "
                f"{self._agents}"
            )
        slots = Slots(hello.obs_space, hello.action_space)
        kinds = hello.obs_space.entities.values()
        size = sum(kind.capacity * (4 * len(kind.features) + 1) for kind in kinds)
        for action in hello.action_space.values():
            size += action.capacity * (num_choices(action, slots) + 4)
        if size > wire.MAX_FRAME:
            raise WireError(
                f"HELLO: an observation must fit {wire.MAX_FRAME} bytes when padded; got {size}. "
                "Lower the capacities"
            )
        action_spec(hello.action_space, slots)

    def _runs(self) -> bool:
        return self._process is None or self._process.poll() is None

    def _fate(self) -> str:
        code = None if self._process is None else self._process.poll()
        return "." if code is None else f"; its process ended with code {code}."

    def _complain(self, text: str) -> None:
        """Tells the game why it is hung up on, if it still listens."""
        if self._connection is not None:
            out = Writer(Kind.ERROR)
            out.text(text)
            with contextlib.suppress(OSError):
                wire.send(self._connection, out, _SEND_TIMEOUT)

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _hang_up(self) -> None:
        """Tells the game to end, and sees to it where it was started here."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                wire.send(self._connection, Writer(Kind.SHUTDOWN), _SEND_TIMEOUT)
        self._drop()
        process, self._process = self._process, None
        if process is not None:
            end_process(process)

    def close(self) -> None:
        """Ends the game and stops listening."""
        self._hang_up()
        door, self._door = self._door, None  # type: ignore[assignment]
        if door is not None:
            close_door(self._address, door)


def _ask(
    agents: Sequence[GameAgent], asked: dict[int, ScoredObservation], alone: bool
) -> dict | None:
    if alone and len(asked) == 1:
        ((number, observation),) = asked.items()
        actions = agents[number].act(observation)
        return None if actions is None else {number: actions}
    answers = act_all(agents, [asked.get(number) for number in range(len(agents))])
    return None if answers is None else dict(enumerate(answers))


def SocketGame(  # noqa: N802 (a builder, named as what it builds)
    command: str = "",
    address: str = "",
    agents: int = 1,
    seed: int = 0,
    step_timeout: float = Limits.step_timeout,
    start_timeout: float = _START_TIMEOUT,
    patience: float = Limits.patience,
    max_restarts: int = Limits.max_restarts,
) -> AgentEnv:
    """Builds the environment of one agent of a game behind a socket.

    ``EnvConfig("rlstack.entity.inverted:SocketGame", options={"command": "./my_game --hard"})``.
    With k agents every k consecutive environments of a pool are one game; rows are the agents'.
    A game that is lost ends its episodes as truncated, and is started, or waited for, again.

    Args:
      command: starts one game; it is told where to connect by the environment variables
        RLSTACK_GAME_ADDRESS and RLSTACK_GAME_TOKEN. Without, games come by themselves.
      address: where to listen, ``host:port`` or ``unix:path``; by default at a free port that
        only this machine reaches. There is no encryption: leave it there, or in a network that
        you trust.
      agents: how many agents the game has.
      seed: of this environment; the game is told its first agent's.
      step_timeout: seconds that the game may take from actions to the next observation.
      start_timeout: seconds that it may take to connect.
      patience: see `Limits`.
      max_restarts: see `Limits`.

    Raises:
      EnvError, GameError, ValueError: see `RemoteGame`.
    """
    limits = Limits(step_timeout, patience, max_restarts=max_restarts)

    def make() -> Session:
        game = RemoteGame(command, address, agents, seed, step_timeout, start_timeout)
        # A reset may start the game again more than once before an observation comes.
        longest = (max_restarts + 1) * (step_timeout + start_timeout + 2 * _SEND_TIMEOUT)
        return Session(game, agents, game.name, limits, longest)

    return seat((command, address, agents), seed, make)
