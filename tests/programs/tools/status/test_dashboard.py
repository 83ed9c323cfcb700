"""`rlstack dashboard`: its data, its server, and its page in a browser."""

import csv
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from rlstack.programs.cli import status as cli
from rlstack.programs.session.metrics import processes
from rlstack.programs.session.run_dir import RunDirError
from rlstack.programs.tools.status.curves import Curves
from rlstack.programs.tools.status.dashboard import Dashboard
from rlstack.programs.tools.status.server import DashboardServer
from tests.programs.tools.status.dashboards import (
    FOREIGN,
    RESULT,
    ask,
    ask_json,
    command,
    finish,
    line,
    log,
    make_run,
)

RETURN = "evaluator/episode_return"

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def port(runs):
    now = [0.0]

    def clock():  # every question reads the files
        now[0] += 10.0
        return now[0]

    with DashboardServer(Dashboard(runs, clock=clock), 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join(10)
        assert not thread.is_alive()


def values(port, run, name=RETURN):
    """The points of a curve: frames, seconds since the first line, value."""
    plots = [
        ask_json(port, f"/plots.json?run={run}&name={name}{axis}") for axis in ("", "&hours=1")
    ]
    if not plots[0]:
        return []
    (frames,), (hours,) = (curves_of(found[name]) for found in plots)
    assert frames["estimate"] == hours["estimate"]
    seconds = [round(3600 * x, 1) for x in hours["x"]]
    return [list(point) for point in zip(frames["x"], seconds, frames["estimate"], strict=True)]


def curves_of(figure):
    """The numbers in a figure."""
    return json.loads(figure.split('<script type="application/json">')[1].split("<")[0])["curves"]


def test_finished_and_growing_runs_and_torn_lines(runs, port):
    assert ask_json(port, "/state.json")["runs"] == []
    finish(make_run(runs / "one"))
    growing = make_run(runs / "two", seed=2)
    with growing.claimed():
        first, second = ask_json(port, "/state.json")["runs"]
        assert (first["id"], first["state"], first["frames"]) == ("two", "starting", 0)
        assert (second["id"], second["state"], second["result"]) == ("one", "finished", 9.0)
        assert values(port, "one") == [[100.0 * i, 10.0 * i - 10, float(i)] for i in range(1, 11)]
        assert values(port, "two") == []
        log(growing, line(10, **{RETURN: 3, "loss": math.nan}))
        with open(growing.metrics, "a") as file:
            file.write('{"env_frames": 20, "wall_time": 1000')
        run = ask_json(port, "/state.json")["runs"][0]
        assert (run["state"], run["frames"], run["metrics"]) == ("running", 10, [RETURN, "loss"])
        assert run["logs"]["loss"] is None
        assert values(port, "two") == [[10.0, 0.0, 3.0]]
        with open(growing.metrics, "a") as file:
            file.write(f'002.0, "{RETURN}": 5}}\nno JSON\n[1]\n')
        again = ask_json(port, "/state.json")["runs"][0]
        assert again["version"] != run["version"] and again["frames"] == 20
        assert values(port, "two") == [[10.0, 0.0, 3.0], [20.0, 1.0, 5.0]]
        # A resumed run has moved the lines after its checkpoint away.
        growing.metrics.unlink()
        log(growing, line(10, **{RETURN: 3}))
        run = ask_json(port, "/state.json")["runs"][0]
        assert values(port, "two") == [[10.0, 0.0, 3.0]] and run["version"] != again["version"]
    shutil.rmtree(runs / "one")
    assert [run["id"] for run in ask_json(port, "/state.json")["runs"]] == ["two"]
    assert ask(port, "/plots.json?run=one&name=a")[0] == 404


def test_only_new_bytes_are_read(runs, port):
    run = make_run(runs / "one")
    log(run, line(10, loss=1))
    assert values_after(port) == [1.0]
    with open(run.metrics, "r+b") as file:  # a change of old bytes is not seen
        file.write(b"x")
    log(run, line(20, loss=2))
    assert values_after(port) == [1.0, 2.0]


def values_after(port):
    ask_json(port, "/state.json")
    return [value for _, _, value in values(port, "one", "loss")]


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_or_damaged_config_leaves_the_other_runs_on_the_page(runs, port, text):
    finish(make_run(runs / "one"))
    other = runs / "two"
    other.mkdir()
    (other / "config.json").write_text(text)
    found = {run["id"]: run for run in ask_json(port, "/state.json")["runs"]}
    assert set(found) == {"one", "two"} and found["one"]["budget"] == 1000
    assert (found["two"]["budget"], found["two"]["state"]) == (0, "stopped")


def test_foreign_and_diverged_files_of_a_run_leave_it_on_the_page(runs, port):
    diverged = finish(make_run(runs / "one"))
    diverged.write_result({**RESULT, "eval_return_mean": math.nan})
    other = make_run(runs / "two")
    log(other, line(10, loss=1))
    with open(other.metrics, "a") as file:
        file.write('{"env_frames": "many", "wall_time": 1}\n{"env_frames": NaN, "wall_time": 1}\n')
        file.write(f'{{"env_frames": 20, "wall_time": 2, "loss": 1{"0" * 400}}}\n')
        file.write('{"env_frames": 30, "wall_time": 3, "program/restarts": NaN}\n')
    (other.path / ".lock").write_text('{"pid": "none"}')
    other.result.write_text(json.dumps({**RESULT, "env_frames": [1]}))
    found = {run["id"]: run for run in ask_json(port, "/state.json")["runs"]}
    assert (found["one"]["state"], found["one"]["result"]) == ("finished", None)
    assert (found["two"]["frames"], found["two"]["result"]) == (30, None)
    assert values(port, "two", "loss") == [[10.0, 0.0, 1.0]]


def test_runs_of_sets_and_sweeps_are_compared_by_the_options_that_differ(runs, tmp_path, port):
    for discount in (0.9, 0.99):
        for seed in (1, 2):
            finish(make_run(runs / "sweep/trials" / str(discount) / f"seed={seed}", seed, discount))
    (runs / "sweep/trials/0.9/seed=1/deep").mkdir()
    found = {run["id"]: run for run in ask_json(port, "/state.json")["runs"]}
    assert len(found) == 4
    one, two = (found[f"sweep/trials/0.99/seed={seed}"] for seed in (1, 2))
    assert one["options"] == {"seed": "1", "agent.discount": "0.99"}
    assert one["group"] == two["group"] == "cartpole-ppo agent.discount=0.99"
    assert found["sweep/trials/0.9/seed=1"]["group"] != one["group"]
    alone = Dashboard(runs / "sweep/trials/0.9/seed=1").state()
    assert [(run["id"], run["name"]) for run in alone["runs"]] == [(".", "seed=1")]
    limited = Dashboard(runs, limit=3).state()
    assert (len(limited["runs"]), limited["hidden"]) == (3, 1)
    with pytest.raises(RunDirError, match="no such directory"):
        Dashboard(tmp_path / "none")


def test_curves_of_several_seeds_are_their_mean_and_range(runs, port):
    for seed, last in ((1, 6.0), (2, 20.0)):
        run = make_run(runs / str(seed), seed)
        log(run, line(0, loss=2), line(100 * seed, loss=last), line(900, rare=1))
    ask_json(port, "/state.json")
    query = "/plots.json?run=1&run=2&name=loss&name=none"
    plots = ask_json(port, query)
    assert list(plots) == ["loss"]
    assert [curve["name"] for curve in curves_of(plots["loss"])] == ["1", "2"]
    assert "polygon" not in plots["loss"] and plots["loss"].count("<circle") == 2
    joined = ask_json(port, query + "&seeds=1")["loss"]
    (curve,) = curves_of(joined)
    assert (curve["x"][0], curve["x"][-1]) == (0, 100)  # where both have values
    # At 100 frames, run 1 has 6, and run 2 is halfway between 2 and 20.
    assert [curve[name][-1] for name in ("estimate", "low", "high")] == [8.5, 6, 11]
    assert "<polygon" in joined and "hours" not in joined
    assert "hours" in ask_json(port, query + "&hours=1")["loss"]


def test_a_part_of_the_x_axis_is_shown(runs, port):
    log(make_run(runs / "1"), *(line(100 * i, loss=i) for i in range(10)))
    ask_json(port, "/state.json")
    query = "/plots.json?run=1&name=loss"
    (curve,) = curves_of(ask_json(port, query + "&from=250&to=600")["loss"])
    assert (curve["x"], curve["estimate"]) == ([300, 400, 500, 600], [3, 4, 5, 6])
    (curve,) = curves_of(ask_json(port, query + "&from=750")["loss"])
    assert curve["x"] == [800, 900]
    assert ask_json(port, query + "&from=901") == {}
    assert ask(port, query + "&to=much")[0] == 400


def test_the_newest_videos_of_a_run_are_shown(runs, port):
    run = make_run(runs / "1")
    make_run(runs / "2")
    assert [x["videos"] for x in ask_json(port, "/state.json")["runs"]] == [[], []]
    run.videos.mkdir()
    for name in ("900.mp4", "1000.mp4", "1.gif", "2.gif", "3.gif", "4.gif", "5.txt", "x.mp4"):
        (run.videos / name).write_bytes(b"frames of " + name.encode())
    time.sleep(1.1)  # a state is kept for a second
    found = {x["id"]: x["videos"] for x in ask_json(port, "/state.json")["runs"]}
    assert found == {"1": ["2.gif", "3.gif", "4.gif", "900.mp4", "1000.mp4"], "2": []}
    for name, kind in (("1000.mp4", "video/mp4"), ("2.gif", "image/gif")):
        status, headers, body = ask(port, f"/video?run=1&name={name}")
        assert (status, headers["Content-Type"], body) == (200, kind, f"frames of {name}")
    refused = ("run=1&name=5.txt", "run=2&name=2.gif", "run=1&name=../config.json", "run=1", "")
    for query in refused:
        assert ask(port, f"/video?{query}")[0] == 404, query
    (run.videos / "2.gif").unlink()
    assert ask(port, "/video?run=1&name=2.gif")[0] == 404


def test_two_environments_are_never_in_one_plot(runs, port):
    for name, env in (("1", "ALE/Pong-v5"), ("2", "my.games:Tag"), ("3", "ALE/Pong-v5")):
        log(make_run(runs / name, int(name), env=env), line(0, loss=1), line(100, loss=2))
    found = {run["id"]: run["environment"] for run in ask_json(port, "/state.json")["runs"]}
    assert found == {"1": "ALE/Pong-v5", "2": "Tag", "3": "ALE/Pong-v5"}
    plots = ask_json(port, "/plots.json?run=1&run=2&run=3&name=loss")
    assert {title: [c["name"] for c in curves_of(plot)] for title, plot in plots.items()} == {
        "loss, ALE/Pong-v5": ["1", "3"],
        "loss, Tag": ["2"],
    }


def test_curves_are_smoothed_and_have_a_logarithmic_axis(runs, port):
    log(make_run(runs / "1"), *(line(10 * i, loss=v) for i, v in enumerate((8, 2, -4, 1000))))
    ask_json(port, "/state.json")
    query = "/plots.json?run=1&name=loss"
    # By hand, with the weight 0.5: 8; (4 + 2) / 1.5; (2 + 1 - 4) / 1.75;
    # (1 + 0.5 - 2 + 1000) / 1.875.
    (curve,) = curves_of(ask_json(port, query + "&smooth=0.5")["loss"])
    assert curve["estimate"] == pytest.approx([8, 4, -4 / 7, 533.0667], rel=1e-5)
    plot = ask_json(port, query + "&log=1")["loss"]
    (curve,) = curves_of(plot)
    assert (curve["x"], curve["estimate"]) == ([0, 10, 30], [8, 2, 1000])
    points = re.search(r'<polyline points="([^"]*)"', plot)[1].split()
    first, second, third = (float(point.split(",")[1]) for point in points)
    # log10(1000 / 8) is 2.097, and log10(8 / 2) is 0.602.
    assert (first - third) / (second - first) == pytest.approx(2.097 / 0.602, rel=0.01)
    assert ">10</text>" in plot and ">1000</text>" in plot and "log10" not in plot
    for wrong in ("1", "-0.1", "nan", "much"):
        assert ask(port, f"{query}&smooth={wrong}")[0] == 400
    log(make_run(runs / "2"), line(0, loss=-1), line(10, loss=0))
    wait_for_run(port, "2")
    assert ask_json(port, "/plots.json?run=2&name=loss&log=1") == {}


def wait_for_run(port, name):
    deadline = time.monotonic() + 10
    while name not in {run["id"] for run in ask_json(port, "/state.json")["runs"]}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_data_behind_the_plots_are_downloaded(runs, port):
    log(make_run(runs / "a,b", env="Tag"), line(0, loss=1.5), line(360, loss=2.5))
    ask_json(port, "/state.json")
    status, headers, body = ask(port, "/data.csv?run=a%2Cb&name=loss&name=none")
    assert status == 200 and headers["Content-Type"].startswith("text/csv")
    assert list(csv.reader(body.splitlines())) == [
        ["environment", "group", "run", "log", "frames", "hours", "value"],
        ["Tag", "cartpole-ppo", "a,b", "loss", "0.0", "0.0", "1.5"],
        ["Tag", "cartpole-ppo", "a,b", "loss", "360.0", "0.01", "2.5"],
    ]
    assert ask(port, "/data.csv?run=..&name=loss")[0] == 404


def test_nodes_waits_and_the_bottleneck(runs, port, monkeypatch):
    run = make_run(runs / "one")
    waits = ("actor/add_wait_seconds", "replay/sample_wait_seconds")
    log(run, *(line(10 * i, **{waits[0]: 0.25 * i, waits[1]: 0.5 * i}) for i in range(9)))
    (run.node_logs / "actor").mkdir(parents=True)
    (run.node_logs / "actor/0").touch()
    (run.node_logs / "actor/1").touch()
    one = processes.NodeProcess(77, 5.0, 10.0, 2**20)
    monkeypatch.setattr(processes, "find", lambda: {str(run.path): {"actor/0": one}})
    with run.claimed():
        shown = ask_json(port, "/state.json")["runs"][0]
    assert (shown["actors_wait"], shown["learner_waits"]) == (0.25, 0.5)
    assert shown["bottleneck"] == (
        "Acting is the bottleneck: the learner waits 50% of the time for batches."
    )
    up, down = shown["nodes"]
    assert (up["name"], up["state"], up["pid"], up["cores"]) == ("actor/0", "up", 77, 0.5)
    assert (down["name"], down["state"], down["pid"]) == ("actor/1", "down", None)


def test_long_curves_have_a_bounded_number_of_points():
    curves = Curves(limit=8)
    for i in range(1000):
        curves.take(line(i, loss=i, rare=math.nan))
    points = curves.points("loss")
    assert 4 <= len(points) <= 9 and points[-1][0] == 999
    assert points[0][2] == sum(range(128)) / 128
    assert all(math.isnan(value) for _, _, value in curves.points("rare"))
    assert curves.points("none") == []
    curves.clear()
    assert curves.names() == []
    with pytest.raises(ValueError, match="must be even"):
        Curves(limit=3)


def test_only_requests_of_this_machine_for_known_paths_are_answered(runs, port):
    make_run(runs / "one")
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1", f"127.0.0.1:{port}"):
        status, headers, body = ask(port, "/", [host])
        assert status == 200 and "<title>rlstack dashboard" in body
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers
    refused = ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "x@localhost", "")
    for host in (*([name] for name in refused), [], ["localhost", "evil.example"]):
        for path in ("/", "/state.json", "/plots.json?run=one&name=a"):
            status, _, body = ask(port, path, host)
            assert status == 403 and "localhost" in body, host
    paths = ("/config.json", "/one/config.json", "/../config.json", "//etc/passwd", "/state.json/")
    runs_asked = ("../runs/one", "/etc", "none", "one/checkpoints")
    for path in (*paths, *(f"/plots.json?run={name}&name=a" for name in runs_asked)):
        assert ask(port, path)[0] == 404, path
    assert ask(port, "/plots.json?name=a")[0] == 400
    assert ask(port, "/", method="POST")[0] == 501
    status, _, body = ask(port, "http://[")
    assert status == 400 and body.startswith("a request must ask for a path")
    assert "http" not in ask(port, "/")[2].replace("http://www.w3.org/2000/svg", "")


def test_the_command_ends_with_ctrl_c_and_frees_its_port(runs):
    finish(make_run(runs / "one"))
    with command(runs, "--port", 0) as (started, port):
        assert len(ask_json(port, "/state.json")["runs"]) == 1
        busy = subprocess.run(
            [sys.executable, "-m", "rlstack", "dashboard", str(runs), "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert busy.returncode == 1
        assert busy.stderr == (
            f"rlstack dashboard: port {port} cannot be used: another program uses it. Choose "
            "another with --port N; --port 0 takes a free one\n"
        )
        # A connection that says nothing does not hold the command up.
        with socket.create_connection(("127.0.0.1", port)):
            started.send_signal(signal.SIGINT)
            rest, errors = started.communicate(timeout=20)
        assert (started.returncode, rest, errors) == (0, "", "")
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind(("127.0.0.1", port))


def test_errors_of_the_command_are_one_line(runs, capsys, monkeypatch):
    def failed(*args):
        code = cli.dashboard([str(arg) for arg in args])
        errors = capsys.readouterr().err
        assert errors.startswith("rlstack dashboard: ") and errors.count("\n") == 1
        return code, errors

    assert failed(runs / "none")[0] == 1
    assert "--port must be 0 to 65535" in failed(runs, "--port", 70_000)[1]
    assert "--limit must be at least 1" in failed(runs, "--limit", 0)[1]
    monkeypatch.setattr(DashboardServer, "server_bind", forbidden)
    assert "this user may not use it" in failed(runs, "--port", 80)[1]


def forbidden(_):
    raise PermissionError(13, "Permission denied")
