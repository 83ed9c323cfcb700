"""`rlstack top`: the state of runs, from their files and processes."""

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from rlstack.programs.cli import status as cli
from rlstack.programs.session.metrics import processes
from rlstack.programs.session.run_dir import RunDir, RunDirError
from rlstack.programs.tools.status.runs import STATES, NodeRows, RunReader, find_runs
from rlstack.programs.tools.status.top import Top, show
from tests.programs.launched import FAST, Launched
from tests.programs.tools.status.dashboards import FOREIGN

CONFIG = {"preset": "cartpole-ppo", "topology": "heavy_env", "frames": 1000}
RESULT = {
    "eval_return_mean": 9.0,
    "eval_return_std": 1.0,
    "eval_episodes": 10,
    "env_frames": 1000,
    "learner_steps": 5,
    "wall_seconds": 3.0,
    "frames_per_second": 300.0,
    "seed": 1,
    "topology": "heavy_env",
    "preset": "cartpole-ppo",
    "git_commit": "unknown",
}
NOW = 1_000_100.0

pytestmark = [pytest.mark.timeout(60)]


@pytest.fixture
def run(tmp_path):
    directory = RunDir.create(tmp_path / "runs" / "one", "cartpole-ppo", 1)
    directory.write_config(json.dumps(CONFIG))
    return directory


def log(run, *lines):
    with open(run.metrics, "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def line(frames, seconds, **logs):
    return {"env_frames": frames, "wall_time": 1_000_000.0 + seconds, **logs}


def state(run):
    return RunReader(run.path, lambda: NOW).read().state


def shown(*paths, **settings):
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(paths, console, once=True, limit=settings.get("limit", 20))
    return console.export_text()


def test_each_state_is_told_from_the_files(run):
    seen = [state(run)]
    with run.claimed() as claimed:
        seen.append(state(run))
        log(run, line(500, 0))
        seen.append(state(run))
        lock = json.loads((run.path / ".lock").read_text())
        claimed.write_result({**RESULT, "env_frames": 400})
    seen.append(state(run))  # a resumed run was interrupted after its result
    (run.path / ".lock").write_text(json.dumps({**lock, "started": 1}))
    seen.append(state(run))
    (run.path / ".lock").write_text(json.dumps({**lock, "machine": "another"}))
    seen.append(state(run))
    (run.path / ".lock").write_text("{}")
    failure = {"node": "learner", "reason": "no memory", "restarts": False}
    run.failures.write_text(json.dumps(failure) + "\n")
    seen.append(state(run))
    run.write_result(RESULT)
    seen.append(state(run))
    words = "stopped, starting, running, stopped, killed, elsewhere, failed, finished"
    assert seen == words.split(", ")
    assert set(seen) == set(STATES)


def test_only_new_lines_are_read_and_waits_are_shares_of_the_time(run):
    reader = RunReader(run.path, lambda: NOW)
    assert reader.read().silence == float("inf")
    log(run, *(line(i, i, **{"actor/add_wait_seconds": 0.25 * i, "loss": 1}) for i in range(9)))
    with open(run.metrics, "a") as file:
        file.write('{"env_frames": 9, "wall')
    found = reader.read()
    assert (found.frames, found.budget, found.silence) == (8, 1000, 92.0)
    assert found.waits == {"actor/add_wait_seconds": 0.25}
    with open(run.metrics, "a") as file:
        file.write('_time": 1000010.0, "loss": "nan"}\n')
    found = reader.read()
    assert (found.frames, found.silence) == (9, 90.0)
    assert found.logs["loss"] != found.logs["loss"]
    # A resumed run has moved the lines after its checkpoint away.
    run.metrics.unlink()
    log(run, line(3, 3))
    assert reader.read().frames == 3


def test_the_table_has_runs_nodes_and_restarts(run, tmp_path, monkeypatch):
    log(run, line(0, 0), line(500, 2, **{"actor/frames_per_second": 250, "learner/steps": 7}))
    log(run, line(600, 3, **{"actor/episode_return": 21.5, "replay/sample_wait_seconds": 0.5}))
    for node in ("actor/0", "actor/1", "learner/0"):
        (run.node_logs / node).parent.mkdir(parents=True, exist_ok=True)
        (run.node_logs / node).touch()
    failure = {"node": "actor/1", "reason": "killed", "restarts": True}
    run.failures.write_text(2 * (json.dumps(failure) + "\n"))
    other = RunDir.create(tmp_path / "runs" / "two", "p", 1)
    other.write_config(json.dumps(CONFIG))
    one = processes.NodeProcess(77, 5.0, 10.0, 2**20)
    monkeypatch.setattr(processes, "find", lambda: {str(run.path): {"actor/0": one}})
    with run.claimed():
        rows = [text.split() for text in shown(tmp_path / "runs").splitlines()]
    first = " ".join(next(row for row in rows if row[:1] == ["one"]))
    assert "running 600/1,000 60% 250 21.5 7" in first and " 2 " in first
    assert ["actor/0", "up", "77", "0.50", "1", "MiB", "0"] in rows
    assert ["actor/1", "down", "2"] in rows and ["learner", "down", "0"] in rows
    assert sum(row[:1] == ["two"] for row in rows) == 1
    assert "1 more runs" in shown(tmp_path / "runs", limit=1)
    with pytest.raises(RunDirError, match="must be the directory of a run"):
        Top([tmp_path / "none"])
    assert find_runs(tmp_path) == [run.path, other.path]


def test_each_run_is_found_once_though_links_loop(run):
    folder = run.path.parent
    (folder / "a").symlink_to(folder)  # as does "latest", before the run's own name
    (folder / "b").mkdir()
    (folder / "b" / "up").symlink_to(folder)
    (folder / "latest").symlink_to(run.path)
    assert find_runs(folder) == [run.path]
    (folder / "b" / "two").mkdir()
    (folder / "b" / "two" / "config.json").write_text("{}")
    assert find_runs(folder) == [folder / "b" / "two", run.path]
    assert find_runs(folder / "latest") == [folder / "latest"]


def test_a_config_with_a_byte_order_mark_is_read(run):
    config = run.path / "config.json"
    config.write_bytes(b"\xef\xbb\xbf" + config.read_bytes())
    found = RunReader(run.path).read()
    assert (found.preset, found.budget) == ("cartpole-ppo", 1000)


@pytest.mark.parametrize("text", FOREIGN)
def test_a_foreign_or_damaged_config_is_a_row_of_the_table(run, text):
    other = run.path.with_name("two")
    other.mkdir()
    (other / "config.json").write_text(text)
    rows = [row.split() for row in shown(run.path.parent).splitlines()]
    assert {"one", "two"} < {row[0] for row in rows}
    assert next(row for row in rows if row[0] == "two")[-3:] == ["0/0", "0%", "0"]


def test_a_config_that_is_damaged_later_does_not_change_what_is_known(run):
    reader = RunReader(run.path, lambda: NOW)
    assert reader.read().budget == 1000
    run.config.write_text("[1]")
    assert (reader.read().budget, reader.read().preset) == (1000, "cartpole-ppo")


def test_the_budget_has_the_steps_learned_from_before_acting(run):
    config = {"frames": 1000, "offline_updates": 10}
    run.config.write_text(json.dumps({**config, "replay": {"batch_size": 8, "unroll_length": 2}}))
    assert RunReader(run.path, lambda: NOW).read().budget == 1160


def test_the_limit_must_be_positive(run, capsys):
    for limit in (0, -1):
        assert cli.top([str(run.path), "--once", "--limit", str(limit)]) == 1
        errors = capsys.readouterr().err
        assert errors == f"rlstack top: --limit must be at least 1; got {limit}\n"


def test_processes_are_found_by_their_titles(tmp_path):
    def process(pid, title, ticks, start):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "cmdline").write_bytes(title.encode() + b"\0\0")
        fields = ["S", *["0"] * 10, str(ticks), "0", *["0"] * 6, str(start), "0"]
        (tmp_path / pid / "stat").write_text(f"{pid} (a) b) {' '.join(fields)}")
        (tmp_path / pid / "statm").write_text("9 2 1")

    ticks = os.sysconf("SC_CLK_TCK")
    (tmp_path / "uptime").write_text("100.0 1.0")
    process("5", "rlstack: actor/0 /runs/a b", 3 * ticks, 90 * ticks)
    process("6", "rlstack: actor/0:env/0-1 /runs/a b", 4 * ticks, 95 * ticks)
    process("7", "rlstack: supervisor:actor/0 /runs/a b", 1, 0)
    process("8", "rlstack: launcher /runs/a b", 1, 0)
    process("9", "bash", 1, 0)
    (tmp_path / "10").mkdir()  # has ended
    found = processes.find(tmp_path)
    assert set(found) == {"/runs/a b"} and set(found["/runs/a b"]) == {"actor/0"}
    actor = found["/runs/a b"]["actor/0"]
    assert (actor.pid, actor.cpu_seconds, actor.age) == (5, 7.0, 10.0)
    meter = processes.CpuMeter()
    assert meter.share("a", actor, 100.0) == pytest.approx(0.7)
    assert meter.share("a", actor._replace(cpu_seconds=8.0), 102.0) == pytest.approx(0.5)
    assert processes.find(tmp_path / "none") == {}


def test_the_command_does_not_import_jax(run):
    code = "import sys; from rlstack.programs.__main__ import main; code = main(sys.argv[1:]); "
    code += "print('jax' in sys.modules, code)"

    def top(*args):
        command = [sys.executable, "-c", code, "top", *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=50)

    done = top(str(run.path), "--once")
    assert done.stdout.endswith("False 0\n"), done.stderr
    assert "one (cartpole-ppo, heavy_env)" in done.stdout
    assert top(str(run.path / "none")).stdout == "False 1\n"


@pytest.mark.slow
@pytest.mark.timeout(150, method="thread")
def test_a_running_program_is_shown_with_its_nodes(tmp_path):
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", "heavy_env", "--program.num-actors", 1, *FAST)
    with Launched(run_dir, *args, "--run-dir", run_dir) as program:
        program.wait_for(lambda: "actor/0" in program.titles(), "an actor")
        program.wait_for(lambda: "running" in shown(run_dir), "logs")
        rows = [text.split()[:2] for text in shown(run_dir).splitlines()]
        assert {("actor/0", "up"), ("learner", "up")} <= {tuple(row) for row in rows}
    assert "running" not in shown(run_dir)


def test_nodes_of_several_policies_have_the_names_of_their_processes(run):
    for name in ("actor/0", "learner/0", "learner/1", "inferencer/0", "inferencer/1"):
        log_file = run.node_logs / name
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log_file.write_text("")
    status = RunReader(run.path).read()
    assert set(status.nodes) == {"actor/0", "inferencer/0", "inferencer/1", "learner"}
    names = ("actor/0", "learner/left", "learner/right", "inferencer/left/0", "inferencer/right/0")
    found = {name: processes.NodeProcess(1, 0.0, 1.0, 1) for name in names}
    rows = NodeRows().of(status, found)
    assert {row.name: row.state for row in rows} == dict.fromkeys(names, "up")
    one = {name: process for name, process in found.items() if name == "actor/0"}
    assert "learner" in {row.name for row in NodeRows().of(status, one) if row.state == "down"}
