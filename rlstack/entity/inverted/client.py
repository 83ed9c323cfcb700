"""The game's end of the socket, for games in another Python process.

A game's program is::

    from rlstack.entity.inverted.client import run

    run(MyGame)  # started by SocketGame(command="python my_game.py")
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from rlstack.entity.inverted import wire
from rlstack.entity.inverted.agents import Actions, Game, ScoredObservation, TeamAgent
from rlstack.entity.inverted.door import ADDRESS, TOKEN, connect
from rlstack.entity.inverted.errors import GameError
from rlstack.entity.inverted.messages import Hello, Messages, write_hello
from rlstack.entity.inverted.wire import Kind, Writer
from rlstack.entity.spaces import ActionSpace, ObsSpace
from rlstack.entity.validator import Validator
from rlstack.envs.adapters import takes_seed

_SEND_TIMEOUT = 60.0  # seconds; the trainer may be busy
_CONNECT_TIMEOUT = 30.0


class Connection:
    """A game's connection to whoever decides for its agents.

    Attributes:
      agents: whom to ask, one for each agent.
      seed: what the game should seed itself with.
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
        """Connects.

        Args:
          obs_space: what every agent sees.
          action_space: what every agent does.
          num_agents: how many there are.
          name: how messages call the game.
          address: where to; by default what the game was started with.
          token: who it is; by default what the game was started with.
          patience: seconds to wait for actions.

        Raises:
          GameError: the other side refuses the game; the message says why.
          OSError: nobody listens there.
          ValueError: no address.
        """
        address = address or os.environ.get(ADDRESS, "")
        if not address:
            raise ValueError(f"Connection: needs an address; none came, and ${ADDRESS} is not set.")
        token = os.environ.get(TOKEN, "") if token is None else token
        self.agents = [TeamAgent(self, i) for i in range(num_agents)]
        self._patience = patience
        self._check = Validator(obs_space, action_space, name).check
        self._messages = Messages(obs_space, action_space)
        self._socket: Any = connect(address, _CONNECT_TIMEOUT)
        self._send(write_hello(Hello(token, name, num_agents, obs_space, action_space)))
        welcome = self._receive(_CONNECT_TIMEOUT)
        if welcome is None or welcome.kind is not Kind.WELCOME:
            self.close()
            raise GameError("Connection: must be welcomed; the other side hung up.")
        version = welcome.u32()
        if version != wire.VERSION:
            self.close()
            raise GameError(
                f"Connection: the protocol's version must be {wire.VERSION}; got {version}."
            )
        self.seed = welcome.u64()

    def ask(
        self, observations: Mapping[int, ScoredObservation], alone: bool
    ) -> dict[int, Actions] | None:
        """Asks agents by number; None when the game is to end.

        Raises:
          EnvError: an observation is wrong.
          GameError: the other side complains.
          TimeoutError: it is silent.
        """
        out, names = Writer(Kind.OBSERVE), {}
        out.u8(alone)
        out.u32(len(observations))
        for number, observation in observations.items():
            self._check(observation)
            out.u32(number)
            names[number] = self._messages.write_observation(out, observation)
        self._send(out)
        data = self._receive(self._patience)
        if data is None or data.kind is Kind.SHUTDOWN:
            self.close()
            return None
        answers = {}
        for _ in range(data.count("the number of agents", len(names))):
            number = data.u32()
            if number not in names:
                raise wire.WireError(f"ACT: must answer agents {list(names)}; got {number}")
            answers[number] = self._messages.read_actions(data, names[number])
        data.end()
        return answers

    def end(self, number: int, observation: ScoredObservation) -> None:
        """Shows an agent's last observation.

        Raises:
          EnvError: the observation is wrong.
        """
        self._check(observation)
        out = Writer(Kind.GAME_OVER)
        out.u32(number)
        out.u8(observation.truncated)
        self._messages.write_observation(out, observation)
        self._send(out)

    def _send(self, out: Writer) -> None:
        if self._socket is not None:
            # Who hung up may have said why; that is found when its answer is awaited.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                wire.send(self._socket, out, _SEND_TIMEOUT)

    def _receive(self, timeout: float) -> wire.Reader | None:
        data = None if self._socket is None else wire.receive(self._socket, timeout)
        if data is not None and data.kind is Kind.ERROR:
            self.close()
            raise GameError(f"Connection: the other side says: {data.text()}")
        return data

    def close(self) -> None:
        """Hangs up; agents answer None from now on."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            out = Writer(Kind.ERROR)
            out.text("".join(traceback.format_exception(error)))
            with contextlib.suppress(OSError):
                self._send(out)
        self.close()


def run(make: Callable[..., Game], num_agents: int = 1, **options: Any) -> None:
    """Plays a game, in a process that was started as a `SocketGame`'s command.

    Args:
      make: makes the game; given ``options``, and ``seed`` if it has such a parameter. It is
        called twice: for the spaces, and once the seed is known.
      num_agents: how many agents it is given.
      **options: for the game.
    """
    game, name = make(**options), getattr(make, "__name__", type(make).__name__)
    with Connection(game.obs_space, game.action_space, num_agents, name) as connection:
        if takes_seed(make):
            game = make(**{"seed": connection.seed, **options})
        game.play(connection.agents)
