"""`--program.metrics`: the text, who may read it, and that it is there only while a run trains."""

import contextlib
import dataclasses
import io
import math
import socket
import threading
import urllib.error
import urllib.request

import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.run import train
from rlstack.programs.session.callbacks import Callback
from rlstack.programs.session.metrics import server
from rlstack.programs.session.metrics.figures import Figures, Node, as_text
from rlstack.programs.session.metrics.processes import NodeProcess
from rlstack.programs.session.progress import Progress, open_logs
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage.loggers import InMemoryLogger
from tests.programs.running import nothing_left, ppo, run
from tests.rpc.test_addresses import needs_loopback

pytestmark = pytest.mark.timeout(100)
FIGURES = Figures(
    {"preset": 'a "b"\\c', "seed": "1"},
    budget=1000,
    frames=500,
    logs={
        "learner/steps": 20.0,
        "actor/episode_return": 12.5,
        "left/actor/episode_return": 3.0,
        "evaluator/episode_return": math.nan,
        "replay/sample_wait_seconds": 2.5,
        "learner/loss": -0.25,
    },
    logged=1e9,
    nodes={"actor/0": Node(True, 2, 0.5, 100.0, 3.0), "learner": Node(False, 0, 12.0)},
    processes={"actor/0": NodeProcess(7, 1.5, 10.0, 4096)},
)


def samples(text):
    """The values of a text, by name and labels."""
    parser = pytest.importorskip("prometheus_client.parser")
    found = {}
    for family in parser.text_string_to_metric_families(text):
        assert family.documentation and family.name.startswith("rlstack_")
        for sample in family.samples:
            found[(sample.name, *sorted(sample.labels.items()))] = sample.value
            assert (family.type == "counter") == sample.name.endswith("_total")
    return found


def test_prometheus_reads_the_text():
    found = samples(as_text(FIGURES))
    assert found[("rlstack_run_info", ("preset", 'a "b"\\c'), ("seed", "1"))] == 1
    for name, value in (
        ("frames_total", 500),
        ("frames_budget", 1000),
        ("updates_total", 20),
        ("episode_return", 12.5),
        ("last_log_timestamp_seconds", 1e9),
    ):
        assert found[(f"rlstack_{name}",)] == value
    assert math.isnan(found[("rlstack_evaluation_return",)])
    assert found[("rlstack_episode_return", ("policy", "left"))] == 3
    assert found[("rlstack_wait_seconds_total", ("log", "replay/sample_wait_seconds"))] == 2.5
    assert found[("rlstack_log", ("name", "learner/loss"))] == -0.25
    actor, learner = ("node", "actor/0"), ("node", "learner")
    for name, value in (
        ("up", 1),
        ("restarts_total", 2),
        ("heartbeat_age_seconds", 0.5),
        ("frames_per_second", 100),
        ("params_lag_updates", 3),
        ("memory_bytes", 4096),
        ("cpu_seconds_total", 1.5),
    ):
        assert found[(f"rlstack_node_{name}", actor)] == value
    assert found[("rlstack_node_up", learner)] == 0
    assert ("rlstack_node_frames_per_second", learner) not in found


def listening(address):
    cfg = ProgramConfig(metrics=address)
    return dataclasses.replace(preset("cartpole-ppo"), program=cfg)


@contextlib.contextmanager
def served(path, address, nodes=dict):
    logger = server.MetricsServer(listening(address), path, 100, nodes)
    try:
        yield logger
    finally:
        logger.close()
        logger.close()


def read(url, host=""):
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return answer.read().decode()


def test_a_port_alone_is_that_of_loopback_and_needs_its_name(tmp_path):
    with served(tmp_path, "0") as logger:
        assert logger.address.startswith("http://127.0.0.1:")
        assert "rlstack_frames_total 100\n" in read(logger.address)
        logger.write(250, {"learner/steps": 3})
        assert "rlstack_frames_total 250\n" in read(logger.address)
        assert "rlstack_updates_total 3\n" in read(logger.address, "localhost")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            read(logger.address, "elsewhere.example")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            read(logger.address.removesuffix("metrics"))
    with pytest.raises(urllib.error.URLError):
        read(logger.address)


@pytest.mark.parametrize(
    ("asked", "host"),
    [
        ("0.0.0.0:0", "127.0.0.1"),
        pytest.param("[::1]:0", "[::1]", marks=needs_loopback),
        pytest.param("[::]:0", "[::1]", marks=needs_loopback),
    ],
)
def test_another_address_is_listened_at_if_it_is_asked_for(tmp_path, asked, host):
    with served(tmp_path, asked) as logger:
        port = logger.address.removesuffix("/metrics").rpartition(":")[2]
        assert "rlstack_frames_total" in read(f"http://{host}:{port}/metrics")


def test_a_port_that_cannot_be_used_is_said_before_a_run_begins(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = rf"program\.metrics must be PORT or .* got {port}: Address already in use"
        with pytest.raises(ValueError, match=said):
            run(ppo("single_process", program={"metrics": str(port)}), tmp_path / "run")
    with pytest.raises(ValueError, match="an interface that has one"):
        server.check("nosuch0:9100")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


class _Reader(Callback):
    def __init__(self, url):
        self._url, self.texts = url, []

    def on_evaluation(self, frames, evaluation):
        self.texts.append(read(self._url))


def test_the_logs_of_a_run_have_the_server_only_if_it_is_asked_for(tmp_path):
    for address, expected in (("", 0), ("0", 1)):
        experiment = dataclasses.replace(listening(address), loggers=("jsonl",))
        directory = RunDir(tmp_path / f"run{expected}")
        directory.path.mkdir()
        logs = open_logs(directory, Progress(), experiment)
        found = [one for one in logs._loggers if isinstance(one, server.MetricsServer)]
        logs.write(10, {"learner/steps": 1})
        texts = [read(one.address) for one in found]
        assert len(texts) == expected
        assert all("rlstack_frames_total 10\n" in text for text in texts)
        logs.close()
        assert not any(thread.name == "metrics" for thread in threading.enumerate())


@pytest.mark.slow
@pytest.mark.chosen
def test_a_run_in_one_process_is_watched_while_it_trains(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/metrics"
    experiment = ppo("single_process", frames=600, program={"metrics": str(port)})
    reader = _Reader(url)
    with nothing_left():
        result = train.run(experiment, tmp_path / "run", callbacks=[reader], stream=io.StringIO())
    found = samples(reader.texts[-1])
    assert found[("rlstack_frames_total",)] == result.env_frames
    assert found[("rlstack_frames_budget",)] == 600
    assert found[("rlstack_updates_total",)] == result.learner_steps
    assert ("rlstack_frames_per_second",) in found
    with pytest.raises(urllib.error.URLError):
        read(url)


def test_the_coordinator_tells_of_every_node(tmp_path):
    coordinator = Coordinator(preset("cartpole-ppo"), RunDir(tmp_path), InMemoryLogger())
    counts, gauges = {"env_frames": 640.0}, {"params/version": 2.0}
    coordinator.report("actor/0", 1, 7, counts, gauges, {}, 1)
    coordinator.report("learner", 0, 8, {"learner_steps": 5.0}, {}, {}, 1)
    nodes = coordinator.figures()
    assert {name: node.restarts for name, node in nodes.items()} == {"actor/0": 1, "learner": 0}
    assert all(node.up and node.silence == 0 for node in nodes.values())
    assert nodes["actor/0"].lag == 3 and nodes["learner"].frames_per_second is None
    assert nodes["actor/0"].frames_per_second >= 0
