"""The learner of one policy is lost and started again; the learners of the others go on."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.config.member_config import HistoryConfig
from rlstack.programs.config.program_config import ProgramConfig
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.program.base import ProgramState
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.multi_policy.learner import (
    FollowingLearnerNode,
    LeadingLearnerNode,
    Part,
    PartFiles,
)
from rlstack.programs.program.multi_policy.versions import CopiedVersions
from rlstack.programs.program.multi_policy.writer import RenewedWriter
from rlstack.programs.run.launch import ProgramError
from rlstack.programs.session import timing
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.run_dir import RunDir
from rlstack.replay import ReplayClosedError, ReplayTimeoutError
from rlstack.rpc import UnavailableError
from rlstack.storage import checkpoint, checkpoint_record
from rlstack.storage.loggers import InMemoryLogger
from tests.programs.launched import FAST, Launched
from tests.programs.multi_policy.cases import chain
from tests.programs.multi_policy.test_parts import tree
from tests.programs.multi_policy.test_topologies import LEARNING, chains
from tests.programs.running import failures, nothing_left, run, series

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(240, method="thread")

RESTARTS = {"on_learner_loss": "restart"}
_LATER = [pytest.mark.slow, pytest.mark.chosen]
NAME = "learner/distributor"


@pytest.fixture(autouse=True)
def _nothing_left():
    with nothing_left():
        yield


@pytest.mark.parametrize(
    "program", [{"pacing": "lock_step"}, {}], ids=["lock_step", "rounds of one policy"]
)
def test_where_actors_wait_for_all_learners_a_restart_is_refused(program):
    experiment = chains("heavy_env", program={**RESTARTS, "pacing": "asynchronous"})
    changes = {"program": dataclasses.replace(experiment.program, **program)}
    if not program:
        changes["replay"] = dataclasses.replace(experiment.replay, min_actors=1)
    with pytest.raises(ValueError, match="on_learner_loss must be end"):
        dataclasses.replace(experiment, **changes)


# What an actor does.


class Writer:
    """A writer whose replay may be full or closed."""

    def __init__(self, error=None):
        self.error, self.steps, self.closed = error, [], False

    def add(self, env_ids, transition, timeout=None):
        if self.error:
            raise self.error("no")
        self.steps.append(transition.params_version[0])

    def close(self):
        self.closed = True


class Acting:
    """A `RenewedWriter`, and a coordinator that says whether its learner is there."""

    def __init__(self):
        self.learners, self.opened, self.version = {NAME: 0}, [], 0
        program = SimpleNamespace(poll=lambda: ProgramState(learners=self.learners))
        self.writer = RenewedWriter(self.open, NAME, program)

    def open(self):
        self.opened.append(Writer())
        return self.opened[-1]

    def add(self):
        self.version += 1
        self.writer.add(None, SimpleNamespace(params_version=np.full(4, self.version)))


def test_steps_are_discarded_from_the_end_of_the_memory_until_the_learner_is_back():
    acting = Acting()
    acting.add()
    acting.opened[0].error = ReplayClosedError
    acting.add()
    assert acting.opened[0].closed
    acting.add()  # the coordinator has not missed the learner yet
    acting.learners = {}
    acting.add()
    assert (len(acting.opened), acting.writer.discarded) == (1, 12)
    assert not acting.writer.has_learner
    acting.learners = {NAME: 1}
    acting.add()
    assert (acting.opened[0].steps, acting.opened[1].steps) == ([1], [5])
    assert acting.writer.has_learner


def test_a_full_replay_is_waited_for_unless_the_learner_is_lost():
    acting = Acting()
    acting.opened[0].error = ReplayTimeoutError
    with pytest.raises(ReplayTimeoutError):
        acting.add()
    acting.learners = {}
    acting.add()
    assert acting.writer.discarded == 4
    acting.learners = {NAME: 0}  # it was stopped, and goes on
    acting.add()
    assert acting.opened[1].steps == [3]


def test_a_learner_whose_restart_was_not_noticed_gets_a_new_writer():
    """Its memory, or the items of its replay, are not those of the old writer."""
    acting = Acting()
    acting.learners = {NAME: 1}
    acting.add()
    assert acting.opened[0].closed
    assert acting.opened[1].steps == [1]
    acting.add()
    assert len(acting.opened) == 2


def test_a_copy_of_versions_asks_for_all_after_a_learner_that_is_lost():
    """The restarted one may give their numbers to other versions."""
    cfg = HistoryConfig(of="learner", period=10, max_versions=2)
    asked = []

    def exchange(name, known, results):
        asked.append(known.tolist())
        raise UnavailableError("lost")

    agent = SimpleNamespace(initial_params=lambda key: {"w": np.zeros(2, np.float32)})
    copy = CopiedVersions(cfg, "past", agent, SimpleNamespace(exchange=exchange))
    copy._known = np.array([1, 2])
    for _ in range(2):
        with pytest.raises(UnavailableError):
            copy.exchange()
    assert asked == [[1, 2], [-1, -1]]


# What the coordinator knows.


@pytest.fixture
def coordinator(tmp_path):
    cfg = ProgramConfig(on_learner_loss="restart")
    experiment = chain(topology="heavy_env", frames=1000, program=cfg)
    directory = RunDir.create(tmp_path / "run", "test", 1)
    return Coordinator(experiment, directory, InMemoryLogger())


def report(coordinator, node, incarnation=0, gauges=None, **counts):
    return coordinator.report(node, incarnation, 100, counts, gauges or {}, {}, 0)["learners"]


def test_a_learner_is_there_from_its_first_count_until_it_is_silent(coordinator):
    assert report(coordinator, NAME) == {}
    assert report(coordinator, NAME, learner_steps=0) == {NAME: 0}
    for _ in range(int(timing.LEARNER_ABSENT / timing.REPORT_PERIOD) + 1):
        coordinator.check_learner(timing.REPORT_PERIOD)
    assert report(coordinator, "actor/0", env_frames=8) == {}
    coordinator.alive(NAME)
    assert report(coordinator, "actor/0", env_frames=8) == {NAME: 0}
    assert report(coordinator, NAME, 1) == {}  # it restores its checkpoint
    assert report(coordinator, NAME, 1, learner_steps=9) == {NAME: 1}


def test_the_newest_version_is_one_that_the_lost_learner_could_not_report(coordinator):
    report(coordinator, NAME, learner_steps=5)
    report(coordinator, "actor/0", gauges={"distributor/params/version": 7.0}, env_frames=8)
    report(coordinator, "actor/1", gauges={"retailer/params/version": 99.0}, env_frames=8)
    report(coordinator, NAME, 1)
    assert coordinator.newest_version(NAME) == 7
    report(coordinator, NAME, 1, learner_steps=8)
    assert coordinator.newest_version(NAME) == 8


def test_where_learners_do_not_restart_actors_are_told_of_none(tmp_path):
    experiment = chain(topology="heavy_env", frames=1000)
    directory = RunDir.create(tmp_path / "run", "test", 1)
    coordinator = Coordinator(experiment, directory, InMemoryLogger())
    assert report(coordinator, NAME, learner_steps=5) == {}


# Checkpoints.


def leading(tmp_path, others, states):
    """A learner that writes checkpoints, whose polls return these states, the last for ever."""
    learner = LeadingLearnerNode.__new__(LeadingLearnerNode)
    learner._setup = SimpleNamespace(
        experiment=SimpleNamespace(checkpoints_kept=3),
        policy="retailer",
        directory=RunDir(tmp_path),
        learner_restarts=True,
    )
    learner._others, learner._files = others, PartFiles(RunDir(tmp_path))
    learner._number, learner._checkpoints, learner._saved_frames = 0, 1, 7
    learner._poll = lambda: states.pop(0) if len(states) > 1 else states[0]
    return learner


def test_a_checkpoint_stays_due_while_a_learner_is_lost(tmp_path):
    there = ProgramState(learners={NAME: 0}, env_frames=7)
    lost = there._replace(learners={})
    learner = leading(
        tmp_path, {"distributor": SimpleNamespace(give_part=lambda *_: None)}, [there, lost]
    )
    learner._write(there, tree(1), {})
    assert not (tmp_path / "checkpoints").exists()
    assert (learner._checkpoints, learner._saved_frames) == (0, -1)
    learner._save_if_due(lost._replace(checkpoints=1))  # does nothing
    assert learner._checkpoints == 0


def test_a_learner_that_was_restarted_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "ASK_PART_AGAIN", 0.05)
    there = ProgramState(learners={NAME: 0}, env_frames=7)
    asked = []

    def give_part(*call):
        asked.append(call)
        if len(asked) == 3:
            PartFiles(RunDir(tmp_path)).write("distributor", 1, Part(tree(2), {}, Progress(7)))

    learner = leading(tmp_path, {"distributor": SimpleNamespace(give_part=give_part)}, [there])
    learner._write(there, tree(1), {})
    assert asked == [(1, False)] * 3
    assert (tmp_path / "checkpoints" / "step_000000000007").exists()


# Whole programs.


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("topology", "trainers"),
    [
        ("heavy_env", "one_each"),
        pytest.param("heavy_env", "one", marks=_LATER),
        pytest.param("light_env", "one_each", marks=_LATER),
        pytest.param("distributed", "one_each", marks=_LATER),
    ],
)
def test_a_learner_that_fails_in_a_thread_continues_while_the_other_one_learns(
    tmp_path, monkeypatch, topology, trainers
):
    write, failed = FollowingLearnerNode.write, []

    def fail_once(node, step, logs):
        write(node, step, logs)
        if not failed and checkpoint.latest(node._setup.directory.checkpoints):
            failed.append(step)
            raise OSError("gone")

    monkeypatch.setattr(FollowingLearnerNode, "write", fail_once)
    stop = StopConfig(factory="tests.programs.multi_policy.ending:of_distributor")
    experiment = chains(
        topology, 10_000_000, {**RESTARTS, "trainers": trainers}, checkpoint_period=400, stop=stop
    )
    result = run(experiment, tmp_path / "run")
    assert result.ended_by == stop.factory
    assert [(f["node"], f["restarts"]) for f in failures(tmp_path / "run")] == [(NAME, True)]
    assert result.policies["distributor"]["learner_steps"] > failed[0] + 40
    steps = {name: series(tmp_path / "run", f"{name}/learner/steps") for name in LEARNING}
    assert all(counts == sorted(counts) for counts in steps.values())


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("trainers", ["one_each", "one"])
def test_an_error_that_comes_back_after_the_restart_ends_the_program_with_its_name(
    tmp_path, trainers
):
    experiment = chains("heavy_env", program={**RESTARTS, "trainers": trainers})
    scale = NormalisationConfig(reward_scale=float("inf"))
    member = dataclasses.replace(experiment.policies["distributor"], normalisation=scale)
    policies = {**experiment.policies, "distributor": member}
    experiment = dataclasses.replace(experiment, policies=policies, frames=10_000_000)
    with pytest.raises(ProgramError, match=f"node {NAME} failed: NonFiniteError"):
        run(experiment, tmp_path / "run")
    found = [(f["node"], f["restarts"]) for f in failures(tmp_path / "run")]
    assert found[:2] == [(NAME, True), (NAME, False)]


def saved_numbers(run_dir, policy):
    """(version, steps that the optimizer counts) of a policy in the newest checkpoint."""
    path = checkpoint.latest(run_dir / "checkpoints")
    leaves = checkpoint_record.leaves_of(checkpoint_record.read(path, "test"))

    def read(begin, end=""):
        found = {
            number: leaf
            for number, leaf in leaves.items()
            if leaf.path.startswith(begin) and leaf.path.endswith(end)
        }
        return max(int(x) for x in checkpoint.read_arrays(path, found, "test").values())

    version = read(f"['learner']['version']['{policy}']")
    return version, read(f"['learner']['learner_state']['{policy}']", ".count")


def has_more(run_dir, policy):
    """Whether the coordinator knows of updates that the newest checkpoint does not have."""
    return series(run_dir, f"{policy}/learner/steps")[-1] > saved_numbers(run_dir, policy)[0]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    ("topology", "launch", "policy"),
    [
        ("heavy_env", "processes", "retailer"),
        ("heavy_env", "processes", "distributor"),
        ("heavy_env", "launchpad", "distributor"),
        ("light_env", "processes", "retailer"),
        ("light_env", "processes", "distributor"),
        ("light_env", "launchpad", "retailer"),
        ("distributed", "processes", "retailer"),
        ("distributed", "processes", "distributor"),
        ("distributed", "launchpad", "distributor"),
    ],
)
def test_a_killed_learner_continues_from_its_checkpoint_while_the_other_one_learns(
    tmp_path, topology, launch, policy
):
    run_dir, (other,) = tmp_path / "run", set(LEARNING) - {policy}
    options = (
        "--topology", topology, "--frames", 10_000_000, "--checkpoint-period", 8000,
        "--program.on-learner-loss", "restart", "--program.launch", launch, "--run-dir", run_dir,
        "--stop.factory", f"tests.programs.multi_policy.ending:of_{policy}",
    )  # fmt: skip
    with Launched(run_dir, "supply-chain-policies", *options, *FAST) as program:
        program.wait_for_log("distributor/learner/loss")
        program.wait_for_checkpoint()
        program.wait_for(lambda: saved_numbers(run_dir, policy)[0] >= 2, "two saved updates")
        program.wait_for(lambda: has_more(run_dir, policy), "an update that is not saved")
        before, steps_before = saved_numbers(run_dir, policy)
        program.kill(f"learner/{policy}")
        code, left = program.end(120.0)
    assert (code, left) == (0, []), program.stderr
    (failure,) = program.failures()
    assert (failure["node"], failure["restarts"]) == (f"learner/{policy}", True)
    assert failure["reason"] == "killed by SIGKILL"
    assert f"learner/{policy}: continues from step_" in program.stderr
    steps = {name: series(run_dir, f"{name}/learner/steps") for name in LEARNING}
    assert all(counts == sorted(counts) for counts in steps.values())
    # While the steps of the lost one stay the same, those of the other one grow.
    lost = [i for i, count in enumerate(steps[policy]) if steps[policy].count(count) > 2]
    assert steps[other][lost[-1]] > steps[other][lost[0]]
    assert min(series(run_dir, f"{policy}/replay/lag_min")) >= 0
    result = json.loads((run_dir / "result.json").read_text())
    version, steps_after = saved_numbers(run_dir, policy)
    assert result["policies"][policy]["learner_steps"] == version
    # The optimizer went on from the checkpoint, without the updates that were lost.
    kept = steps_after / (steps_before / before)
    assert before < kept < version
