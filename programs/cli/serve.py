"""`rlstack serve`."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import tyro

from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.signals import StopSignals

_POLL = 0.1  # seconds between checks of whether a signal has come


@dataclasses.dataclass(frozen=True)
class _ServeOptions:
    """Answer requests of other programs for the actions of a run's policy. Ctrl-C ends it.

    By default over HTTP, to programs of this machine: POST /act with JSON such as
    {"observation": [0, 0, 0, 0]}. With --games to games that speak the game protocol.
    """

    run_dir: tyro.conf.Positional[Path]
    """The directory of the run."""
    port: int = 6090
    """The port of HTTP. 0 takes a free one."""
    origins: tuple[str, ...] = ()
    """Web pages that may send requests, by their origin, such as http://localhost:3000."""
    games: str = ""
    """Serve the game protocol instead, at HOST:PORT or unix:PATH. Everyone who reaches the address
    can connect, and nothing is encrypted."""
    params: Literal["last", "best"] = "last"
    """Which params: the last ones, or those with the best return in an evaluation of the run."""
    policy: Literal["greedy", "explore"] = "greedy"
    """greedy takes the best action; explore explores as at the end of training."""
    name: str = ""
    """Which policy, if the run trained several."""
    max_players: int = 1000
    """Most players, with a state each, at the same time. Games reserve memory for all of them."""


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code."""
    chosen = parse(_ServeOptions, "rlstack serve", args)
    if chosen.max_players < 1:
        raise UsageError(f"--max-players must be at least 1; got {chosen.max_players}")
    if chosen.games and (chosen.name or chosen.origins):
        raise UsageError("--games cannot be combined with --name or --origins")
    RunDir.open(chosen.run_dir)  # before JAX is imported
    (_serve_games if chosen.games else _serve_http)(chosen)
    return 0


def _serve_http(chosen: _ServeOptions) -> None:
    from rlstack.programs.build.policies.policy import load
    from rlstack.programs.tools.serve.players import Players
    from rlstack.programs.tools.serve.policy_server import PolicyServer

    greedy = chosen.policy == "greedy"
    policy = load(chosen.run_dir, params=chosen.params, greedy=greedy, policy=chosen.name)
    players = Players(policy, chosen.max_players)
    with PolicyServer(players, chosen.port, chosen.origins) as server:
        name = RunDir(chosen.run_dir).name
        print(f"{server.address} acts with {name}; Ctrl-C ends it", flush=True)
        _until_signal(functools.partial(server.serve_forever, _POLL), server.shutdown)


def _serve_games(chosen: _ServeOptions) -> None:
    from rlstack.programs.tools.serve.game_server import GameServer

    server = GameServer(
        chosen.run_dir,
        chosen.games,
        params=chosen.params,
        greedy=chosen.policy == "greedy",
        most=chosen.max_players,
        tell=functools.partial(print, flush=True),
    )
    try:
        name = RunDir(chosen.run_dir).name
        print(f"{server.address} acts with {name}; Ctrl-C ends it", flush=True)
        _until_signal(server.serve_forever, server.shutdown)
    finally:
        server.close()


def _until_signal(serve: Callable[[], None], shutdown: Callable[[], None]) -> None:
    """Serves in a thread until SIGINT or SIGTERM."""
    thread = threading.Thread(target=serve, name="server", daemon=True)
    with StopSignals() as stop:
        thread.start()
        while stop.received is None and thread.is_alive():
            thread.join(_POLL)
        shutdown()
        thread.join()
