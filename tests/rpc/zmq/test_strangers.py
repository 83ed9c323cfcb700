"""What strangers get from a server of the transport zmq: nothing."""

import os
import pickle
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from rlstack.rpc import RemoteObject, UnavailableError, codec, serve, versions
from tests.rpc.nodes import Node

zmq = pytest.importorskip("zmq")

from rlstack.rpc.zmq import keys  # noqa: E402  (after zmq is known to be there)

pytestmark = pytest.mark.timeout(60)
LATER = [pytest.mark.slow, pytest.mark.timeout(300)]
TRIES = pytest.mark.parametrize("tries", [5, pytest.param(1000, marks=LATER)])
REQUEST = codec.encode((0, 0, 0, 0, (1,), {}))


@pytest.fixture
def served(zmq_keys):
    """A node, its port, and its program's keys."""
    node = Node()
    with serve(node) as server:
        yield node, int(server.address.rsplit(":", 1)[1]), keys.current()
        with RemoteObject(server.address, Node, name="n") as client:  # it still serves its own
            assert client.echo(1) == 1


def plain(socket, own):
    """No keys at all."""


def password(socket, own):
    """Another mechanism."""
    socket.plain_username, socket.plain_password = b"user", b"word"


def wrong_client(socket, own):
    """Knows the server's public key, as someone who has read the traffic may."""
    socket.curve_serverkey = own.server_public
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()


def wrong_server(socket, own):
    """Keys of another program."""
    other = keys.make()
    socket.curve_serverkey = other.server_public
    socket.curve_publickey, socket.curve_secretkey = other.client_public, other.client_secret


def public_client(socket, own):
    """Knows the public keys of both sides, and guesses the secret one."""
    socket.curve_serverkey = own.server_public
    socket.curve_publickey, socket.curve_secretkey = own.client_public, zmq.curve_keypair()[1]


KINDS = [plain, password, wrong_client, wrong_server, public_client]


@TRIES
def test_valid_requests_with_wrong_keys_get_no_answer(served, tries):
    node, port, own = served
    context = zmq.Context()
    sockets = []
    try:
        for number in range(tries):
            socket = context.socket(zmq.DEALER)
            sockets.append(socket)
            socket.linger = 0
            KINDS[number % len(KINDS)](socket, own)
            socket.connect(f"tcp://127.0.0.1:{port}")
            socket.send_multipart([b"rpc_hello", versions.own()])
            socket.send_multipart([b"add", REQUEST])
            if len(sockets) == 100 or number == tries - 1:
                assert not any(s.poll(1 if s is not sockets[-1] else 1500) for s in sockets)
                while sockets:
                    sockets.pop().close()
    finally:
        for socket in sockets:
            socket.close()
        context.term()
    assert node.runs == []


@TRIES
def test_garbage_gets_no_answer(served, tries):
    node, port, _ = served
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
    for number in range(tries):
        bad = [
            b"",
            bytes(1000),
            os.urandom(2000),
            pickle.dumps({"a": 1}),
            REQUEST,
            greeting + b"\x04\x26\x05READY" + os.urandom(60),  # skips the handshake
            greeting + b"\x02" + (1 << 40).to_bytes(8, "big") + b"huge",
            greeting.replace(b"CURVE", b"NULL\0") + b"\x04\x19\x05READY",
        ][number % 8]
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(bad)
            stranger.settimeout(0.02)
            assert b"RLC" not in read(stranger)
    assert node.runs == []


def read(connection):
    """All that comes within the time limit of a connection."""
    found = b""
    try:
        while part := connection.recv(65536):
            found += part
    except OSError:
        pass
    return found


@TRIES
def test_recorded_traffic_is_of_no_use(served, tries):
    node, port, _ = served
    sent, received = record(port, lambda address: RemoteObject(address, Node, name="n").add(7))
    assert node.runs == [7]
    assert len(sent) > 500 and len(received) > 300
    assert b"RLC" not in sent + received and b"add" not in sent  # encrypted
    for number in range(tries):
        cut = len(sent) if number % 2 == 0 else number * 37 % len(sent)
        with socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(sent[:cut])
            stranger.settimeout(0.02)
            assert len(read(stranger)) < len(received)
    assert node.runs == [7]


def record(port, use):
    """Lets `use` call through a relay; returns what was sent and received."""
    found = [bytearray(), bytearray()]
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def relay(source, target, kept):
            try:
                while part := source.recv(65536):
                    kept.extend(part)
                    target.sendall(part)
            except OSError:
                pass

        def accept():
            inner, _ = listener.accept()
            with inner, socket.create_connection(("127.0.0.1", port)) as outer:
                other = threading.Thread(target=relay, args=(outer, inner, found[1]))
                other.start()
                relay(inner, outer, found[0])
                outer.shutdown(socket.SHUT_RDWR)
                other.join(5)

        thread = threading.Thread(target=accept)
        thread.start()
        use(f"zmq://localhost:{listener.getsockname()[1]}")
        thread.join(10)
    return bytes(found[0]), bytes(found[1])


def test_a_client_does_not_talk_to_the_server_of_another_program(zmq_keys):
    with serve(Node()) as server:
        with keys.made():
            stranger = RemoteObject(server.address, Node, name="n", timeout=0.7)
            with pytest.raises(UnavailableError, match="could not be reached"):
                stranger.echo(1)
        assert RemoteObject(server.address, Node, name="n").echo(1) == 1


def test_without_keys_nothing_is_served():
    for use in (
        lambda: serve(Node(), transport="zmq"),
        lambda: RemoteObject("zmq://localhost:1", Node, name="n").echo(1),
    ):
        with pytest.raises(ValueError, match="must have its program's keys"):
            use()


def test_keys_are_in_a_private_file_that_goes_with_the_program():
    before = dict(os.environ)
    with keys.made() as path:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
        own = keys.current()
        secrets = [own.client_secret.decode(), own.server_secret.decode()]
        assert not any(secret in f"{own!r} {own} {dict(os.environ)}" for secret in secrets)
        with pytest.raises(TypeError, match="keys are not pickled"):
            pickle.dumps(own)
        with keys.made():
            assert keys.current().client_secret != own.client_secret
        os.chmod(path, 0o640)
        keys._read.cache_clear()
        with pytest.raises(PermissionError, match="only this user may own and read"):
            keys.current()
    assert not os.path.exists(os.path.dirname(path))
    assert dict(os.environ) == before


def test_a_damaged_file_of_keys_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    monkeypatch.setenv(keys.VARIABLE, str(path))
    good = keys.make().text().split()
    for bad in (b"", b"\n".join(good[:3]), b"\n".join([good[1], good[0], *good[2:]]), b"x" * 163):
        path.write_bytes(bad)
        path.chmod(0o600)
        with pytest.raises(ValueError, match="must hold two pairs of keys"):
            keys.current()


def test_a_server_listens_where_it_is_told(zmq_keys):
    with serve(Node(), bind_address="127.0.0.1") as server:
        port = int(server.address.rsplit(":", 1)[1])
        lines = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
        listening = [line.split()[1:4] for line in lines]
        mine = [local for local, _, state in listening if local.endswith(f":{port:04X}")]
        assert "0100007F" in {local.split(":")[0] for local in mine}
        assert "00000000" not in {local.split(":")[0] for local in mine}
    with pytest.raises(OSError, match=r"this host must let a server listen on 203\.0\.113\.1"):
        serve(Node(), bind_address="203.0.113.1")


def test_a_taken_port_is_said(zmq_keys):
    with serve(Node()) as server:
        start = time.monotonic()
        with pytest.raises(OSError, match="must let a server listen on"):
            serve(Node(), port=int(server.address.rsplit(":", 1)[1]))
        assert time.monotonic() - start < 5
