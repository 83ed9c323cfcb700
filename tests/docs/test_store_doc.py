"""The commands of docs/using_runs.md on object stores, with a server of S3; sets, and nodes."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore")
pytest.importorskip("moto")

import rlstack
from rlstack.programs.__main__ import main
from rlstack.programs.session import stored
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint, files
from rlstack.storage.mirror import Manifest
from rlstack.storage.objects import Objects
from tests.programs.launched import FAST
from tests.programs.running import metrics
from tests.storage import s3_server

PAGE = Path(__file__).resolve().parents[2] / "docs" / "using_runs.md"
pytestmark = [pytest.mark.slow, pytest.mark.chosen, pytest.mark.timeout(280)]


@pytest.fixture
def on_host(s3, monkeypatch, tmp_path):
    """Returns a function that gives this process the copies of another host."""

    def go(name):
        monkeypatch.setenv(files.COPIES, str(tmp_path / name))
        stored._fetched.clear()

    go("host-a")
    return go


def _commands():
    text = PAGE.read_text()
    block = re.search(r"## Runs in object stores.*?```sh\n(.*?)```", text, re.DOTALL)[1]
    words = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [line[1:] for line in words if line[0] == "rlstack"]


def test_the_commands_of_the_page(on_host, capsys, caplog):
    url, small = f"s3://{s3_server.BUCKET}/runs/one", (*map(str, FAST), "--frames", "2000")
    train, resume, evaluate, top = [
        [word.replace("s3://my-bucket", f"s3://{s3_server.BUCKET}") for word in words]
        for words in _commands()
    ]
    assert main([*train, *small, "--checkpoint-period", "1000"]) == 0
    before = metrics(RunDir.open(url).path)
    on_host("host-b")
    assert "--frames" in resume
    resume[resume.index("--frames") + 1] = "3000"
    assert main(resume) == 0
    directory = RunDir.open(url)
    lines = metrics(directory.path)
    assert lines[: len(before)] == before
    assert lines[-1]["env_frames"] >= 3000
    on_host("host-c")
    capsys.readouterr()
    assert main([*evaluate, "--episodes", "2"]) == 0
    assert json.loads(capsys.readouterr().out)["eval_episodes"] == 2
    assert main([*top, "--once"]) == 0
    assert re.search(r"one \(cartpole-ppo.*finished", capsys.readouterr().out)
    policy = rlstack.load(url)
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)
    (newest,) = checkpoint.paths(RunDir.open(url).checkpoints)[:1]
    assert checkpoint.read_metadata(newest)["env_frames"] >= 3000
    assert main(["diff", url, url]) == 0
    assert url in capsys.readouterr().out
    assert main(["train", "cartpole-ppo", "--run-dir", url]) == 1
    assert f"--resume {url}" in capsys.readouterr().err
    written = [path for path in files.copies().parent.rglob("*") if path.is_file()]
    assert len(written) > 50
    secret = s3_server.SECRET.encode()
    assert [path for path in written if secret in path.read_bytes()] == []
    # The newest checkpoint is damaged in the store: an older one is used.
    store = Objects(url, 5.0)
    stored_files = Manifest.read(store)[0].files.items()
    arrays = f"checkpoints/{newest.name}/arrays/"
    store.delete([p.key for name, ps in stored_files if name.startswith(arrays) for p in ps])
    on_host("host-d")
    assert main([*evaluate, "--episodes", "2"]) == 0
    assert f"{arrays}manifest.ocdbt" in caplog.text and "is left out" in caplog.text


def test_a_set_and_a_report_of_it(on_host, tmp_path, capsys):
    url, small = f"s3://{s3_server.BUCKET}/sets/one", (*map(str, FAST), "--frames", "1000")
    assert main(["train", "cartpole-ppo", "--seeds", "2", *small, "--run-dir", url]) == 0
    on_host("host-b")
    assert main(["train", "--resume", url, "--frames", "1500"]) == 0
    on_host("host-c")
    assert main(["report", f"s3://{s3_server.BUCKET}/sets", "--out", str(tmp_path / "r.md")]) == 0
    assert "1: " in (tmp_path / "r.md").read_text()
    frames = [json.loads(RunDir.open(f"{url}/seed={n}").result.read_text()) for n in (1, 2)]
    assert all(result["env_frames"] >= 1500 for result in frames)
    assert RunDir.at(url).path.joinpath("report.md").is_file()
    search = ["sweep", "cartpole-ppo", "--search", "optuna", "--space", "agent.discount", "0.9"]
    capsys.readouterr()
    assert main([*search, "0.99", "--run-dir", f"{url}-search"]) == 1
    assert "must be on a file system" in capsys.readouterr().err


def test_nodes_of_one_machine(on_host):
    url = f"s3://{s3_server.BUCKET}/nodes/one"
    small = (*map(str, FAST), "--frames", "2000", "--checkpoint-period", "1000")
    args = ("train", "cartpole-ppo", "--topology", "distributed", *small, "--run-dir", url)
    assert main([*args, "--program.num-actors", "1"]) == 0
    on_host("host-b")
    directory = RunDir.open(url)
    assert json.loads(directory.result.read_text())["env_frames"] >= 2000
    assert checkpoint.newest_intact(directory.checkpoints) is not None
    assert any(directory.replay.iterdir())
    assert main(["train", "--resume", url, "--frames", "3000"]) == 0
