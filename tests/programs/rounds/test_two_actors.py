"""Two actors in lock-step learn bit for bit what a loop in one process learns with their games."""

import contextlib
import dataclasses
import zlib

import jax
import numpy as np
import pytest

from rlstack.acting.actor import Actor, transition_spec
from rlstack.acting.inferencer import Inferencer
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import divide, share_games
from rlstack.programs.build.policies.player import fixed_inferencer
from rlstack.programs.build.replay import stored_spec
from rlstack.programs.build.seeds import acting_key, role_key, role_seed
from rlstack.programs.program.actor import env_config
from rlstack.replay import InProcessReplay
from tests.programs.multi_policy.test_topologies import LEARNING, chains, learned, same_policies
from tests.programs.running import nothing_left, run, series

pytestmark = pytest.mark.timeout(120, method="thread")

# Each actor has an inference service, so that the random numbers of acting are those of its own.
PROGRAM = {"pacing": "lock_step", "num_actors": 2, "num_inferencers": 2}


class Share:
    """What one actor adds to a replay of all actors."""

    def __init__(self, replay, env_ids):
        self._replay, self._ids = replay, np.asarray(env_ids, np.int32)

    def add(self, env_ids, transition):
        assert env_ids is None  # pools of a policy set are synchronous
        self._replay.add(self._ids, transition)


def seed_of(seed, rank, role):
    """The seed of an actor's environments or seating; the first actor's has no rank in its name."""
    name = f"{role}/{rank}" if rank else role
    entropy = [seed, zlib.crc32(name.encode()) % 2**31, 0]
    return int(np.random.SeedSequence(entropy).generate_state(1)[0]) // 4


class Oracle:
    """The policies of an experiment, and the games of each actor of its program, in one process."""

    def __init__(self, experiment, closing):
        self.experiment, self._closing = experiment, closing
        self._spec, self._division = environment_spec(experiment), divide(experiment)
        self._agents, self.replays, self.learners = {}, {}, {}
        for member in self._division.learning:
            own = member.experiment
            agent = make_agent(own, self._spec)
            cfg, step = stored_spec(own, transition_spec(agent, self._spec))
            seed, actors = role_seed(own.seed, "replay"), own.num_actors
            replay = InProcessReplay(cfg, own.total_envs, seed=seed, spec=step, num_actors=actors)
            key = role_key(own.seed, "learner")
            self.learners[member.name] = Learner(own.learner, agent, replay, key)
            self._agents[member.name], self.replays[member.name] = agent, replay
        self._actors = [self._actors_of(rank) for rank in range(experiment.num_actors)]

    def _actors_of(self, rank):
        experiment = self.experiment
        seeds = [seed_of(experiment.seed, rank, role) for role in ("env", "seating")]
        cfg = env_config(experiment)
        shared = self._closing.enter_context(share_games(experiment, self._division, cfg, *seeds))
        made = {}
        for name, member in self._division.members.items():
            own = member.experiment
            key, ids = acting_key(own.seed, rank), own.env_ids(rank)
            if name not in self.learners:
                made[name] = Actor(
                    shared.views[name], fixed_inferencer(member, self._spec, key), None
                )
                continue
            inferencer = Inferencer(
                own.inferencer, self._agents[name], self.learners[name], len(ids), key, ids
            )
            made[name] = Actor(shared.views[name], inferencer, Share(self.replays[name], ids))
        return made

    def train(self):
        """Steps the games of all actors, then learns, until the frames are made."""
        while self._frames() < self.experiment.frames:
            for actors in self._actors:
                for actor in actors.values():
                    actor.act()
                for actor in actors.values():
                    actor.receive()
            for name, learner in self.learners.items():
                replay = self.replays[name]
                while replay.can_sample():
                    learner.step(replay.sample())
                    replay.set_params_version(learner.version)

    def _frames(self):
        return sum(actors[name].env_frames for actors in self._actors for name in self.learners)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("topology", ["heavy_env", "light_env", "distributed"])
@pytest.mark.parametrize("rounds", [True, False], ids=["rounds", "batches"])
def test_two_actors_in_lock_step_equal_one_process_bit_for_bit(tmp_path, topology, rounds):
    experiment = chains(topology, frames=1800, program=PROGRAM)
    changes = {"min_actors": 2} if rounds else {"batch_size": 8, "max_size": 16}
    replay = dataclasses.replace(experiment.replay, **changes)
    experiment = dataclasses.replace(experiment, replay=replay)
    with nothing_left():
        result = run(experiment, tmp_path / "run")
    with contextlib.ExitStack() as closing:
        oracle = Oracle(experiment, closing)
        oracle.train()
    updates = {name: learner.version for name, learner in oracle.learners.items()}
    assert updates == {name: result.policies[name]["learner_steps"] for name in LEARNING}
    assert updates["retailer"] >= 10
    expected = {name: jax.tree.leaves(x.params) for name, x in oracle.learners.items()}
    assert same_policies(learned(tmp_path / "run"), expected)
    if rounds:
        assert set(series(tmp_path / "run", "retailer/replay/round_actors")) <= {0, 2}
    stats = oracle.replays["distributor"].stats()
    assert series(tmp_path / "run", "distributor/replay/inserts")[-1] == stats["inserts"]
