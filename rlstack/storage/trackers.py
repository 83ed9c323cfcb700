"""Loggers that pass a run on to experiment trackers: Weights & Biases, MLflow, Trackio.

A tracker gets at most one line a second, with the newest value of each log: it needs milliseconds
for a line, and a fast run has dozens a second. A line of an evaluation is passed on as it is.

Each is imported when one is made. They keep the id of their run in ``trackers.json`` of the run
directory, so that a resumed run goes on in the same place. Where they write, and to whom, is said
by their own environment variables; without any, they write to files on this machine.
"""

from __future__ import annotations

import abc
import contextlib
import json
import math
import os
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.storage import files

_IDS = "trackers.json"
_lock = threading.Lock()  # each logger has a thread
_LINE_SECONDS = 1.0  # between two lines
_BATCH_SECONDS = 5.0  # between two calls of MLflow, each with the lines since
_EVALUATION = "evaluator/"  # in the names of the logs of evaluations
_MAX_PARAM = 500  # characters of a value of the config, the least that MLflow's servers take


class Tracker(abc.ABC):
    """A logger that passes on at most one line a second."""

    def __init__(self) -> None:
        """Starts without a line to pass on."""
        self._step = 0
        self._newest: dict[str, Any] = {}  # the newest values of the lines that wait
        self._passed = -math.inf  # when the last line was passed on

    def write(self, step: int, logs: Mapping[str, Any]) -> None:
        """Takes a line; passes it on if it is of an evaluation, or a second has passed."""
        judged = any(_EVALUATION in name for name in logs)
        if judged:
            self.pass_on()
        self._step = step
        self._newest.update(logs)
        if judged or time.monotonic() >= self._passed + _LINE_SECONDS:
            self.pass_on()

    def pass_on(self) -> None:
        """Passes on the line that waits, if there is one."""
        if self._newest:
            logs, self._newest = self._newest, {}
            self._passed = time.monotonic()
            self._log(self._step, logs)

    @abc.abstractmethod
    def _log(self, step: int, logs: dict[str, Any]) -> None: ...


class Wandb(Tracker):
    """Logs to Weights & Biases, by ``env_frames``.

    ``WANDB_PROJECT`` is "rlstack" by default. Without an API key and without ``WANDB_MODE``, the
    run is offline, in the folder ``wandb`` of the run directory, for ``wandb sync``.
    """

    def __init__(self, run_dir: Path) -> None:
        """Starts or continues the run."""
        import wandb

        super().__init__()
        mode = os.environ.get("WANDB_MODE")
        if not mode and not os.environ.get("WANDB_API_KEY") and not _has_key():
            mode = "offline"
        ids = _ids(run_dir)
        ids.setdefault("wandb", uuid.uuid4().hex[:8])
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "rlstack"),
            name=run_dir.name,
            dir=str(run_dir),
            config=_config(run_dir),
            id=ids["wandb"],
            resume="allow",
            mode=mode,
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("env_frames")
        self._run.define_metric("*", step_metric="env_frames")
        _keep(run_dir, ids)

    def _log(self, step: int, logs: dict[str, Any]) -> None:
        self._run.log({"env_frames": step, **logs})  # wandb's own step counts the lines

    def write_video(self, step: int, path: Path) -> None:
        """Logs a video."""
        from wandb import Video

        kind: Any = path.suffix[1:]
        self._run.log({"env_frames": step, "evaluator/video": Video(str(path), format=kind)})

    def close(self) -> None:
        """Ends the run."""
        self.pass_on()
        self._run.finish()


class MLflow(Tracker):
    """Logs to MLflow, by frames: metrics, and the config as parameters.

    ``MLFLOW_TRACKING_URI`` says where; by default a database in the run directory, for
    ``mlflow ui --backend-store-uri``. ``MLFLOW_EXPERIMENT_NAME`` is the preset by default.
    """

    def __init__(self, run_dir: Path) -> None:
        """Starts or continues the run."""
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        super().__init__()
        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        # MLflow would keep the artifacts of a database in the current directory.
        artifacts = None if uri else str(run_dir / "mlartifacts")
        uri = uri or f"sqlite:///{run_dir / 'mlflow.db'}"
        self._client: Any = MlflowClient(tracking_uri=uri)
        config, ids = _config(run_dir), _ids(run_dir)
        if "mlflow" not in ids:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or str(config.get("preset", "rlstack"))
            found = self._client.get_experiment_by_name(name)
            experiment = (
                found.experiment_id if found else self._client.create_experiment(name, artifacts)
            )
            run = self._client.create_run(experiment, run_name=run_dir.name)
            ids["mlflow"] = run.info.run_id
            params = [Param(key, str(value)[:_MAX_PARAM]) for key, value in _flat(config)]
            for first in range(0, len(params), 100):  # the most that one call may have
                self._client.log_batch(ids["mlflow"], params=params[first : first + 100])
            _keep(run_dir, ids)
        self._id = ids["mlflow"]
        self._waiting: list[Any] = []
        self._sent = -_BATCH_SECONDS + time.monotonic()
        self._client.update_run(self._id, status="RUNNING")

    def _log(self, step: int, logs: dict[str, Any]) -> None:
        now = int(time.time() * 1000)
        self._waiting += [self._metric(k, float(value), now, step) for k, value in logs.items()]
        if time.monotonic() >= self._sent + _BATCH_SECONDS:
            self._send()

    def _send(self) -> None:
        metrics, self._waiting = self._waiting, []
        self._sent = time.monotonic()
        for first in range(0, len(metrics), 500):  # the most that one call may have is 1000
            self._client.log_batch(self._id, metrics=metrics[first : first + 500])

    def write_video(self, step: int, path: Path) -> None:
        """Keeps a video as an artifact; its name has the step."""
        del step
        self._client.log_artifact(self._id, str(path), "videos")

    def close(self) -> None:
        """Logs the lines that wait, and ends the run."""
        self.pass_on()
        self._send()
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """Logs to Trackio, in its folder on this machine; ``TRACKIO_DIR`` names another.

    ``TRACKIO_PROJECT`` is "rlstack" by default.
    """

    def __init__(self, run_dir: Path) -> None:
        """Starts or continues the run."""
        import trackio

        super().__init__()
        self._run: Any = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "rlstack"),
            name=run_dir.name,
            config=_config(run_dir),
            resume="allow",
        )

    def _log(self, step: int, logs: dict[str, Any]) -> None:
        self._run.log(logs, step=step)

    def write_video(self, step: int, path: Path) -> None:
        """Logs a video."""
        from trackio import Video

        self._run.log({"evaluator/video": Video(str(path))}, step=step)

    def close(self) -> None:
        """Ends the run."""
        self.pass_on()
        self._run.finish()


def _has_key() -> bool:
    """Returns whether ``wandb login`` has stored a key in ~/.netrc."""
    with contextlib.suppress(OSError, RuntimeError):  # it may not be read, or there is no home
        path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        return path.is_file() and "wandb" in path.read_text(errors="replace")
    return False


def _config(run_dir: Path) -> dict[str, Any]:
    """Returns the config of the run; empty if it has none."""
    path = run_dir / "config.json"
    return files.read_json(path) if path.is_file() else {}


def _ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / _IDS
    return files.read_json(path) if path.is_file() else {}


def _keep(run_dir: Path, ids: Mapping[str, str]) -> None:
    """Adds ids to the run's file of ids, which other trackers may have changed meanwhile."""
    with _lock:
        files.write(run_dir / _IDS, json.dumps({**_ids(run_dir), **ids}))


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the entries of a tree of dicts, with joined names."""
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{name}.")
        else:
            found.append((prefix + name, value))
    return found
