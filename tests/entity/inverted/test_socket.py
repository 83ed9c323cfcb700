"""Games in other processes, working and broken ones."""

import contextlib
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from rlstack.checks import EnvCrash, EnvError
from rlstack.entity.inverted import GameError, SocketGame, wire
from rlstack.entity.inverted.client import Connection
from rlstack.entity.inverted.listener import Listener, connect
from rlstack.entity.inverted.wire import MAGIC
from rlstack.envs import SyncEnv
from tests.entity.inverted import games
from tests.entity.inverted.test_inverted import bids, random_actions
from tests.rpc.test_addresses import needs_loopback

pytestmark = pytest.mark.timeout(60)


def command(*arguments):
    return f"{sys.executable} -m tests.entity.inverted.games {' '.join(arguments)}"


def game_process():
    (child,) = psutil.Process().children()
    return child


def kill_game():
    """Kills the process that guards the game; returns when the kernel has killed the game too."""
    guard = game_process()
    guard.kill()
    while guard.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.005)


def test_a_game_in_another_process_plays_with_random_actions():
    rng = np.random.default_rng(0)
    with SyncEnv(SocketGame, 1, options={"command": command("mine_sweeper", "1")}) as pool:
        timestep, ends = pool.reset(), 0
        while ends < 3:
            timestep = pool.step(random_actions(rng, pool, timestep))
            ends += timestep.last().sum()
        child = game_process()
    assert not child.is_running()


def test_two_agents_in_another_process():
    options = {"command": command("Bidding", "2", "how=sparse"), "agents": 2}
    with SyncEnv(SocketGame, 2, options=options) as pool:
        pool.reset()
        rewards = np.sum([pool.step(bids(pool)).reward for _ in range(4)], 0)
        np.testing.assert_array_equal(rewards, [8, 8])


def test_metrics_come_over_the_socket_as_extras():
    told = command("Bidding", "2", "costs=yes")
    options = {"command": told, "agents": 2, "extras": ["cost"]}
    with SyncEnv(SocketGame, 2, options=options) as pool:
        steps = [pool.reset(), *(pool.step(bids(pool)) for _ in range(3))]
    assert [step.extras["cost"].tolist() for step in steps] == [
        [0, 1],
        [10, 11],
        [20, 21],
        [30, 31],
    ]


def test_a_killed_game_truncates_its_episodes_and_is_restarted():
    options = {"command": command("Bidding", "2"), "agents": 2, "max_restarts": 1}
    with SyncEnv(SocketGame, 2, options=options) as pool:
        pool.reset()
        for kill in range(2):
            pool.step(bids(pool))
            kill_game()
            timestep = pool.step(bids(pool))
            for _ in range(3):  # the game may have been killed after its answer
                if not timestep.last().all():
                    timestep = pool.step(bids(pool))
            assert timestep.last().all()
            np.testing.assert_array_equal(timestep.discount, 1)
            if kill:
                with pytest.raises(
                    RuntimeError, match=r"at most 1 restarts within .*lost once more"
                ):
                    pool.step(bids(pool))
            else:
                assert pool.step(bids(pool)).first().all()


def test_a_game_that_hangs_or_fails_is_lost():
    for fail, text in (("hang", "silent for 0.5 s"), ("raise", "lost my marbles")):
        options = {
            "command": command("Bidding", "1", f"fail={fail}"),
            "step_timeout": 0.5,
            "max_restarts": 0,
        }
        with SyncEnv(SocketGame, 1, options=options) as pool:
            pool.reset()
            with pytest.raises(RuntimeError, match=text):
                for _ in range(5):
                    timestep = pool.step(bids(pool))
            assert timestep.last().all() and timestep.discount.all()


class Connecting:
    """Connects several times, one after the other, from a thread of this process."""

    def __init__(self, path, *clients):
        self.address, self.clients, self.failures = f"unix:{path}", clients, []
        self.thread = threading.Thread(target=self.run)

    def run(self):
        for client in self.clients:
            for _ in range(200):
                try:
                    client(self.address)
                    break
                except (FileNotFoundError, ConnectionError):  # no listener yet
                    time.sleep(0.02)
                except BaseException as error:
                    self.failures.append(error)
                    break

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.thread.join(10)


def says(data, told=None):
    def client(address):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(address.removeprefix("unix:"))
            sock.settimeout(5)
            sock.sendall(data)
            answer = sock.recv(1 << 16)
        if told is not None:
            told.append(answer)

    return client


def frame(kind, body=b""):
    return struct.pack("<IB", len(body) + 1, kind) + body


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (frame(1, MAGIC + struct.pack("<I", 7)), "version must be 1; the game has version 7"),
        (frame(1, b"HTTP"), "must begin with b'RLGP'"),
        (b"GET / HTTP/1.1\r\n\r\n", "a frame must have 1 to"),
        (frame(3), "must begin with HELLO; got OBSERVE"),
        (frame(99), "kind must be 1 to 11; got 99"),
        (frame(1, MAGIC + struct.pack("<II", 1, 1 << 31)), "more bytes"),
        (frame(1, MAGIC + struct.pack("<III", 1, 1, 97)), "token must be that of"),
    ],
)
def test_programs_that_are_not_games_of_this_version_are_refused(tmp_path, data, message):
    """They are told why, the error has the reason, and a game that connects later is found."""
    told = []
    client = says(data, told)
    with (
        Connecting(tmp_path / "socket", client) as connecting,
        pytest.raises(GameError, match=f"did not connect.*refused: .*{message}"),
    ):
        SocketGame(address=connecting.address, start_timeout=0.5)
    assert re.search(message, told[0].decode(errors="replace"))

    def polite(address):
        with good_hello(address) as connection:
            games.Bidding(num_agents=1).play(connection.agents)

    with Connecting(tmp_path / "socket", client, polite) as connecting:
        SocketGame(address=connecting.address, start_timeout=5.0).close()
    assert connecting.failures == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # Each has a frame that goes on for a while, and only its first bytes have come.
        (struct.pack("<I", 16 << 20) + frame(3)[4:] + MAGIC + bytes(4), "got OBSERVE"),
        (struct.pack("<IB", 16 << 20, 1) + b"HTTP" + bytes(4), "must begin with b'RLGP'"),
        (struct.pack("<IB", 100, 1) + MAGIC + struct.pack("<I", 7), "has version 7"),
        (struct.pack("<IB", 300_000, 1) + MAGIC + struct.pack("<I", 1), "at most 262144 bytes"),
        (struct.pack("<IB", 100, 1) + MAGIC + struct.pack("<II", 1, 3) + b"odd", "token must be"),
    ],
)
def test_strangers_are_refused_by_their_first_bytes(tmp_path, data, message):
    listener = Listener(f"unix:{tmp_path / 's'}")
    listener.hellos.expect("ours")
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(listener.address.removeprefix("unix:"))
        stranger.sendall(data)
        assert (
            listener.accept("ours", 0.3, keep_waiting=lambda: not listener.hellos.refused) is None
        )
        stranger.settimeout(5)
        assert message in stranger.recv(1 << 16).decode(errors="replace")
    listener.close()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_loopback)])
def test_games_connect_over_ipv4_and_ipv6(host):
    listener = Listener(f"{host}:0")
    assert listener.address.startswith(f"{host}:") and not listener.address.endswith(":0")
    listener.hellos.expect("ours")
    with connect(listener.address, 5.0) as game:
        game.sendall(frame(1, MAGIC + struct.pack("<II", 1, 4) + b"ours" + bytes(20)))
        caller = listener.accept("ours", 5.0, keep_waiting=lambda: True)
    caller.connection.close()
    listener.close()


def test_hellos_that_come_byte_by_byte_are_read(tmp_path):
    listener = Listener(f"unix:{tmp_path / 's'}")
    listener.hellos.expect("ours")
    hello = frame(1, MAGIC + struct.pack("<II", 1, 4) + b"ours" + bytes(20))
    with socket.socket(socket.AF_UNIX) as game:
        game.connect(listener.address.removeprefix("unix:"))
        for byte in hello[:-1]:
            game.sendall(bytes([byte]))
            listener.hellos._read_all()
        assert listener.accept("ours", 0.0, keep_waiting=lambda: False) is None
        game.sendall(hello[-1:] + b"later")
        caller = listener.accept("ours", 5.0, keep_waiting=lambda: True)
    assert caller.hello == hello[4:] and caller.connection.recv(9) == b"later"
    caller.connection.close()
    listener.close()


RAW = "\x1b[2J\nan error of ours: \u202e" + "x" * (1 << 20)


def test_texts_of_games_are_shown_as_one_short_line(tmp_path):
    """Their name, what they report, and the names of their spaces."""
    assert wire.shown("a\n\x1b[2J'") == '"a\\n\\x1b[2J\'"'
    assert wire.shown("x" * 100) == "'" + "x" * 36 + " ... " + "x" * 36 + "'"
    assert len(wire.shown(RAW)) <= 80 and wire.shown(RAW).isprintable()
    assert wire.printable("plain 'text'") == "plain 'text'"
    assert wire.printable("a\nb\x1b") == "a\\nb\\x1b"
    assert len(wire.printable(RAW)) <= 1000 and wire.printable(RAW).isprintable()

    def reports(address):
        game = games.Bidding(num_agents=1)
        with Connection(games.OBS, games.ACTIONS, 1, RAW[:2000], address, "") as connection:
            connection.agents[0].act(game.see(0, 0, [0.0]))
            out = wire.Writer(wire.Kind.ERROR)
            out.text(RAW)
            connection._send(out)

    options = {"start_timeout": 5.0, "max_restarts": 0}
    connecting = Connecting(tmp_path / "socket", reports)
    with (
        connecting,
        SyncEnv(SocketGame, 1, options={**options, "address": connecting.address}) as e,
    ):
        e.reset()
        assert e.step(bids(e)).last().all()
        with pytest.raises(EnvCrash) as lost:
            e.reset()
    assert "reports: '\\x1b[2J\\nan error of ours" in str(lost.value)
    assert str(lost.value).isprintable() and len(str(lost.value)) < 600

    hello = (
        MAGIC
        + struct.pack("<IIII", 1, 0, 0, 1)
        + struct.pack("<III", 0, 30_000, 0)
        + bytes(4 * 30_000)
    )
    with (
        Connecting(tmp_path / "names", says(frame(1, hello))) as connecting,
        pytest.raises(EnvError, match="must be unique") as wrong,
    ):
        SocketGame(address=connecting.address, start_timeout=5.0)
    assert len(str(wrong.value)) < 600


def test_a_wrong_game_ends_the_wait_at_once(tmp_path):
    """Its token shows that it is the game; the rest of its HELLO is wrong."""
    hello = MAGIC + struct.pack("<IIIIIII", 1, 0, 0, 1, 1, 0, 1 << 31)
    with (
        Connecting(tmp_path / "socket", says(frame(1, hello))) as connecting,
        pytest.raises(EnvError, match="a capacity must be at most 65536"),
    ):
        SocketGame(address=connecting.address, start_timeout=30.0)


def test_strangers_do_not_end_a_game_nor_the_wait_for_one():
    """While it starts, while it plays and while it is restarted, any local program may connect."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    over, met = threading.Event(), []

    def bother():
        silent = []
        while not over.wait(0.01):
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", frame(1, MAGIC), frame(1)[:3]):
                with contextlib.suppress(OSError):
                    stranger = socket.create_connection(("127.0.0.1", int(address[10:])), 1)
                    stranger.sendall(data)
                    met.append(data)
                    silent.append(stranger)  # some say nothing more and stay; others leave
            while len(silent) > 20:
                silent.pop(0).close()
        for stranger in silent:
            stranger.close()

    stranger = threading.Thread(target=bother)
    stranger.start()
    try:
        options = {
            "command": command("Bidding", "1"), "address": address, "max_restarts": 2,
            "start_timeout": 20.0,
        }  # fmt: skip
        with SyncEnv(SocketGame, 1, options=options) as pool:
            pool.reset()
            for _ in range(2):
                assert pool.step(bids(pool)).reward.all()
            kill_game()
            while not pool.step(bids(pool)).last():
                pass
            assert pool.step(bids(pool)).first()
            assert pool.step(bids(pool)).reward.all()
    finally:
        over.set()
        stranger.join(10)
    assert len(met) > 20


def test_the_hello_of_a_game_that_has_ended_is_read(tmp_path):
    """The game refuses its options, so it ends at once; a stranger connected before."""
    listener = Listener(f"unix:{tmp_path / 's'}")
    listener.hellos.expect("ours")
    with socket.socket(socket.AF_UNIX) as stranger, socket.socket(socket.AF_UNIX) as game:
        for sock in (stranger, game):
            sock.connect(listener.address.removeprefix("unix:"))
        game.sendall(frame(1, MAGIC + struct.pack("<II", 1, 4) + b"ours"))
        game.close()
        caller = listener.accept("ours", 10.0, keep_waiting=lambda: False)
    listener.close()
    assert caller is not None
    caller.connection.close()


def test_games_at_one_address_find_their_own_connections(tmp_path):
    """Each has a token of its own, and the connections come in any order."""
    options = {"command": command("Bidding", "1"), "address": f"unix:{tmp_path / 's'}"}
    with SyncEnv(SocketGame, 3, "thread", options=options) as pool:
        pool.reset()
        assert pool.step(bids(pool)).reward.all()


def good_hello(address):
    return Connection(games.OBS, games.ACTIONS, 1, "raw", address, "")


def garbage(data):
    """A game that sends HELLO and one observation, then invalid bytes."""

    def client(address):
        game = games.Bidding(num_agents=1)
        with good_hello(address) as connection:
            connection.agents[0].act(game.see(0, 0, [0.0]))
            connection._socket.sendall(data)
            with pytest.raises(GameError, match=r"the trainer reports"):
                connection._receive(5)

    return client


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        frame(3, b"\x05"),
        frame(3, struct.pack("<BIIdI", 0, 1, 0, 0.0, 1 << 30)),
        frame(5, struct.pack("<IB", 9, 0)),
        frame(4),
    ],
)
def test_invalid_bytes_truncate_the_episode(tmp_path, data):
    def polite(address):
        with good_hello(address) as connection:
            games.Bidding(num_agents=1).play(connection.agents)

    connecting = Connecting(tmp_path / "socket", garbage(data), polite)
    options = {"address": connecting.address, "start_timeout": 5.0}
    with connecting, SyncEnv(SocketGame, 1, options=options) as pool:
        pool.reset()
        timestep = pool.step(bids(pool))
        assert timestep.last().all() and timestep.discount.all()
        assert pool.step(bids(pool)).first().all()
        assert pool.step(bids(pool)).reward == 2
    assert connecting.failures == []


def test_commands_that_are_not_games_are_refused():
    with pytest.raises(RuntimeError, match=r"did not connect.*ended with code 1"):
        SocketGame(command="false")
    with pytest.raises(RuntimeError, match="no-such-program"):
        SocketGame(command="no-such-program")
    with pytest.raises(EnvError, match="has 2 agents; set the option 'agents'"):
        SocketGame(command=command("Bidding", "2"))
    with pytest.raises(ValueError, match=r"needs a command.*or an address"):
        SocketGame()


def test_ctrl_c_leaves_no_process():
    program = (
        "import numpy as np\n"
        "from rlstack.envs import SyncEnv\n"
        "from rlstack.entity.inverted import SocketGame\n"
        f"pool = SyncEnv(SocketGame, 2, options=dict(command={command('Bidding', '2')!r}, "
        "agents=2))\n"
        "pool.reset()\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    pool.step({'bid': np.ones((2, 1), np.int32)})\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        assert trainer.stdout.readline() == b"ready\n"
        children = psutil.Process(trainer.pid).children(recursive=True)
        assert len(children) == 2  # the guard and the game
        os.kill(trainer.pid, signal.SIGINT)
        assert b"KeyboardInterrupt" in trainer.communicate(timeout=20)[1]
        assert not psutil.wait_procs(children, timeout=5)[1]
    finally:
        trainer.kill()
        trainer.wait()
