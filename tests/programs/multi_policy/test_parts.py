"""Checkpoints of several learners, and what the coordinator counts of several policies."""

import contextlib
import logging
from types import SimpleNamespace

import numpy as np
import pytest

from rlstack.programs.program.base import OVER, RUNNING, SAVING, ProgramState
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.multi_policy.learner import (
    FollowingLearnerNode,
    LeadingLearnerNode,
    Part,
    PartFiles,
    joined,
    part_of,
)
from rlstack.programs.program.stopping import NodeLostError
from rlstack.programs.session import timing
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage.loggers import InMemoryLogger
from tests.programs.multi_policy.cases import chain


def tree(value):
    return {
        "learner": {"params": {"w": np.full(2, value)}, "version": np.int64(value)},
        "replay": {"steps": np.full(3, value)},
        "versions": {},
    }


def test_parts_are_joined_by_policy_and_taken_apart_again():
    whole = joined({"a": tree(1), "b": tree(2)})
    assert set(whole) == {"learner", "replay"}
    assert whole["learner"]["version"] == {"a": 1, "b": 2}
    assert part_of(joined({"b": tree(2)}), "b")["learner"]["version"] == 2
    with_versions = {**tree(1), "versions": {"past": {"ids": np.arange(3)}}}
    found = joined({"a": with_versions, "b": tree(2)})["policies"]
    assert set(found) == {"past"}
    np.testing.assert_array_equal(found["past"]["inferencer"]["versions"]["ids"], [0, 1, 2])
    assert part_of(joined({"a": with_versions}), "a")["versions"].keys() == {"past"}


def test_a_part_is_taken_once_and_those_of_an_earlier_command_are_removed(tmp_path):
    files = PartFiles(RunDir(tmp_path))
    assert files.take("a", 1) is None
    files.write("a", 1, Part(tree(1), {"replay/a": 5}, Progress(7)))
    files.write("b", 1, Part(tree(2), {}, Progress(7)))
    assert files.take("a", 2) is None
    part = files.take("a", 1)
    assert part.metadata == {"replay/a": 5}
    np.testing.assert_array_equal(part.tree["replay"]["steps"], [1, 1, 1])
    assert files.take("a", 1) is None
    files.remove("b")
    assert files.take("b", 1) is None
    assert not RunDir(tmp_path).parts.exists()


def test_a_part_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file, where a folder must be")
    with pytest.raises(OSError, match="parts"):
        PartFiles(RunDir(tmp_path)).write("a", 1, Part(tree(1), {}, Progress(7)))


def test_no_checkpoint_is_written_without_the_part_of_a_learner_that_has_ended(
    tmp_path, monkeypatch, caplog
):
    """Otherwise a resumed run would have params of different times, or none."""
    monkeypatch.setattr(timing, "PARTS_AT_END", 0.2)
    asked = []
    learner = LeadingLearnerNode.__new__(LeadingLearnerNode)
    kept = SimpleNamespace(checkpoints_kept=3)
    learner._setup = SimpleNamespace(policy="a", directory=RunDir(tmp_path), experiment=kept)
    learner._others = {"b": SimpleNamespace(give_part=lambda *call: asked.append(call))}
    learner._number, learner._files = 0, PartFiles(RunDir(tmp_path))
    learner._poll = lambda: ProgramState(OVER)
    with caplog.at_level(logging.WARNING):
        learner._write(ProgramState(SAVING, env_frames=7), tree(1), {})
    assert asked == [(1, True)]
    assert "b gave no part" in caplog.text
    assert not (tmp_path / "checkpoints").exists()
    learner._files.write("b", 2, Part(tree(2), {}, Progress(7)))
    learner._write(ProgramState(SAVING, env_frames=7), tree(1), {})
    assert (tmp_path / "checkpoints" / "step_000000000007").exists()


@pytest.fixture
def coordinator(tmp_path):
    """Of a program in which a retailer and a distributor learn, with four rows each."""
    experiment = chain(topology="heavy_env", frames=1000, updates=5)
    directory = RunDir.create(tmp_path / "run", "test", 1)
    return Coordinator(experiment, directory, InMemoryLogger())


def report(coordinator, node, gauges=None, **counts):
    batch = report.batches = getattr(report, "batches", 0) + 1
    return coordinator.report(node, 0, 100, counts, gauges or {}, {}, batch)


def test_the_last_learner_to_spend_its_updates_ends_training(coordinator):
    report(coordinator, "learner/distributor", learner_steps=9)
    report(coordinator, "actor/0", env_frames=80)
    assert report(coordinator, "learner/retailer", learner_steps=4)["phase"] == RUNNING
    assert report(coordinator, "learner/retailer", learner_steps=5)["phase"] == SAVING


def test_a_program_is_saved_only_once_every_learner_has_started(coordinator):
    report(coordinator, "learner/distributor", learner_steps=0)
    assert coordinator.interrupt(2) == OVER


def test_params_of_each_policy_are_compared_with_its_own_learner(coordinator):
    report(coordinator, "learner/distributor", learner_steps=3)
    report(coordinator, "learner/retailer", learner_steps=1)
    report(
        coordinator,
        "actor/0",
        {"retailer/params/version": 1, "distributor/params/version": 1},
        env_frames=120,
    )
    logs = coordinator._newest.logs
    assert (logs["retailer/params/lag"], logs["distributor/params/lag"]) == (0, 2)
    assert (logs["retailer/learner/steps"], logs["distributor/learner/steps"]) == (1, 3)
    assert logs["learner/steps"] == 1
    assert coordinator.status()["nodes"]["actor/0"]["lag"] == 2


def test_the_learner_that_is_silent_is_named(coordinator):
    for policy in ("retailer", "distributor"):
        report(coordinator, f"learner/{policy}", learner_steps=0)
    with pytest.raises(NodeLostError, match="not reported") as caught:
        for _ in range(1000):
            coordinator.alive("learner/retailer")
            coordinator.check_learner(timing.REPORT_PERIOD)
    assert caught.value.node == "learner/distributor"


@pytest.fixture
def following():
    """A learner that gives its parts, their numbers, and what its next polls return."""
    learner = FollowingLearnerNode.__new__(FollowingLearnerNode)
    learner._asked = learner._given = 0, False
    learner._source = SimpleNamespace(clean=lambda: None)
    phase = contextlib.nullcontext
    learner._program = SimpleNamespace(phase=phase, has_lasting_work=False)
    learner._setup = SimpleNamespace(policy="distributor")
    learner._tree = lambda: ({}, {})
    given, states = [], [ProgramState(OVER)]
    learner._files = SimpleNamespace(write=lambda policy, number, part: given.append(number))
    learner._poll = lambda now=False: states[-1]
    return learner, given, states


def test_the_last_part_is_given_only_after_the_last_update(following):
    """This learner may learn of the end later than the one that asks, up to a report's period."""
    learner, given, states = following
    states[:] = [ProgramState(SAVING)]
    learner.give_part(5, True)
    learner._save_if_due(ProgramState(RUNNING))  # between two updates
    assert given == []
    learner._save_if_due(ProgramState(SAVING))  # after the last
    assert (given, learner._given) == ([5], (5, True))
    assert learner._program.has_lasting_work


def test_a_learner_that_learns_on_gives_the_part_that_a_stopped_one_called_the_last(following):
    learner, given, states = following
    states[:] = [ProgramState(RUNNING)]
    learner.give_part(5, True)
    learner._save_if_due(ProgramState(RUNNING))
    assert (given, learner._given) == ([5], (5, False))
