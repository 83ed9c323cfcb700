"""`rlstack serve` over HTTP: actions, states of players, refused requests, and Ctrl-C."""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import pytest
from dm_env import specs

import rlstack
from rlstack.programs.cli import commands as cli
from rlstack.programs.tools.serve.players import Players
from rlstack.programs.tools.serve.policy_server import PolicyServer
from rlstack.types import EnvSpec
from tests.programs import running

METHODS = ("GET", "POST", "DELETE")

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(scope="module")
def balancing(tmp_path_factory):
    """A run of PPO on CartPole, whose policy keeps no state."""
    directory = tmp_path_factory.mktemp("serve") / "run"
    running.run(running.ppo("single_process", frames=300), directory)
    return directory


@pytest.fixture(scope="module")
def remembering(tmp_path_factory):
    """A run of a recurrent policy."""
    directory = tmp_path_factory.mktemp("serve") / "recurrent"
    running.run(running.recurrent("single_process", frames=200), directory)
    return directory


@contextlib.contextmanager
def serving(players, **options):
    """The port of a server."""
    with PolicyServer(players, 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class Answer(NamedTuple):
    status: int
    content: object  # JSON, or the text of an error
    headers: object


def ask(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        data = None if body is None else body if isinstance(body, str) else json.dumps(body)
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers["Content-Type"] == "application/json"
        return Answer(answer.status, json.loads(text) if is_json else text, answer.headers)


def act(port, observation, path="/act", **fields):
    status, content, _ = ask(port, "POST", path, {"observation": observation, **fields})
    assert status == 200, content
    return content


def test_actions_are_those_of_the_policy(balancing):
    policy = rlstack.load(balancing)
    seen = np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)
    with serving(Players(policy.twin(0))) as port:
        shown = ask(port, "GET", "/").content
        assert shown["env"] == "CartPole-v1" and not shown["keeps_state"]
        assert shown["observation"]["shape"] == [4] and shown["action"]["num_values"] == 2
        alone = [act(port, row.tolist())["action"] for row in seen]
        assert alone == [int(policy.act(row)) for row in seen] and set(alone) == {0, 1}
        policy.reset()
        assert act(port, seen.tolist())["action"] == policy.act(seen).tolist()
        policy.reset()
        found, wanted = act(port, seen[0].tolist(), "/predict"), policy.predict(seen[0])
        assert found["action"] == wanted.action and found["value"] == pytest.approx(wanted.value)
        chances = wanted.probabilities["action"]
        assert np.allclose(found["probabilities"]["action"], chances)


@pytest.mark.slow
@pytest.mark.chosen
def test_each_player_has_a_state_of_its_own(remembering):
    policy = rlstack.load(remembering)
    shape = policy.spec.observation.shape
    seen = np.random.default_rng(1).normal(size=(2, 12, *shape)).astype(np.float32)

    def values(rows, policy):
        return [policy.predict(row).value for row in rows]

    wanted = [values(rows, policy.twin(0)) for rows in seen]
    assert wanted[0] != [policy.twin(0).predict(row).value for row in seen[0]]  # it remembers
    players = Players(policy, most=2)
    with serving(players) as port:

        def value(row, player, **fields):
            answer = act(port, row.tolist(), "/predict", player=player, **fields)
            return answer["value"]

        found = [
            [value(row, name) for row, name in zip(rows, "ab", strict=True)]
            for rows in zip(*seen, strict=True)
        ]
        np.testing.assert_allclose(np.transpose(found), wanted, rtol=1e-5, atol=1e-6)
        # A player begins a new episode, a player is forgotten, and rows of a batch begin apart.
        again = [value(row, "a", first=i == 0) for i, row in enumerate(seen[0])]
        np.testing.assert_allclose(again, wanted[0], rtol=1e-5, atol=1e-6)
        status, text, _ = ask(
            port, "POST", "/act", {"observation": seen[0, 0].tolist(), "player": "c"}
        )
        assert status == 429 and "at most 2 players" in text
        assert ask(port, "DELETE", "/players/a").status == 200
        assert ask(port, "DELETE", "/players/a").status == 404
        both = [
            value(rows, "c", first=[i == 0, i in (0, 4)])
            for i, rows in enumerate(np.moveaxis(seen, 0, 1))
        ]
        np.testing.assert_allclose(np.array(both)[:, 0], wanted[0], rtol=1e-5, atol=1e-6)
        later = values(seen[1, 4:], policy.twin(0))
        np.testing.assert_allclose(np.array(both)[4:, 1], later, rtol=1e-5, atol=1e-6)
        status, text, _ = ask(port, "POST", "/act", {"observation": seen[0, 0].tolist()})
        assert status == 400 and "player must name whose step it is" in text


@pytest.mark.slow
@pytest.mark.chosen
def test_threads_may_ask_at_the_same_time(remembering):
    policy = rlstack.load(remembering)
    rows = np.random.default_rng(2).normal(size=(8, *policy.spec.observation.shape))
    twin = policy.twin(0)
    wanted = [twin.predict(row).value for row in rows]
    with serving(Players(policy)) as port, ThreadPoolExecutor(6) as pool:

        def play(name):
            return [act(port, row.tolist(), "/predict", player=f"{name}")["value"] for row in rows]

        for found in pool.map(play, range(6)):
            np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_step_that_does_not_fit_is_refused_and_leaves_nothing_behind(balancing, remembering):
    good = [0.0] * 4
    with serving(Players(rlstack.load(balancing))) as port:
        for body, why in (
            ("{", "Expecting"),
            ([], "a step must be an object"),
            ({}, "must have an observation"),
            ({"observation": good, "reset": True}, "no other fields than .*reset"),
            ({"observation": [0.0] * 3}, r"must have shape \(4,\)"),
            ({"observation": [[0.0], [0.0, 1.0]]}, "an array of one shape"),
            ({"observation": {"x": 1}}, "must hold numbers"),
            ({"observation": "left"}, "must hold numbers"),
            ({"observation": good, "first": 1}, "first must be true or false"),
            ({"observation": good, "reward": None}, "reward must be a number"),
            ({"observation": good, "player": 1}, "player must be a text"),
            ("[" * 100_000, ""),
        ):
            status, text, _ = ask(port, "POST", "/act", body)
            assert status == 400, (body, text)
            assert re.search(why, text), text
        assert act(port, good)["action"] in (0, 1)
        for method, path in (("GET", "/act"), ("POST", "/"), ("POST", "/x"), ("DELETE", "/x")):
            assert ask(port, method, path, {} if method == "POST" else None).status == 404
        with socket.create_connection(("127.0.0.1", port), timeout=20) as raw:
            raw.sendall(
                b"POST /act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n"
            )
            assert b" 400 " in raw.recv(1000)
    players = Players(rlstack.load(remembering), most=1)
    with pytest.raises(ValueError):
        players.act({"observation": [1.0] * 99, "player": "a"})
    shape = rlstack.load(remembering).spec.observation.shape
    assert players.act({"observation": np.zeros(shape).tolist(), "player": "b"})


class Anything:
    """Players that answer each step with the same action."""

    def __init__(self, action=0.5):
        self.action = action

    def describe(self):
        return {"env": "any"}

    def act(self, step):
        return {"action": self.action}

    predict = act

    def forget(self, player):
        return True


def test_numbers_that_are_not_finite_are_refused(balancing):
    with serving(Players(rlstack.load(balancing))) as port:
        for number, shown in (("NaN", "nan"), ("-Infinity", "-inf"), ("1e999", "inf")):
            for path in ("/act", "/predict"):
                body = f'{{"observation": [{number}, 0, 0, 0]}}'
                status, text, _ = ask(port, "POST", path, body)
                assert (status, text) == (
                    400,
                    f"observation must hold finite numbers; got {shown}.\n",
                )
        status, text, _ = ask(port, "POST", "/act", '{"observation": [0,0,0,0], "reward": NaN}')
        assert (status, text) == (400, "reward must hold finite numbers; got nan.\n")
        assert act(port, [0.0] * 4, "/predict")["action"] in (0, 1)


def test_lone_surrogates_are_refused_with_an_answer(balancing, capfd):
    """JSON may hold them, and UTF-8 may not."""
    with serving(Players(rlstack.load(balancing))) as port:
        status, text, _ = ask(port, "POST", "/act", '{"observation": [0,0,0,0], "\\ud800": 1}')
        assert status == 400 and text.endswith("got \\ud800.\n")
        assert act(port, [0.0] * 4, player="\ud800")["action"] in (0, 1)
    assert capfd.readouterr().err == ""


def check_padded(run, sizes, compiled):
    """Padded batches act as those that nothing was added to; rows of a player stay its own."""
    rng = np.random.default_rng(0)
    plain, served = rlstack.load(run), rlstack.load(run)
    players = Players(served)
    shape = plain.spec.observation.shape
    for rows in sizes:
        plain.reset()
        for _ in range(2):
            seen = rng.normal(size=(rows, *shape)).astype(plain.spec.observation.dtype)
            step = {"observation": seen.tolist(), "player": f"player {rows}"}
            found = players.predict(step)
            assert len(found["action"]) == len(found["value"]) == rows
            if rows == sizes[-1]:
                wanted = plain.predict(seen)
                np.testing.assert_allclose(found["value"], wanted.value, rtol=1e-4, atol=1e-5)
    assert served._predict._cache_size() == compiled
    return players, shape


def test_batches_of_many_sizes_are_compiled_for_few(balancing):
    check_padded(balancing, [*range(1, 40), 3], compiled=5)  # 1, 8, 16, 32 and 64 rows


@pytest.mark.slow
@pytest.mark.chosen
def test_padded_batches_keep_the_states_of_their_rows(remembering):
    players, shape = check_padded(remembering, [1, 3, 5, 9, 12], compiled=3)
    with pytest.raises(ValueError, match=r"the 12 environments of the last call.*got 11"):
        players.act({"observation": np.zeros((11, *shape)).tolist(), "player": "player 12"})
    ended = {"observation": np.zeros((12, *shape)).tolist(), "player": "player 12"}
    assert len(players.act({**ended, "first": [True] + 11 * [False]})["action"]) == 12


def test_an_answer_that_json_cannot_represent_is_an_error_of_the_server(capfd):
    with serving(Anything(float("nan"))) as port:
        status, text, _ = ask(port, "POST", "/act", {})
    assert status == 500 and "must answer with finite numbers" in text
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("request_line", "header", "why"),
    [
        ("POST /act", f"Content-Length: {'9' * 5000}", b"one Content-Length of at most"),
        ("POST /act", "Content-Length: 2\r\nContent-Length: 3", b"one Content-Length"),
        ("POST /act", "Content-Length: 2\r\nTransfer-Encoding: chunked", b"Transfer-Encoding"),
        ("DELETE /players/a", "Transfer-Encoding: chunked", b"no Transfer-Encoding"),
        ("GET /", f"Content-Length: {'9' * 5000}", b"one Content-Length"),
        *((f"{method} http://[", "X: 1", b"must ask for a path") for method in METHODS),
    ],
)
def test_a_malformed_request_is_refused_with_a_reason(capfd, request_line, header, why):
    request = f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{header}\r\n\r\n"
    with (
        serving(Anything()) as port,
        socket.create_connection(("127.0.0.1", port), timeout=20) as raw,
    ):
        raw.sendall(request.encode())
        answer = raw.makefile("rb").read()  # until the server closes
    assert answer.startswith(b"HTTP/1.1 400 ") and why in answer and b"Connection: close" in answer
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("method", ["GET", "DELETE", "OPTIONS"])
def test_a_body_that_is_not_needed_does_not_begin_the_next_request(method):
    with serving(Anything()) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        with contextlib.closing(connection):
            for body in ("{}", "x" * 100_000, None):
                connection.request(method, "/players/a" if method == "DELETE" else "/", body)
                answer = connection.getresponse()
                assert answer.status in (200, 204) and answer.headers["Connection"] is None
                answer.read()
                connection.request("POST", "/act", "{}")
                assert json.loads(connection.getresponse().read()) == {"action": 0.5}


def test_only_this_machine_and_the_web_pages_that_are_named_may_ask(balancing):
    page, body = "http://localhost:3000", {"observation": [0.0] * 4}
    with serving(Players(rlstack.load(balancing)), origins=[page]) as port:
        for host in ("evil.example", "127.0.0.1.evil.example"):
            assert ask(port, "POST", "/act", body, Host=host).status == 403
            assert ask(port, "GET", "/", Host=host).status == 403
        status, text, headers = ask(port, "POST", "/act", body, Origin="http://evil.example")
        assert status == 403 and "--origins" in text
        assert headers["Access-Control-Allow-Origin"] is None
        assert ask(port, "OPTIONS", "/act", Origin="http://evil.example").status == 403
        allowed = ask(port, "OPTIONS", "/act", Origin=page)
        assert allowed.status == 204 and allowed.headers["Access-Control-Allow-Origin"] == page
        assert "POST" in allowed.headers["Access-Control-Allow-Methods"]
        answer = ask(port, "POST", "/act", body, Origin=page)
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == page


class Pair(NamedTuple):
    left: object
    right: object


class Structured:
    """A policy whose specs have dicts and tuples; the action depends on the observation."""

    class Agent:
        def initial_state(self, rows):
            return ()

    agent = Agent()
    spec = EnvSpec(
        {"a": specs.Array((2,), np.float32), "b": (Pair(specs.Array((), np.int32), None),)},
        {"x": specs.BoundedArray((2,), np.float32, -np.inf, [1.0, 2.0])},
    )

    def reset(self, rows=None):
        pass

    def act(self, observation, reward):
        (pair,) = observation["b"]
        assert isinstance(pair, Pair) and pair.right is None
        return {"x": np.asarray(observation["a"], np.float32) + pair.left + reward}


def test_structures_go_through_json(monkeypatch):
    monkeypatch.setattr("rlstack.programs.tools.serve.players.Policy", Structured)
    players = Players(Structured())
    seen = {"a": [1.0, 2.0], "b": [[3, None]]}
    assert players.act({"observation": seen, "reward": 0.5}) == {"action": {"x": [4.5, 5.5]}}
    described = {"shape": [2], "dtype": "float32", "minimum": None, "maximum": [1.0, 2.0]}
    monkeypatch.setattr(
        Structured,
        "experiment",
        type("E", (), {"env": type("V", (), {"name": "n"})}),
        raising=False,
    )
    monkeypatch.setattr(Structured, "env_frames", 3, raising=False)
    shown = players.describe()
    assert shown["action"] == {"x": described} and shown["env_frames"] == 3
    assert json.loads(json.dumps(shown))["observation"]["b"][0][0]["dtype"] == "int32"


@pytest.mark.slow
@pytest.mark.chosen
def test_the_command_ends_with_ctrl_c_and_frees_its_port(balancing):
    arguments = [sys.executable, "-m", "rlstack", "serve", str(balancing), "--port", "0"]
    started = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        first = started.stdout.readline()
        assert first.startswith("http://127.0.0.1:") and first.endswith("Ctrl-C ends it\n")
        port = int(first.split("/")[2].split(":")[1])
        assert act(port, [0.0] * 4)["action"] in (0, 1)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().read()  # it stays open, and does not delay the end
        started.send_signal(signal.SIGINT)
        rest, errors = started.communicate(timeout=20)
        assert (started.returncode, rest, errors) == (0, "", "")
        connection.close()
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))
    finally:
        started.kill()
        started.communicate()


def test_errors_of_the_command_are_one_line(balancing, tmp_path, capsys):
    def failed(*args):
        code = cli.main("serve", [str(arg) for arg in args])
        errors = capsys.readouterr().err
        assert errors.startswith("rlstack serve: ") and errors.count("\n") == 1
        return code, errors

    assert failed(tmp_path / "none")[0] == 1
    assert "--port must be 0 to 65535" in failed(balancing, "--port", 70_000)[1]
    assert failed(balancing, "--max-players", 0)[0] == 2
    assert "cannot be combined" in failed(balancing, "--games", "x:1", "--name", "y")[1]
    assert "must be 'host:port'" in failed(balancing, "--games", "nowhere")[1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert "another program uses it" in failed(balancing, "--port", port)[1]
