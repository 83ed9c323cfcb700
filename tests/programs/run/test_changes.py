"""A resumed run may change what has no effect on learning, and nothing else."""

import dataclasses
import io
import json
import shutil

import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.config.program_config import ProgramConfig, RayConfig
from rlstack.programs.run import train
from rlstack.programs.run.record import record
from rlstack.programs.session.run_config import CHANGEABLE, changed, moved
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.fused import test_fused_run as fused
from tests.programs.running import metrics

pytestmark = pytest.mark.timeout(120)
BRIEF = EvaluatorConfig(episodes=2, num_envs=2, period="off")
CHANGES = {
    "evaluator.period": 300,
    "evaluator.episodes": 4,
    "evaluator.num_envs": 4,
    "evaluator.epsilon": 0.5,
    "stop.patience": 100,
    "loggers": ("jsonl",),
    "log-period": 70,
    "checkpoint_period": 130,
    "checkpoints_kept": 9,
}


def quiet(experiment, path):
    return train.run(experiment, path, stream=io.StringIO())


def resume(path, **options):
    return train.resume(path, stream=io.StringIO(), **options)


def small(**changes):
    base = dataclasses.replace(preset("cartpole-ppo"), evaluator=BRIEF, frames=600)
    return dataclasses.replace(base, log_period=200, **changes)


def dqn():
    base = preset("cartpole-dqn")
    replay = dataclasses.replace(base.replay, min_size=100, batch_size=16, max_size=400)
    return dataclasses.replace(base, replay=replay, evaluator=BRIEF, frames=600)


_LATER = [pytest.mark.slow, pytest.mark.chosen]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "make",
    [
        small,
        pytest.param(dqn, marks=_LATER),
        pytest.param(lambda: fused.ppo(updates=4), marks=_LATER, id="fused"),
    ],
)
def test_a_resumed_run_learns_the_same_with_other_logs_and_evaluations(tmp_path, make):
    experiment = make()
    quiet(dataclasses.replace(experiment, evaluator=BRIEF), tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    more = {"updates": 8} if experiment.updates else {"frames": 1200}
    first = resume(tmp_path / "one", **more)
    second = resume(tmp_path / "other", **more, changes=CHANGES)
    assert (first.eval_episodes, second.eval_episodes) == (2, 4)
    assert first.env_frames == second.env_frames > 300
    one, other = fused.saved(tmp_path / "one"), fused.saved(tmp_path / "other")
    assert len(one) > 20 and one == other  # params, optimizer, replay, keys and exploration
    kept = [len(checkpoint.paths(tmp_path / name / "checkpoints")) for name in ("one", "other")]
    assert kept[0] < 4 <= kept[1] or experiment.topology == "fused"
    lines = [len(metrics(tmp_path / name)) for name in ("one", "other")]
    assert lines[0] < lines[1]


def test_what_was_changed_is_recorded(tmp_path):
    quiet(small(), tmp_path / "run")
    resume(tmp_path / "run", frames=900, changes={"evaluator.episodes": 4})
    resume(tmp_path / "run", frames=1200)
    resume(tmp_path / "run", frames=1200, changes={"evaluator.episodes": 6})  # it has finished
    lines = [json.loads(x) for x in (tmp_path / "run" / "changes.jsonl").read_text().splitlines()]
    assert [line["changed"] for line in lines] == [
        {"frames": [600, 900], "evaluator.episodes": [2, 4]},
        {"frames": [900, 1200]},
    ]
    assert 600 <= lines[0]["env_frames"] < 900 <= lines[1]["env_frames"] < 1200
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (config["frames"], config["evaluator"]["episodes"]) == (1200, 4)


def test_a_run_that_a_rule_ended_goes_on_with_another_rule(tmp_path):
    judged = dataclasses.replace(BRIEF, period=100)
    ended = small(evaluator=judged, stop=dataclasses.replace(small().stop, return_reached=1.0))
    assert "return_reached" in quiet(ended, tmp_path / "run").ended_by
    assert "return_reached" in resume(tmp_path / "run", changes={"log_period": 50}).ended_by
    assert resume(tmp_path / "run", changes={"stop.return_reached": 1e6}).ended_by == "frames"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "agent.discount",
            0.9,
            "agent.discount must stay as it is; a resumed run may",
        ),
        ("seed", 3, "seed must stay"),
        ("evaluator.perod", 3, "no option evaluator.perod; did you mean evaluator.period?"),
        ("evaluatr", 3, "no option evaluatr"),
        ("evaluator.episodes", 3, "a multiple of num_envs"),
        ("evaluator.epsilon", "much", "epsilon must be a number; got 'much'"),
        ("loggers", "jsonl", "loggers must be a tuple; got 'jsonl'"),
    ],
)
def test_other_options_are_refused(name, value, text):
    with pytest.raises(ValueError, match=text.replace("?", r"\?")):
        changed(small(), {name: value})


def test_values_that_are_right_in_pairs_only_are_taken_together():
    given = {"evaluator.num_envs": 3, "evaluator.episodes": 9}
    assert changed(small(), given).evaluator == dataclasses.replace(BRIEF, episodes=9, num_envs=3)
    assert changed(small(), {"evaluator": BRIEF}).evaluator is BRIEF
    assert all(hasattr(small(), name) for name in CHANGEABLE)


def test_a_command_that_is_started_again_takes_its_own_hosts_and_nothing_else():
    before = dataclasses.replace(small(), program=ProgramConfig(num_actors=3, hosts=("a", "b")))
    elsewhere = {"hosts": ("c",), "host": 0, "ports": "20000-20010", "interface": "eth1"}
    ray = RayConfig(address="head:6379", lost_seconds=1.0)
    now = moved(before, ProgramConfig(num_actors=5, metrics="9100", ray=ray, **elsewhere)).program
    assert now.num_actors == 3 and now.metrics == "9100"
    assert {name: getattr(now, name) for name in elsewhere} == elsewhere
    assert now.ray == dataclasses.replace(RayConfig(), address="head:6379")


def test_auto_resume_starts_continues_and_leaves_a_finished_run(tmp_path, capsys):
    run_dir = tmp_path / "run"
    words = ["cartpole-dqn", "--frames", "300", "--run-dir", str(run_dir), "--auto-resume"]
    words += ["--evaluator.episodes", "2", "--evaluator.num-envs", "2", "--loggers", "jsonl"]
    assert main("train", words) == 0
    first = (run_dir / "result.json").read_bytes()
    (run_dir / "result.json").unlink()
    shutil.rmtree(run_dir / "checkpoints")  # as of a run that ended before its first one
    assert main("train", words) == 0
    assert json.loads((run_dir / "result.json").read_text())["env_frames"] >= 300
    again = (run_dir / "result.json").read_bytes()
    assert main("train", words) == 0  # there is nothing left to do
    assert (run_dir / "result.json").read_bytes() == again != first
    capsys.readouterr()
    assert main("train", words[:3] + words[5:]) == 2
    assert "--auto-resume needs --run-dir" in capsys.readouterr().err


def test_the_command_takes_the_same_options(tmp_path, capsys):
    run_dir = tmp_path / "run"
    quiet(small(), run_dir)
    go_on = ("train", "--resume", str(run_dir))
    for option in ("--agent.discount=0.9", "--seed=4", "--topology=fused"):
        assert main("train", [*go_on[1:], option]) == 2
        told = capsys.readouterr().err
        name = option.partition("=")[0]
        assert told.startswith(f"rlstack train: {name} must stay as it is; a resumed run may have")
        assert "--evaluator.*" in told and "RUN_DIR/config.json trains a new run" in told
    given = ("--frames", "900", "--evaluator.episodes", "6", "--loggers", "jsonl")
    assert main("train", [*go_on[1:], *given]) == 0
    assert "over 6 episodes" in capsys.readouterr().out
    (line,) = (run_dir / "changes.jsonl").read_text().splitlines()
    assert set(json.loads(line)["changed"]) == {"frames", "evaluator.episodes", "loggers"}


@pytest.mark.slow
@pytest.mark.chosen
def test_a_dataset_that_has_changed_is_refused(tmp_path):
    quiet(small(), tmp_path / "source")
    data = tmp_path / "data"
    record(tmp_path / "source", data, frames=300, policy="explore")
    base = preset("bc")
    cloned = dataclasses.replace(base, data=str(data), frames=2000, evaluator=BRIEF)
    helped = dqn()
    replay = dataclasses.replace(helped.replay, demonstrations=str(data))
    helped = dataclasses.replace(helped, replay=replay)
    for experiment, name in ((cloned, "cloned"), (helped, "helped")):
        quiet(experiment, tmp_path / name)
        shutil.copytree(tmp_path / name, tmp_path / f"{name} again")
        resume(tmp_path / f"{name} again", frames=2 * experiment.frames)
    shutil.rmtree(data)
    record(tmp_path / "source", data, frames=400, policy="explore")
    for name in ("cloned", "helped", "helped again"):
        with pytest.raises(checkpoint.CheckpointError, match=r"has changed since .* was saved"):
            resume(tmp_path / name, frames=10_000)
    assert not RunDir(tmp_path / "cloned").changes.exists()


def test_a_checkpoint_without_fingerprints_is_read(tmp_path):
    """Checkpoints of earlier versions have none either, so their datasets are not compared."""
    quiet(small(), tmp_path / "run")
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert checkpoint.read_metadata(newest)["run"]["datasets"] == {}
