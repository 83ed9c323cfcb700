"""Programs over each transport: as a single process bit for bit, and keys are nowhere."""

import json
import os
import threading
from pathlib import Path

import psutil
import pytest

from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.run import launch
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import transports
from tests.programs.launched import FAST, Launched
from tests.programs.running import TOPOLOGIES, nothing_left, ppo, run
from tests.programs.test_topologies import LOCK_STEP, check_parity, single

__all__ = ["single"]

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "topology"),
    [
        ("courier", "heavy_env"),
        ("zmq", "heavy_env"),
        pytest.param("zmq", "distributed", marks=pytest.mark.chosen),
    ],
)
def test_lock_step_over_sockets_equals_a_single_process_bit_for_bit(
    tmp_path, single, transport, topology
):
    program = {**LOCK_STEP, "transport": transport}
    with nothing_left():
        check_parity(single, ppo, 5200, topology, tmp_path / "run", program=program)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_processes_over_zmq_in_lock_step_equal_a_single_process_bit_for_bit(
    tmp_path, single, topology
):
    program = {**LOCK_STEP, "transport": "zmq", "launch": "processes"}
    check_parity(single, ppo, 5200, topology, tmp_path / "run", program=program)


@pytest.mark.slow
@pytest.mark.parametrize("interface", [pytest.param("", marks=pytest.mark.chosen), "0.0.0.0"])
def test_servers_over_zmq_listen_at_loopback_unless_told_otherwise(tmp_path, interface):
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.05):
            seen.update(listening() - before)

    def listening():
        found = psutil.Process().net_connections("tcp")
        return {c.laddr for c in found if c.status == psutil.CONN_LISTEN}

    before, looking = listening(), threading.Thread(target=look)
    looking.start()
    try:
        program = {"interface": interface, "num_actors": 1, "transport": "zmq"}
        run(ppo("light_env", program=program), tmp_path / "run")
    finally:
        over.set()
        looking.join()
    assert len(seen) >= 3  # coordinator, learner, service
    assert {place.ip for place in seen} == {interface or "127.0.0.1"}


@pytest.mark.slow
@pytest.mark.chosen
def test_keys_are_nowhere_but_in_a_file_that_is_gone_at_the_end(tmp_path):
    arguments = ("cartpole-ppo", "--topology", "light_env", "--frames", "100000000", *FAST)
    arguments += ("--program.transport", "zmq", "--run-dir", tmp_path / "run")
    with Launched(tmp_path / "run", *arguments) as launched:
        launched.wait_for_update()
        (path,) = [p for p in _files(tmp_path) if p.parent.name.startswith("rlstack-keys-")]
        keys = path.read_text().split()
        assert len(keys) == 4 and not path.is_relative_to(tmp_path / "run")
        seen = [
            f"{process.cmdline()} {process.environ()}"
            for process in [psutil.Process(launched.process.pid), *launched.processes()]
            if process.is_running()
        ]
        assert len(seen) >= 8
        found = [json.dumps([p.name, _text(p)]) for p in _files(tmp_path) if p != path]
        assert not [key for key in keys for text in (*seen, *found) if key in text]
        launched.process.terminate()
        _, left = launched.end(60)
        assert left == [] and not path.exists()
    assert not [key for key in keys for p in _files(tmp_path) if key in _text(p)]


def _files(folder):
    return [Path(at, name) for at, _, names in os.walk(folder) for name in names]


def _text(path):
    return path.read_text(errors="replace") if path.is_file() else ""


def test_each_way_to_launch_has_its_default(tmp_path):
    default = "courier" if transports.is_installed("courier") else "zmq"
    chosen = {}
    for how in ("threads", "processes"):
        experiment = ppo("heavy_env", program={"launch": how})
        with launch._started(experiment, RunDir(tmp_path)):
            chosen[how] = transports.current()
    assert chosen == {"threads": "direct", "processes": default}


def test_direct_calls_between_processes_are_refused():
    with pytest.raises(ValueError, match="transport must be zmq or courier"):
        ProgramConfig(transport="direct")
