"""Hooks of a user's own, by name, for programs in other processes."""

import json
import time

from rlstack.acting.evaluator import Evaluator


class Lines:
    """Writes each line of logs to a file of its own."""

    def __init__(self, run_dir):
        self._file = open(run_dir / "own.jsonl", "a")  # noqa: SIM115  (closed by close())

    def write(self, step, logs):
        self._file.write(json.dumps({"step": step, **logs}) + "\n")
        self._file.flush()

    def close(self):
        self._file.write('{"closed": true}\n')
        self._file.close()


class Failing:
    """Fails at each line."""

    def __init__(self, run_dir):
        pass

    def write(self, step, logs):
        raise ConnectionError("the tracking server is down")

    def close(self):
        raise ConnectionError("still down")


class Hanging(Failing):
    """Hangs at its first line."""

    def write(self, step, logs):
        time.sleep(1000)


def takes_nothing():
    """Has the wrong signature for a logger."""


class After:
    """A stop rule that sees the updates of the learner."""

    def __init__(self, least=3):
        self._least = least

    def __call__(self, step, logs):
        return logs.get("learner/steps", 0) >= self._least and "enough updates"


def raises(step, logs):
    """A stop rule with a mistake."""
    return logs["no such log"]


def raising():
    return raises


class Shortest(Evaluator):
    """Judges by the shortest episode."""

    def evaluate(self, params, env, progress=None):
        found = super().evaluate(params, env, progress)
        shortest = found.lengths.argmin()
        return found._replace(
            returns=found.returns[[shortest]],
            lengths=found.lengths[[shortest]],
            metrics={**found.metrics, "longest": found.lengths.max(keepdims=True)},
        )
