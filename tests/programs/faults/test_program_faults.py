"""Nodes are killed: programs go on if that is safe, otherwise end, and leave nothing behind."""

import dataclasses
import io
import random
import re
import signal
import time

import numpy as np
import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.run import train
from rlstack.programs.run.launch import ProgramError
from rlstack.replay import ReplayConfig
from tests.programs.launched import FAST, Launched
from tests.programs.running import SHARED_MEMORY, TOPOLOGIES, failures, nothing_left, series

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(180, method="thread")

LAUNCHES = [
    "threads",
    pytest.param("processes", marks=pytest.mark.slow),
    pytest.param("launchpad", marks=pytest.mark.slow),
]
ENDLESS = ("--frames", 100_000_000)
TWO = ("--program.num-actors", 2, "--program.num-inferencers", 2)


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


def ppo(topology, *more):
    return ("cartpole-ppo", "--topology", topology, *TWO, *FAST, *more)


def dqn(topology, *more):
    """A preset whose updates take a few hundred bytes, so that frames come quickly."""
    return (
        "cartpole-dqn", "--topology", topology, *FAST, "--replay.batch-size", 32,
        "--replay.samples-per-insert", 4, *more,
    )  # fmt: skip


def faulty(topology, flag=None, fault="raise", **program):
    """PPO on environments of which one fails at its third step; only once if ``flag`` is given."""
    options = {"fault": fault} | ({"flag": str(flag)} if flag else {})
    return Experiment(
        preset="faulty",
        agent=PPOConfig(num_epochs=1, num_minibatches=1),
        env=EnvConfig(
            "tests.envs.faulty:Faulty",
            num_envs=4,
            type="for_loop",
            options=options,
            eval_options={"fault": "none"},
        ),
        replay=ReplayConfig(sampler="fifo", batch_size=4, unroll_length=16, max_size=8),
        frames=3000,
        topology=topology,
        log_period=200,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        program=ProgramConfig(**program),
    )


def check_gone(program, code, left):
    assert left == []
    assert not [f for f in program.failures() if f["node"] in ("learner", "coordinator", "replay")]
    assert code in (0, 130, 143), program.stderr


def check_restart(topology, name, tmp_path, frames=150_000):
    run_dir = tmp_path / "run"
    with Launched(run_dir, *ppo(topology, "--frames", frames, "--run-dir", run_dir)) as program:
        program.wait_for_update()
        program.kill(name)
        program.wait_for_log("program/restarts", at_least=1)
        code, left = program.end(120)
        check_gone(program, code, left)
        assert code == 0
        (failure,) = program.failures()
    assert (failure["node"], failure["reason"]) == (name, "killed by SIGKILL")
    assert (failure["incarnation"], failure["restarts"]) == (0, True)
    assert series(run_dir, "program/restarts")[-1] == 1
    assert np.isfinite(series(run_dir, "learner/loss")).all()
    assert (run_dir / "result.json").exists()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(120, method="thread")
def test_a_killed_actor_is_started_again(tmp_path):
    check_restart("heavy_env", "actor/1", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "name"),
    [
        ("light_env", "actor/0"),
        ("distributed", "actor/1"),
        ("light_env", "inferencer/0"),
        ("distributed", "inferencer/1"),
        ("heavy_env", "evaluator"),
    ],
)
def test_a_killed_node_that_holds_nothing_is_started_again(tmp_path, topology, name):
    # The evaluator has the lowest priority, so its restart takes long.
    check_restart(topology, name, tmp_path, frames=600_000 if name == "evaluator" else 150_000)


@pytest.mark.parametrize(
    ("topology", "launch"),
    [
        ("heavy_env", "threads"),
        pytest.param("light_env", "threads", marks=[pytest.mark.slow, pytest.mark.chosen]),
        pytest.param("heavy_env", "processes", marks=pytest.mark.slow),
        pytest.param("light_env", "processes", marks=pytest.mark.slow),
    ],
)
def test_an_actor_whose_environment_raises_is_started_again(tmp_path, topology, launch):
    experiment = faulty(topology, tmp_path / "flag", num_actors=2, launch=launch)
    # A restart is counted when the process runs again; the other actor must not finish before.
    experiment = dataclasses.replace(experiment, frames=3000 if launch == "threads" else 100_000)
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.env_frames >= experiment.frames
    failed = failures(tmp_path / "run")
    assert {f["node"] for f in failed} <= {"actor/0", "actor/1"}
    assert all(f["restarts"] for f in failed if "exit code" in f["reason"])
    assert any("told to fail" in f.get("traceback", "") for f in failed)
    assert series(tmp_path / "run", "program/restarts")[-1] in (1, 2)  # both may fail at once


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_actor_that_always_fails_ends_the_program_with_its_traceback(tmp_path, launch):
    experiment = faulty("heavy_env", num_actors=1, launch=launch, max_restarts=0)
    with pytest.raises(ProgramError, match="actor/0") as caught:
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert "ArithmeticError: told to fail" in str(caught.value)
    assert "tests/envs/faulty.py" in str(caught.value)
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.slow
def test_an_actor_that_fails_again_and_again_is_given_up(tmp_path):
    experiment = faulty("light_env", fault="vary", num_actors=1, launch="threads", max_restarts=2)
    with pytest.raises(ProgramError, match="told to fail"):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert [f["restarts"] for f in failures(tmp_path / "run")] == [True, True, False]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_error_that_comes_back_at_once_ends_the_program_with_its_text(tmp_path, launch):
    experiment, out = faulty("heavy_env", num_actors=2, launch=launch), io.StringIO()
    with pytest.raises(ProgramError, match="ArithmeticError: told to fail") as caught:
        train.run(experiment, tmp_path / "run", stream=out)
    assert "actor/" in str(caught.value)
    assert len(failures(tmp_path / "run")) <= 4  # ten restarts of each actor are allowed
    said = [line for line in out.getvalue().splitlines() if "restarts in" in line]
    assert said
    reason = r"ArithmeticError: told to fail \(.*faulty\.py:\d+: raise .*\); restarts in 0\.2 s"
    assert all(re.search(reason, line) for line in said)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_recovered_failure_is_not_blamed_for_a_later_one(tmp_path, launch):
    """An actor fails once and is started again; then an update of the learner gives NaN."""
    experiment = faulty("heavy_env", tmp_path / "flag", num_actors=2, launch=launch)
    normalisation = dataclasses.replace(experiment.normalisation, reward_scale=float("inf"))
    experiment = dataclasses.replace(experiment, normalisation=normalisation, frames=100_000)
    with pytest.raises(ProgramError, match="node learner failed: NonFiniteError"):
        train.run(experiment, tmp_path / "run", stream=io.StringIO())
    found = failures(tmp_path / "run")
    assert [f["restarts"] for f in found if "told to fail" in f["reason"]] == [True]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("launch", LAUNCHES)
def test_an_actor_whose_environment_exits_with_code_0_is_started_again(tmp_path, launch):
    flag = tmp_path / "flag"
    experiment = faulty("heavy_env", flag, fault="leave", num_actors=1, launch=launch)
    result = train.run(experiment, tmp_path / "run", stream=io.StringIO())
    assert result.env_frames >= experiment.frames
    (failure,) = failures(tmp_path / "run")
    assert failure["node"] == "actor/0"
    assert "step raised SystemExit: 0" in failure["reason"] and "faulty.py" in failure["reason"]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["heavy_env", "distributed"])
def test_a_killed_learner_ends_the_program_which_resumes_with_its_replay(tmp_path, topology):
    run_dir = tmp_path / "run"
    periods = ("--checkpoint-period", 4000, "--run-dir", run_dir)
    with Launched(run_dir, *dqn(topology, *ENDLESS, *periods)) as program:
        program.wait_for_checkpoint()
        program.wait_for_log("learner/loss")
        program.kill("learner")
        killed = time.monotonic()
        code, left = program.end(20)
        assert time.monotonic() - killed < 10.0
        assert code not in (0, 130, 143)
        assert left == []
        *_, said = program.stderr.strip().splitlines()
        assert "node learner failed: killed by SIGKILL" in program.stderr[-1500:], said
        saved = program.saved_frames()
    before = len(series(run_dir, "replay/inserts"))
    again = ("--resume", run_dir, "--frames", saved + 4000)
    with Launched(run_dir, *again) as program:
        code, left = program.end(120)
        assert (code, left) == (0, []), program.stderr
    inserts = series(run_dir, "replay/inserts")[before:]
    assert inserts[0] >= 0.9 * (saved - 1000)  # an item starts at nearly every frame
    steps = series(run_dir, "learner/steps")
    assert steps[-1] > steps[before] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["replay", "coordinator"])
def test_a_killed_replay_or_coordinator_ends_the_program(tmp_path, name):
    run_dir = tmp_path / "run"
    args = ppo("distributed", *ENDLESS, "--run-dir", run_dir)
    with Launched(run_dir, *args) as program:
        program.wait_for_update()
        program.kill(name)
        killed = time.monotonic()
        code, left = program.end(20)
        assert time.monotonic() - killed < 10.0
        assert code not in (0, 130, 143)
        assert left == []
        assert f"node {name} failed: killed by SIGKILL" in program.stderr[-1500:]


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends_everything(tmp_path, topology, number, expected):
    run_dir = tmp_path / "run"
    with Launched(run_dir, *ppo(topology, *ENDLESS, "--run-dir", run_dir)) as program:
        program.wait_for_update()
        program.process.send_signal(number)
        sent = time.monotonic()
        code, left = program.end(20)
        assert time.monotonic() - sent < 10.0
        check_gone(program, code, left)
        assert code == expected
        assert "everything is saved" in program.stderr
        assert program.saved_frames() > 0
    assert not (run_dir / "result.json").exists()


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_nodes_start_ends_everything(tmp_path, number):
    run_dir = tmp_path / "run"
    with Launched(run_dir, *ppo("light_env", *ENDLESS, "--run-dir", run_dir)) as program:
        program.wait_for(lambda: "actor/0" in program.nodes(), "an actor")
        program.process.send_signal(number)
        sent = time.monotonic()
        code, left = program.end(20)
        assert time.monotonic() - sent < 10.0
        assert code == 128 + number
        assert left == []


@pytest.mark.slow
@pytest.mark.parametrize("topology", [*SHARED_MEMORY, "distributed"])
def test_the_death_of_the_parent_saves_and_ends_everything(tmp_path, topology):
    run_dir = tmp_path / "run"
    with Launched(run_dir, *ppo(topology, *ENDLESS, "--run-dir", run_dir)) as program:
        program.wait_for_update()
        # The learner saves the frame count that it last received, at most a second ago.
        program.wait_for_log("wall_time", at_least=time.time() + 2.0)
        program.process.kill()
        killed = time.monotonic()
        _, left = program.end(20)
        assert left == []
        assert time.monotonic() - killed < 12.0
        assert program.saved_frames() > 0
        saved = program.saved_frames()
    again = ("--resume", run_dir, "--frames", saved + 3000)
    with Launched(run_dir, *again) as program:
        assert program.end(120) == (0, []), program.stderr


@pytest.mark.slow
@pytest.mark.chosen
def test_threads_of_a_program_that_failed_are_gone_and_another_runs(tmp_path):
    experiment = faulty("light_env", num_actors=2, launch="threads", max_restarts=0)
    with pytest.raises(ProgramError):
        train.run(experiment, tmp_path / "one", stream=io.StringIO())
    env = dataclasses.replace(experiment.env, options={"fault": "none"})
    whole = dataclasses.replace(experiment, env=env)
    assert train.run(whole, tmp_path / "two", stream=io.StringIO()).env_frames >= 3000


@pytest.mark.slow
@pytest.mark.timeout(400, method="thread")
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_chaos_does_not_keep_a_program_from_learning(tmp_path, topology):
    """For 60 s, kills one random actor or service every 5 s."""
    run_dir, draw, kills = tmp_path / "run", random.Random(1), 0
    more = ("--program.num-actors", 4, "--program.max-restarts", 100, "--replay.max-size", 64)
    with Launched(run_dir, *ppo(topology, *ENDLESS, *more, "--run-dir", run_dir)) as program:
        program.wait_for_update()
        until = time.monotonic() + 60.0
        while time.monotonic() < until:
            names = [n for n in program.nodes() if n.startswith(("actor", "inferencer"))]
            program.kill(draw.choice(sorted(names)))
            kills += 1
            time.sleep(5.0)
            assert program.process.poll() is None, program.stderr
        # The number of updates in which the preset learns the task.
        program.wait_for_log("learner/steps", at_least=590, timeout=200)
        program.process.send_signal(signal.SIGINT)
        code, left = program.end(20)
        check_gone(program, code, left)
        assert code == 130
        killed = [f for f in program.failures() if f["reason"] == "killed by SIGKILL"]
        assert len(killed) == kills
        assert all(f["restarts"] for f in killed)
    assert np.isfinite(series(run_dir, "learner/loss")).all()
    assert 0.5 * kills <= series(run_dir, "program/restarts")[-1] <= len(program.failures())
    assert train.evaluate(run_dir, episodes=20).returns.mean() >= 475


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param("learner", "heavy_env", marks=pytest.mark.chosen),
        ("coordinator", "light_env"),
        ("learner", "distributed"),
        ("replay", "distributed"),
    ],
)
def test_a_program_starts_again_from_its_last_checkpoint_after_a_loss(tmp_path, name, topology):
    run_dir = tmp_path / "run"
    resumes = ("--program.on-loss", "resume", "--checkpoint-period", 4000)
    service = ("--replay.service", "table") if topology == "distributed" else ()
    args = dqn(topology, *ENDLESS, *resumes, *service, "--run-dir", run_dir)
    with Launched(run_dir, *args) as program:
        program.wait_for_checkpoint()
        program.kill(name)
        program.wait_for(lambda: any(f.get("program") for f in program.failures()), "the restart")
        saved = program.saved_frames()
        program.wait_for(lambda: program.saved_frames() > saved, "a later checkpoint")
        program.process.send_signal(signal.SIGINT)
        assert program.end(30) == (130, []), program.stderr
        assert f"{name}: killed by SIGKILL; all nodes restart in 0.2 s" in program.stderr
    frames = series(run_dir, "env_frames")
    assert np.diff(frames).min() > 0  # lines of metrics after the checkpoint were moved
    assert "is saved" in program.stderr


@pytest.mark.slow
@pytest.mark.chosen
def test_an_exception_of_the_learner_is_no_loss(tmp_path):
    """NaN would come again: the program ends with it."""
    diverges = ("--agent.optimizer.learning-rate", 1e30, "--program.on-loss", "resume")
    args = ppo("heavy_env", *ENDLESS, *diverges, "--run-dir", tmp_path / "run")
    with Launched(tmp_path / "run", *args) as program:
        code, left = program.end(120)
    assert (code, left) == (1, []), program.stderr
    assert "all nodes restart" not in program.stderr and "NonFiniteError" in program.stderr
