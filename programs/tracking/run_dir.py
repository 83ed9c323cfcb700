"""The directory of one run: where its config, logs, checkpoints and result lie.

```
config.json      the resolved config, re-runnable as it is
metrics.jsonl    scalars, one JSON object a line
tensorboard/     the same as TensorBoard events
checkpoints/     see rlstack.storage.checkpoint
result.json      how it ended; absent while it runs
logs/            what each node printed, where the topology has several; hosts.jsonl says where
                 each was, on a cluster
failures.jsonl   what failed in which node
replay/          checkpoints of the replay service, in the distributed topology
dump-N/          what update N was made from, if it gave NaN
```
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlstack.storage.loggers import to_json


class RunDirError(ValueError):
    """A run directory that cannot be made, written or read as such."""


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The paths of one run; made by `create` or `open`."""

    path: Path
    """The absolute path of the directory."""

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None,
        preset: str,
        seed: int,
        *,
        root: str | os.PathLike[str] = "runs",
    ) -> RunDir:
        """Make the directory of a new run and make sure that it can be written.

        Args:
          path: the directory, new or empty; None for a fresh one under `root`, named
            PRESET-sSEED-DATE-TIME.
          preset: names the experiment.
          seed: of the experiment.
          root: where fresh directories go.

        Raises:
          RunDirError: if it cannot be written, or holds anything already.
        """
        made = _fresh(Path(root), f"{preset or 'run'}-s{seed}") if path is None else Path(path)
        try:
            made.mkdir(parents=True, exist_ok=True)
            holds = sorted(child.name for child in made.iterdir())
            if not holds:
                with tempfile.TemporaryFile(dir=made) as probe:
                    probe.write(b"probe")
        except OSError as error:
            raise RunDirError(
                f"RunDir.create: {made} must be a directory that can be written; "
                f"{error.strerror or error}. Choose another with --run-dir."
            ) from error
        if (made / "config.json").exists():
            raise RunDirError(
                f"RunDir.create: {made} must be new or empty; it holds a run already. Go on with "
                f"that one by --resume {made}, or choose another --run-dir."
            )
        if holds:
            raise RunDirError(
                f"RunDir.create: {made} must be new or empty; it holds {', '.join(holds[:3])}. "
                "Choose another --run-dir."
            )
        return cls(made.absolute())

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """The directory of a run that exists.

        Raises:
          RunDirError: if `path` holds no run.
        """
        found = cls(Path(path).absolute())
        if not found.config.is_file():
            why = "it has no config.json" if found.path.is_dir() else "there is no such directory"
            raise RunDirError(
                f"RunDir.open: {path} must be the directory of a run; {why}. "
                "Runs lie under runs/ unless --run-dir said otherwise."
            )
        return found

    @property
    def config(self) -> Path:
        """The resolved config."""
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        """The scalars, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        """The directory that `rlstack.storage.checkpoint` writes to."""
        return self.path / "checkpoints"

    @property
    def failures(self) -> Path:
        """What failed in which node of a program, one JSON object a line."""
        return self.path / "failures.jsonl"

    @property
    def node_logs(self) -> Path:
        """The directory of what the nodes of a program print."""
        return self.path / "logs"

    @property
    def replay(self) -> Path:
        """The directory of a replay service's own checkpoints."""
        return self.path / "replay"

    @property
    def result(self) -> Path:
        """How the run ended."""
        return self.path / "result.json"

    def dump(self, update: int) -> Path:
        """A new directory for what the update of that number was made from."""
        path = self.path / f"dump-{update}"
        for again in range(1, 10_000):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
            path = self.path / f"dump-{update}.{again}"
        return path

    def write_config(self, text: str) -> None:
        """Replace config.json by a JSON text, whole or not at all."""
        write_text(self.config, text)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, whole or not at all."""
        write_json(self.result, result)


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` (numpy scalars too; NaN and infinities as strings) as JSON, atomically.

    Raises:
      TypeError: if JSON cannot hold it; nothing is written.
      OSError: if the file system refuses; the old file stays.
    """
    write_text(path, json.dumps(to_json(value), indent=2, allow_nan=False) + "\n")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file under another name, flush it to disk and rename it to `path`.

    Raises:
      OSError: if the file system refuses; the old file stays.
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(partial, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise type(error)(
            error.errno,
            f"{path} could not be written: {error.strerror}. Free space there (df) or make it "
            "writable, or choose another --run-dir",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


def _fresh(root: Path, name: str) -> Path:
    """A directory under `root` that this call has made, and so no other run has."""
    base = root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise RunDirError(
            f"RunDir.create: {root.absolute()} must be a directory that can be written; "
            f"{error.strerror or error}. Choose another with --run-dir."
        ) from error
    raise RunDirError(f"RunDir.create: too many runs named {base}. Choose one with --run-dir.")
