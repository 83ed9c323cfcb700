"""A policy whose critic sees the state acts, and is exported, without the state."""

import json

import numpy as np
import pytest

import rlstack
from rlstack.agents.ppo import PPOConfig
from rlstack.checks import WrongKindError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.networks import NetworkConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy_replay
from rlstack.programs.tools.export import export
from rlstack.programs.tools.greedy import greedy_function
from tests.programs import running

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A short run of the supply chain with one policy and a critic that sees all facilities."""
    experiment = Experiment(
        preset="chain",
        agent=PPOConfig(num_epochs=2, num_minibatches=2),
        env=EnvConfig(
            "rlstack.envs.seats.games:SupplyChain",
            num_envs=12,
            options={"critic_state": "joined", "seat_index": True, "weeks": 8},
        ),
        network=NetworkConfig(hidden_sizes=(16,)),
        normalisation=NormalisationConfig(observations=True, rewards="return"),
        replay=on_policy_replay(12, 8),
        evaluator=EvaluatorConfig(episodes=6, num_envs=3),
        frames=960,
    )
    directory = tmp_path_factory.mktemp("critic") / "chain"
    running.run(experiment, directory)
    return directory


def seen_by(policy, rows):
    """Observations ``[rows, ...]`` without the state, and two states for the critic."""
    rng = np.random.default_rng(0)
    seen = {
        "observation": rng.normal(size=(rows, 7)).astype(np.float32),
        "seat": np.arange(rows, dtype=np.int32) % 3,
    }
    states = [
        {str(seat): rng.normal(size=(rows, 7)).astype(np.float32) for seat in range(3)}
        for _ in range(2)
    ]
    return seen, states


@pytest.mark.slow
@pytest.mark.chosen
def test_the_policy_acts_without_the_state(chain):
    policy = rlstack.load(chain)
    seen, states = seen_by(policy, 9)
    blind = policy.predict(seen)
    assert blind.value is None
    for state in states:
        whole = policy.predict({**seen, "critic_state": state})
        np.testing.assert_array_equal(blind.action, whole.action)
        np.testing.assert_array_equal(blind.probabilities["action"], whole.probabilities["action"])
        assert whole.value.shape == (9,)
    one = {name: entry[0] for name, entry in seen.items()}
    policy.reset()
    assert policy.act(one) == blind.action[0]
    with pytest.raises(WrongKindError, match="must be a dict with keys"):
        policy.act({"observation": seen["observation"]})


def test_the_exported_function_has_no_input_for_the_state(chain, tmp_path):
    pytest.importorskip("flatbuffers")
    policy = rlstack.load(chain)
    function = greedy_function(policy)
    assert [port.name for port in function.observation] == [
        "observation/observation",
        "observation/seat",
    ]
    found = export(chain, "stablehlo", tmp_path / "policy.stablehlo")
    said = json.loads(found.description.read_text())
    assert [entry["name"] for entry in said["observation_spec"]] == ["observation", "seat"]
    seen, _ = seen_by(policy, 5)
    from jax import export as jax_export

    loaded = jax_export.deserialize(bytearray(found.path.read_bytes()))
    actions = loaded.call({f"observation/{name}": entry for name, entry in seen.items()})
    np.testing.assert_array_equal(actions, policy.act(seen))
