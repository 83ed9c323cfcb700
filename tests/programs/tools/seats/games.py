"""Games and runs for the tests of matches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.agents.fixed import ScriptedConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.envs.seats.game import GameStep, Seats
from rlstack.envs.seats.turns import Ending, Turn, Turns
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import divide
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.config.member_config import MemberConfig
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from tests.programs.multi_policy import cases
from tests.programs.multi_policy.cases import small

HERE = "tests.programs.tools.seats.games"


class Take:
    """Seats take 1 or 2 of the stones in turn; who takes the last one wins.

    What a seat sees: the stones that are left, and how often it was asked, in its action mask too.
    """

    seats = ("first", "second")
    action_names = ("one", "two")
    observation_spec = {  # noqa: RUF012
        "stones": specs.Array((1,), np.float32),
        "action_mask": specs.BoundedArray((2,), np.int8, 0, 1),
    }
    action_spec = specs.DiscreteArray(2, np.int32)

    def __init__(self, stones=5):
        self._all = self._left = stones
        self._turn = 0

    def __str__(self):
        return f"{self._left} stones"

    def reset(self):
        self._left, self._turn = self._all, 0
        return Turn(0)

    def observe(self, seat):
        mask = np.array([1, self._left > 1], np.int8)
        return {"stones": np.full(1, self._left, np.float32), "action_mask": mask}

    def step(self, action):
        self._left -= int(action) + 1
        if self._left > 0:
            self._turn = 1 - self._turn
            return Turn(self._turn)
        ended = {
            seat: Ending(self.observe(seat), 1.0 if seat == self._turn else -1.0)
            for seat in range(2)
        }
        return Turn(None, 0.0, ended)


TakeStones = Turns(Take)


class Three:
    """Three seats are rewarded with their numbers, for two steps; actions mean nothing."""

    seats = ("a", "b", "c")
    observation_spec = specs.Array((1,), np.float32)
    action_spec = specs.BoundedArray((2,), np.float32, -1.0, 1.0)

    def reset(self):
        self._time = 0
        return [np.zeros(1, np.float32)] * 3

    def step(self, actions):
        self._time += 1
        return GameStep(
            [np.zeros(1, np.float32)] * 3, [0.0, 1.0, 2.0], [1.0] * 3, last=self._time == 2
        )


ThreeSeats = Seats(Three)


def one_policy(env, **changes):
    """PPO that plays all seats of a game."""
    rows = env.num_envs
    evaluator = EvaluatorConfig(episodes=rows, num_envs=rows)
    return small(env, {}, rows, **{"evaluator": evaluator, "frames": rows, **changes})


def connect_four(**changes):
    """PPO on Connect Four."""
    return one_policy(EnvConfig("rlstack.envs.seats.games:ConnectFour", num_envs=4), **changes)


def take(**changes):
    """PPO on a game of turns, in an asynchronous pool."""
    env = EnvConfig(f"{HERE}:TakeStones", num_envs=4, type="thread", num_workers=4, wait_num=2)
    return one_policy(env, **changes)


def in_step(env):
    """Returns environments as they are in a synchronous pool."""
    return dataclasses.replace(env, type="for_loop", num_workers=0, wait_num=0)


def against_rule():
    """A set of a policy that learns and of a rule, on the game of three seats."""
    policies = {
        "learner": MemberConfig(seats=("a", "b")),
        "rule": MemberConfig(agent=ScriptedConfig(f"{HERE}:half")),
    }
    return cases.small(EnvConfig(f"{HERE}:ThreeSeats", num_envs=6), policies, 4)


def half(observation):
    """A rule: always 1/2."""
    return jnp.full((len(observation), 2), 0.5)


def leave_run(path, experiment, seed=1, frames=100):
    """Writes the directory of a run with random params, which is faster than training.

    Calling it again adds a checkpoint.
    """
    if path.exists():
        directory = RunDir.open(path)
    else:
        directory = RunDir.create(path, experiment.preset, 1)
        directory.config.write_text(to_json(experiment))
    spec = environment_spec(experiment)
    key = jax.random.PRNGKey(seed)
    if experiment.policies:
        learning = divide(experiment).learning
        agents = {member.name: make_agent(member.experiment, spec) for member in learning}
        params = {name: agent.initial_params(key) for name, agent in agents.items()}
    else:
        params = make_agent(experiment, spec).initial_params(key)
    params = jax.tree.map(lambda x: 20.0 * x, params)  # whose choices are decided
    state = {"learner": {"params": params}}
    checkpoint.save(directory.checkpoints, frames, state, {"env_frames": frames})
    return directory.path
