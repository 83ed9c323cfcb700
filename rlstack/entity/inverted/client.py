"""The game's side of the connection, for games in another Python process.

The program of a game is::

    from rlstack.entity.inverted.client import run

    run(MyGame)  # started by SocketGame(command="python my_game.py")
"""

from __future__ import annotations

import contextlib
import os
import socket
import traceback
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rlstack.entity.environment import Actions
from rlstack.entity.inverted import wire
from rlstack.entity.inverted.game import Game, GameError, GroupAgent, ScoredObservation
from rlstack.entity.inverted.listener import connect
from rlstack.entity.inverted.messages import Hello, MessageCodec, write_hello
from rlstack.entity.inverted.wire import Kind, Writer
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.validator import Validator
from rlstack.envs.adapters import takes_seed

_SEND_TIMEOUT = 60.0  # seconds; the trainer may be busy
_CONNECT_TIMEOUT = 30.0


class Connection:
    """A game's connection to the trainer, which chooses the actions of its agents; an `AgentGroup`.

    Attributes:
      agents: the agents to ask for actions.
      seed: the seed that the game should use.
    """

    def __init__(
        self,
        obs_space: ObsSpace,
        action_space: ActionSpace,
        num_agents: int = 1,
        name: str = "game",
        address: str | None = None,
        token: str | None = None,
        patience: float = 3600.0,
    ):
        """Connects to the trainer, and sends the game's spaces.

        Args:
          obs_space: the observation space of every agent.
          action_space: the action space of every agent.
          num_agents: number of agents.
          name: name of the game in errors.
          address: the trainer's address; by default ``$RLSTACK_GAME_ADDRESS``.
          token: identifies the game; by default ``$RLSTACK_GAME_TOKEN``.
          patience: seconds to wait for actions.

        Raises:
          GameError: the trainer refuses the game; the message contains the reason.
          OSError: no program listens at the address.
          ValueError: there is no address.
        """
        address = address or os.environ.get(wire.ADDRESS_VARIABLE, "")
        if not address:
            raise ValueError(
                f"Connection: needs an address; got none, and ${wire.ADDRESS_VARIABLE} is not set. "
                "Let SocketGame start this program, or give the address at which it listens."
            )
        token = os.environ.get(wire.TOKEN_VARIABLE, "") if token is None else token
        self.agents = [GroupAgent(self, i) for i in range(num_agents)]
        self._patience = patience
        self._check = Validator(obs_space, action_space, name).check
        self._codec = MessageCodec(obs_space, action_space)
        self._socket: socket.socket | None = connect(address, _CONNECT_TIMEOUT)
        self._send(write_hello(Hello(token, name, num_agents, obs_space, action_space)))
        welcome = self._receive(_CONNECT_TIMEOUT)
        if welcome is None or welcome.kind is not Kind.WELCOME:
            self.close()
            raise GameError("Connection: HELLO must be answered by WELCOME; the trainer closed it.")
        version = welcome.u32()
        if version != wire.VERSION:
            self.close()
            raise GameError(
                f"Connection: the protocol's version must be {wire.VERSION}; got {version}."
            )
        self.seed = welcome.u64()

    def ask(
        self, observations: Mapping[int, ScoredObservation], sequential: bool
    ) -> dict[int, Actions] | None:
        """Requests actions by agent number; returns None when the game has to end its loop.

        Raises:
          EnvError: an observation is invalid.
          GameError: the trainer reports an error.
          TimeoutError: no answer came within ``patience``.
        """
        out, ids = Writer(Kind.OBSERVE), {}
        out.u8(sequential)
        out.u32(len(observations))
        for number, observation in observations.items():
            self._check(observation)
            out.u32(number)
            ids[number] = self._codec.write_observation(out, observation)
        self._send(out)
        data = self._receive(self._patience)
        if data is None or data.kind is Kind.SHUTDOWN:
            self.close()
            return None
        answers = {}
        for _ in range(data.count("the number of agents", len(ids))):
            number = data.u32()
            if number not in ids:
                raise wire.WireError(f"ACT: must answer agents {list(ids)}; got {number}")
            answers[number] = self._codec.read_actions(data, ids[number])
        data.end()
        return answers

    def game_over(self, number: int, observation: ScoredObservation) -> None:
        """Shows an agent the last observation of its game.

        Raises:
          EnvError: the observation is invalid.
        """
        self._check(observation)
        out = Writer(Kind.GAME_OVER)
        out.u32(number)
        out.u8(observation.truncated)
        self._codec.write_observation(out, observation)
        self._send(out)

    def _send(self, out: Writer) -> None:
        if self._socket is not None:
            # A trainer that has disconnected may have sent its reason before; _receive then raises
            # it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.send(self._socket, out, _SEND_TIMEOUT)

    def _receive(self, timeout: float) -> wire.Reader | None:
        data = None if self._socket is None else wire.receive(self._socket, timeout)
        if data is not None and data.kind is Kind.ERROR:
            self.close()
            raise GameError(f"Connection: the trainer reports: {wire.printable(data.text())}")
        return data

    def close(self) -> None:
        """Disconnects. From now on the agents return None."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            out = Writer(Kind.ERROR)
            # What the trainer shows; this process has the whole traceback.
            out.text("".join(traceback.format_exception_only(error)).strip())
            with contextlib.suppress(OSError):
                self._send(out)
        self.close()


def run(make: Callable[..., Game], num_agents: int = 1, **options: Any) -> None:
    """Plays a game in a process that was started as the command of a `SocketGame`.

    Args:
      make: builds the game, from ``options`` and, if it has such a parameter, ``seed``. It is
          called twice: first for the spaces, then again when the seed is known.
      num_agents: number of agents of the game.
      **options: options of the game.
    """
    game, name = make(**options), getattr(make, "__name__", type(make).__name__)
    with Connection(game.obs_space, game.action_space, num_agents, name) as connection:
        if takes_seed(make):
            game = make(**{"seed": connection.seed, **options})
        game.play(connection.agents)
