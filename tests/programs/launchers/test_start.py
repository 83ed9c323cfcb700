"""How programs start: nodes wait for one another, and share what they compile."""

import os
import stat
import time

import pytest

from programs.launchers import compiled
from tests.programs.launched import FAST, Launched
from tests.programs.running import nothing_left

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
