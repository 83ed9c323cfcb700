"""Spaces that do not start at 0: what people use outside of the stack has the environment's values.

The references count by hand: a choice i of a space that starts at k is k + i there.
"""

import dataclasses
import io
import json

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium import spaces
from rich.console import Console

import rlstack
from rlstack.envs.values import from_zero
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.experiment import EnvConfig
from rlstack.programs.pictures.labels import Numbers
from rlstack.programs.pictures.scene import bars_of
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.run.record import record
from rlstack.programs.tools.export import export
from rlstack.programs.tools.greedy import greedy_function
from rlstack.programs.tools.seats.asking import Asker
from rlstack.programs.tools.serve.players import Players
from rlstack.storage.datasets import Dataset, DatasetError, check_specs
from rlstack.types import StepType, TimeStep
from tests.programs import running
from tests.programs.tools.test_export import untrained

pytestmark = pytest.mark.timeout(120)
LENGTH = 5
PAIR_START, MOVE_START = np.array([-4, 7]), np.array([5, -1])


class Numbered(gymnasium.Env):
    """Trusts its caller; it shows its own actions, so that everything can be checked."""

    observation_space = spaces.Dict(
        {"place": spaces.Discrete(3, start=1), "pair": spaces.MultiDiscrete([2, 3], start=[-4, 7])}
    )
    action_space = spaces.MultiDiscrete([2, 3], start=[5, -1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._time = 0
        return self._seen(np.zeros(2, int)), {}

    def step(self, action):
        assert self.action_space.contains(np.asarray(action)), action
        self._time += 1
        return self._seen(action - MOVE_START), 1.0, False, self._time == LENGTH, {}

    def _seen(self, choices):
        return {"place": 1 + self._time % 3, "pair": PAIR_START + choices}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with params that have learned nothing."""
    name = f"{__name__}:Numbered"
    base = running.ppo("single_process")
    experiment = dataclasses.replace(base, env=EnvConfig(name, 2, "for_loop"))
    return untrained(experiment, tmp_path_factory.mktemp("starts") / "run")


@pytest.fixture(scope="module")
def policy(run):
    return rlstack.load(run)


def choices(policy, place, pair):
    """The choices of the agent itself, [B, 2], for observations that count from 0."""
    rows = len(place)
    seen = {"place": np.asarray(place, np.int32), "pair": np.asarray(pair, np.int32)}
    step = TimeStep(
        np.full(rows, StepType.MID, np.int32), np.zeros(rows, np.float32), np.ones(rows), seen
    )
    state = policy.agent.initial_state(rows)
    output, _ = policy.agent.actor_step(jax.random.PRNGKey(0), policy.params, step, state)
    return np.asarray(output.action)


ROWS = [(place, [first, second]) for place in range(3) for first in range(2) for second in range(3)]
PLACES, PAIRS = [row[0] for row in ROWS], np.array([row[1] for row in ROWS])


@pytest.mark.slow
@pytest.mark.chosen
def test_the_loop_of_a_user_gives_and_gets_the_environments_own_values(policy):
    env = Numbered()
    observation, _ = env.reset(seed=0)
    for _ in range(LENGTH):
        action = policy.act(observation)
        wanted = choices(policy, [observation["place"] - 1], [observation["pair"] - PAIR_START])
        np.testing.assert_array_equal(action, wanted[0] + MOVE_START)
        assert action.dtype == np.int32
        observation, *_ = env.step(action)  # checks the action
    policy.reset()


def test_batches_and_predictions_too(policy):
    seen = {"place": np.array(PLACES) + 1, "pair": PAIRS + PAIR_START}
    wanted = choices(policy, PLACES, PAIRS)
    assert len(np.unique(wanted, axis=0)) > 1
    np.testing.assert_array_equal(policy.act(seen), wanted + MOVE_START)
    np.testing.assert_array_equal(policy.predict(seen).action, wanted + MOVE_START)
    policy.reset()
    for entry, value, text in (
        ("place", 0, r"\['place'\] must hold integers in \[1, 3\]; got 0"),
        ("pair", [-4, 10], r"\['pair'\] must hold integers in \[\[-4, 7\], \[-3, 9\]\]; got 10"),
        ("pair", [-4.0, 7.5], r"\['pair'\] must hold integers .* such as 7\.5"),
    ):
        with pytest.raises(ValueError, match=text):
            policy.act({"place": 1, "pair": [-4, 7], entry: value})
    with pytest.raises(ValueError, match="reward must hold finite numbers; got nan"):
        policy.act({"place": 1, "pair": [-4, 7]}, np.nan)


def test_with_the_spec_of_a_pool_the_policy_counts_from_zero(run, policy):
    inner = rlstack.load(run, spec=from_zero(policy.spec))
    found = inner.act({"place": np.array(PLACES), "pair": PAIRS})
    np.testing.assert_array_equal(found, choices(policy, PLACES, PAIRS))


def test_an_exported_policy_has_the_environments_own_values(run, policy, tmp_path):
    seen = {"observation/place": np.array(PLACES) + 1, "observation/pair": PAIRS + PAIR_START}
    function = greedy_function(policy)
    action, _ = function.call({k: v.astype(np.int32) for k, v in seen.items()}, {})
    np.testing.assert_array_equal(action["action"], choices(policy, PLACES, PAIRS) + MOVE_START)
    said = json.loads(export(run, "npz", tmp_path / "policy.npz").description.read_text())
    pair, place = said["observation_spec"]
    assert (place["num_values"], place["start"], pair["start"]) == (3, 1, [-4, 7])
    assert (pair["minimum"], pair["maximum"]) == ([-4, 7], [-3, 9])
    assert said["action_spec"][0]["start"] == [5, -1]


@pytest.mark.slow
def test_files_act_as_the_policy(run, tmp_path):
    pytest.importorskip("flatbuffers")
    assert export(run, "stablehlo", tmp_path / "policy.stablehlo").batch is None  # it compares


def test_a_served_policy_has_the_environments_own_values(policy):
    players = Players(policy)
    shown = players.describe()
    assert shown["observation"]["place"] == {
        "shape": [], "dtype": "int32", "num_values": 3, "start": 1,
    }  # fmt: skip
    assert (shown["action"]["minimum"], shown["action"]["maximum"]) == ([5, -1], [6, 1])
    for (place, pair), wanted in zip(ROWS, choices(policy, PLACES, PAIRS), strict=True):
        own = {"place": place + 1, "pair": [pair[0] - 4, pair[1] + 7]}
        assert players.act({"observation": own})["action"] == (wanted + MOVE_START).tolist()
    for place in (0, 1.5, float("nan"), [1, 2, 9]):
        with pytest.raises(
            ValueError, match=r"observation\['place'\] must hold integers in \[1, 3"
        ):
            players.act({"observation": {"place": place, "pair": [-4, 7]}})


def test_a_recording_holds_the_environments_own_values(run, policy, tmp_path):
    path, header = record(run, tmp_path / "data", frames=10, policy="explore")
    assert json.loads((path / "dataset.json").read_text())["format"] == 3
    with np.load(path / "shard-00000.npz") as shard:
        place, pair = shard["observation['place']"], shard["observation['pair']"]
        action, first = shard["action"], shard["step_type"] == StepType.FIRST
    np.testing.assert_array_equal(place[:6], [1, 2, 3, 1, 2, 3])
    after = np.flatnonzero(~first)
    np.testing.assert_array_equal(pair[after], action[after - 1] - MOVE_START + PAIR_START)
    assert set(action[:, 0]) == {5, 6} and set(action[:, 1]) == {-1, 0, 1}
    dataset = Dataset(path)
    steps, actions = dataset.read(np.arange(header.steps))
    np.testing.assert_array_equal(steps.observation["place"], place - 1)
    np.testing.assert_array_equal(steps.observation["pair"], pair - PAIR_START)
    np.testing.assert_array_equal(actions, action - MOVE_START)
    assert actions.dtype == steps.observation["place"].dtype == np.int32
    check_specs(dataset.header.spec, policy.spec, "here")
    # Recorded before datasets kept the start: the values count from 0.
    check_specs(from_zero(dataset.header.spec), policy.spec, "here")
    with pytest.raises(DatasetError, match=r"pair'\] is int32.2. in 0.* there and .* in .-4, 7."):
        check_specs(dataset.header.spec, from_zero(policy.spec), "here")


def test_people_see_and_type_the_environments_own_numbers(run, policy, monkeypatch):
    stage = Stage(policy.experiment, 0)
    spec = environment_spec(policy.experiment).action
    inner = rlstack.load(run, spec=stage.spec)
    prediction = inner.predict({"place": 0, "pair": np.array([0, 0])})
    bars = bars_of(prediction, None, stage.labels)
    assert [[bar.label for bar in own] for _, own in bars] == [["5", "6"], ["-1", "0", "1"]]
    chosen = [[bar.label for bar in own if bar.chosen] for _, own in bars]
    assert chosen == [[str(x)] for x in (prediction.action + MOVE_START).tolist()]
    out = io.StringIO()
    asker = Asker(Console(file=out, width=200), Numbers(spec), stage.spec.action)
    lines = iter(["0", "6", "2", "-1"])  # 0 and 2 are no choices, though there are as many
    monkeypatch.setattr(asker.console, "input", lambda text: next(lines))
    action = asker.ask(None)
    np.testing.assert_array_equal(action, [1, 0])
    assert asker.told(None, action) == "action 0: 6, action 1: -1"
    assert "'0' is not a choice; choose from 5, 6" in out.getvalue()
    stage.close()


def test_a_choice_may_be_negative_in_the_spec_itself():
    """Integer actions of a dm_env need not count from 0: bars and questions show them."""
    from dm_env import specs

    spec = specs.BoundedArray((2,), np.int32, [-1, 0], [1, 2])
    labels = Numbers(spec)
    (one, two) = labels.choosers(None, {"action": 2})
    assert (one.least, two.least) == (-1, 0)
    assert [labels.choice("action", i, 0) for i in range(3)] == ["-1", "0", "1"]
    asker = Asker(Console(file=io.StringIO()), labels, spec)
    assert [len(rows) for rows in asker.legal(None)["action"]] == [3, 3]
    np.testing.assert_array_equal(asker.first_legal(None), [-1, 0])
