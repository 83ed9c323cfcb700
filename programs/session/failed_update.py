"""Files of an update that gave NaN: written when it fails, read to repeat it."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from rlstack.learning.learner import NonFiniteError
from rlstack.programs.session.run_dir import RunDir
from rlstack.references import renamed

_FILE = "update.pkl"


class Counting(Protocol):
    """An object that counts updates, such as a learner."""

    @property
    def version(self) -> int:
        """The number of updates."""


@contextlib.contextmanager
def saved_on_failure(directory: RunDir, learner: Counting, policy: str = "") -> Iterator[None]:
    """Saves the inputs of an update that gives NaN, and names the command that repeats it.

    Args:
      directory: the run's directory.
      learner: the learner that makes the updates; only its version is read.
      policy: name of the learner's policy, if the run has several; "" otherwise.

    Raises:
      NonFiniteError: the update gave NaN or infinity; the message ends with the command.
    """
    try:
        yield
    except NonFiniteError as error:
        try:
            path = directory.dump(learner.version + 1)
            with open(path / _FILE, "wb") as file:
                whose = {"policy": policy} if policy else {}
                pickle.dump({**error.before, **whose, "batch": error.batch}, file)
        except OSError as refused:  # the NaN is still what ended the run
            text = f"Its inputs could not be saved in {directory.path}: {refused.strerror}."
        else:
            text = f"To make that update again: rlstack rerun {path}"
        raise NonFiniteError(f"{error} {text}", error.before, error.batch) from error


def check(dump_dir: Path) -> None:
    """Checks that a directory holds the inputs of an update.

    Raises:
      ValueError: the directory holds no such inputs. If it is a run directory, the message names
        the directories in it that hold some.
    """
    if not (dump_dir / _FILE).is_file():
        there = sorted(str(path.parent) for path in dump_dir.glob(f"*/{_FILE}"))
        raise ValueError(
            f"{dump_dir} must be a directory dump-N, which an update that gave NaN leaves in the "
            f"directory of its run; it has no {_FILE}. There is {', '.join(there) or 'none'} in it."
        )


def load(dump_dir: Path) -> dict[str, object]:
    """Returns the inputs of the update: ``params``, ``learner_state`` and ``batch``, in numpy."""
    with open(dump_dir / _FILE, "rb") as file:
        return _Unpickler(file).load()


class _Unpickler(pickle.Unpickler):
    """Reads what this or an older version of the stack has written."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class(renamed(module), name)
