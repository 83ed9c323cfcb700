"""A game in another process, behind a socket, as a `rlstack.entity.inverted.Game`.

It runs its loop in a thread like any other game; that thread passes messages between the game and
its agents. docs/game_protocol.md describes the messages.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence

from rlstack.checks import EnvError
from rlstack.entity.environment import Actions
from rlstack.entity.inverted import guard, wire
from rlstack.entity.inverted.game import GameAgent, GameError, GameLost, ScoredObservation, act_all
from rlstack.entity.inverted.listener import Listener, close_listener, open_listener
from rlstack.entity.inverted.messages import Hello, MessageCodec, read_hello
from rlstack.entity.inverted.wire import Kind, Reader, WireError, Writer
from rlstack.entity.padded import action_spec, num_choices
from rlstack.entity.spaces import Slots

SEND_TIMEOUT = 10.0  # seconds
START_TIMEOUT = 30.0  # seconds that a game may take to connect, by default
_EXIT_TIMEOUT = 2.0  # seconds that a game's process may take to exit before it is killed


class RemoteGame:
    """A game behind a socket.

    Attributes:
      obs_space: the space that the game sent at its first connection.
      action_space: the action space that it sent then.
      name: name of the game in errors.
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
        """Starts the game, if there is a command, and waits for its HELLO.

        Raises:
          EnvError: the game has another version of the protocol, or does not follow it, or has
            another number of agents.
          GameError: the game did not start or did not connect.
          ValueError: neither command nor address was given, or listening at the address is not
              possible.
        """
        if not command and not address:
            raise ValueError(
                "SocketGame: needs a command that starts the game, or an address at which the "
                "game connects; got neither."
            )
        self.name = "SocketGame"
        self._command, self._address, self._agents, self._seed = command, address, agents, seed
        self._step_timeout, self._start_timeout = step_timeout, start_timeout
        self._token = secrets.token_hex(16) if command else ""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._listener: Listener | None = open_listener(address, self._token)
        try:
            hello = self._connect(lambda: True)
            self._check(hello)
        except BaseException as error:
            if isinstance(error, WireError):
                self._send_error(str(error))
            self.close()
            if isinstance(error, WireError):
                raise EnvError(f"{self.name}: {error}.") from None
            raise
        self.name = f"SocketGame {wire.shown(hello.name)}"
        self.obs_space, self.action_space = hello.obs_space, hello.action_space
        self._hello = hello
        self._codec = MessageCodec(hello.obs_space, hello.action_space)

    def play(self, agents: Sequence[GameAgent]) -> None:
        """Passes messages between the game and its agents until one of them ends the loop.

        Raises:
          GameError: the game connected again with other spaces.
          GameLost: the connection ended in the middle of a game, the game sent nothing for
              ``step_timeout``, or it sent an invalid message.
        """
        group = getattr(agents[0], "group", None)

        def alive() -> bool:
            return not getattr(group, "interrupted", False)

        try:
            if self._connection is None:
                hello = self._connect(alive)
                if hello._replace(token="") != self._hello._replace(token=""):
                    raise GameError(
                        f"{self.name}: must connect again with the same name, agents and spaces; "
                        f"got {wire.shown(hello.name)}, {hello.num_agents} agents, "
                        f"{wire.printable(f'{hello.obs_space} and {hello.action_space}')}."
                    )
            assert self._connection is not None
            relay(
                self._connection, self._codec, agents, self.name, self._step_timeout,
                alive=alive, why=self._exit_code,
            )  # fmt: skip
        except (WireError, EnvError) as error:
            text = wire.printable(str(error))  # names of the game, of which it may have thousands
            self._send_error(text)
            raise GameLost(f"{self.name}: {text}") from error
        except TimeoutError:
            text = f"{self.name}: was silent for {self._step_timeout:g} s."
            raise GameLost(text) from None
        except OSError as error:
            raise GameLost(f"{self.name}: {error}{self._exit_code()}") from error
        finally:
            self._disconnect()

    def _connect(self, alive: Callable[[], bool]) -> Hello:
        """Starts the game if there is a command, and accepts its connection."""
        assert self._listener is not None
        if self._command:
            try:
                self._process = start_program(
                    shlex.split(self._command), self._listener.address, self._token
                )
            except OSError as error:
                raise GameError(f"{self.name}: {self._command!r}: {error}") from error
        while True:
            caller = self._listener.accept(
                self._token, self._start_timeout, lambda: alive() and self._is_running()
            )
            if caller is None:
                raise GameLost(self._no_connection(self._listener))
            self._connection = caller.connection
            hello = read_hello(Reader(caller.hello))
            try:
                welcome(self._connection, self._seed)
            except OSError:  # it has disconnected since its HELLO
                self._close_connection()
                continue
            return hello

    def _no_connection(self, listener: Listener) -> str:
        """Returns the error message when no game has connected."""
        refused = listener.hellos.refused
        return (
            f"{self.name}: the game did not connect to {listener.address} within "
            f"{self._start_timeout:g} s{self._exit_code()}"
            + (f" The last connection was refused: {refused}." if refused else "")
        )

    def _check(self, hello: Hello) -> None:
        """Checks the game's number of agents, and its spaces."""
        if hello.num_agents != self._agents:
            raise WireError(
                f"the game has {hello.num_agents} agents; set the option 'agents', which is "
                f"{self._agents}, to that number"
            )
        check_size(hello)

    def _is_running(self) -> bool:
        return self._process is None or self._process.poll() is None

    def _exit_code(self) -> str:
        """Returns the last part of an error message: the exit code, if the process has ended."""
        code = None if self._process is None else self._process.poll()
        return "." if code is None else f"; its process ended with code {code}."

    def _send_error(self, text: str) -> None:
        if self._connection is not None:
            refuse(self._connection, text)

    def _close_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _disconnect(self) -> None:
        """Tells the game to end, and makes sure that the process that was started here exits."""
        if self._connection is not None:
            shut_down(self._connection)
        self._close_connection()
        process, self._process = self._process, None
        if process is not None:
            stop_program(process)

    def close(self) -> None:
        """Ends the game and stops listening."""
        self._disconnect()
        listener, self._listener = self._listener, None
        if listener is not None:
            close_listener(self._address, self._token, listener)


def relay(
    connection: socket.socket,
    codec: MessageCodec,
    agents: Sequence[GameAgent],
    name: str,
    step_timeout: float,
    *,
    alive: Callable[[], bool],
    why: Callable[[], str] = lambda: ".",
) -> None:
    """Passes messages between a connected game and its agents until one of them ends the loop.

    Args:
      connection: the connection to the game, after WELCOME.
      codec: the codec for the game's spaces.
      agents: all agents of the game.
      name: the game's name in errors.
      step_timeout: longest time in seconds between two messages of the game.
      alive: called several times a second; False ends the loop.
      why: returns the end of an error message: the reason of the disconnection if it is known.

    Raises:
      GameLost: the connection ended in the middle of a game, or the game reports an error.
      WireError, EnvError: the game sent an invalid message.
      OSError, TimeoutError: the connection failed, or the game was silent.
    """
    playing: set[int] = set()  # agents that are in a game
    while True:
        data = wire.receive(connection, step_timeout, alive=alive)
        if data is None:
            if playing and alive():
                raise GameLost(f"{name}: disconnected in the middle of a game{why()}")
            return
        if data.kind is Kind.OBSERVE:
            sequential, asked = data.flag(), _read_observations(data, codec, len(agents))
            playing |= set(asked)
            answers = _ask(agents, asked, sequential)
            if answers is None:
                return
            out = Writer(Kind.ACT)
            out.u32(len(asked))
            for number in asked:
                out.u32(number)
                codec.write_actions(out, answers[number])
            wire.send(connection, out, SEND_TIMEOUT)
        elif data.kind is Kind.GAME_OVER:
            number = data.count("the agent's number", len(agents) - 1)
            truncated = data.flag()
            observation = codec.read_observation(data, truncated)
            data.end()
            agents[number].game_over(observation)
            playing.discard(number)
        elif data.kind is Kind.ERROR:
            raise GameLost(f"{name}: reports: {wire.shown(data.text())}")
        else:
            raise WireError(f"a game must not send {data.kind.name}")


def _read_observations(
    data: Reader, codec: MessageCodec, num_agents: int
) -> dict[int, ScoredObservation]:
    asked = {}
    number = data.count("the number of agents", num_agents)
    for _ in range(number):
        agent = data.count("an agent's number", num_agents - 1)
        asked[agent] = codec.read_observation(data)
    data.end()
    if len(asked) < number or not asked:
        raise WireError("OBSERVE: must have at least one observation, and one for each agent")
    return asked


def check_size(hello: Hello) -> None:
    """Checks the spaces of a game, and the size of a padded observation.

    Raises:
      WireError: an observation has too many bytes.
      EnvError: the spaces break their rules.
    """
    slots = Slots(hello.obs_space, hello.action_space)
    kinds = hello.obs_space.entities.values()
    size = sum(kind.capacity * (4 * len(kind.features) + 1) for kind in kinds)
    for action in hello.action_space.values():
        size += action.capacity * (num_choices(action, slots) + 4)
    if size > wire.MAX_FRAME:
        raise WireError(
            f"HELLO: a padded observation must fit {wire.MAX_FRAME} bytes; got {size}. "
            "Lower the capacities"
        )
    action_spec(hello.action_space, slots)


def welcome(connection: socket.socket, seed: int) -> None:
    """Sends WELCOME.

    Raises:
      OSError: the game has disconnected.
    """
    out = Writer(Kind.WELCOME)
    out.u32(wire.VERSION)
    out.u64(seed)
    wire.send(connection, out, SEND_TIMEOUT)


def refuse(connection: socket.socket, reason: str) -> None:
    """Sends a game the reason why the connection ends, if it is still connected."""
    out = Writer(Kind.ERROR)
    out.text(reason)
    with contextlib.suppress(OSError):
        wire.send(connection, out, SEND_TIMEOUT)


def shut_down(connection: socket.socket) -> None:
    """Tells a game to end its loop, if it is still connected."""
    with contextlib.suppress(OSError):
        wire.send(connection, Writer(Kind.SHUTDOWN), SEND_TIMEOUT)


def _ask(
    agents: Sequence[GameAgent], asked: dict[int, ScoredObservation], sequential: bool
) -> dict[int, Actions] | None:
    if sequential and len(asked) == 1:
        ((number, observation),) = asked.items()
        actions = agents[number].act(observation)
        return None if actions is None else {number: actions}
    answers = act_all(agents, [asked.get(number) for number in range(len(agents))])
    if answers is None:
        return None
    return {number: actions for number, actions in enumerate(answers) if actions is not None}


def start_program(
    command: Sequence[str], address: str, token: str, **variables: str
) -> subprocess.Popen[bytes]:
    """Starts the program of a game in its own session, so that Ctrl-C reaches only the trainer.

    The program is a child of `guard`, which ends it when this process is killed.

    Args:
      command: the program and its arguments.
      address: the address to which the program must connect.
      token: the token that the program's HELLO must contain.
      **variables: more environment variables.

    Raises:
      OSError: there is no such program.
      ValueError: the command is empty.
    """
    if not command:
        raise ValueError("SocketGame: command must name a program; got an empty one.")
    if shutil.which(command[0]) is None:  # the guard could only print this
        raise FileNotFoundError(errno.ENOENT, "no such program", command[0])
    greeting = {wire.ADDRESS_VARIABLE: address, wire.TOKEN_VARIABLE: token}
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, *command],
        env={**os.environ, **greeting, **variables},
        stdin=subprocess.PIPE,  # without input; its end tells the guard that this process ended
        start_new_session=True,
    )


def stop_program(process: subprocess.Popen[bytes]) -> None:
    """Gives a process time to exit, then kills it and all processes that it started."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_EXIT_TIMEOUT)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
