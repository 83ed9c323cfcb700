"""Learning from a replay on the device: equal to learning from one on the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.learning.device_learner import DeviceLearner
from rlstack.learning.device_replay import DeviceReplay
from rlstack.learning.learner import Learner, NonFiniteError
from rlstack.replay import InProcessReplay, ReplayConfig, Sample
from rlstack.types import Batch
from tests.agent_cases import BATCH, LENGTH, assert_close, case

# Each step of the four environments allows three batches, once 12 items were inserted.
CONFIG = ReplayConfig(
    sampler="prioritized",
    batch_size=4,
    unroll_length=2,
    max_size=40,
    min_size=12,
    samples_per_insert=3.0,
    samples_per_insert_tolerance=0.0,
)
RECORDED = case("dqn").batch.trajectory
SPEC = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), RECORDED)


def step_of(number, reward=None):
    """Steps of four environments, with rewards that no other step has."""
    step = jax.tree.map(lambda x: np.asarray(x)[number % (LENGTH + 1)], RECORDED)
    reward = np.cos(number + np.arange(BATCH)) if reward is None else np.full(BATCH, reward)
    return step._replace(timestep=step.timestep._replace(reward=reward.astype(np.float32)))


def make(cfg=CONFIG, **learner):
    replay = DeviceReplay(cfg, BATCH, rng_key=jax.random.PRNGKey(5), spec=SPEC)
    agent, key = case("dqn").agent, jax.random.PRNGKey(0)
    return replay, DeviceLearner(LearnerConfig(**learner), agent, replay, key)


def as_on_an_accelerator(learner):
    """Makes a learner read its logs one call later, and keep the batch of an update that fails."""
    learner._placement.on_cpu = learner._updater.keeps_cells = False


class OnHost:
    """The same learner with the host's replay, which gives the items that the device drew."""

    def __init__(self):
        self.stored = InProcessReplay(CONFIG, BATCH, seed=0, spec=SPEC)
        self.learner = Learner(LearnerConfig(), case("dqn").agent, self, jax.random.PRNGKey(0))

    def update_priorities(self, keys, priorities):
        self.priorities = priorities

    def learn(self, replay):
        """Learns from the batches that the device will draw; returns the logs."""
        table, logs = replay.table(None), []
        replay._write_waiting()
        state = jax.tree.map(jnp.copy, replay.state)
        for _ in range(replay.counters.ready()):
            state, cells, weights = jax.jit(table.draw)(state)
            keys = replay.counters.keys(np.asarray(cells))
            trajectory = self.stored._ring.gather(*np.divmod(keys, BATCH))
            sample = Sample(Batch(trajectory, np.asarray(weights)), keys.astype(np.uint64))
            logs.append(self.learner.step(sample))
            state = jax.jit(table.update_priorities)(state, cells, self.priorities)
        return logs


def test_three_updates_in_one_call_are_those_of_the_host():
    (replay, learner), host = make(), OnHost()
    counts = []
    for number in range(20):
        replay.add(None, step_of(number))
        host.stored.add(None, step_of(number))
        wanted = host.learn(replay)
        counts.append(len(wanted))
        logs = learner.update_from(replay)
        assert learner.version == host.learner.version
        assert_close(learner.params, host.learner.params, atol=1e-5)
        if wanted:
            assert len(logs["loss"]) == len(wanted)
            mean = np.mean([log["loss"] for log in wanted])
            np.testing.assert_allclose(logs["loss"].mean(), mean, rtol=1e-3, atol=1e-6)
    assert counts == [0] * 5 + [3] * 15  # 12 items after five steps, and three batches a step
    assert learner.last_logs() == {} == learner.update_from(replay)
    assert int(replay.state.drawn) == replay.counters.samples == 4 * 45


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("way", ["by calls", "ahead", "resumed"])
def test_calls_do_not_change_what_is_learned(way):
    """By calls of one update, as for convolutions on a CPU; with logs that come one call later."""
    results = []
    for chosen in ("", way):
        replay, learner = make()
        if chosen == "ahead":
            as_on_an_accelerator(learner)
        learner._by_calls = chosen == "by calls"
        losses = []
        for number in range(12):
            if number == 8 and chosen == "resumed":
                saved = jax.tree.map(np.array, (learner.save(), replay.save()))
                replay, learner = make()
                learner.load(saved[0])
                replay.load(saved[1])
            replay.add(None, step_of(number))
            losses.append(learner.update_from(replay, most=20).get("loss", ()))
        losses = np.hstack([*losses, learner.last_logs().get("loss", ())])
        assert learner.version == len(losses) == 20
        results.append((learner.params, np.mean(losses), replay.state))
    exact = {} if way == "by calls" else {"atol": 0, "rtol": 0}
    assert_close(results[0][:2], results[1][:2], **exact)
    assert_close(results[0][2], results[1][2], **exact)


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("by_calls", [True, False])
def test_an_update_that_gives_nan_changes_nothing_and_holds_its_batch(on_cpu, by_calls):
    replay, learner = make()
    learner._by_calls = by_calls
    if not on_cpu:
        as_on_an_accelerator(learner)
    for number in range(8):
        replay.add(None, step_of(number))
        learner.update_from(replay)
    learner.last_logs()
    before = learner.version
    with pytest.raises(NonFiniteError, match=r"gave non-finite .*loss") as caught:
        for number in range(8, 16):
            replay.add(None, step_of(number, np.nan))
            good = jax.tree.map(np.array, (learner.params, learner.learner_state))
            learner.update_from(replay)
    assert before <= learner.version < before + 24
    assert f"update {learner.version + 1} gave" in str(caught.value)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(learner.params))
    assert_close(caught.value.before["params"], learner.params, atol=0, rtol=0)
    if not on_cpu:  # the call after the one that failed changed nothing
        assert_close((learner.params, learner.learner_state), good, atol=0, rtol=0)
    reward = caught.value.batch.trajectory.timestep.reward
    assert reward.shape == (3, 4) and np.isnan(reward).any()
    assert int(replay.state.credit) == replay.counters.credit
    assert int(replay.state.drawn) == replay.counters.samples
