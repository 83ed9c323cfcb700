"""Actors play their own environments, and explore as the frames of the run say."""

import dataclasses
import io
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from rlstack.acting.inferencer import Inferencer
from rlstack.agents.ppo import PPO
from rlstack.exploration import RunCounts
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.presets import preset
from rlstack.programs.program import actor, inference
from rlstack.programs.program.actor import EnvGauges, env_seed
from rlstack.programs.program.base import ProgramState, Setup
from rlstack.programs.run import train
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.programs.running import TOPOLOGIES, dqn, failures, nothing_left, run

# Programs in threads handle signals, so the time limit must not need one.
pytestmark = pytest.mark.timeout(120, method="thread")
EXPERIMENT = dataclasses.replace(preset("cartpole-ppo"), seed=7)


@pytest.mark.parametrize(
    ("rank", "incarnation", "role", "seed"),
    [
        (0, 0, "env", 195554056),
        (0, 3, "env", 166079163),
        (1, 0, "env", 415318468),
        (2, 0, "env", 345793112),
        (2, 3, "env", 305303309),
        (0, 0, "seating", 1023575629),
        (2, 0, "seating", 492071239),
    ],
)
def test_seeds_of_an_actor_are_these_numbers(rank, incarnation, role, seed):
    """The numbers are ``SeedSequence([7, crc32(b"env/2") % 2**31, incarnation])``, of 30 bits."""
    assert env_seed(7, rank, incarnation, role) == seed


def test_no_two_actors_play_the_same_environments():
    """Environment i of a pool has the pool's seed plus i."""
    played = [
        env_seed(7, rank, incarnation, role) + i
        for rank in range(8)
        for incarnation in range(3)
        for role in ("env", "seating")
        for i in range(64)
    ]
    assert len(set(played)) == len(played)


def test_a_resumed_program_plays_new_episodes():
    """Of the first command and of two that resume it: environments and actions are others."""
    setup = Setup(EXPERIMENT, None, None)
    resumed = [
        dataclasses.replace(setup, restored=Path(f"/runs/a/checkpoints/step_{frames:012d}"))
        for frames in (1000, 2000)
    ]
    assert [own.acting_seed for own in (setup, *resumed)] == [7, 702907285, 653525068]


class Reporting:
    """A coordinator's client, and a pool, whose counters are set by the test."""

    last_restart = "it hung"

    def __init__(self):
        self.counters, self.counted, self.notes = {}, [], []

    def stats(self):
        return self.counters

    def count(self, **totals):
        self.counted.append(totals)

    def note(self, text):
        self.notes.append(text)


def test_an_actor_reports_the_counters_of_its_pool():
    pool = Reporting()
    gauges = EnvGauges(pool, lambda: {"replay/size": 8.0}, pool, EXPERIMENT)
    assert gauges() == {"replay/size": 8.0} and not pool.counted
    pool.counters = {"restarts": 2, "masks_without_choice": 5}
    gauges()
    assert pool.counted == [{"env_masks_without_choice": 5}, {"env_restarts": 2}]
    assert len(pool.notes) == 1 and "(2 so far)" in pool.notes[0]


class FailsOnce(gymnasium.Env):
    """Episodes of ten steps; raises at its 150th step unless the file ``flag`` exists."""

    observation_space = gymnasium.spaces.Box(0.0, 10.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, flag):
        self._flag, self._steps = Path(flag), 0

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._steps += 1
        if self._steps == 150 and not self._flag.exists():
            self._flag.touch()
            raise ArithmeticError("told to fail")
        at = self._steps % 10
        return np.array([at], np.float32), 1.0, at == 0, False, {}


@pytest.fixture
def first_counts(monkeypatch):
    """The counts of the first step that each inferencer acts on, ``(steps, episodes)``."""
    found = []

    class Watched(Inferencer):
        seen = False

        def inference(self, env_ids, timestep):
            if not self.seen:
                self.seen = True
                table = self.save()["table"]
                found.append((np.array(table.env_steps), np.array(table.episodes)))
            return super().inference(env_ids, timestep)

    monkeypatch.setattr(actor, "Inferencer", Watched)
    monkeypatch.setattr(inference, "Inferencer", Watched)
    return found


def test_the_counts_of_a_run_are_for_each_of_its_environments():
    experiment = dqn("distributed", env={"num_envs": 4}, program={"num_actors": 5})
    state = ProgramState(env_frames=1000, episodes=45)
    assert Setup(experiment, None, None).run_counts(state) == RunCounts(50, 2)
    # Of several policies that learn, with 10 rows in each actor.
    one_of_several = Setup(experiment, None, None, policy="a", rows=10)
    assert one_of_several.run_counts(state) == RunCounts(20, 0)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_resumed_program_explores_from_the_frames_of_the_run_on(tmp_path, topology, first_counts):
    experiment = dqn(topology, frames=1000, env={"num_envs": 2}, program={"num_actors": 2})
    with nothing_left():
        made = run(experiment, tmp_path / "run")
        # In a program that starts, one actor may begin later than the other.
        assert all((steps < 250).all() for steps, _ in first_counts)
        assert (first_counts[0][0] == 0).all() and (first_counts[0][1] == 0).all()
        first_counts.clear()
        saved = checkpoint.latest(tmp_path / "run" / "checkpoints")
        train.resume(tmp_path / "run", frames=1500, stream=io.StringIO())
    told = checkpoint.read_metadata(saved)
    assert told["episodes"] > 0
    for steps, episodes in first_counts:
        assert (steps >= made.env_frames // 4).all() and (steps < 1500 // 4).all()
        assert (episodes >= told["episodes"] // 4).all()
    assert len(first_counts) == (2 if topology == "heavy_env" else 1)


@pytest.mark.slow
@pytest.mark.chosen
def test_an_actor_that_is_started_again_explores_from_the_frames_of_the_run_on(
    tmp_path, first_counts
):
    env = EnvConfig(
        f"{__name__}:FailsOnce", 2, "for_loop", options={"flag": str(tmp_path / "flag")}
    )
    experiment = dataclasses.replace(dqn("heavy_env", frames=1500), env=env)
    with nothing_left():
        run(experiment, tmp_path / "run")
    assert len(failures(tmp_path / "run")) == 1
    (begun, _), (steps, episodes) = first_counts
    # It failed after 150 steps of each environment; its last report may be some steps older.
    assert (begun == 0).all() and (steps > 50).all() and (steps <= 150).all()
    assert (episodes >= 4).all() and (episodes <= 15).all()


@pytest.mark.parametrize("asks", [True, False])
def test_an_actor_that_asks_a_service_traces_no_params(tmp_path, monkeypatch, asks):
    """They take most of an actor's start, and no message that it gets has some."""
    traced = []
    with make_env(EXPERIMENT.env, 0) as env:
        spec = env.spec
    setup = Setup(EXPERIMENT, RunDir(tmp_path), spec)
    assert setup.step is not None  # cached, as in a program's nodes
    initial = PPO.initial_params
    monkeypatch.setattr(PPO, "initial_params", lambda *args: traced.append(1) or initial(*args))
    service = object() if asks else None
    actor.LearningPart(setup, 0, object(), object(), service, Reporting())
    assert bool(traced) == (not asks)
