"""The scheduler of searches: Optuna suggests the trials' values and stores them in a database.

Each trial trains in a process, which ends early if the trial is unpromising. A trial that fails is
reported and does not end the others.

Several commands may add trials at the same time, also on several machines. Each has a folder with a
lock in the directory of the study. A trial that was running when its command ended is marked as
interrupted, and its values are tried again, from the checkpoints in its directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from rlstack.programs.session.result import read_result
from rlstack.programs.session.run_dir import RunDir, new_directory
from rlstack.programs.session.run_lock import RunLockedError
from rlstack.programs.session.stopping import RETURN
from rlstack.programs.study import report, space
from rlstack.programs.study.executors import Work, may_share_a_program
from rlstack.programs.study.space import Range, Values
from rlstack.programs.study.study import SearchConfig, Study, Trial, is_study
from rlstack.storage import jsonl

_RANDOM = 10  # trials at random before the first suggestion; fewer in sweeps of few trials
_COMPLETE = 5  # trials that must be complete before one is pruned
_UNPRUNED = 2  # the first evaluations, after which no trial is pruned
_STATES = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
_PATIENCE = 60.0  # seconds for another command's lock of the database, and for its processes to end


def search(work: Work) -> list[Trial]:
    """Continues a search until it has all trials; returns them in their order.

    Raises:
      ValueError: see `Database`.
      Interrupted: SIGINT or SIGTERM was received, and all processes have ended.
    """
    worker = new_directory(work.root / "workers", socket.gethostname())
    with RunDir(worker).claimed():
        database = Database(work.study, work.root, worker.name)
        _Search(work, database).run()
    return database.trials()


class Database:
    """The trials of a search."""

    def __init__(self, study: Study, root: Path, worker: str = "") -> None:
        """Opens the database, or makes it.

        Args:
          study: the search.
          root: the directory of the search; its name is the study's name in the database.
          worker: this command's folder in ``workers``; "" for a command that adds no trials.

        Raises:
          ValueError: Optuna is not installed, the database cannot be opened, or it has a study of
            this name that searches something else.
        """
        assert isinstance(study.scheduler, SearchConfig)
        self._optuna = _import()
        self._root, self._worker, self._total = root, worker, study.scheduler.trials
        self._space = {name: self._distribution(v) for name, v in study.values.items()}
        self._asked: dict[int, Any] = {}  # Optuna's trials, by number
        url = study.scheduler.storage or _url_of(root / "study.db")
        try:
            self._study = self._open(url, root.name, study.base.seed)
        except Exception as error:
            reason = " ".join(str(error).split("\n")[0].split())
            raise ValueError(
                f"Study: the database of the trials cannot be opened: {reason}. Give another with "
                "--storage URL, such as sqlite:///FILE or postgresql://USER@HOST/NAME."
            ) from error
        self._check(study)

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
        return Trial(directory, dict(trial.params), number=trial.number)

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

    def trials(self) -> list[Trial]:
        """Returns the trials that have begun, by number."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            given = trial.user_attrs
            if trial.state.name not in _STATES or given.get("dropped") == "surplus":
                continue
            state = given.get("dropped") or _STATES[trial.state.name]
            found.append(
                Trial(
                    given.get("directory", ""),
                    {name: trial.params[name] for name in self._space if name in trial.params},
                    number=trial.number,
                    state=state,
                    value=trial.value if state in ("complete", "pruned") else None,
                    seconds=trial.duration.total_seconds() if trial.duration else 0.0,
                    error=given.get("error", ""),
                    evaluations=trial.intermediate_values,
                )
            )
        return found

    def _open(self, url: str, name: str, seed: int) -> Any:
        waits = {"connect_args": {"timeout": _PATIENCE}} if url.startswith("sqlite") else {}
        self._storage = self._optuna.storages.RDBStorage(url, engine_kwargs=waits)
        return self._optuna.create_study(
            storage=self._storage,
            sampler=self._sampler(seed, min(_RANDOM, max(1, self._total // 3))),
            pruner=self._optuna.pruners.MedianPruner(_COMPLETE, _UNPRUNED + 1),
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )

    def _check(self, study: Study) -> None:
        """Checks that the database's study searches what this one does, or writes that it does."""
        theirs = self._study.user_attrs.get("searches")
        if theirs is None:
            trees = {name: space.to_tree(values) for name, values in study.values.items()}
            mine = json.dumps([study.base.preset, trees], sort_keys=True)
            self._study.set_user_attr("searches", mine)
            return
        preset, trees = json.loads(theirs)
        values = {name: space.from_tree(tree) for name, tree in trees.items()}
        if (preset, values) != (study.base.preset, dict(study.values)):
            raise ValueError(
                f"Study: the database has a study {self._study.study_name!r} that searches other "
                f"values: {theirs}. Give another name with --run-dir."
            )

    def _sampler(self, seed: int, first: int) -> Any:
        class Sampler(self._optuna.samplers.TPESampler):  # type: ignore[name-defined]
            """Draws from the numbers of the seed and of the trial.

            With numbers of the seed alone, each command of a search would draw the same values.
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
        if not isinstance(values, Range):
            return made.CategoricalDistribution(values)
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


class _Search:
    """Trains trials until there are enough."""

    def __init__(self, work: Work, database: Database) -> None:
        self._work, self._database, self._processes = work, database, work.processes
        self._running: dict[str, _Running] = {}  # by the trial's number, as text

    def run(self) -> None:
        """Trains trials in several processes at a time."""
        for name, failure in self._processes.run(self._work.jobs, self._start_next, self._judge):
            self._end(self._running.pop(name), failure)
            report.write(self._work.study, self._work.root, self._database.trials())

    def _start_next(self) -> bool:
        if (trial := self._database.ask()) is None:
            return False
        root, name = self._work.root, str(trial.number)
        directory, log = root / trial.name, root / "logs" / name
        try:
            study = self._work.study.of_trial(trial.values)
        except ValueError as error:  # these values do not fit together
            self._fail(trial, str(error))
            return True
        if not is_study(directory):
            directory.mkdir(parents=True, exist_ok=True)
            study.write(directory)
        self._running[name] = _Running(trial, study, directory)
        self._processes.start(name, log, directory)
        self._say(trial, f"{report.text_of(trial.values)}; its output is in {log}")
        return True

    def _judge(self) -> None:
        """Records new evaluations, and asks trials to end that are worse than most others."""
        for name, one in self._running.items():
            if self._record(one):
                self._processes.stop(name)

    def _record(self, one: _Running) -> bool:
        """Records the new evaluations of a trial; returns whether it should end."""
        scheduler = self._work.study.scheduler
        assert isinstance(scheduler, SearchConfig)
        for number, mean in one.evaluations():
            ends = self._database.report(one.trial.number, number, mean)
            if ends and scheduler.prunes and not one.pruned:
                one.pruned = f"pruned after evaluation {number}, with return {mean:.1f}"
        return bool(one.pruned)

    def _end(self, one: _Running, failure: str) -> None:
        trial, number = one.trial, one.trial.number
        self._record(one)
        if failure and one.pruned:
            self._database.prune(number)
            self._say(trial, one.pruned)
            return
        results = [read_result(RunDir(path)) for path in one.paths]
        returns = [result.eval_return_mean for result in results if result is not None]
        if failure or len(returns) < len(results):
            self._fail(trial, failure or "a run left no result")
        elif not math.isfinite(value := float(np.mean(returns))):
            self._fail(trial, f"its return is {value}")
        else:
            self._database.complete(number, value)
            self._say(trial, f"return {value:.1f}")

    def _fail(self, trial: Trial, error: str) -> None:
        error = " ".join(error.split())
        self._database.fail(trial.number, error)
        self._say(trial, f"failed: {error}")

    def _say(self, trial: Trial, text: str) -> None:
        self._work.say(f"trial {trial.number}: {text}")


class _Running:
    """A trial that trains.

    Attributes:
      trial: the trial.
      paths: the directories of its runs.
      pruned: why it was asked to end; "" if it was not.
    """

    def __init__(self, trial: Trial, study: Study, directory: Path) -> None:
        self.trial, self.pruned = trial, ""
        self.paths = [directory / run.name for run in study.trials()]
        # Runs that train together are evaluated together. Otherwise the first seed decides, because
        # the others have not begun.
        paths = self.paths if may_share_a_program(study) else self.paths[:1]
        self._metrics = [_Metrics(path) for path in paths]
        self._seen = 0

    def evaluations(self) -> Iterator[tuple[int, float]]:
        """Yields the number, from 1, and the mean return of each new evaluation of all runs."""
        returns = [metrics.returns() for metrics in self._metrics]
        while all(len(found) > self._seen for found in returns):
            mean = float(np.mean([found[self._seen] for found in returns]))
            self._seen += 1
            yield self._seen, mean


class _Metrics:
    """Reads the returns of a run's evaluations while they are written."""

    def __init__(self, directory: Path) -> None:
        self._path = RunDir(directory).metrics
        self._at = 0  # bytes that were read
        self._returns: list[float] = []

    def returns(self) -> list[float]:
        """Returns the mean returns of all evaluations so far."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            file.seek(0, 2)
            if file.tell() < self._at:  # a resumed run moves lines to another file
                self._at, self._returns = 0, []
            file.seek(self._at)
            whole = file.read().rpartition(b"\n")[0]
            self._at += len(whole) + 1 if whole else 0
            for line in whole.splitlines():
                with contextlib.suppress(ValueError, RecursionError):
                    value = jsonl.numbers(json.loads(line)).get(RETURN)
                    if value is not None:
                        self._returns.append(value)
        return self._returns


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
            "Study: Optuna, which searches, is not installed. Install the extra: "
            "pip install 'rlstack[sweep]'; or give each value with --vary."
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
