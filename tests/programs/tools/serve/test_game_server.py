"""`rlstack serve --games`: games that connect are played as by the run's agent."""

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlstack.entity.inverted import wire
from rlstack.entity.inverted.client import Connection
from rlstack.entity.inverted.game import GameError, GroupAgent
from rlstack.entity.spaces import EntityType, ObsSpace
from rlstack.programs.tools.game_agent import team_from_run
from rlstack.programs.tools.serve import game_server
from rlstack.programs.tools.serve.game_server import GameServer
from tests.entity.inverted import games
from tests.entity.inverted.test_game_agent import BIDDING, Counted, leave_run

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of a recurrent policy: its actions depend on earlier observations."""
    return leave_run(tmp_path_factory.mktemp("games") / "run", BIDDING)


@contextlib.contextmanager
def serving(run_dir, address="127.0.0.1:0", **options):
    """Yields a server, and the list of the lines that it reports."""
    told = []
    server = GameServer(run_dir, address, tell=told.append, **options)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server, told
    finally:
        server.shutdown()
        thread.join()
        server.close()
    assert not server._threads


class Limited:
    """Ends the loop of a connected game after a number of games."""

    def __init__(self, group, num_games):
        self.group, self.num_games, self.scores = group, num_games, [[], []]

    def ask(self, observations, sequential):
        over = len(self.scores[0]) == self.num_games
        return None if over else self.group.ask(observations, sequential)

    def game_over(self, number, observation):
        self.scores[number].append(observation.score)
        self.group.game_over(number, observation)


def play(address, num_games=3, how="sparse"):
    """The scores of both agents, in a game that connects."""
    game = games.Bidding(how)
    with Connection(game.obs_space, game.action_space, 2, "bidding", address, "") as connection:
        limited = Limited(connection, num_games)
        game.play([GroupAgent(limited, number) for number in range(2)])
    return limited.scores


def wait_for(condition, timeout=20.0):
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def wanted(run_dir, num_games=3, how="sparse"):
    game = games.Bidding(how)
    team = team_from_run(run_dir, game.obs_space, game.action_space, 2)
    players = [Counted(player, num_games) for player in team]
    game.play(players)
    return [player.scores for player in players]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_many_games_are_played_as_by_the_runs_agent(run_dir, tmp_path, kind):
    address = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/games"
    with serving(run_dir, address, most=8) as (server, told), ThreadPoolExecutor(4) as pool:
        scores = wanted(run_dir)
        assert list(pool.map(play, [server.address] * 4)) == [scores] * 4
        assert play(server.address) == scores  # the players of games that are over play again
        wait_for(lambda: sum(line.endswith(": over") for line in told) == 5)
        assert sum("connected, 2 agents" in line for line in told) == 5


def test_games_that_do_not_fit_are_refused_with_the_reason(run_dir):
    game = games.Bidding()
    with serving(run_dir, most=3) as (server, told):
        with pytest.raises(GameError, match="trained on"):
            other = dataclasses.replace(games.OBS, global_features=("a", "b"))
            Connection(other, games.ACTIONS, 2, "other", server.address, "")
        spaces = (game.obs_space, game.action_space)
        one = Connection(*spaces, 2, "one", server.address, "")
        with one, pytest.raises(GameError, match="2 agents, and 1 players are free"):
            Connection(*spaces, 2, "two", server.address, "")
        wait_for(lambda: any("game 2 ('one'): over" in line for line in told))
        Connection(*spaces, 2, "three", server.address, "").close()
        wait_for(lambda: any("('three'): over" in line for line in told))
        with socket.create_connection(server.address.split(":")) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert stranger.recv(1000)  # the reason
        assert sum("refused" in line for line in told) == 2
        assert play(server.address) == wanted(run_dir)


def test_a_game_that_is_lost_frees_its_players(run_dir):
    game = games.Bidding()
    with serving(run_dir, most=2) as (server, told):
        connection = Connection(game.obs_space, game.action_space, 2, "lost", server.address, "")
        connection.ask({0: game.see(0, 0, [0.0, 0.0])}, sequential=True)
        connection.close()
        wait_for(lambda: any("disconnected in the middle" in line for line in told))
        assert play(server.address) == wanted(run_dir)


def test_what_games_say_is_told_as_one_short_line(run_dir):
    """They are strangers: escape sequences, forged lines and megabytes are not printed."""
    game, raw = games.Bidding(), "\x1b[2J\ngame 1: over" + "x" * 100_000
    with serving(run_dir, most=2) as (server, told):
        connection = Connection(game.obs_space, game.action_space, 2, raw, server.address, "")
        out = wire.Writer(wire.Kind.ERROR)
        out.text(raw)
        connection._send(out)
        wait_for(lambda: len(told) == 2)
        connection.close()
        assert "reports: '\\x1b[2J\\ngame 1: over" in told[1]
        kinds = {raw[:5_000] + str(i): EntityType(("a",)) for i in range(10)}
        with pytest.raises(GameError, match="trained on"):
            Connection(ObsSpace(kinds), games.ACTIONS, 2, "other", server.address, "")
        wait_for(lambda: len(told) == 3)
        assert "refused" in told[2]
    assert all(line.isprintable() and len(line) < 1200 for line in told)


def test_the_end_does_not_wait_for_games_one_after_the_other(run_dir, monkeypatch):
    """Some read nothing, so that what is sent to them waits."""
    monkeypatch.setattr(game_server, "_END", 0.5)
    over = threading.Event()
    with serving(run_dir) as (server, _):
        for _ in range(5):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            server._threads.add(thread)
        begun = time.monotonic()
        server.shutdown()
        assert 0.4 < time.monotonic() - begun < 1.5
        over.set()
        server._threads.clear()


@pytest.mark.slow
@pytest.mark.chosen
def test_games_are_told_when_the_command_ends(run_dir):
    arguments = [sys.executable, "-m", "rlstack", "serve", str(run_dir), "--games"]
    started = subprocess.Popen(
        [*arguments, "127.0.0.1:0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        address = started.stdout.readline().split(" ")[0]
        game = games.Bidding()
        with Connection(game.obs_space, game.action_space, 2, "kept", address, "") as connection:
            first = game.see(0, 0, [0.0, 0.0])
            assert connection.ask({0: first}, sequential=True)
            started.send_signal(signal.SIGINT)
            begun = time.monotonic()
            assert started.wait(20) == 0 and time.monotonic() - begun < 5
            assert connection.ask({0: first}, sequential=True) is None
        assert started.stderr.read() == ""
    finally:
        started.kill()
        started.communicate()
