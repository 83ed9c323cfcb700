"""Several learner processes: their shares, what is refused, whole programs, and faults."""

import dataclasses
import signal
import time

import numpy as np
import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.programs.config.experiment import ProgramConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import Setup
from rlstack.programs.program.data_parallel import shards
from rlstack.programs.program.failures import cause
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.programs.launched import FAST, Launched
from tests.programs.running import metrics, nothing_left, series

TWO = ("--learner.processes", 2, "--program.num-actors", 2)
ENDLESS = ("--frames", 100_000_000)


def several(name="cartpole-ppo", topology="heavy_env", *, learner=None, program=None, **changes):
    return dataclasses.replace(
        preset(name),
        topology=topology,
        learner=LearnerConfig(processes=2, **(learner or {})),
        program=ProgramConfig(**{"num_actors": 4, **(program or {})}),
        **changes,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "single_process"}, r"topology must be heavy_env, light_env or distributed"),
        ({"topology": "fused"}, r"topology must be"),
        (
            {"program": {"launch": "threads"}},
            r"program\.launch must be processes, ray or hosts .* threads",
        ),
        ({"program": {"launch": "launchpad"}}, r"program\.launch must be processes, ray or hosts"),
        ({"program": {"pacing": "lock_step"}}, r"program\.pacing must be asynchronous"),
        (
            {"program": {"num_actors": 3}},
            r"program\.num_actors must be a multiple of 2 .* got 3\. ",
        ),
        ({"learner": {"devices": (0, 1, 2)}}, r"learner\.devices must be a multiple of 2 devices"),
        ({"learner": {"prefetch": "on"}}, r"learner\.prefetch must be auto or off"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        several(**changes)
    assert "\n" not in str(error.value) and "learner.processes 2" in str(error.value)


def test_a_replay_that_cannot_be_divided_is_refused():
    cfg = preset("cartpole-ppo").replay
    for changes, message in (
        ({"batch_size": 7}, r"replay\.batch_size must be a multiple of 2 .* got 7"),
        ({"min_actors": 2}, r"replay\.min_actors must be 0"),
    ):
        with pytest.raises(ValueError, match=message):
            several(replay=dataclasses.replace(cfg, **changes))
    with pytest.raises(ValueError, match=r"replay\.service must be table .* got reverb"):
        several(topology="distributed", replay=dataclasses.replace(cfg, service="reverb"))


def test_shares_divide_actors_replay_and_batch(tmp_path):
    setup = Setup(several("cartpole-dqn"), RunDir(tmp_path), None)
    vars(setup)["step"] = "the step"
    found = shards.all_of(setup)
    assert [share.step for share in found] == ["the step"] * 2
    whole = setup.experiment
    for share in found:
        experiment = share.experiment
        assert 2 * experiment.replay.batch_size == whole.replay.batch_size
        assert 2 * experiment.replay.max_size == whole.replay.max_size
        assert 2 * experiment.total_envs == whole.total_envs
        assert shards.name_of(share, "replay") == f"replay/{share.directory.index}"
    assert found[0].experiment.seed != found[1].experiment.seed
    assert found[0].directory.checkpoints != found[1].directory.checkpoints
    # Each environment of a share has one actor.
    places = [shards.of_actor(setup, rank) for rank in range(4)]
    for index in (0, 1):
        ids = [s.experiment.env_ids(r) for s, r in places if s.directory.index == index]
        here = sorted(i for some in ids for i in some)
        assert here == list(range(found[index].experiment.total_envs))


def test_with_one_learner_there_are_no_shares(tmp_path):
    setup = Setup(dataclasses.replace(preset("cartpole-dqn")), RunDir(tmp_path), None)
    assert shards.all_of(setup) == [setup] and shards.of_actor(setup, 3) == (setup, 3)
    assert shards.name_of(setup, "replay") == "replay"


@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "distributed"])
def test_the_program_has_a_learner_and_a_replay_for_each_process(tmp_path, topology):
    replay = dataclasses.replace(preset("cartpole-ppo").replay, service="table")
    experiment = several(topology=topology, replay=replay, program={"num_inferencers": 2})
    setup = Setup(experiment, RunDir(tmp_path), None)
    vars(setup)["step"] = None
    nodes = {node.name: node for node in graph_of(setup).nodes}
    assert {"learner/0", "learner/1"} <= nodes.keys() and "learner" not in nodes
    assert ({"replay/0", "replay/1"} <= nodes.keys()) == (topology == "distributed")
    learners = [nodes[f"actor/{rank}"].args[3][""].node for rank in range(4)]
    assert learners == ["learner/0", "learner/1"] * 2
    assert nodes["evaluator"].args[1][""].node == "learner/0"


def ppo(topology, *more):
    service = ("--replay.service", "table") if topology == "distributed" else ()
    return ("cartpole-ppo", "--topology", topology, *TWO, *FAST, *service, *more)


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "topology",
    [pytest.param("heavy_env", marks=pytest.mark.chosen), "light_env", "distributed"],
)
def test_a_program_reaches_its_end_and_is_resumed(tmp_path, topology):
    run_dir = tmp_path / "run"
    args = ppo(topology, "--frames", 6000, "--run-dir", run_dir)
    with nothing_left(), Launched(run_dir, *args) as program:
        code, left = program.end(90)
    assert (code, left) == (0, []), program.stderr
    assert program.failures() == []
    steps = series(run_dir, "learner/steps")[-1]
    batch = preset("cartpole-ppo").replay
    # Every frame but those of the last unrolls was learned from, half of them by each process.
    assert 0.6 * 6000 < steps * batch.batch_size * batch.unroll_length <= 6600
    assert np.isfinite(series(run_dir, "learner/loss")).all()
    with nothing_left(), Launched(run_dir, "--resume", run_dir, "--frames", 9000) as program:
        code, left = program.end(90)
    assert (code, left) == (0, []), program.stderr
    assert series(run_dir, "learner/steps")[-1] > steps
    newest = checkpoint.latest(run_dir / "checkpoints")
    own = checkpoint.latest(run_dir / "learners" / "1" / "checkpoints")
    assert newest.name == own.name


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_a_program_may_load_what_an_earlier_one_compiled(tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")  # as in a user's commands
    monkeypatch.setenv("RLSTACK_COMPILATION_CACHE", str(tmp_path / "compiled"))
    for name in ("first", "second"):
        run_dir = tmp_path / name
        args = ppo("heavy_env", "--frames", 6000, "--run-dir", run_dir)
        with nothing_left(), Launched(run_dir, *args) as program:
            code, left = program.end(90)
        assert (code, left) == (0, []), program.stderr
    assert list((tmp_path / "compiled").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", [pytest.param("learner/1", marks=pytest.mark.chosen), "learner/0"])
def test_a_killed_learner_process_ends_the_program_and_is_named(tmp_path, name):
    run_dir = tmp_path / "run"
    with nothing_left(), Launched(run_dir, *ppo("heavy_env", *ENDLESS, "--run-dir", run_dir)) as p:
        p.wait_for_update()
        p.kill(name)
        begun = time.monotonic()
        code, left = p.end(30)
        assert code == 1 and left == [], p.stderr
        assert time.monotonic() - begun < 15.0
        assert f"node {name} failed: killed by SIGKILL" in p.stderr
    ended = [f["node"] for f in p.failures() if not (f["restarts"] or f["secondary"])]
    assert ended == [name]


@pytest.mark.slow
@pytest.mark.timeout(250)
@pytest.mark.parametrize("name", [pytest.param("learner/1", marks=pytest.mark.chosen), "learner/0"])
def test_or_all_go_on_from_the_last_checkpoint_within_a_minute(tmp_path, name):
    run_dir = tmp_path / "run"
    resumes = ("--program.on-loss", "resume", "--checkpoint-period", 4000)
    args = ppo("heavy_env", *ENDLESS, *resumes, "--run-dir", run_dir)
    with nothing_left(), Launched(run_dir, *args) as p:
        p.wait_for_checkpoint()
        p.kill(name)
        begun = time.monotonic()
        p.wait_for(lambda: any(f.get("program") for f in p.failures()), "the restart")
        saved = p.saved_frames()
        assert saved > 0
        p.wait_for(lambda: p.saved_frames() > saved, "a later checkpoint", timeout=60)
        assert time.monotonic() - begun < 60.0
        p.process.send_signal(signal.SIGINT)
        code, left = p.end(30)
        assert code == 130 and left == [], p.stderr
        assert f"{name}: killed by SIGKILL; all nodes restart in 0.2 s" in p.stderr
    assert cause(p.failures()) is None


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_program_saves_and_ends(tmp_path, number):
    run_dir = tmp_path / "run"
    with nothing_left(), Launched(run_dir, *ppo("heavy_env", *ENDLESS, "--run-dir", run_dir)) as p:
        p.wait_for_update()
        p.process.send_signal(number)
        code, left = p.end(30)
        assert code == 128 + number and left == [], p.stderr
        assert p.saved_frames() > 0
        assert p.failures() == []
    own = checkpoint.latest(run_dir / "learners" / "1" / "checkpoints")
    assert checkpoint.step_of(own) == p.saved_frames()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_learner_process_that_hangs_ends_the_program(tmp_path):
    run_dir = tmp_path / "run"
    quick = ("--program.silence-seconds", 5)
    args = ppo("heavy_env", *ENDLESS, "--run-dir", run_dir, *quick)
    with nothing_left(), Launched(run_dir, *args) as p:
        p.wait_for_update()
        p.nodes()["learner/1"].suspend()
        code, left = p.end(60)
        assert code == 1 and left == [], p.stderr
        assert "node learner/1 failed: it gave no sign of life for 5 s" in p.stderr


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["cartpole-ppo"])
def test_cartpole_is_solved(tmp_path, name):
    run_dir = tmp_path / "run"
    chosen = ("--topology", "heavy_env", *TWO, "--run-dir", run_dir)
    with nothing_left(), Launched(run_dir, name, *chosen) as program:
        code, left = program.end(280)
    assert (code, left) == (0, []), program.stderr
    returns = [
        line["evaluator/episode_return"]
        for line in metrics(run_dir)
        if "evaluator/episode_return" in line
    ]
    assert max(returns[-1:]) >= 475
