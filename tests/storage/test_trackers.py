"""Experiment trackers, each against its real package if it is installed, with local files only."""

import json
import sys
import types

import pytest

from rlstack.programs.session.own_loggers import check_loggers, own_loggers
from rlstack.storage import trackers

pytestmark = pytest.mark.timeout(120, method="thread")
CONFIG = {"preset": "mine", "frames": 100, "agent": {"kind": "PPOConfig", "discount": 0.9}}


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a run, with its config."""
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture(scope="module")
def trackio_dir(tmp_path_factory):
    """The folder of Trackio, which reads its name when it is imported."""
    directory = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(directory))
        yield directory


@pytest.fixture
def video(tmp_path):
    """A video of two frames."""
    image = pytest.importorskip("PIL.Image")
    first, second = (image.new("RGB", (16, 16), color) for color in ("red", "blue"))
    path = tmp_path / "100.gif"
    first.save(path, save_all=True, append_images=[second])
    return path


def write_twice(make, run_dir):
    """Logs in two commands of one run."""
    for first in (100, 300):
        logger = make(run_dir)
        logger.write(first, {"learner/loss": 0.5, "actor/episode_return": float(first)})
        logger.write(first + 100, {"evaluator/episode_return": 2.0})
        logger.close()


def test_mlflow_has_metrics_by_frames_and_the_config(run_dir, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    write_twice(trackers.MLflow, run_dir)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["agent.discount"] == "0.9" and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "actor/episode_return")
    assert [(point.step, point.value) for point in history] == [(100, 100.0), (300, 300.0)]
    last = client.get_metric_history(run.info.run_id, "evaluator/episode_return")
    assert [point.step for point in last] == [200, 400]


def test_wandb_writes_offline(run_dir, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(run_dir / "none"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_twice(trackers.Wandb, run_dir)
    files = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2
    identifier = json.loads((run_dir / "trackers.json").read_text())["wandb"]
    assert all(identifier in file.name for file in files)
    written = files[0].read_bytes()
    assert b"actor/episode_return" in written and b"env_frames" in written


@pytest.mark.parametrize("case", ["no home", "not readable", "a key"])
def test_the_key_of_wandb_is_looked_for_where_there_may_be_no_home(tmp_path, monkeypatch, case):
    """A container's user may have neither HOME nor an entry in passwd."""
    netrc = tmp_path / ".netrc"
    netrc.write_text("machine api.wandb.ai")

    def home():
        if case == "no home":
            raise RuntimeError("Could not determine home directory.")
        return tmp_path

    def read_text(*_, **__):
        raise PermissionError

    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setattr(trackers.Path, "home", staticmethod(home))
    if case == "not readable":
        monkeypatch.setattr(trackers.Path, "read_text", read_text)
    assert trackers._has_key() is (case == "a key")


def test_trackio_keeps_a_run_on_this_machine(run_dir, trackio_dir):
    trackio = pytest.importorskip("trackio")
    write_twice(trackers.Trackio, run_dir)
    del trackio
    found = [path for path in trackio_dir.rglob("*") if path.is_file()]
    assert any(b"actor/episode_return" in path.read_bytes() for path in found)


@pytest.mark.parametrize(
    ("name", "make"),
    [("wandb", trackers.Wandb), ("mlflow", trackers.MLflow), ("trackio", trackers.Trackio)],
)
def test_trackers_keep_videos(run_dir, monkeypatch, trackio_dir, video, name, make):
    monkeypatch.setenv("NETRC", str(run_dir / "none"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    pytest.importorskip(name)
    logger = make(run_dir)
    logger.write_video(100, video)
    logger.close()
    content = video.read_bytes()
    root = trackio_dir if name == "trackio" else run_dir
    assert any(path.read_bytes() == content for path in root.rglob("*.gif"))


class Passed(trackers.Tracker):
    """A tracker that keeps the lines that are passed on."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def _log(self, step, logs):
        self.lines.append((step, logs))


def test_a_tracker_gets_one_line_a_second_with_the_newest_values(monkeypatch):
    now = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("rlstack.storage.trackers.time", clock)
    tracker = Passed()
    for i in range(25):  # eight lines a second, of which every fourth has the return of an episode
        tracker.write(i, {"loss": 0.5 * i, **({"return": i} if i % 4 == 1 else {})})
        now[0] += 0.125
    assert [step for step, _ in tracker.lines] == [0, 8, 16, 24]
    assert [logs.get("return") for _, logs in tracker.lines] == [None, 5, 13, 21]
    assert [logs["loss"] for _, logs in tracker.lines] == [0.0, 4.0, 8.0, 12.0]


def test_a_tracker_gets_evaluations_at_their_steps(monkeypatch):
    tracker = Passed()
    tracker.write(1, {"loss": 1.0})
    tracker.write(2, {"loss": 2.0})
    tracker.write(3, {"evaluator/episode_return": 7.0})
    tracker.write(4, {"loss": 4.0})
    tracker.write(5, {"chain/evaluator/episode_return": 8.0})
    tracker.write(6, {"loss": 6.0})
    tracker.pass_on()
    assert tracker.lines == [
        (1, {"loss": 1.0}),
        (2, {"loss": 2.0}),
        (3, {"evaluator/episode_return": 7.0}),
        (4, {"loss": 4.0}),
        (5, {"chain/evaluator/episode_return": 8.0}),
        (6, {"loss": 6.0}),
    ]


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="loggers mlflow needs the package mlflow"):
        check_loggers(("jsonl", "mlflow"))
    with pytest.raises(ValueError, match="did you mean 'wandb'"):
        check_loggers(("wandbb",))


def test_a_tracker_that_fails_ends_nothing(run_dir, monkeypatch):
    def init(**settings):
        raise ConnectionError("no network")

    fake = types.SimpleNamespace(init=init, Settings=dict)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    told = []
    (logger,) = own_loggers(("wandb", "jsonl"), run_dir, told.append)
    logger.write(1, {"loss": 1.0})
    logger.close()
    line = init.__code__.co_firstlineno + 1
    assert told == [
        "the logger wandb raised ConnectionError: no network "
        f'(in {__file__}:{line}: raise ConnectionError("no network")); the run goes on.'
    ]
