"""The coordinator: what it counts, and what it tells each node and when."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest

from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.program.base import EVALUATING, OVER, RUNNING, SAVING
from rlstack.programs.program.coordinator import Coordinator
from rlstack.programs.program.stopping import NodeLostError
from rlstack.programs.session.display import ProgressDisplay
from rlstack.programs.session.progress import Progress
from rlstack.programs.session.run_dir import RunDir
from rlstack.rpc import codec
from rlstack.storage.loggers import InMemoryLogger


class Desk:
    """A coordinator together with the files that it writes."""

    def __init__(self, tmp_path, start_frames=0, start=None, **changes):
        periods = {"log_period": 100, "checkpoint_period": 250, "frames": 1000, **changes}
        experiment = dataclasses.replace(preset("cartpole-ppo"), topology="heavy_env", **periods)
        evaluator = dataclasses.replace(experiment.evaluator, period=400)
        experiment = dataclasses.replace(experiment, evaluator=evaluator)
        self.directory = RunDir.create(tmp_path / "run", "test", 1)
        self.directory.write_config(to_json(experiment))
        self.logger = InMemoryLogger()
        start = start or Progress(start_frames)
        self.coordinator = Coordinator(experiment, self.directory, self.logger, start)
        self.batches = 0

    def report(self, node="actor/0", incarnation=0, logs=None, gauges=None, batch=None, **counts):
        self.batches += 1
        batch = self.batches if batch is None else batch
        return self.coordinator.report(
            node, incarnation, 100 + incarnation, counts, gauges or {}, logs or {}, batch
        )

    def logged(self, name):
        return [value for _, value in self.logger.series(name)]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_frames_are_the_sum_of_all_actors_and_of_all_their_incarnations(desk):
    assert desk.report(env_frames=30)["env_frames"] == 30
    assert desk.report(env_frames=50)["env_frames"] == 50
    assert desk.report("actor/1", env_frames=7)["env_frames"] == 57
    # After a restart the actor counts from 0; its earlier frames still count.
    assert desk.report(incarnation=1, env_frames=0)["env_frames"] == 57
    assert desk.report(incarnation=1, env_frames=20)["env_frames"] == 77
    assert desk.report(incarnation=3, env_frames=5)["env_frames"] == 82


def test_restarts_of_environments_are_the_sum_of_all_actors_and_incarnations(desk):
    desk.report(env_frames=10, env_restarts=2)
    desk.report("actor/1", env_frames=10)
    desk.report(incarnation=1, env_frames=0)
    desk.report(incarnation=1, env_frames=80, env_restarts=1)
    desk.report("actor/1", env_frames=200, env_restarts=4)
    assert desk.logged("env/restarts")[-1] == 7
    assert not desk.logged("env/masks_without_choice")


def test_masks_without_a_legal_action_are_the_sum_of_all_actors_and_incarnations(desk):
    desk.report(env_frames=10, env_masks_without_choice=3)
    desk.report("actor/1", env_frames=100, env_masks_without_choice=20)
    desk.report(incarnation=1, env_frames=80, env_masks_without_choice=1)
    desk.report("actor/1", env_frames=200, env_masks_without_choice=30)
    assert desk.logged("env/masks_without_choice")[-1] == 3 + 30 + 1


def test_episodes_are_counted_over_all_commands_of_a_run(tmp_path):
    desk = Desk(tmp_path)
    both = {"actor/episode_return": [5.0, 6.0], "actor/episode_length": [1, 2]}
    assert desk.report(env_frames=10, logs=both)["episodes"] == 2
    one_of_several = {"actor/episode_return": [1.0], "left/actor/episode_return": [1.0]}
    assert desk.report("actor/1", env_frames=10, logs=one_of_several)["episodes"] == 3
    resumed = Desk(tmp_path / "resumed", start=Progress(20, episodes=3))
    assert resumed.report(env_frames=10, logs=both)["episodes"] == 5


def test_logs_that_are_sent_again_count_once(desk):
    desk.report(env_frames=10, logs={"actor/episode_return": [1.0]}, batch=1)
    for _ in range(2):  # the answer to the first one was lost
        desk.report(env_frames=20, logs={"actor/episode_return": [5.0, 6.0]}, batch=2)
    desk.report("actor/1", env_frames=10, logs={"actor/episode_return": [8.0]}, batch=1)
    desk.report(incarnation=1, env_frames=80, logs={"actor/episode_return": [10.0]}, batch=1)
    assert desk.logged("actor/episode_return") == [pytest.approx((1 + 5 + 6 + 8 + 10) / 5)]


def test_notes_are_numbered_and_the_oldest_are_forgotten(desk):
    assert desk.coordinator.status()["notes"] == []
    for i in range(25):
        desk.coordinator.note("actor/0", f"restart {i}")
    notes = desk.coordinator.status()["notes"]
    assert notes[-1] == [25, "actor/0: restart 24"]
    assert len(notes) == 20


def test_the_last_words_of_an_earlier_incarnation_are_ignored(desk):
    desk.report(env_frames=30)
    desk.report(incarnation=1, env_frames=10)
    late = desk.report(incarnation=0, env_frames=900)
    assert (late["env_frames"], late["phase"]) == (40, OVER)  # it may still run, long cut off
    latest = desk.report(incarnation=1, env_frames=15)
    assert (latest["env_frames"], latest["phase"]) == (45, RUNNING)


def test_frames_that_are_lost_with_an_actor_are_those_of_unrolls_it_had_begun(desk, monkeypatch):
    """8 environments, unrolls of 32 steps; also the frames of the 0.2 s between two reports."""
    now = [100.0]
    monkeypatch.setattr("rlstack.programs.program.coordinator.time.monotonic", lambda: now[0])
    desk.report(env_frames=0)
    now[0] += 10.0
    desk.report(env_frames=8 * (3 * 32 + 5))
    desk.report(incarnation=1, env_frames=0)
    desk.report("learner", learner_steps=3)
    desk.report(incarnation=2, env_frames=400)  # the one before had made no frames
    begun, between = 8 * 5, 0.2 * 8 * (3 * 32 + 5) / 10
    assert desk.logged("program/lost_frames")[-1] == pytest.approx(begun + between)


def test_rates_of_actors_add_up_to_the_rate_that_a_display_shows(tmp_path, monkeypatch):
    """Actors report at different moments; one is lost for 3 s, and starts again from 0 frames."""
    desk, now = Desk(tmp_path, frames=10**6), [100.0]
    monkeypatch.setattr("rlstack.programs.program.coordinator.time.monotonic", lambda: now[0])
    display = ProgressDisplay(10**6, io.StringIO(), clock=lambda: now[0])
    speeds, began = {"actor/0": 100.0, "actor/1": 37.0, "actor/2": 400.0}, 105.0
    shown = []
    for tick in range(400):  # 40 s; actors compile for 5 s
        now[0] = 100.0 + 0.1 * tick
        for i, (actor, speed) in enumerate(speeds.items()):
            restarted = actor == "actor/1" and tick >= 200
            if tick % (i + 2) == 0 and not (actor == "actor/1" and 170 <= tick < 200):
                since = 120.0 if restarted else began
                frames = int(speed * max(0.0, now[0] - since))
                desk.report(actor, incarnation=int(restarted), env_frames=frames)
        if tick % 5 == 3:  # as a launcher asks
            status = desk.coordinator.status()
            display.write_nodes(status["nodes"])
            display.write(status["env_frames"], status["logs"])
            rates = [node["frames/s"] for node in status["nodes"].values()]
            program = re.search(r"([\d,]+) frames/s", display.line())
            assert float(program[1].replace(",", "")) == pytest.approx(sum(rates), abs=0.5)
            shown.append((now[0], status["env_frames"], rates))
    time_then, frames_then, _ = shown[-32]  # 15.5 s before
    true = (shown[-1][1] - frames_then) / (shown[-1][0] - time_then)
    assert sum(shown[-1][2]) == pytest.approx(true, rel=0.05)
    # Over the 15 s that contain the loss, the restarted actor was slower than it is.
    at_start = next(rates for moment, _, rates in shown if moment > 108)
    assert at_start == pytest.approx([100.0, 37.0, 400.0], rel=0.25)
    loss = next(rates for moment, _, rates in shown if moment > 121)
    assert 15 < loss[1] < 35


def test_nodes_that_moved_are_found(desk):
    assert desk.coordinator.locate("inferencer/0") == ""
    desk.coordinator.relocate("inferencer/0", "10.0.0.2:1234")
    desk.coordinator.relocate("inferencer/1", "10.0.0.3:1234")
    desk.coordinator.relocate("inferencer/0", "10.0.0.4:4321")
    assert desk.coordinator.locate("inferencer/0") == "10.0.0.4:4321"


def test_a_lost_report_loses_no_frames(desk):
    desk.report(env_frames=10)
    assert desk.report(env_frames=60)["env_frames"] == 60  # the report of 30 frames was lost


def test_frames_go_on_from_those_of_the_run_that_is_resumed(tmp_path):
    desk = Desk(tmp_path, start_frames=600)
    answer = desk.report(env_frames=0)
    assert answer.pop("train_seconds") > 0
    assert answer == {
        "phase": RUNNING, "env_frames": 600, "checkpoints": 0, "evaluations": 0, "timed_frames": 0,
        "episodes": 0, "granted": 256, "learners": {}, "learns_from_data": False, "together": "",
    }  # fmt: skip
    assert desk.report(env_frames=399)["phase"] == RUNNING
    assert desk.report(env_frames=400)["phase"] == SAVING


def test_checkpoints_and_evaluations_become_due_by_frames(desk):
    def due(frames):
        answer = desk.report(env_frames=frames)
        return answer["checkpoints"], answer["evaluations"]

    assert [due(f) for f in (249, 250, 399, 401, 499, 780, 790)] == [
        (0, 0), (1, 0), (1, 0), (1, 1), (1, 1), (2, 1), (2, 1),
    ]  # fmt: skip
    # Every node gets the same answer.
    assert desk.report("evaluator")["evaluations"] == 1


def test_the_phases_come_in_order_and_the_result_is_filed(desk):
    desk.report("learner", learner_steps=3)
    assert desk.report(env_frames=999)["phase"] == RUNNING
    assert desk.report(env_frames=1004)["phase"] == SAVING
    assert desk.report("learner", learner_steps=4)["phase"] == SAVING
    desk.coordinator.saved()
    assert desk.report("evaluator")["phase"] == EVALUATING
    # A late result of an earlier evaluation does not end the program.
    desk.coordinator.evaluated(800, np.array([5.0]), np.array([5]), last=False)
    assert desk.report("evaluator")["phase"] == EVALUATING
    assert not desk.coordinator.wait_until_over(0.0)
    desk.coordinator.evaluated(1004, np.array([10.0, 30.0]), np.array([10, 30]), last=True)
    assert desk.report("evaluator")["phase"] == OVER
    assert desk.coordinator.wait_until_over(0.0)
    result = json.loads(desk.directory.result.read_text())
    assert (result["eval_return_mean"], result["eval_return_std"]) == (20.0, 10.0)
    assert (result["env_frames"], result["learner_steps"]) == (1004, 4)
    assert result["topology"] == "heavy_env"
    assert desk.logged("evaluator/episode_return") == [5.0, 20.0]


def test_frames_that_come_after_the_budget_are_counted_but_order_nothing_more(desk):
    desk.report(env_frames=1001)
    answer = desk.report("actor/1", env_frames=300)
    assert answer["env_frames"] == 1301
    assert answer["phase"] == SAVING


def test_the_learners_last_updates_are_logged_though_no_frames_came_since(desk):
    desk.report("learner", learner_steps=1)
    desk.report(env_frames=1004)
    desk.report("learner", logs={"learner/loss": [2.0, 4.0]}, learner_steps=3)
    desk.coordinator.saved()
    assert desk.logged("learner/loss") == [3.0]
    assert desk.logged("learner/steps") == [1, 3]
    assert len(desk.logged("actor/frames_per_second")) == 1
    assert len(desk.logged("learner/updates_per_second")) == 2


def test_logs_and_gauges_are_averaged_over_nodes(desk):
    desk.report(logs={"actor/episode_return": [10.0, 20.0]}, env_frames=40)
    desk.report("actor/1", incarnation=2, logs={"actor/episode_return": [60.0]}, env_frames=40)
    desk.report("learner", learner_steps=6, gauges={"replay/size": 9.0})
    desk.report("inferencer/0", gauges={"service/fill": 0.5})
    desk.report("inferencer/1", gauges={"service/fill": 0.7})
    desk.report(env_frames=60)
    (frames, logs) = desk.logger.records[-1]
    assert frames == 100
    assert logs["actor/episode_return"] == 30.0
    assert logs["learner/steps"] == 6
    assert logs["replay/size"] == 9.0
    assert logs["service/fill"] == pytest.approx(0.6)
    assert logs["program/restarts"] == 2
    assert logs["actor/frames_per_second"] > 0


def test_an_interruption_before_there_is_a_learner_ends_the_program_at_once(desk):
    desk.report(env_frames=1)
    assert desk.coordinator.interrupt(2) == OVER
    assert desk.report(env_frames=2)["phase"] == OVER
    assert desk.coordinator.interrupted == 2


def test_an_interruption_saves_but_does_not_judge(desk):
    desk.report("learner", learner_steps=1)
    desk.report(env_frames=300)
    assert desk.coordinator.interrupt(15) == SAVING
    assert desk.report(env_frames=310)["phase"] == SAVING
    desk.coordinator.interrupt(15)  # a repeated call changes nothing
    assert desk.report(env_frames=310)["phase"] == SAVING
    desk.coordinator.saved()
    assert desk.report(env_frames=310)["phase"] == OVER
    assert not desk.directory.result.exists()


def test_the_result_adds_up_the_time_of_all_commands_of_a_run(tmp_path):
    desk = Desk(tmp_path)
    start = Progress(env_frames=600, train_seconds=50.0, timed_frames=600)
    desk.coordinator = Coordinator(preset("cartpole-ppo"), desk.directory, desk.logger, start)
    answer = desk.report("learner", env_frames=400, learner_steps=3)
    assert (answer["env_frames"], answer["timed_frames"]) == (1000, 1000)
    assert 50.0 < answer["train_seconds"] < 60.0
    desk.coordinator.saved()
    desk.coordinator.evaluated(1000, np.array([5.0]), np.array([5]), last=True)
    result = json.loads(desk.directory.result.read_text())
    assert 50.0 < result["wall_seconds"] < 60.0
    assert result["frames_per_second"] == pytest.approx(1000 / result["wall_seconds"])


def test_an_interruption_while_the_last_params_are_judged_ends_that(desk):
    desk.report("learner", learner_steps=1)
    desk.report(env_frames=1000)
    desk.coordinator.saved()
    desk.coordinator.interrupt(2)
    assert desk.report("evaluator")["phase"] == OVER
    assert not desk.directory.result.exists()


def test_it_waits_for_nodes_that_have_neither_left_nor_heard_of_the_end(desk):
    desk.report("learner", learner_steps=1)
    desk.report(env_frames=1000, ended=1)
    desk.report("actor/1", env_frames=1)
    desk.coordinator.saved()
    desk.coordinator.evaluated(1000, np.array([5.0]), np.array([5]), last=True)
    assert not desk.coordinator.wait_until_left(0)
    assert desk.report("learner")["phase"] == OVER
    assert not desk.coordinator.wait_until_left(0)
    desk.report("actor/1", incarnation=1)  # the restarted actor receives the phase, too
    assert desk.coordinator.wait_until_left(0)
    desk.coordinator.interrupt(15)  # nodes that are just starting have not received it
    assert not desk.coordinator.wait_until_left(0)


def test_the_status_tells_of_every_node(desk):
    desk.report(env_frames=30)
    desk.report("learner", incarnation=0, learner_steps=2)
    status = desk.coordinator.status()
    assert status["phase"] == RUNNING
    assert status["env_frames"] == 30
    assert set(status["nodes"]) == {"actor/0", "learner"}
    assert status["nodes"]["actor/0"]["pid"] == 100


def test_a_node_is_shown_as_silent_after_ten_seconds_in_which_the_coordinator_ran(desk):
    def state():
        return desk.coordinator.status()["nodes"]["actor/0"]["state"]

    desk.report("actor/0")
    for _ in range(48):  # it is slow on a machine with few cores
        desk.coordinator.check_learner(0.2)
    desk.coordinator.check_learner(3600.0)  # this process was stopped
    assert state() == "up"
    for _ in range(3):
        desk.coordinator.check_learner(0.2)
    assert state() == "silent"
    desk.report("actor/0")
    assert state() == "up"


def test_a_learner_that_shows_no_sign_of_life_is_lost(desk):
    desk.coordinator.check_learner(1000.0)  # there is none yet
    desk.report("learner", learner_steps=1)
    for _ in range(299):
        desk.coordinator.check_learner(0.2)
    desk.coordinator.alive("learner")
    for _ in range(298):
        desk.coordinator.check_learner(0.2)
    desk.coordinator.check_learner(3600.0)  # this process was stopped
    with pytest.raises(NodeLostError, match="it has not reported for 60 s") as caught:
        for _ in range(3):
            desk.coordinator.check_learner(0.2)
    assert caught.value.node == "learner"


def test_a_log_that_cannot_be_written_is_a_failure_of_the_coordinator_not_of_its_caller(desk):
    def refuse(step, logs):
        raise OSError(28, "No space left on device", "metrics.jsonl")

    desk.logger.write = refuse
    assert desk.report(env_frames=150)["phase"] == RUNNING
    with pytest.raises(OSError, match="No space left on device"):
        desk.coordinator.wait_until_over(0.0)


def test_a_repeated_announcement_of_the_last_checkpoint_changes_nothing(desk):
    desk.report("learner", learner_steps=1)
    desk.report(env_frames=1004)
    desk.coordinator.saved()
    desk.coordinator.evaluated(1004, np.array([10.0]), np.array([10]), last=True)
    desk.coordinator.saved()
    assert desk.report("learner")["phase"] == OVER


def test_thousands_of_unread_events_fit_into_a_message(desk):
    logs = {f"learner/log_{i}": 1.0 for i in range(12)}
    for number in range(20_000):
        desk.coordinator._events.send("update", number, logs)
    answer = codec.decode(codec.encode(desk.coordinator.events(0, "")))
    assert len(answer) == 20_000
    assert codec.decode(answer[-1]) == [20_000, "update", 19_999, logs]
