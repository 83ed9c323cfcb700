"""Populations: selection, copies, lineage, and exact resume in one compiled program."""

import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import signal

import numpy as np
import pytest

from rlstack.configs.acting import EvaluatorConfig
from rlstack.programs.cli.commands import main
from rlstack.programs.config.presets import preset
from rlstack.programs.config.stop_config import StopConfig
from rlstack.programs.run.train import Opened
from rlstack.programs.session.result import Result
from rlstack.programs.session.signals import Interrupted
from rlstack.programs.study import executors, pbt, train, vmapped
from rlstack.programs.study.executors import Work
from rlstack.programs.study.pbt import Copy, Lineage
from rlstack.programs.study.space import Range, draw
from rlstack.programs.study.study import FailedTrialsError, PbtConfig, Study, read
from rlstack.storage import checkpoint
from tests.fused.test_fused_run import dqn, ppo
from tests.programs.running import metrics, nothing_left, params

RATE = "agent.optimizer.learning_rate"
RATES = {RATE: Range(1e-5, 1e-1, log=True)}


def population(base=None, size=4, vary=RATES, **pbt):
    base = base or ppo(updates=0, frames=2_000, checkpoint_period=600)
    return Study(base, tuple(range(1, 1 + size)), vary, PbtConfig(**{"period": 300, **pbt}))


def select(scores, values=None, found=None, number=1):
    found = found or population(size=len(scores))
    values = values or [{RATE: 1e-3} for _ in scores]
    return pbt.select(found, number, scores, [100] * len(scores), values, range(len(scores)))


def test_the_worst_quarter_copies_the_best_quarter():
    values = [{RATE: 10.0 ** -(1 + i / 2)} for i in range(8)]
    scores = [3.0, -math.inf, 8.0, 5.0, 1.0, 7.0, 4.0, 6.0]
    chosen = population(size=8, resample=0.0)
    sources, factors = set(), set()
    for number in range(1, 30):
        copies = select(scores, values, chosen, number)
        assert [copy.member for copy in copies] == [1, 4]
        for copy in copies:
            assert (copy.selection, copy.frames, copy.score) == (number, 100, scores[copy.member])
            assert copy.before == values[copy.member]
            sources.add(copy.source)
            factors.add(round(copy.after[RATE] / values[copy.source][RATE], 6))
        assert copies == select(scores, values, chosen, number)
    assert sources == {2, 5} and factors == {0.8, 1.2}


def test_equal_members_copy_nothing():
    assert select([500.0] * 4) == []
    assert select([-math.inf] * 4) == []


def test_changed_values_stay_in_their_ranges():
    spaces = {
        RATE: Range(1e-3, 2e-3),
        "agent.num_epochs": Range(1, 4, whole=True),
        "agent.gae_lambda": (0.5, 0.9),
    }
    found = population(vary=spaces, resample=0.3)
    before = {RATE: 2e-3, "agent.num_epochs": 1, "agent.gae_lambda": 0.5}
    seen = [select([0.0, 1.0, 2.0, 3.0], [before] * 4, found, n)[0].after for n in range(1, 80)]
    assert all(1e-3 <= values[RATE] <= 2e-3 for values in seen)
    assert {type(values["agent.num_epochs"]) for values in seen} == {int}
    assert {values["agent.num_epochs"] for values in seen} == {1, 2, 3, 4}
    assert {values["agent.gae_lambda"] for values in seen} == {0.5, 0.9}
    assert Range(0, 10, step=2.5).fitted(6.0) == 5.0
    rng = np.random.default_rng(1)
    drawn = [math.log10(draw(Range(1e-6, 1e-2, log=True), rng)) for _ in range(2_000)]
    assert abs(np.mean(drawn) + 4) < 0.15 and min(drawn) < -5.9 and max(drawn) > -2.1


def test_members_begin_with_their_own_values_or_with_the_given_one():
    drawn = Lineage.new(population()).values
    assert (
        len({values[RATE] for values in drawn}) == 4 and drawn == Lineage.new(population()).values
    )
    base = population().base
    given = Lineage.new(population(start="given")).values
    assert given == [{RATE: base.agent.optimizer.learning_rate}] * 4
    members = Lineage.new(population()).members(population())
    assert [member.seed for member in members] == [1, 2, 3, 4]


def test_what_cannot_be_a_population_is_refused(capsys):
    with pytest.raises(ValueError, match="at least 2"):
        population(size=1)
    with pytest.raises(ValueError, match="one or more options must vary"):
        population(vary={})
    with pytest.raises(ValueError, match=r"got network\.dropout"):
        population(vary={"network.dropout": Range(0.0, 0.5)})
    with pytest.raises(ValueError, match=r"fraction must be in \(0, 0\.5\]"):
        PbtConfig(fraction=0.6)
    for words, text in (
        (["--population", "4"], "Add --vary NAME LOW HIGH"),
        (["--pbt.period", "100"], "--pbt needs --population"),
        (["--population", "4", "--seeds", "1", "2"], "leave out --seeds"),
        (["--population", "4", "--vary", RATE, "1e-2", "1e-5"], "the lower one first"),
        (["--population", "4", "--vary", "agent.discont", "0.9", "1"], "did you mean"),
    ):
        assert main("train", ["cartpole-ppo", *words]) != 0
        assert text in capsys.readouterr().err


def test_a_lineage_is_read_as_it_was_written(tmp_path):
    found = pbt.Lineage.new(population())
    copy = Copy(1, 300, 0, 3, -math.inf, 0.5, found.values[0], {RATE: 1e-4})
    found.take([copy], [-math.inf, 0.0, 0.25, 0.5])
    found.write(tmp_path)
    assert pbt.read_lineage(tmp_path, population()) == found
    assert found.values[0] == {RATE: 1e-4} and found.newest == [copy]


def test_a_part_of_a_checkpoint_is_copied(tmp_path):
    def tree(x):
        learner = {"params": {"w": np.full(3, x)}, "learner_state": (x, np.zeros((0, 2)))}
        return {"learner": {**learner, "version": np.int64(x)}, "replay": np.full(2, x)}

    mine = checkpoint.save(tmp_path / "a", 5, tree(1.0), {"env_frames": 5})
    theirs = checkpoint.save(tmp_path / "b", 6, tree(2.0), {"env_frames": 6})
    parts = ("['learner']['params']", "['learner']['learner_state']")
    made = checkpoint.copy_parts(mine, theirs, parts)
    assert checkpoint.latest(tmp_path / "a") == made
    found = checkpoint.restore(made, tree(0.0))
    assert found["learner"]["params"]["w"].tolist() == [2.0] * 3
    assert found["learner"]["learner_state"][0] == 2.0
    assert found["learner"]["version"] == 1 and found["replay"].tolist() == [1.0] * 2
    assert checkpoint.read_metadata(made)["env_frames"] == 5
    other = checkpoint.save(tmp_path / "b", 7, {"learner": {"params": np.zeros(4)}}, {})
    with pytest.raises(checkpoint.CheckpointError, match="structure, shapes and dtypes"):
        checkpoint.copy_parts(mine, other, parts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Four members on Catch, in one program."""
    root = tmp_path_factory.mktemp("populations") / "population"
    out = io.StringIO()
    with nothing_left():
        ended = train.run(population(), root, stream=out)
    return root, ended, out.getvalue()


@pytest.mark.slow
@pytest.mark.chosen
def test_members_copy_each_other_in_one_program(trained):
    root, ended, text = trained
    found = pbt.read_lineage(root, read(root))
    # An iteration has 64 steps, of which some begin an episode and are no frames, and a period 5.
    assert found.selections == 7 and 1 <= len(found.copies) <= 7
    assert {copy.selection for copy in found.copies} <= set(range(1, 8))
    report = (root / "report.md").read_text()
    assert "## Lineage" in report and "| member-3 |" in report
    assert "the best is" in text
    for i, one in enumerate(ended):
        config = json.loads((root / one.name / "config.json").read_text())
        assert config["agent"]["optimizer"]["learning_rate"] == found.values[i][RATE]
        assert one.values == found.values[i] and one.result.seed == 1 + i
        logged = [
            line["population/score"]
            for line in metrics(root / one.name)
            if "population/score" in line
        ]
        assert logged
    out = io.StringIO()
    assert train.resume(root, stream=out) == ended and "has finished" in out.getvalue()
    newest = found.copies[-1]
    assert newest.score < newest.source_score and 1e-5 <= newest.after[RATE] <= 1e-1


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("interrupted_at", [3, 8])
def test_a_resumed_population_is_the_same_bit_for_bit(
    trained, tmp_path, monkeypatch, interrupted_at
):
    calls = []
    call = vmapped.VmappedRuns.call

    def interrupting(self, *args):
        calls.append(args)
        if len(calls) == interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)
        return call(self, *args)

    root = tmp_path / "population"
    short = population(ppo(updates=0, frames=2_000, checkpoint_period=600))
    with monkeypatch.context() as patch:
        patch.setattr(vmapped.VmappedRuns, "call", interrupting)
        with pytest.raises(Interrupted):
            train.run(short, root, stream=io.StringIO())
    ended = train.resume(root, stream=io.StringIO())
    whole, others, _ = trained
    assert pbt.read_lineage(root, short).copies == pbt.read_lineage(whole, short).copies
    for one, other in zip(ended, others, strict=True):
        assert one.result.env_frames == other.result.env_frames
        for x, y in zip(params(root / one.name), params(trained[0] / other.name), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_killed_population_goes_on_from_what_all_members_have(trained, tmp_path, monkeypatch):
    saved = pbt.Lineage.write

    def killed(self, directory):
        if self.selections > 3:  # members have saved, and the lineage is not written
            raise KeyboardInterrupt
        saved(self, directory)

    root = tmp_path / "population"
    with monkeypatch.context() as patch:
        patch.setattr(pbt.Lineage, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            train.run(population(), root, stream=io.StringIO())
    assert pbt.read_lineage(root, population()).selections == 3
    ended = train.resume(root, stream=io.StringIO())
    for one, other in zip(ended, trained[1], strict=True):
        for x, y in zip(params(root / one.name), params(trained[0] / other.name), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.slow
@pytest.mark.chosen
def test_members_that_diverge_copy_others(tmp_path):
    found = population(vary={RATE: (1e-3, 1e30)}, resample=0.0)
    rates = [values[RATE] for values in Lineage.new(found).values]
    assert set(rates) == {1e-3, 1e30}
    ended = train.run(found, tmp_path / "population", stream=io.StringIO())
    assert all(one.result.env_frames >= 2_000 for one in ended)
    assert {one.values[RATE] for one in ended} == {1e-3}


@pytest.mark.slow
def test_dqn_in_a_population(tmp_path):
    found = population(dqn(updates=0, frames=2_000), size=2, fraction=0.5)
    ended = train.run(found, tmp_path / "population", stream=io.StringIO())
    assert all(one.result.env_frames >= 2_000 for one in ended)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_members_whose_options_cannot_be_traced_train_as_the_runs_of_a_grid(tmp_path):
    base = ppo(updates=0, frames=600)
    found = population(base, size=3, vary={**RATES, "agent.num_epochs": (1, 2)}, fraction=0.5)
    root, out = tmp_path / "population", io.StringIO()
    ended = train.run(found, root, stream=out)
    assert out.getvalue().count("there is one for each value of agent.num_epochs") == 2
    assert [one.name for one in ended] == ["member-0", "member-1", "member-2"]
    assert all(one.result.env_frames >= 600 for one in ended)
    assert pbt.read_lineage(root, read(root)).selections == 1


def apart(size=2, **changes):
    base = ppo("single_process", updates=0, frames=900, log_period=100)
    return population(dataclasses.replace(base, **changes), size=size, fraction=0.5)


def test_a_population_whose_members_were_not_all_made_has_all_when_it_is_resumed(
    tmp_path, monkeypatch
):
    """The command was killed while it made them."""
    monkeypatch.setattr(pbt, "_train_apart", lambda *_: [])
    root = tmp_path / "population"
    train.run(apart(size=3), root, stream=io.StringIO())
    configs = [(root / f"member-{i}" / "config.json").read_text() for i in range(3)]
    for i in (1, 2):
        shutil.rmtree(root / f"member-{i}")
    (root / "member-1").mkdir()
    train.resume(root, stream=io.StringIO())
    assert configs == [(root / f"member-{i}" / "config.json").read_text() for i in range(3)]


RESULT = Result(1.0, 0.0, 2, 300, 1, 1.0, 300.0, 1, "single_process", "catch", "unknown")


@pytest.mark.parametrize("jobs", [1, 2])
def test_members_apart_get_all_budgets(tmp_path, monkeypatch, jobs):
    given = []

    @contextlib.contextmanager
    def opened(path, budgets, **_):
        given.append((path.name, budgets))
        yield Opened(None, None, result=RESULT._replace(env_frames=budgets["frames"]))

    def in_processes(work, trials, budgets):
        for trial in trials:
            with opened(work.root / trial.name, budgets):
                yield trial.ended("it left no result")

    monkeypatch.setattr("rlstack.programs.run.train.earlier_run", opened)
    monkeypatch.setattr(executors, "_in_processes", in_processes)
    monkeypatch.setattr(train, "_report", lambda *_, **__: None)
    root = tmp_path / "population"
    with contextlib.suppress(FailedTrialsError):  # no process has left a result
        train.run(apart(), root, jobs=jobs, stream=io.StringIO())
    given.clear()
    with contextlib.suppress(FailedTrialsError):
        train.resume(root, {"updates": 7, "hours": 0.5}, jobs=jobs, stream=io.StringIO())
    assert given[-2:] == [
        (f"member-{i}", {"frames": 900, "updates": 7, "hours": 0.5}) for i in range(2)
    ]


def test_members_apart_that_have_ended_take_no_part_in_selections(tmp_path, monkeypatch):
    ends = {"member-1": "stop.patience: 3", "member-2": "updates"}
    trained = []

    def train_to(work, trials, budgets):
        trained.append([trial.name for trial in trials])
        for trial in trials:
            by = ends.get(trial.name, "frames")
            frames = 250 if trial.name in ends else budgets["frames"]
            steps = 9 if by == "updates" else 1
            result = RESULT._replace(env_frames=frames, learner_steps=steps, ended_by=by)
            yield trial.ended(result)

    monkeypatch.setattr(executors, "train", train_to)
    monkeypatch.setattr(pbt, "_copy", lambda *_: None)
    found = apart(size=4, updates=9)
    state = pbt.Lineage.new(found)
    state.scores = [3.0, 9.0, 0.0, 5.0]
    state.write(tmp_path)
    for member in state.members(found):
        (tmp_path / member.name).mkdir()
        (tmp_path / member.name / "config.json").write_text("{}")
    ended = pbt.train(Work(found, tmp_path, io.StringIO()), {})
    assert [one.result.env_frames for one in ended] == [900, 250, 250, 900]
    left = ["member-0", "member-3"]
    assert trained == [[f"member-{i}" for i in range(4)], left, left]
    assert pbt.read_lineage(tmp_path, found).apart


@pytest.mark.parametrize("state", [{"apart": True}, {"selections": 1}])
def test_members_that_began_apart_never_share_a_program(tmp_path, monkeypatch, state):
    """Their checkpoints are not in the lineage. Earlier versions did not write how they began."""
    found, called = population(), []
    monkeypatch.setattr(pbt, "_train_apart", lambda *arguments: called.append(arguments) or [])
    lineage = dataclasses.replace(pbt.Lineage.new(found), **state)
    lineage.write(tmp_path)
    for member in lineage.members(found):
        (tmp_path / member.name).mkdir()
        (tmp_path / member.name / "config.json").write_text("{}")
    assert pbt.train(Work(found, tmp_path, io.StringIO()), {}) == [] and len(called) == 1


def test_checkpoints_of_members_stay_while_the_lineage_names_none_of_them(tmp_path):
    """A member keeps the one before until all members have theirs, and none is removed in doubt."""
    found = population(ppo(updates=0, frames=2_000, checkpoints_kept=1), size=2)
    lineage = pbt.Lineage.new(found)
    lineage.checkpoints = ["step_000000000300"] * 2
    kept = {"member-0": ("300", "600"), "member-1": ("600",)}
    for name, steps in kept.items():
        for step in steps:
            (tmp_path / name / "checkpoints" / f"step_000000000{step}").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    with pbt._opened(Work(found, tmp_path, io.StringIO()), lineage) as opened:
        assert {run.experiment.checkpoints_kept for run in opened} == {2}
    left = [sorted(x.name[-3:] for x in (tmp_path / n / "checkpoints").iterdir()) for n in kept]
    assert left == [["300"], ["600"]]


@pytest.mark.slow
def test_members_apart_end_by_other_budgets_and_by_stop_rules(tmp_path):
    """Then a new budget lets them go on."""
    root = tmp_path / "population"
    ended = train.run(apart(updates=2), root, stream=io.StringIO())
    assert {(one.result.ended_by, one.result.learner_steps) for one in ended} == {("updates", 2)}
    out = io.StringIO()
    assert train.resume(root, stream=out) == ended and "has finished" in out.getvalue()
    longer = train.resume(root, {"updates": 3}, stream=io.StringIO())
    assert {(one.result.ended_by, one.result.learner_steps) for one in longer} == {("updates", 3)}
    stop = {
        "stop": StopConfig(return_reached=-1e9),
        "evaluator": EvaluatorConfig(episodes=2, num_envs=2, period=200),
    }
    root = tmp_path / "stopped"
    ended = train.run(apart(**stop), root, stream=io.StringIO())
    assert all(one.result.ended_by.startswith("stop.return_reached") for one in ended)
    assert all(one.result.env_frames < 300 for one in ended)
    assert train.resume(root, stream=io.StringIO()) == ended
    longer = train.resume(root, {"frames": 1_200}, stream=io.StringIO())
    for one, before in zip(longer, ended, strict=True):
        assert before.result.env_frames < one.result.env_frames < 1_200


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
@pytest.mark.parametrize("jobs", [1, 2])
def test_members_apart_copy_each_other_by_their_checkpoints(tmp_path, jobs):
    root = tmp_path / "population"
    with nothing_left():
        ended = train.run(apart(), root, jobs=jobs, stream=io.StringIO())
    found = pbt.read_lineage(root, read(root))
    assert found.selections == 2 and found.copied
    assert all(one.result.env_frames >= 900 for one in ended)
    assert "## Members" in (root / "report.md").read_text()
    for copy in found.copies:
        assert copy.score < copy.source_score and copy.frames >= 300
    for i, one in enumerate(ended):
        config = json.loads((root / one.name / "config.json").read_text())
        assert config["frames"] == 900
        assert config["agent"]["optimizer"]["learning_rate"] == found.values[i][RATE]
    if jobs == 1:
        again = train.resume(root, {"frames": 1_200}, stream=io.StringIO())
        assert all(one.result.env_frames >= 1_200 for one in again)
        assert pbt.read_lineage(root, read(root)).selections == 3


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(500)
def test_a_population_with_a_far_too_small_learning_rate_solves_cartpole(tmp_path):
    pytest.importorskip("gymnax")
    tuned = preset("gymnax-cartpole-ppo")
    optimizer = dataclasses.replace(tuned.agent.optimizer, learning_rate=1e-7)  # 1e-3 is right
    base = dataclasses.replace(
        tuned,
        agent=dataclasses.replace(tuned.agent, num_epochs=20, optimizer=optimizer),
        frames=60_000,
        loggers=("jsonl",),
    )
    space = {RATE: Range(1e-7, 1e-1, log=True)}
    cfg = PbtConfig(period=4_000, resample=0.5, start="given")
    root = tmp_path / "population"
    made = Study(base, tuple(range(1, 9)), space, cfg)
    ended = train.run(made, root, stream=io.StringIO())
    assert {values[RATE] for values in Lineage.new(made).values} == {1e-7}
    returns = [one.result.eval_return_mean for one in ended]
    assert np.median(returns) >= 475  # what the tuned preset reaches
    assert all(one.result.env_frames < 62_000 for one in ended)
