"""The shard of each learner process: its actors, its part of the replay and of each batch.

A shard is a `Setup` like that of a program with one learner, with the actors of the shard only. So
everything that makes, writes, reads and saves a replay serves a shard too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program.base import Setup
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint


@dataclasses.dataclass(frozen=True)
class ShardDir(RunDir):
    """The run directory; the replays of all shards but the first have folders of their own in it.

    The first shard's is saved as that of a single learner, with or in the checkpoints of the run.
    """

    index: int = 0
    """Index of the learner process."""

    @property
    def checkpoints(self) -> Path:
        """The directory of the shard's checkpoints."""
        return self._own / "checkpoints"

    @property
    def replay(self) -> Path:
        """The directory of the shard's replay service."""
        return self._own / "replay"

    @property
    def _own(self) -> Path:
        return self.path / "learners" / str(self.index) if self.index else self.path


def all_of(setup: Setup) -> Sequence[Setup]:
    """Returns the setups of all shards; with one learner, the program's own."""
    count = setup.experiment.learner.processes
    return [setup] if count == 1 else [_shard(setup, index) for index in range(count)]


def of_actor(setup: Setup, rank: int) -> tuple[Setup, int]:
    """Returns the setup of an actor's shard, and the actor's rank in it."""
    found = all_of(setup)
    return found[rank % len(found)], rank // len(found)


def name_of(shard: Setup, group: str) -> str:
    """Returns the name of the node of a group that serves a shard, such as "replay/1"."""
    directory = shard.directory
    return f"{group}/{directory.index}" if isinstance(directory, ShardDir) else shard.node(group)


def _shard(setup: Setup, index: int) -> Setup:
    directory = ShardDir(setup.directory.path, setup.directory.claim, index)
    restored = setup.restored
    if index and restored is not None:
        step = checkpoint.step_of(restored)
        paths = checkpoint.paths(directory.checkpoints)  # the newest first
        restored = next((path for path in paths if checkpoint.step_of(path) == step), None)
    shard = dataclasses.replace(
        setup,
        experiment=_experiment(setup.experiment, index),
        directory=directory,
        restored=restored,
    )
    vars(shard)["step"] = setup.step  # it is cached there
    return shard


def _experiment(experiment: Experiment, index: int) -> Experiment:
    cfg, program, learner = experiment.replay, experiment.program, experiment.learner
    count = learner.processes
    tolerance = cfg.samples_per_insert_tolerance
    replay = dataclasses.replace(
        cfg,
        batch_size=cfg.batch_size // count,
        max_size=-(-cfg.max_size // count),
        min_size=-(-cfg.min_size // count),
        samples_per_insert_tolerance=None if tolerance is None else tolerance / count,
        importance_anneal_samples=-(-cfg.importance_anneal_samples // count),
    )
    actors = program.num_actors // count
    inferencers = min(program.num_inferencers, actors)
    return dataclasses.replace(
        experiment,
        seed=role_seed(experiment.seed, "share", index),
        replay=replay,
        learner=dataclasses.replace(learner, processes=1, devices=()),
        program=dataclasses.replace(program, num_actors=actors, num_inferencers=inferencers),
    )
