"""The directory of one run, with its config, logs, checkpoints and result.

```
config.json      the resolved config, from which the run can be repeated
changes.jsonl    options that were changed when the run was resumed, with both values
metrics.jsonl    scalars, one JSON object per line
tensorboard/     the same scalars as TensorBoard events
checkpoints/     see rlstack.storage.checkpoint; best/ has the params of the best evaluation
result.json      the result; a resumed run keeps the earlier one until it has its own
metrics.abandoned.jsonl
                 scalars from after the checkpoint from which a run was resumed
logs/            the output of each node, for topologies of several nodes; on a cluster,
                 hosts.jsonl lists the host of each node
failures.jsonl   the failures of nodes
videos/          a video for every N-th evaluation, if evaluator.video says so
replay/          checkpoints of the replay service, for the distributed topology
learners/N/      the same of the replay of learner process N, for N > 0
dump-N/          the inputs of update N, if it gave NaN
trackers.json    the ids of the run in experiment trackers
.lock            the command that writes to the directory (rlstack.programs.session.run_lock)
```

A directory in an object store has a copy on this machine, whose paths these are; see
`rlstack.programs.session.stored`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlstack.programs.session.run_lock import Claim, ClaimLostError, RunLock
from rlstack.storage import files
from rlstack.storage.loggers import to_json

_LONGEST = 4095  # bytes of a path that Linux takes
_DEEPEST = 400  # bytes that files of a run add at most, those of a checkpoint that is being written


class RunDirError(ValueError):
    """A run directory cannot be created, written or read."""


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The paths of one run; use `create` or `open` to get one."""

    path: Path
    """The absolute path of the directory."""

    claim: Claim | None = None
    """The right to write to it; None for readers."""

    @classmethod
    def create(
        cls,
        path: str | os.PathLike[str] | None,
        preset: str,
        seed: int,
        *,
        root: str | os.PathLike[str] = "runs",
    ) -> RunDir:
        """Creates the directory of a new run and checks that it can be written.

        Args:
          path: the directory, new or empty, or the URL of one in an object store; None for a new
            one under `root`, named PRESET-sSEED-DATE-TIME.
          preset: the name of the experiment.
          seed: the seed of the experiment.
          root: the parent of directories without a given path.

        Raises:
          RunDirError: the directory cannot be written, or is not empty.
        """
        _check_name(files.local(path or root))
        made = (
            new_directory(Path(root), f"{preset or 'run'}-s{seed}")
            if path is None
            else files.local(path)
        )
        found = cls(made.absolute())
        try:
            made.mkdir(parents=True, exist_ok=True)
            found.check_new()
            holds = _held(made)
            if not holds:
                with tempfile.TemporaryFile(dir=made) as probe:
                    probe.write(b"probe")
        except OSError as error:
            raise _not_writable(made, error.strerror or error) from error
        _check_empty(made, holds)
        return found

    def check_free(self) -> None:
        """Checks, like `create`, that a new run can use the directory; writes nothing.

        Raises:
          RunDirError: the directory cannot be written, or is not empty.
        """
        check_writable(self.path)
        self.check_new()
        try:
            _check_empty(self.path, _held(self.path) if self.path.exists() else [])
        except OSError as error:
            raise _not_writable(self.path, error.strerror or error) from error

    def check_new(self) -> None:
        """Checks that the directory holds no run yet.

        Raises:
          RunDirError: the directory holds a run.
        """
        stored = self._stored if self.claim is None else None
        if (stored is not None and stored.holds_run(self.path)) or self.config.exists():
            raise RunDirError(
                f"RunDir.create: {self.name} must be new or empty; it holds a run already. "
                f"Continue that run with --resume {self.name}, or choose another --run-dir."
            )

    @classmethod
    def at(cls, path: str | os.PathLike[str]) -> RunDir:
        """Returns a directory by its path or its URL; nothing is read."""
        return cls(files.local(path).absolute())

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunDir:
        """Returns the directory of an existing run.

        Args:
          path: the directory, or the URL of one in an object store.

        Raises:
          RunDirError: `path` holds no run.
        """
        found = cls.at(path)
        found.fetch()
        if not found.config.is_file():
            raise RunDirError(
                f"RunDir.open: {files.shown(path)} must be the directory of a run; "
                f"{_why_none(files.local(path))}"
            )
        return found

    @property
    def name(self) -> str:
        """The path, or the URL of a directory in an object store."""
        return files.shown(self.path)

    @property
    def is_stored(self) -> bool:
        """Whether the directory is in an object store."""
        return bool(files.url_of(self.path))

    @property
    def _stored(self) -> ModuleType | None:
        """The module for a directory in an object store; None for all others."""
        if not self.is_stored:
            return None
        from rlstack.programs.session import stored

        return stored

    def fetch(self, part: str = "") -> None:
        """Brings the copy of a directory in an object store up to date; does nothing for others.

        Args:
          part: a folder in it; "" for the files that are in none.

        Raises:
          rlstack.storage.objects.StoreError: the store refuses it, or does not answer.
        """
        if self.claim is None and (stored := self._stored) is not None:
            stored.fetch(self.path, part)

    @property
    def newest_checkpoints(self) -> Path:
        """The directory of checkpoints; of a store's, the copy has the newest one up to date."""
        if self.claim is None and (stored := self._stored) is not None:
            stored.fetch(self.path, stored.NEWEST)
        return self.path / "checkpoints"

    def _part(self, name: str) -> Path:
        self.fetch(name)
        return self.path / name

    @contextlib.contextmanager
    def claimed(self) -> Iterator[RunDir]:
        """Yields this directory with the right to write to it, which no other command then has.

        Raises:
          RunLockedError: another command writes to the directory.
          RunDirError: the directory cannot be written.
          rlstack.storage.objects.StoreError: its store refuses it, or does not answer.
        """
        _check_name(self.path)
        try:
            lock = RunLock(self.path)
        except OSError as error:
            raise RunDirError(
                f"RunDir.claimed: {self.path / '.lock'} must be a file that can be written; "
                f"{error.strerror or error}. Free space there (df) or make it writable."
            ) from error
        try:
            stored = self._stored
            with stored.written(self.path, lock) if stored else contextlib.nullcontext():
                yield dataclasses.replace(self, claim=lock.claim)
        finally:
            lock.release()

    def check_claim(self) -> None:
        """Checks that no other command has taken the directory over; readers pass.

        Raises:
          ClaimLostError: another command has taken it over.
        """
        if self.claim is not None:
            self.claim.check()

    @property
    def config(self) -> Path:
        """The file of the resolved config."""
        return self.path / "config.json"

    @property
    def changes(self) -> Path:
        """The options that resumed commands changed, one JSON object per command."""
        return self.path / "changes.jsonl"

    @property
    def metrics(self) -> Path:
        """The file of scalars, one JSON object per line."""
        return self.path / "metrics.jsonl"

    @property
    def abandoned_metrics(self) -> Path:
        """The scalars from after the checkpoints from which the run was resumed."""
        return self.path / "metrics.abandoned.jsonl"

    @property
    def tensorboard(self) -> Path:
        """The directory of TensorBoard's event files."""
        return self._part("tensorboard")

    @property
    def checkpoints(self) -> Path:
        """The directory that `rlstack.storage.checkpoint` writes to."""
        return self._part("checkpoints")

    @property
    def best(self) -> Path:
        """The directory of the one checkpoint with the best return in an evaluation."""
        return self._part("checkpoints/best")

    @property
    def parts(self) -> Path:
        """The directory where learners of several policies pass parts of a checkpoint."""
        return self.path / "checkpoints" / "parts"

    @property
    def failures(self) -> Path:
        """The file of node failures, one JSON object per line."""
        return self.path / "failures.jsonl"

    @property
    def node_logs(self) -> Path:
        """The directory of the nodes' output."""
        return self._part("logs")

    @property
    def profile(self) -> Path:
        """The directory of what nodes measured with ``--profile``, and of their traces."""
        return self._part("profile")

    @property
    def replay(self) -> Path:
        """The directory of the replay service's checkpoints."""
        return self._part("replay")

    @property
    def videos(self) -> Path:
        """The directory of the videos of evaluations."""
        return self._part("videos")

    @property
    def result(self) -> Path:
        """The file of the result."""
        return self.path / "result.json"

    def dump(self, update: int) -> Path:
        """Creates and returns a directory for the inputs of the update of this number."""
        path = self.path / f"dump-{update}"
        for again in range(1, 10_000):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                break
            path = self.path / f"dump-{update}.{again}"
        return path

    def write_config(self, text: str) -> None:
        """Replaces config.json, atomically."""
        self._write(self.config, text)

    def clear_unused(self) -> None:
        """Removes the files of a run that ended before it wrote any results, if it left no others.

        The directory is then free for another run.
        """
        own = (self.config, self.metrics, self.tensorboard)
        others = {path.name for path in self.path.iterdir()} - {path.name for path in own}
        has_metrics = self.metrics.exists() and self.metrics.stat().st_size > 0
        if not has_metrics and all(name.startswith((".lock", ".store")) for name in others):
            self.metrics.unlink(missing_ok=True)
            shutil.rmtree(self.tensorboard, ignore_errors=True)
            self.config.unlink(missing_ok=True)

    def write_result(self, result: Mapping[str, object]) -> None:
        """Writes result.json, atomically; NaN and infinities become strings.

        Raises:
          TypeError: JSON cannot represent a value; nothing is written.
          OSError: the file cannot be written; the old file stays.
        """
        self._write(self.result, json.dumps(to_json(result), indent=2, allow_nan=False) + "\n")

    def _write(self, path: Path, text: str) -> None:
        """Writes a text file, which survives a loss of power."""
        try:
            files.write(path, text, to_disk=True, check=self.check_claim)
        except ClaimLostError:
            raise
        except OSError as error:
            raise type(error)(
                error.errno,
                f"{path} could not be written: {error.strerror}. Free space there (df) or make it "
                "writable, or choose another --run-dir",
            ) from error


def fetched(path: Path) -> Path:
    """Returns a folder of runs; that of a URL is a copy, with all runs in it up to date.

    Raises:
      rlstack.storage.objects.StoreError: the store refuses it, or does not answer.
    """
    path = files.local(path)
    if files.url_of(path):
        from rlstack.programs.session import stored

        stored.fetch_below(path)
    return path


def option_values(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the entries of a config as JSON by their names as options, such as agent.discount."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= option_values(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value
    return found


def new_directory(root: Path, name: str) -> Path:
    """Creates and returns a directory under `root`, named after the time; no other run has it."""
    base = root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for path in (base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 10_000))):
            with contextlib.suppress(FileExistsError):
                path.mkdir()
                return path
    except OSError as error:
        raise _not_writable(root.absolute(), error.strerror or error) from error
    raise RunDirError(f"RunDir.create: too many runs named {base}. Choose one with --run-dir.")


def check_writable(path: Path) -> None:
    """Checks that a directory can be written, or created if it does not exist; writes nothing.

    Raises:
      RunDirError: the directory cannot be written or created.
    """
    _check_name(path)
    path = path.absolute()
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        raise _not_writable(path, f"{nearest} is no directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise _not_writable(path, f"this user may not write to {nearest}")


def _check_name(path: Path) -> None:
    """Checks that checkpoints can be written under a path.

    Raises:
      RunDirError: the path is not UTF-8, which the checkpoint library needs, or is too long for the
        names of checkpoint files.
    """
    path = path.absolute()
    shown = os.fsencode(path).decode(errors="backslashreplace")
    try:
        length = len(str(path).encode())
    except UnicodeEncodeError as error:
        raise _not_writable(
            shown, "its name must be UTF-8, because checkpoints cannot be saved under another"
        ) from error
    if length + _DEEPEST > _LONGEST:
        raise _not_writable(
            f"{shown[:40]}...",
            f"its path has {length} bytes, and for the files of checkpoints it must have at most "
            f"{_LONGEST - _DEEPEST}",
        )


def _held(path: Path) -> list[str]:
    """Returns the names of a directory's entries, except the lock."""
    own = (".lock", ".store")  # the second one with its endings
    return sorted(child.name for child in path.iterdir() if not child.name.startswith(own))


def _check_empty(path: Path, holds: Sequence[str]) -> None:
    if holds:
        raise RunDirError(
            f"RunDir.create: {path} must be new or empty; it holds {', '.join(holds[:3])}. "
            "Choose another --run-dir."
        )


def _not_writable(path: Path | str, why: object) -> RunDirError:
    return RunDirError(
        f"RunDir.create: {path} must be a directory that can be written; {why}. Choose another "
        "with --run-dir."
    )


def _why_none(path: Path) -> str:
    """Returns why a path is no run's directory, and which one may be meant."""
    for depth in ("*", "*/*"):  # grids, populations and folders; then searches
        if runs := sorted(path.glob(f"{depth}/config.json")):
            first = RunDir(runs[0].parent).name
            return f"it holds {len(runs)} of them. Name one, such as {first}."
    why = "it has no config.json" if path.is_dir() else "there is no such directory"
    return f"{why}. Runs are under runs/ unless --run-dir named another directory."
