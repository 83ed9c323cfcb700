"""`rlstack export`: the policy of a run in files that need no rlstack."""

import importlib.util
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import rlstack
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.presets import preset
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.export import export
from rlstack.programs.tools.greedy import greedy_function, row_by_row
from rlstack.storage import checkpoint
from tests.programs import running

pytestmark = pytest.mark.timeout(120)

# Acts without rlstack and Haiku on the observations of a file, and writes the actions to another.
OUTSIDE = """
import json, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("rlstack", "haiku"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
import numpy as np
from jax import export

folder, names = sys.argv[1], sys.argv[2:]
for name in names:
    policy = export.deserialize(bytearray(open(f"{folder}/{name}.stablehlo", "rb").read()))
    description = json.load(open(f"{folder}/{name}.stablehlo.json"))
    seen = np.load(f"{folder}/{name}-seen.npy")
    state = {
        entry["name"]: np.tile(np.array(entry["initial"], entry["dtype"]), (seen.shape[1], 1))
        for entry in description["state"]
    }
    actions = []
    for observation in seen:
        if state:
            action, state = policy.call(observation, state)
        else:
            action = policy.call(observation)
        actions.append(np.asarray(action))
    np.save(f"{folder}/{name}-actions.npy", np.stack(actions))
"""


def untrained(experiment, path):
    """A run directory with the params of an agent that has learned nothing."""
    directory = RunDir.create(path, experiment.preset, experiment.seed)
    directory.write_config(to_json(experiment))
    params = make_agent(experiment, environment_spec(experiment)).initial_params(
        jax.random.PRNGKey(3)
    )
    if experiment.normalisation.observations:  # else the statistics are empty, and change nothing
        statistics = jax.tree.map(lambda x: x + 0.3, params.statistics)
        params = params._replace(statistics=statistics)
    progress = {"env_frames": 0, "train_seconds": 0.0, "timed_frames": 0}
    checkpoint.save(directory.checkpoints, 0, {"learner": {"params": params}}, progress)
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A recurrent policy with normalised observations, and one that learns values."""
    folder = tmp_path_factory.mktemp("export")
    normalisation = NormalisationConfig(observations=True, rewards="return")
    experiment = running.recurrent("single_process", normalisation=normalisation)
    untrained(experiment, folder / "memory")
    untrained(running.dqn("single_process"), folder / "dqn")
    return folder


def expected(run, steps=5, rows=3):
    """Observations [steps, rows, ...] and the actions of the policy."""
    policy = rlstack.load(run)
    shape = (steps, rows, *policy.spec.observation.shape)
    seen = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return seen, np.stack([policy.act(observation) for observation in seen])


@pytest.mark.slow
@pytest.mark.chosen
def test_stablehlo_acts_as_the_policy_in_a_process_without_rlstack(runs, tmp_path):
    pytest.importorskip("flatbuffers")
    wanted = {}
    for name in ("memory", "dqn"):
        found = export(runs / name, "stablehlo", tmp_path / f"{name}.stablehlo")
        assert found.batch is None
        seen, wanted[name] = expected(runs / name)
        np.save(tmp_path / f"{name}-seen.npy", seen)
        assert len(np.unique(wanted[name])) > 1
    done = subprocess.run(
        [sys.executable, "-c", OUTSIDE, tmp_path, *wanted],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    for name, actions in wanted.items():
        assert np.array_equal(np.load(tmp_path / f"{name}-actions.npy"), actions)
    state = json.loads((tmp_path / "memory.stablehlo.json").read_text())["state"]
    # The discounted returns of normalised rewards change no action, so they are left out.
    assert [(entry["name"], entry["shape"]) for entry in state] == [("state/0", [32])]


def test_npz_has_the_params_by_name_and_a_description(runs):
    path, description, _ = export(runs / "dqn", "npz")
    assert path == runs / "dqn" / "policy.npz"
    said = json.loads(description.read_text())
    with np.load(path) as arrays:
        assert {k: [str(v.dtype), list(v.shape)] for k, v in arrays.items()} == said["params"]
        layers = [(arrays[f"{n}/w"], arrays[f"{n}/b"]) for n in sorted({n[:-2] for n in arrays})]
    assert said["network"]["activation"] == "relu" and said["env_frames"] == 0
    assert said["observation_spec"][0]["shape"] == [4]
    assert said["action_spec"] == [
        {"name": "", "shape": [], "dtype": "int32", "num_values": 2},
    ]
    # The network computed by hand: hidden layers first, then the values.
    layers.sort(key=lambda layer: layer[0].shape[1] == 2)
    seen, actions = expected(runs / "dqn")
    hidden = seen
    for weights, bias in layers[:-1]:
        hidden = np.maximum(hidden @ weights + bias, 0)
    weights, bias = layers[-1]
    assert np.array_equal((hidden @ weights + bias).argmax(-1), actions)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_map_over_rows_gives_the_same_actions(runs):
    function = greedy_function(rlstack.load(runs / "memory"))
    seen, _ = expected(runs / "memory")
    rows = seen.shape[1]
    state = {name: np.repeat(x[None], rows, 0) for name, x in function.initial_state.items()}
    left, right = (
        f.call({"observation": seen[0]}, state) for f in (function, row_by_row(function))
    )
    assert np.array_equal(left[0]["action"], right[0]["action"])
    assert np.allclose(left[1]["state/0"], right[1]["state/0"], atol=1e-6)


def test_what_cannot_be_exported_is_refused(runs, tmp_path, monkeypatch):
    random = untrained(preset("cartpole-random"), tmp_path / "random")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"greedy policy of \w+ depends on random numbers"):
        export(random, "stablehlo")
    with pytest.raises(ValueError, match="format must be npz, stablehlo, onnx; got 'pickle'"):
        export(runs / "dqn", "pickle")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"format onnx needs the package jax2onnx.*doctor"):
        export(runs / "dqn", "onnx")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["memory", "dqn"])
def test_onnx_acts_as_the_policy(name, runs, tmp_path):
    pytest.importorskip("jax2onnx")
    runtime = pytest.importorskip("onnxruntime")
    path, description, _ = export(runs / name, "onnx", tmp_path / "policy.onnx")
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    said = json.loads(description.read_text())
    assert said["batch"] == "any" or name == "memory"
    seen, wanted = expected(runs / name)
    rows = seen.shape[1] if said["batch"] == "any" else said["batch"]
    state = {
        entry["name"]: np.tile(np.array(entry["initial"], np.float32), (rows, 1))
        for entry in said["state"]
    }
    for observation, actions in zip(seen, wanted, strict=True):
        action, *after = session.run(None, {"observation": observation[:rows], **state})
        assert np.array_equal(action, actions[:rows])
        state = dict(zip(state, after, strict=True))


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "name",
    [
        *("pendulum-sac", "cartpole-pqn", "cartpole-c51", "entity-xor-ppo", "cartpole-bc"),
        *("pendulum-crossq", "pendulum-tqc", "pendulum-simba", "pendulum-d4pg", "pendulum-mpo"),
        *("cartpole-vmpo", "cartpole-ppg", "deepsea-rnd", "toll-ppo-lagrangian", "maze-plr"),
        *("catch-muzero", "tictactoe-alphazero", "pendulum-tdmpc2"),
        *("twostep-qmix", "cover-maddpg"),
        "cartpole-dreamer",
    ],
)
def test_agents_of_every_kind_can_be_exported(name, tmp_path):
    pytest.importorskip("flatbuffers")
    experiment = preset(name)
    assert export(untrained(experiment, tmp_path / "run"), "stablehlo").batch is None
