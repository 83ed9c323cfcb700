"""The checkpoints of a replay service, each paired with a checkpoint of the learner.

The learner's metadata names the replay's checkpoint and has the digests of its files
(`rlstack.programs.session.progress.resume_point` compares them). The replay's checkpoint is
written first, next to the earlier ones; what no checkpoint of the learner names is removed after
the learner's checkpoint is there. So whichever write fails, the earlier pairs are whole.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Protocol

from rlstack.programs.session.progress import REPLAY
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.run_lock import ClaimLostError
from rlstack.replay.served import checkpoints
from rlstack.storage import checkpoint, checkpoint_files


class Server(Protocol):
    """The learner's side of a replay whose server writes its own checkpoints."""

    def checkpoint(self, *, keep: int | None) -> str:
        """Makes the server write a checkpoint; returns its path."""


class SavedReplays:
    """The replay's checkpoints of one run, or of one of its policies if it has several."""

    def __init__(self, directory: RunDir, policy: str = "") -> None:
        """Reads nothing yet."""
        self._directory = directory
        self._entry = f"{REPLAY}/{policy}" if policy else REPLAY
        self._folder = directory.replay / policy

    def save(self, buffer: Server) -> dict[str, Any]:
        """Makes the server write a checkpoint; returns what the learner's metadata must hold.

        Raises:
          OSError: the file system refuses it; earlier checkpoints are intact.
        """
        self._directory.check_claim()
        try:
            path = Path(buffer.checkpoint(keep=None))
            return {self._entry: {"name": path.name, "files": checkpoint_files.digests(path)}}
        except OSError:
            checkpoints.clear(self._folder)
            self.clean()
            raise

    def clean(self) -> None:
        """Removes every checkpoint of the replay that no checkpoint of the learner names.

        It removes nothing while a checkpoint of the learner is unreadable, or after another command
        has taken the run directory over.
        """
        with contextlib.suppress(checkpoint.CheckpointError, ClaimLostError):
            named = self._named()
            self._directory.check_claim()
            known = {name for name in named if name is not None}
            checkpoints.keep_only(self._folder, known, unnumbered_too=None not in named)

    def _named(self) -> set[str | None]:
        """Returns the names in the learner's checkpoints; None for one that names nothing."""
        told = map(checkpoint.read_metadata, checkpoint.paths(self._directory.checkpoints))
        return {metadata.get(self._entry, {}).get("name") for metadata in told}

    def belonging_to(self, path: Path | None, service: str = "reverb") -> Path | None:
        """Returns the replay's checkpoint of a learner's checkpoint; None for a new run.

        Args:
          path: the learner's checkpoint.
          service: the service that loads the replay's checkpoint, "reverb" or "table".

        Raises:
          ValueError: the replay's checkpoint is of the other service, or missing. An empty replay
            would not be the replay of the run.
        """
        if path is None:
            return None
        directory = self._folder
        name = checkpoint.read_metadata(path).get(self._entry, {}).get("name")
        # Earlier versions did not name it, and kept one.
        found = directory / name if name else checkpoints.newest(directory)
        if found is None or not checkpoints.is_complete(found):
            raise ValueError(
                f"{found or directory} must be a complete checkpoint of the replay, which belongs "
                f"to {path}. To go on with an empty replay, set checkpoint_replay to false in "
                f"{self._directory.config}."
            )
        written_by = "table" if checkpoints.is_table(found) else "reverb"
        if written_by != service:
            raise ValueError(
                f"{found} must be a checkpoint of the replay service {service}; got one of "
                f"{written_by}. Set service of replay to {written_by} in {self._directory.config}."
            )
        return found
