"""The topology fused: equal to a single process, resumed exactly, and ended as other runs are."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlstack.agents.dqn import DQNConfig
from rlstack.agents.ppo import PPOConfig
from rlstack.checks import EnvError
from rlstack.configs.acting import EvaluatorConfig
from rlstack.fused.loop import NO_LIMIT, Limits
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.toy import Catch
from rlstack.learning.learner import NonFiniteError
from rlstack.networks import NetworkConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.build.fused import Keys, Parts
from rlstack.programs.config.experiment import EnvConfig, Experiment, LearnerConfig
from rlstack.programs.config.fused_config import FusedConfig
from rlstack.programs.run import train
from rlstack.programs.run.fused import Fused
from rlstack.programs.session import failed_update
from rlstack.programs.session.signals import Interrupted
from rlstack.replay import ReplayConfig
from rlstack.storage import checkpoint, jsonl
from tests.programs.running import nothing_left, params, same, series

# Calls of the loop of any length, so that their number differs from run to run.
_SHORT = FusedConfig(call_seconds=0.01)


def ppo(topology="fused", **changes):
    """PPO on Catch: an update is 4 x 16 steps."""
    experiment = Experiment(
        preset="catch-fused",
        agent=PPOConfig(num_epochs=2, num_minibatches=2),
        env=EnvConfig("rlstack.jax_envs.toy:Catch", 4, "jax", options={"rows": 5, "columns": 3}),
        network=NetworkConfig(hidden_sizes=(16,)),
        replay=ReplayConfig(sampler="fifo", batch_size=4, unroll_length=16, max_size=8),
        frames=10**6,
        updates=20,
        topology=topology,
        log_period=200,
        checkpoint_period=10**6,
        evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        loggers=("jsonl",),
        fused=_SHORT,
    )
    return dataclasses.replace(experiment, **changes)


def dqn(**changes):
    """DQN on Catch, with prioritized two-step items."""
    replay = ReplayConfig(
        sampler="prioritized",
        batch_size=8,
        unroll_length=2,
        starts="not_last",
        max_size=200,
        min_size=40,
        samples_per_insert=2.0,
    )
    return ppo(**{"agent": DQNConfig(epsilon_frames=200), "replay": replay, **changes})


def run(experiment, directory):
    return train.run(experiment, directory, stream=io.StringIO())


def saved(directory):
    """The leaves of the newest checkpoint, with their digests, by name."""
    path = checkpoint.latest(directory / "checkpoints")
    record = json.loads((path / "checkpoint.json").read_text())
    return {leaf[0]: leaf for leaf in record["leaves"]}


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fused") / "run"
    return directory, run(ppo(), directory)


def test_ppo_learns_what_it_learns_in_a_single_process(fused, tmp_path):
    directory, result = fused
    single = run(ppo("single_process"), tmp_path / "single")
    assert (result.learner_steps, result.env_frames) == (20, single.env_frames)
    assert result.ended_by == single.ended_by == "updates"
    # XLA joins other operations here, which round differently by some 1e-7.
    for one, other in zip(params(directory), params(tmp_path / "single"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert result.eval_return_mean == single.eval_return_mean
    returns = [np.mean(series(d, "actor/episode_return")) for d in (directory, tmp_path / "single")]
    assert set(np.sign(returns)) <= {-1.0, 0.0, 1.0}
    lengths = series(directory, "actor/episode_length")
    assert set(lengths) == {4.0}


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("make", [ppo, dqn])
def test_a_resumed_run_equals_one_that_was_not_interrupted(fused, tmp_path, make):
    if make is ppo:
        directory = fused[0]
    else:
        directory = tmp_path / "half"
        run(make(), directory)
    result = train.resume(directory, updates=40, stream=io.StringIO())
    whole = run(make(updates=40), tmp_path / "whole")
    assert result.learner_steps == whole.learner_steps == 40
    assert result.env_frames == whole.env_frames
    found, wanted = saved(directory), saved(tmp_path / "whole")
    assert found.keys() == wanted.keys()
    assert any("acting" in name for name in found)
    assert found == wanted  # with the digests of all arrays
    assert same(params(directory), params(tmp_path / "whole"))


def test_the_first_call_and_the_first_evaluation_compile_nothing(compilations):
    with compilations() as compiled:
        loop = Fused(ppo())
        loop.call(Limits(1))
        loop.call(Limits(2))
    assert compiled.count("jit(run)") == 1
    with compilations() as compiled:
        loop.evaluate()
    loop.close()
    assert compiled == []


@pytest.mark.slow
@pytest.mark.chosen
def test_the_loop_is_compiled_once(tmp_path, monkeypatch):
    loops = []
    close = Fused.close
    monkeypatch.setattr(Fused, "close", lambda self: (loops.append(self), close(self)))
    run(ppo(), tmp_path / "run")
    assert loops[0]._run._cache_size() == 1


@pytest.mark.slow
@pytest.mark.chosen
def test_logs_evaluations_and_checkpoints_are_those_of_other_runs(tmp_path):
    evaluator = EvaluatorConfig(episodes=2, num_envs=2, period=400)
    with nothing_left():
        result = run(
            dqn(evaluator=evaluator, updates=0, frames=1000, checkpoint_period=500),
            tmp_path / "run",
        )
    assert result.topology == "fused"
    assert result.env_frames >= 1000
    lines = list(jsonl.read(tmp_path / "run" / "metrics.jsonl"))
    evaluated = [line["env_frames"] for line in lines if "evaluator/episode_return" in line]
    # A call ends where something is due, not where its time is over.
    assert [frames // 400 for frames in evaluated] == [1, 2, 2]
    assert evaluated[0] < 404 + 4
    steps = [int(path.name[5:]) for path in checkpoint.paths(tmp_path / "run" / "checkpoints")]
    assert len(steps) == 2
    assert 500 <= min(steps) < 508
    for name in ("learner/loss", "learner/steps", "replay/size", "replay/samples"):
        assert series(tmp_path / "run", name)
    for name in ("actor/frames_per_second", "learner/updates_per_second"):
        assert series(tmp_path / "run", name)
    last = [line for line in lines if "replay/inserts" in line][-1]
    # Two samples for each item after the first 40, in batches of 8.
    allowed = 2.0 * (last["replay/inserts"] - 40) + 8
    assert allowed - 8 < last["replay/samples"] <= allowed
    assert last["replay/samples"] == 8 * last["learner/steps"]


_TOO_LARGE = OptimizerConfig(learning_rate=1e30)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(
    "experiment",
    [
        ppo(agent=PPOConfig(optimizer=_TOO_LARGE)),
        dqn(agent=DQNConfig(optimizer=_TOO_LARGE, huber_delta=0.0)),
    ],
    ids=["ppo", "dqn"],
)
def test_an_update_that_gives_nan_is_saved_and_can_be_repeated(experiment, tmp_path):
    with pytest.raises(NonFiniteError, match="rlstack rerun"):
        run(experiment, tmp_path / "run")
    (dump,) = (tmp_path / "run").glob("dump-*")
    logs = train.rerun(dump)
    assert not np.isfinite(list(logs.values())).all()
    saved_update = failed_update.load(dump)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(saved_update["params"]))
    # The saved batch is the one that failed. An empty batch would have only zeros.
    batch = saved_update["batch"]
    shape = (experiment.replay.unroll_length + 1, experiment.replay.batch_size)
    assert batch.trajectory.timestep.observation.shape[:2] == shape
    assert (batch.trajectory.timestep.observation.max(axis=(2, 3)) == 1).all()
    assert (batch.weights > 0).all()


class Failing:
    """A constant, and NaN at the 50th step of an episode that does not end.

    With ``whole`` it is an integer, and 2 at that step, which is outside of its space.
    """

    def __init__(self, whole=False):
        self._whole = whole

    def observation_spec(self):
        from dm_env import specs

        if self._whole:
            return specs.BoundedArray((1,), np.int32, 0, 1, "constant")
        return specs.Array((1,), np.float32, "constant")

    def action_spec(self):
        from dm_env import specs

        return specs.DiscreteArray(2, np.int32, "ignored")

    def reset(self, rng_key):
        return jnp.int32(0), jnp.ones(1, np.int32 if self._whole else np.float32)

    def step(self, rng_key, state, action):
        from rlstack.jax_envs.environment import Outcome

        observation = jnp.where(state == 49, 2 if self._whole else jnp.nan, 1)[None]
        observation = observation.astype(np.int32 if self._whole else np.float32)
        return Outcome(state + 1, observation, 1.0, False, False)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("whole", "rule"), [(False, "be finite"), (True, "lie in their spaces")])
def test_an_environment_that_gives_nan_ends_the_run_with_a_checkpoint(tmp_path, whole, rule):
    env = EnvConfig("tests.fused.test_fused_run:Failing", 2, "jax", options={"whole": whole})
    replay = ReplayConfig(sampler="fifo", batch_size=2, unroll_length=8, max_size=4)
    with pytest.raises(EnvError, match=rf"Env 0, 1 .*must {rule}(?s:.*)--resume"):
        run(ppo(env=env, replay=replay), tmp_path / "run")
    assert all(np.isfinite(leaf).all() for leaf in params(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.chosen
def test_an_interruption_saves_a_checkpoint(tmp_path, monkeypatch):
    calls = []
    call = Fused.call

    def interrupting(self, limits):
        calls.append(limits)
        if len(calls) == 3:
            import signal

            signal.raise_signal(signal.SIGINT)
        return call(self, limits)

    monkeypatch.setattr(Fused, "call", interrupting)
    with pytest.raises(Interrupted):
        run(ppo(updates=10**6), tmp_path / "run")
    assert len(calls) == 3
    assert checkpoint.latest(tmp_path / "run" / "checkpoints") is not None


_FIFO = {"sampler": "fifo", "batch_size": 4, "unroll_length": 16, "max_size": 8}


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"env": EnvConfig("CartPole-v1", 4)}, "env.type must be jax .*Add --env.type jax"),
        ({"env": EnvConfig("CartPole-v1", 4, "jax", wait_num=2)}, "env.wait_num must be 0"),
        ({"step_processor": "a.b:c"}, "step_processor must be empty"),
        (
            {"learner": LearnerConfig(devices=(0, 1, 2))},
            "env.num_envs .* multiple of the 3 devices of learner",
        ),
        ({"replay": ReplayConfig(**{**_FIFO, "batch_size": 6})}, "batch_size .*divisor"),
        ({"replay": ReplayConfig(**_FIFO, period=8)}, "replay.period must be None"),
        ({"replay": ReplayConfig(**_FIFO, min_actors=1)}, "min_actors must be 0"),
        (
            {"replay": ReplayConfig(**{**_FIFO, "batch_size": 2}, max_staleness=0)},
            "max_staleness must be at least 1",
        ),
        ({"replay": ReplayConfig(**{**_FIFO, "sampler": "uniform"})}, "samples_per_insert must be"),
    ],
)
def test_what_does_not_run_there_is_said_before_anything_starts(changes, text):
    with pytest.raises(ValueError, match=f"Experiment: .*{text}"):
        ppo(**changes)


class ImageCatch(Catch):
    """Catch, whose board is an image of one channel."""

    def observation_spec(self):
        return specs.BoundedArray((*super().observation_spec().shape, 1), np.float32, 0.0, 1.0)

    def _board(self, state):
        return super()._board(state)[..., None]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("call", ["run", "run_all"])
def test_convolutions_in_a_loop_are_products_of_matrices(call):
    """XLA's convolution is 10 times slower in a loop, and slower still under vmap."""
    experiment = dataclasses.replace(
        ppo(), network=NetworkConfig(torso="minatar", hidden_sizes=(16,), shared=True)
    )
    env = BatchedEnv(ImageCatch(rows=5))
    parts, key = Parts(experiment, env), jax.random.PRNGKey(0)
    keys = Keys(key, env.keys(np.arange(experiment.env.num_envs)), key, key)
    state = jax.eval_shape(lambda: parts.begin(keys))
    arguments = (Limits(1),) if call == "run" else (1, NO_LIMIT)
    traced = jax.make_jaxpr(lambda state: getattr(parts.loop, call)(state, *arguments))(state)
    assert "while" in str(traced)
    assert ("conv_general_dilated" in str(traced)) == (jax.__version_info__ < (0, 6))
