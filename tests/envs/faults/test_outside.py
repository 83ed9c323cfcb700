"""Integers outside of their spaces are errors that name environment and leaf, in all pools."""

from __future__ import annotations

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs
from gymnasium import spaces

from rlstack.checks import EnvError
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.envs.cpp.backend import CppBackend
from rlstack.envs.seats.pettingzoo import AEC, Parallel
from rlstack.jax_envs.environment import Outcome

pytestmark = pytest.mark.timeout(60)

SPACES = {
    "choice": spaces.Discrete(3, start=4),
    "pair": spaces.MultiDiscrete([3, 2], start=[-1, 7]),
    "bits": spaces.MultiBinary(2),
    "byte": spaces.Box(0, 9, (2, 2), np.uint8),
}
FITTING = {"choice": 6, "pair": [1, 8], "bits": [1, 0], "byte": np.full((2, 2), 9, np.uint8)}
WRONG = {"choice": 7, "pair": [2, 7], "bits": [0, 2], "byte": np.full((2, 2), 10, np.uint8)}
TEXT = {
    "choice": r"observation\['choice'\] must lie in its space, integers in \[4, 6\]; got 7\.",
    "pair": r"\['pair'\].* in \[\[-1, 7\], \[1, 8\]\]; got 2 at index \(0,\)",
    "bits": r"\['bits'\].* in \[0, 1\]; got 2 at index \(1,\)",
    "byte": r"\['byte'\].* in \[0, 9\]; got 10 at index \(0, 0\)",
}


class Breaking(gymnasium.Env):
    """Environment 1 leaves the space of one entry at its second step; its Box never matters."""

    def __init__(self, entry: str = "choice", seed: int = 0):
        real = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = spaces.Dict({**SPACES, "real": real})
        self.action_space = spaces.Discrete(2)
        self._entry, self._bad = entry, seed == 1

    def reset(self, *, seed=None, options=None):
        self._time = 0
        return self._observation(), {}

    def step(self, action):
        self._time += 1
        return self._observation(), 0.0, False, False, {}

    def _observation(self):
        shown = {**FITTING, "real": np.full(1, 1.5, np.float32)}  # a little outside, as many do
        if self._bad and self._time == 2:
            shown[self._entry] = WRONG[self._entry]
        return {name: np.asarray(x) for name, x in shown.items()}


def breaks(env, text, rows):
    """Steps twice; the second step must be an error."""
    env.reset()
    env.step(np.zeros(rows, int))
    with pytest.raises(EnvError, match=rf"Env 1 \(.*\): .*{text}"):
        env.step(np.zeros(rows, int))


@pytest.mark.parametrize("entry", sorted(SPACES))
@pytest.mark.parametrize("size", [3, 70])
def test_every_kind_of_integer_is_checked(entry, size):
    with SyncEnv(Breaking, size, "for_loop", options={"entry": entry}) as env:
        breaks(env, TEXT[entry], size)
        assert {k: tuple(v.shape) for k, v in env.spec.observation.items()}["pair"] == (2,)


@pytest.mark.parametrize("kind", ["thread", "process"])
def test_pools_of_all_kinds_check(kind):
    with SyncEnv(Breaking, 2, kind, num_workers=1, check_finite=False) as env:
        breaks(env, TEXT["choice"], 2)


def test_an_asynchronous_pool_checks():
    with AsyncEnv(Breaking, 3, 2, "thread") as env:
        env.async_reset()
        with pytest.raises(EnvError, match=rf"Env 1 \(Breaking\): {TEXT['choice']}"):
            while True:  # on a busy machine the other two may make many steps first
                ids, _ = env.recv()
                env.send(ids, np.zeros(2, int))


def test_environments_of_envpool_are_checked(monkeypatch):
    with SyncEnv("FrozenLake-v1", 3, "cpp") as env:
        env.reset()
        received = CppBackend.recv

        def recv(self):
            ids, timestep = received(self)
            timestep.observation[2] = 16
            return ids, timestep

        monkeypatch.setattr(CppBackend, "recv", recv)
        text = r"Env 2 \(FrozenLake-v1\): observation .*integers in \[0, 15\]; got 16"
        with pytest.raises(EnvError, match=text):
            env.step(np.zeros(3, int))


class Growing:
    """In JAX: shows the time; the third is outside of the spec. No episode ends."""

    def observation_spec(self):
        return {"time": specs.DiscreteArray(3), "real": specs.Array((1,), np.float32)}

    def action_spec(self):
        return specs.DiscreteArray(2)

    def _seen(self, time):
        return {"time": time, "real": jnp.ones(1)}

    def reset(self, rng_key):
        return jnp.int32(1), self._seen(jnp.int32(1))

    def step(self, rng_key, state, action):
        after = state + 1
        return Outcome(after, self._seen(after), 0.0, False, False)


def test_environments_in_jax_are_checked():
    with SyncEnv(Growing, 2, "jax") as env:
        assert env.reset().observation["time"].tolist() == [1, 1]
        env.step(np.zeros(2, int))
        text = r"Env 0 \(Growing\): observation\['time'\] .*\[0, 2\]; got 3"
        with pytest.raises(EnvError, match=text):
            env.step(np.zeros(2, int))


class Counted:
    """A parallel game: agents see 5, 6, 7, then 8, which is outside; they act with 10 or 11."""

    possible_agents = ("x", "y")
    state_space = spaces.Discrete(9, start=-3)

    def observation_space(self, agent):
        return spaces.Dict(
            {"seen": spaces.Discrete(3, start=5), "big": spaces.Box(2, 5, (1,), int)}
        )

    def action_space(self, agent):
        return spaces.Discrete(2, start=10)

    def reset(self, seed=None, options=None):
        self.agents, self._time = list(self.possible_agents), 0
        return self._seen(), {agent: {} for agent in self.agents}

    def step(self, actions):
        assert set(actions.values()) <= {10, 11}
        self._time += 1
        no = dict.fromkeys(self.agents, False)
        found = self._seen(), dict.fromkeys(self.agents, 1.0), {**no, "y": True}, no, {}
        self.agents = ["x"]
        return found

    def state(self):
        return self._time - 3

    def _seen(self):
        seen = {"seen": 5 + self._time, "big": np.array([3])}
        return dict.fromkeys(self.agents, seen)

    def close(self):
        pass


def test_seats_of_parallel_games_count_from_zero_and_are_checked():
    options = {"game": "tests.envs.faults.test_outside:Counted", "critic_state": "game"}
    with SyncEnv(Parallel, 2, "for_loop", options=options) as env:
        steps = [env.reset(), env.step(np.array([0, 1])), env.step(np.array([1, 1]))]
        assert [s.observation["seen"].tolist() for s in steps] == [[0, 0], [1, 1], [2, 0]]
        assert [s.observation["critic_state"].tolist() for s in steps] == [[0, 0], [1, 1], [2, 2]]
        # An agent that has ended sees what is next to 0 in its space.
        assert steps[2].observation["big"].tolist() == [[3], [2]]
        assert env.spec.observation["seen"].start == 5 and env.spec.action.start == 10
        with pytest.raises(EnvError, match=r"Env 0 .*\['seen'\].* integers in \[5, 7\]; got 8"):
            env.step(np.zeros(2, int))


class Turning:
    """Agents act in turn and see 5, 6, ..."""

    possible_agents = ("x", "y")

    def observation_space(self, agent):
        return spaces.Discrete(3, start=5)

    def action_space(self, agent):
        return spaces.Discrete(2, start=10)

    def reset(self, seed=None):
        self.agents, self._time, self.agent_selection = list(self.possible_agents), 0, "x"

    def observe(self, agent):
        return 5 + self._time

    def last(self):
        return self.observe(""), 0.0, self._time == 2, False, {}

    def step(self, action):
        if action is None:
            self.agents.remove(self.agent_selection)
            self.agent_selection = self.agents[0] if self.agents else ""
            return
        assert action in (10, 11)
        self._time += 1
        self.agent_selection = "y" if self.agent_selection == "x" else "x"

    def close(self):
        pass


def test_seats_of_games_of_turns_count_from_zero():
    options = {"game": "tests.envs.faults.test_outside:Turning"}
    with SyncEnv(AEC, 2, "for_loop", options=options) as env:
        seen = [env.reset().observation] + [env.step(np.zeros(2, int)) for _ in range(2)]
        assert seen[0].tolist() == [0, 0] and seen[1].observation.tolist() == [1, 1]
        assert seen[2].observation.tolist() == [2, 2] and seen[2].last().all()
