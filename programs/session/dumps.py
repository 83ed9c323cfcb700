"""What is left behind by an update that gave NaN."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

from programs.session.run_dir import RunDir
from rlstack.learning.learner import Learner, NonFiniteError


@contextlib.contextmanager
def with_dump(directory: RunDir, learner: Learner) -> Iterator[None]:
    """Files what a failing update was made from, and names the command that makes it again."""
    try:
        yield
    except NonFiniteError as error:
        path = directory.dump(learner.version + 1)
        with open(path / "update.pkl", "wb") as file:
            pickle.dump({**error.before, "batch": error.batch}, file)
        raise NonFiniteError(
            f"{error} To make that update again: rlstack rerun {path}", error.before, error.batch
        ) from error
