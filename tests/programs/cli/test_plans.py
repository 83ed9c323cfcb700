"""`--dry-run` says what a run would do, and `diff` what differs between two runs."""

import dataclasses
import re

import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.programs.__main__ import main
from rlstack.programs.build import devices
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.run.plan import plan
from rlstack.programs.session.result import Result
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.programs import running

TOPOLOGIES = ("single_process", *running.TOPOLOGIES)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_dry_run_shows_the_config_and_writes_nothing(topology, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    args = ["--topology", topology, "--run-dir", "runs/x", "--updates", "30"]
    args += ["--replay.service", "table", "--program.num-actors", "3", "--frames", "5000"]
    assert main(["train", "cartpole-dqn", *args, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    text, _, config = shown.partition("config.json:\n")
    rows = dict(re.findall(r"^(\w[\w ]*?) {2,}(.*)$", text, re.M))
    assert rows["budget"] == "5,000 frames or 30 updates, whichever is spent first"
    assert rows["run directory"] == str(tmp_path / "runs" / "x")
    nodes = rows["nodes"].split(", ")
    inferencers = {"heavy_env": 0, "light_env": 1, "distributed": 1}
    if topology == "single_process":
        assert nodes == ["none: this process does everything"] and "launch" not in rows
    else:
        assert len([name for name in nodes if name.startswith("actor/")]) == 3
        assert len([n for n in nodes if n.startswith("inferencer/")]) == inferencers[topology]
        assert rows["launch"].startswith("processes, transport ")
    assert ("replay" in nodes) == ("replay/" in text) == (topology == "distributed")
    experiment = from_json(config)
    assert experiment.topology == topology and experiment.frames == 5000


def test_loggers_are_added_to_those_of_the_experiment(capsys):
    assert main(["train", "cartpole-ppo", "--logger", "terminal", "m:f", "--dry-run"]) == 1
    assert "m:f" in capsys.readouterr().err  # it is imported, as that of --loggers
    args = ["--logger", "terminal", "json:dumps", "--loggers", "jsonl", "terminal"]
    assert main(["train", "cartpole-ppo", *args, "--dry-run"]) == 0
    config = capsys.readouterr().out.partition("config.json:\n")[2]
    assert from_json(config).loggers == ("jsonl", "terminal", "json:dumps")


def test_the_earlier_option_logger_names_the_one_of_today(capsys):
    for words in (["--logger", "json:dumps", "--seed", "2"], ["--seed=2", "--logger=json:dumps"]):
        assert main(["train", "cartpole-ppo", *words, "--dry-run"]) == 0
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert "--loggers jsonl tensorboard terminal json:dumps" in line
        found = from_json(out.partition("config.json:\n")[2])
        assert found.loggers == ("jsonl", "tensorboard", "terminal", "json:dumps")
        assert found.seed == 2
    assert main(["train", "cartpole-ppo", "--loggers", "jsonl", "json:dumps", "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert from_json(out.partition("config.json:\n")[2]).loggers == ("jsonl", "json:dumps")
    assert not err


def test_the_sizes_are_those_of_the_run(tmp_path):
    experiment = running.dqn("single_process", frames=100)  # too few to learn
    experiment = dataclasses.replace(experiment, checkpoint_replay=False)
    found = plan(experiment, tmp_path / "run")
    running.run(experiment, tmp_path / "run")
    assert found.params_bytes == sum(leaf.nbytes for leaf in running.params(tmp_path / "run"))
    path = checkpoint.latest(tmp_path / "run" / "checkpoints")
    written = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    # Arrays of zeros take no space, so a checkpoint may be smaller.
    assert found.params_bytes <= written <= found.checkpoint_bytes + 200_000
    assert {name.rstrip("/") for name, _ in found.files} == {
        str(file.relative_to(tmp_path / "run"))
        for file in [*(tmp_path / "run").iterdir(), tmp_path / "run" / "checkpoints" / "best"]
        if file.name != ".lock"
    }


def test_the_memory_of_the_device_is_told_and_must_be_free(monkeypatch, capsys):
    args = ["train", "gymnax-cartpole-dqn", "--network.hidden-sizes", "4", "--seeds", "3"]
    args += ["--env.name", "rlstack.jax_envs.toy:Catch", "--replay.max-size", "1600"]
    args += ["--replay.unroll-length", "1", "--replay.batch-size", "32", "--dry-run"]
    assert main(args) == 0
    text = capsys.readouterr().out
    rows = dict(re.findall(r"^(\S[\S ]+?) {2,}([\d,]+) bytes", text, re.MULTILINE))
    replay, params, device = (
        int(rows[name].replace(",", "")) for name in ("replay", "params", "learner's device")
    )
    # 10 x 5 inputs, 4 hidden units, 3 values.
    assert params == 4 * (50 * 4 + 4 + 4 * 3 + 3)
    # Of each of three seeds: 1,600 items over 401 steps of 4 environments. A step has the
    # observation, and step type, reward, discount, action, version and three counts.
    each = 4 * 401 * 4 * (50 + 8) + 1600 + 4 * 6 + 8 + 4
    assert replay == 3 * each
    # Two params; target params, Adam's two moments and some counters; and 32 pairs of steps.
    least = 3 * (2 * params + 3 * params + 32 * 2 * 4 * (50 + 8) + 32 * 4)
    assert least <= device - replay < least + 3 * 200
    monkeypatch.setattr(devices, "available_memory", lambda: 1_000_000)
    monkeypatch.setattr(devices.importlib.metadata, "entry_points", lambda group: ())
    with pytest.raises(ValueError, match=rf"they take {device:,} bytes .* and 1,000,000 are free"):
        plan(from_json(text.partition("config.json:\n")[2]), runs=3)


def test_a_dry_run_finds_mistakes(tmp_path):
    hooked = dataclasses.replace(preset("cartpole-ppo"), loggers=("nothing",))
    with pytest.raises(ValueError, match="loggers must be"):
        plan(hooked)
    uneven = LearnerConfig(micro_batches=7)
    with pytest.raises(ValueError, match=r"micro_batches must divide the \d+ rows"):
        plan(dataclasses.replace(preset("cartpole-ppo"), learner=uneven))
    few = dataclasses.replace(preset("cartpole-ppo").agent, num_minibatches=10**6)
    with pytest.raises(ValueError, match=r"num_minibatches must be at most the \d+ rows"):
        plan(dataclasses.replace(preset("cartpole-ppo"), agent=few))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a run already"):
        plan(preset("cartpole-ppo"), tmp_path)


def test_a_dry_run_refuses_the_directories_that_a_run_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").touch()
    (tmp_path / "free").mkdir()
    (tmp_path / "free" / ".lock").touch()
    (tmp_path / "none").symlink_to("missing")

    def refused(*args):
        code = main(["train", "cartpole-ppo", "--dry-run", *args])
        lines = capsys.readouterr().err.splitlines()
        assert code == 1 and len(lines) == 1, lines
        return lines[0]

    assert "must be new or empty; it holds thesis.tex" in refused("--run-dir", "used")
    assert f"{tmp_path / 'used/thesis.tex'} is no directory" in refused(
        "--run-dir", "used/thesis.tex/run"
    )
    assert "none is no directory" in refused("--run-dir", "none")
    assert main(["train", "cartpole-ppo", "--dry-run", "--run-dir", "free"]) == 0
    monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)  # root may write anywhere
    why = f"must be a directory that can be written; this user may not write to {tmp_path}."
    assert f"{tmp_path / 'a/b'} {why} Choose another" in refused("--run-dir", "a/b")
    assert f"{tmp_path / 'runs'} {why}" in refused()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["free", "none", "used"]


RESULT = Result(41.5, 2.0, 20, 300, 1, 0.5, 600.0, 1, "single_process", "mine", "unknown")


def test_diff_shows_what_differs(tmp_path, capsys):
    experiment = running.ppo("single_process", frames=300)
    other = dataclasses.replace(
        experiment, agent=dataclasses.replace(experiment.agent, discount=0.5), updates=1
    )
    for name, config in (("a", experiment), ("b", other)):
        directory = RunDir.create(tmp_path / name, "mine", 1)
        directory.write_config(to_json(config))
        directory.write_result(RESULT._asdict())
    runs = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert main(["diff", *runs]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = {line[0]: line[1:] for line in lines if len(line) > 1}
    assert rows["agent.discount"] == [str(experiment.agent.discount), "0.5"]
    assert rows["updates"] == ["0", "1"]
    assert "agent.gae_lambda" not in rows and "seed" not in rows
    assert rows["eval_return_mean"] == ["41.5", "41.5"]
    (tmp_path / "b" / "result.json").unlink()
    assert main(["diff", *runs]) == 0
    assert re.search(r"eval_return_mean +41.5 +-$", capsys.readouterr().out, re.M)
    assert main(["diff", runs[0], runs[0]]) == 0
    assert "the configs are equal" in capsys.readouterr().out
    assert main(["diff", runs[0], str(tmp_path / "c")]) == 1
    assert "there is no such directory" in capsys.readouterr().err


def test_a_device_that_does_not_exist_is_refused_before_anything_starts(tmp_path, capsys):
    args = ["train", "cartpole-ppo", "--run-dir", str(tmp_path / "run"), "--learner.devices"]
    for more in ([], ["--dry-run"]):
        assert main([*args, "0", "77", *more]) != 0
        error = capsys.readouterr().err.strip()
        assert "\n" not in error and "learner.devices must name devices of this machine" in error
        assert "got 77" in error and not (tmp_path / "run").exists()
    assert main([*args, "0", "--inferencer.devices", "0", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "learner.devices 0, inferencer.devices 0 (of " in shown
