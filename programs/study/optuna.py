"""The trials of a sweep, which Optuna suggests and stores in a database.

Several commands may add trials at the same time, also on several machines. Each has a folder with a
lock in the directory of the sweep. A trial that was running when its command ended is marked as
interrupted, and its values are tried again, from the checkpoints in its directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from rlstack.programs.config.env_config import Option
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.session.run_lock import RunLockedError
from rlstack.programs.study import space
from rlstack.programs.study.space import Choices, Values
from rlstack.programs.study.sweep import Sweep

_RANDOM = 10  # trials at random before the first suggestion; fewer in sweeps of few trials
_COMPLETE = 5  # trials that must be complete before one is pruned
_UNPRUNED = 2  # the first evaluations, after which no trial is pruned
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
_PATIENCE = 60.0  # seconds for another command's lock of the database, and for its processes to end


class Trial(NamedTuple):
    """A trial: values of the options to train with."""

    number: int
    values: dict[str, Option]  # value of each option, by name
    directory: str  # directory of the trial's runs, relative to the sweep's directory


class Row(NamedTuple):
    """A trial of the table."""

    number: int
    values: Mapping[str, Option]
    state: str  # complete, pruned, failed, running or interrupted
    value: float | None  # the return; for a pruned trial the one of its last evaluation
    seconds: float  # duration of the trial; 0 if it has not ended
    evaluations: Mapping[int, float]  # the returns during training, by their number from 1
    directory: str
    error: str  # why it failed


class Study:
    """The trials of a sweep."""

    def __init__(self, sweep: Sweep, root: Path, worker: str = "") -> None:
        """Opens the database, or makes it.

        Args:
          sweep: the sweep.
          root: the directory of the sweep; its name is the study's name in the database.
          worker: this command's folder in ``workers``; "" for a command that adds no trials.

        Raises:
          ValueError: Optuna is not installed, the database cannot be opened, or it has a study of
            this name that searches something else.
        """
        self._optuna = _import()
        self._root, self._worker, self._total = root, worker, sweep.trials
        self._space = {name: self._distribution(v) for name, v in sweep.values.items()}
        self._asked: dict[int, Any] = {}  # Optuna's trials, by number
        url = sweep.storage or _url_of(root / "study.db")
        try:
            self._study = self._open(url, root.name, sweep)
        except Exception as error:
            reason = " ".join(str(error).split("\n")[0].split())
            raise ValueError(
                f"Sweep: the database of the trials cannot be opened: {reason}. Give another with "
                "--storage URL, such as sqlite:///FILE or postgresql://USER@HOST/NAME."
            ) from error
        self._check(sweep)

    def ask(self) -> Trial | None:
        """Returns the next trial, or None if there are as many as the sweep has."""
        self._take_over()
        if self._count() >= self._total:
            return None
        trial = self._study.ask(self._space)
        trial.set_user_attr("worker", self._worker)
        # Another command may have asked for the last trial at the same time.
        if self._count(before=trial.number) >= self._total:
            self._drop(trial.number, "surplus")
            return None
        directory = trial.user_attrs.get("directory") or f"trials/{trial.number}"
        trial.set_user_attr("directory", directory)
        self._asked[trial.number] = trial
        return Trial(trial.number, dict(trial.params), directory)

    def report(self, number: int, evaluation: int, mean: float) -> bool:
        """Records an evaluation of a trial; returns whether the trial should end.

        Args:
          number: number of the trial.
          evaluation: number of the evaluation, from 1.
          mean: mean return of the evaluation.
        """
        trial = self._asked[number]
        trial.report(mean, evaluation)
        return bool(trial.should_prune())

    def complete(self, number: int, value: float) -> None:
        """Records the return of a trial."""
        self._study.tell(self._asked.pop(number), value)

    def prune(self, number: int) -> None:
        """Records that a trial ended early."""
        self._study.tell(self._asked.pop(number), state=self._optuna.trial.TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """Records that a trial failed."""
        trial = self._asked.pop(number)
        trial.set_user_attr("error", error[:500])
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def rows(self) -> list[Row]:
        """Returns the trials that have begun, by number."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            given = trial.user_attrs
            if trial.state.name not in _STATES or given.get("dropped") == "surplus":
                continue
            state = given.get("dropped") or _STATES[trial.state.name]
            found.append(
                Row(
                    trial.number,
                    {name: trial.params[name] for name in self._space if name in trial.params},
                    state,
                    trial.value if state in ("complete", "pruned") else None,
                    trial.duration.total_seconds() if trial.duration else 0.0,
                    trial.intermediate_values,
                    given.get("directory", ""),
                    given.get("error", ""),
                )
            )
        return found

    def _open(self, url: str, name: str, sweep: Sweep) -> Any:
        waits = {"connect_args": {"timeout": _PATIENCE}} if url.startswith("sqlite") else {}
        self._storage = self._optuna.storages.RDBStorage(url, engine_kwargs=waits)
        return self._optuna.create_study(
            storage=self._storage,
            sampler=self._sampler(sweep.base.seed, min(_RANDOM, max(1, sweep.trials // 3))),
            pruner=self._optuna.pruners.MedianPruner(_COMPLETE, _UNPRUNED + 1),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )

    def _check(self, sweep: Sweep) -> None:
        """Checks that the study searches what the sweep does, or writes that it does."""
        tree = {name: space.to_tree(values) for name, values in sweep.values.items()}
        mine = json.dumps([sweep.base.preset, tree], sort_keys=True)
        theirs = self._study.user_attrs.get("searches")
        if theirs is None:
            self._study.set_user_attr("searches", mine)
        elif theirs != mine:
            raise ValueError(
                f"Sweep: the database has a study {self._study.study_name!r} that searches other "
                f"values: {theirs}. Give another name with --run-dir."
            )

    def _sampler(self, seed: int, first: int) -> Any:
        class Sampler(self._optuna.samplers.TPESampler):  # type: ignore[name-defined]
            """Draws from the numbers of the seed and of the trial.

            With numbers of the seed alone, each command of a sweep would draw the same values.
            """

            def before_trial(self, study: Any, trial: Any) -> None:
                """Starts the numbers of a trial."""
                self.__init__(seed=(1_000_003 * seed + trial.number) % 2**32)  # type: ignore[misc]
                super().before_trial(study, trial)

            def __init__(self, seed: int) -> None:
                super().__init__(seed=seed, n_startup_trials=first)

        return Sampler(seed)

    def _distribution(self, values: Values) -> Any:
        made = self._optuna.distributions
        if isinstance(values, Choices):
            return made.CategoricalDistribution(values.values)
        if not values.whole:
            return made.FloatDistribution(
                values.low, values.high, log=values.log, step=values.step or None
            )
        return made.IntDistribution(
            int(values.low), int(values.high), log=values.log, step=int(values.step or 1)
        )

    def _count(self, before: float = math.inf) -> int:
        """Returns how many trials there are, without those that are tried again."""
        return sum(
            trial.number < before and trial.state.name in _STATES and not _dropped(trial)
            for trial in self._study.get_trials(deepcopy=False)
        )

    def _take_over(self) -> None:
        """Queues the unfinished trials of commands that have ended, so that they are continued."""
        state = self._optuna.trial.TrialState.RUNNING
        by_worker: dict[str, list[Any]] = {}
        for trial in self._study.get_trials(deepcopy=False, states=(state,)):
            by_worker.setdefault(trial.user_attrs.get("worker", self._worker), []).append(trial)
        for worker, trials in by_worker.items():
            directory = self._root / "workers" / worker
            # A worker without a folder has another directory for its trials, on another machine.
            if worker == self._worker or not directory.is_dir():
                continue
            with contextlib.suppress(RunLockedError), RunDir(directory).claimed():
                for trial in self._running(trial.number for trial in trials):
                    self._again(trial)

    def _running(self, numbers: Iterable[int]) -> list[Any]:
        """Returns the trials, among the given ones, that have not ended."""
        wanted, state = set(numbers), self._optuna.trial.TrialState.RUNNING
        trials = self._study.get_trials(deepcopy=False, states=(state,))
        return [trial for trial in trials if trial.number in wanted]

    def _again(self, trial: Any) -> None:
        directory = trial.user_attrs.get("directory", "")
        if directory and (self._root / directory).is_dir():
            _wait_for(self._root / directory)
        self._drop(trial.number, "interrupted")
        again = {"directory": directory} if directory else {}
        self._study.enqueue_trial(trial.params, user_attrs=again)

    def _drop(self, number: int, why: str) -> None:
        """Ends a trial that does not count, because its values are tried again or are too many."""
        storage = self._storage
        study = storage.get_study_id_from_name(self._study.study_name)
        trial = storage.get_trial_id_from_study_id_trial_number(study, number)
        storage.set_trial_user_attr(trial, "dropped", why)
        self._study.tell(number, state=self._optuna.trial.TrialState.FAIL)


def _url_of(path: Path) -> str:
    """Returns the URL of a SQLite database, of which the path may have any characters.

    SQLite's own form of a path quotes them. As they are, "?" would end the path, and Optuna would
    take braces as fields of a template. SQLAlchemy adds the quotes that its version removes.
    """
    from sqlalchemy.engine import URL

    quoted = f"file:{quote(os.fsencode(path.absolute()))}"
    made = URL.create("sqlite", database=quoted, query={"uri": "true"})
    return made.render_as_string(hide_password=False)


def _dropped(trial: Any) -> bool:
    return "dropped" in trial.user_attrs


def _wait_for(directory: Path) -> None:
    """Waits until no process of a command that was killed has the runs of a trial any more."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        with contextlib.suppress(RunLockedError), RunDir(directory).claimed():
            return
        time.sleep(0.2)


def _import() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise ValueError(
            "Sweep: Optuna, which searches, is not installed. Install the extra: "
            "pip install 'rlstack[sweep]'; or give each value with --vary."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
