"""How programs start: nodes wait for one another, and share what they compile."""

import dataclasses
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlstack.programs.build.environments import environment_spec
from rlstack.programs.program.base import Setup
from rlstack.programs.program.launch import compiled, launcher, local, processes, wiring
from rlstack.programs.program.launch.launchpad import launch
from rlstack.programs.program.launch.launchpad import titled as titled_script
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session import module_path
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.study import processes as trials
from tests.programs.launched import FAST, Launched
from tests.programs.running import nothing_left, ppo

VARIABLE = "JAX_COMPILATION_CACHE_DIR"


def test_the_folder_for_compiled_functions_is_private_and_removed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with compiled.shared() as variables:
        folder = variables[VARIABLE]
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        with open(os.path.join(folder, "jit_f-cache"), "w"):
            pass
    assert not os.path.exists(folder)


def test_a_launcher_removes_the_folder_of_a_parent_that_was_killed(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    with compiled.shared() as variables:
        monkeypatch.setenv(VARIABLE, variables[VARIABLE])
        compiled.remove()
        assert not os.path.exists(variables[VARIABLE])


def test_a_folder_that_the_user_has_chosen_is_used_and_kept(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with compiled.shared() as variables:
        assert variables == {}
    compiled.remove()
    assert tmp_path.exists()


def test_the_launcher_imports_what_nodes_need_before_it_is_told_of_them(tmp_path):
    directory = RunDir.create(tmp_path / "run", "test", 1)
    with nothing_left(), processes.started(launcher.LOCAL, directory) as process:
        until = time.monotonic() + 60.0
        while "jaxlib" not in Path(f"/proc/{process.pid}/maps").read_text():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)


def test_only_nodes_with_environments_wait_for_the_import_of_envpool(tmp_path, monkeypatch):
    experiment = ppo("light_env")
    setup = Setup(experiment, RunDir(tmp_path), environment_spec(experiment))
    nodes = wiring.indexed(graph_of(setup))
    monkeypatch.setitem(sys.modules, "envpool", object())
    described = [processes._described(node, index, setup) for node, index in nodes]
    assert {n.name.split("/")[0] for n in described if n.envpool} == {"actor", "evaluator"}
    monkeypatch.delitem(sys.modules, "envpool")
    assert not any(processes._described(node, index, setup).envpool for node, index in nodes)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_launcher_imports_for_a_node_when_the_nodes_before_it_have_started(tmp_path):
    """An import that ends the launcher shows that the node before it had been started."""
    (tmp_path / "envpool.py").write_text("raise SystemExit(7)")
    code = f"import sys; sys.path.insert(1, {str(tmp_path)!r}); {launcher.LOCAL.partition(';')[2]}"
    directory = RunDir.create(tmp_path / "run", "test", 1)
    with nothing_left(), processes.started(code, directory) as process:
        node = local.NodeProcess(
            name="first",
            run_dir=str(directory.path),
            record=str(directory.failures),
            log=str(tmp_path / "first" / "0"),
            variables={},
            niceness=0,
            grace=1.0,
            silence=0.0,
            max_restarts=0,
        )
        later = dataclasses.replace(
            node, name="later", log=str(tmp_path / "later" / "0"), envpool=True
        )
        processes._send(processes.Prepared([vars(node), vars(later)], "", b""), process)
        assert process.wait(60.0) == 7
        # The launcher makes the folder of a log when it starts the node.
        assert (tmp_path / "first").exists() and not (tmp_path / "later").exists()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(150, method="thread")
def test_actors_wait_for_a_learner_that_starts_late(tmp_path, monkeypatch):
    """Calls have a deadline of 10 s; with many nodes on few cores the learner starts later."""
    monkeypatch.delenv(VARIABLE, raising=False)  # so that the program makes its own folder
    run_dir = tmp_path / "run"
    args = ("cartpole-ppo", "--topology", "light_env", "--program.num-actors", 2, *FAST)
    with (
        nothing_left(),
        Launched(run_dir, *args, "--frames", 20_000, "--run-dir", run_dir) as program,
    ):
        program.wait_for(lambda: "learner" in program.nodes(), "the learner's process")
        learner = program.nodes()["learner"]
        learner.suspend()
        time.sleep(20.0)
        learner.resume()
        assert program.end(90) == (0, []), program.stderr
        assert program.failures() == []


@pytest.mark.parametrize("code", [launcher.LOCAL, launch.MANAGER, trials._MAIN])
def test_a_process_removes_no_entry_of_pythonpath(code, monkeypatch):
    """With PYTHONSAFEPATH there is no entry for the current directory that `python -c` added."""
    begins, _, _ = code.partition("from ")
    for added in ([], [""]):
        monkeypatch.setattr(sys, "path", [*added, "/one", "/two"])
        exec(begins, {})
        assert sys.path == ["/one", "/two"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("safe", ["", "1"])
@pytest.mark.parametrize("titled", [False, True])
def test_modules_are_those_of_pythonpath_with_and_without_a_safe_path(tmp_path, safe, titled):
    for name in ("first", "here"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "found.py").write_text(f"def main():\n    print({name!r})\n")
    script = tmp_path / "script.py"
    script.write_text("import found\nfound.main()\n")
    command = ["-c", module_path.code_of("found")]
    if titled:
        command = [titled_script.__file__, "title", str(script)]
    done = subprocess.run(
        [sys.executable, *command],
        cwd=tmp_path / "here",
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path / 'first'}{os.pathsep}{module_path.for_children()}",
            "PYTHONSAFEPATH": safe,
        },
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.stdout == "first\n", done.stderr
