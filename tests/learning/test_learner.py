"""The Learner: versions, faults, priorities, save and load."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.configs.learner import LearnerConfig
from rlstack.families.wrapped import Wrapped, WrappedEpochs
from rlstack.fused.devices import Devices
from rlstack.fused.learning import Learning, Updater
from rlstack.learning.learner import Learner, NonFiniteError
from rlstack.replay import Sample
from rlstack.storage.loggers import InMemoryLogger
from tests.agent_cases import assert_close, case, quick_jit

EVENT = threading.Event()
EVENT.set()
KEYS = np.array([5, 6, 7, 8], np.uint64)


class Replay:
    """A replay of one sample that records new priorities."""

    def __init__(self, sample, times=3):
        self.sample, self.times, self.told = sample, times, []

    def update_priorities(self, keys, priorities):
        self.told.append((keys, priorities))

    def set_params_version(self, version):
        self.version = version

    def make_dataset(self, stop=None):
        for _ in range(self.times):
            if stop():
                return
            yield self.sample


def make(name="dqn", replay=None, seed=0, **config):
    return Learner(LearnerConfig(**config), case(name).agent, replay, jax.random.PRNGKey(seed))


def sample(name="dqn"):
    return Sample(case(name).batch, KEYS)


def poisoned(name="dqn"):
    batch = jax.tree.map(np.array, case(name).batch)
    batch.trajectory.timestep.reward[1] = np.nan
    return Sample(batch, KEYS)


def test_every_step_is_a_version_and_priorities_go_to_replay():
    replay = Replay(sample())
    learner = make(replay=replay)
    assert learner.get_params() == (0, learner.params)
    assert learner.get_params(newer_than=0) is None
    before = learner.params
    logs = learner.step(sample())
    version, params = learner.get_params(newer_than=0)
    assert version == learner.version == 1 and params is learner.params
    assert not np.array_equal(before["torso/linear"]["w"], params["torso/linear"]["w"])
    assert all(isinstance(x, np.ndarray | np.generic) for x in logs.values())
    ((keys, priorities),) = replay.told
    assert keys.tolist() == KEYS.tolist()
    _, _, output = case("dqn").learn(before, make().learner_state, case("dqn").batch)
    np.testing.assert_allclose(priorities, output.priorities, rtol=1e-5)
    assert isinstance(priorities, np.ndarray) and priorities.shape == (4,)


@pytest.mark.parametrize(
    ("name", "minibatches"), [("dqn", "auto"), ("ppo-separate", "scan"), ("ppo-separate", "calls")]
)
def test_a_non_finite_update_leaves_all_as_it_was_and_holds_the_batch(name, minibatches):
    replay = Replay(sample(name))
    learner = make(name, replay, minibatches=minibatches)
    learner.step(sample(name))
    replay.told.clear()
    before = jax.tree.map(np.array, learner.save())
    bad = poisoned(name)
    with pytest.raises(NonFiniteError, match=r"update 2 gave non-finite .*loss") as caught:
        learner.step(bad)
    assert_close(learner.save(), before, atol=0, rtol=0)
    assert not replay.told
    assert_close(caught.value.before["params"], before["params"], atol=0, rtol=0)
    bad.batch.trajectory.timestep.reward[:] = 0  # replay may reuse its arrays
    assert np.isnan(caught.value.batch.trajectory.timestep.reward[1]).all()
    assert np.isfinite(learner.step(sample(name))["loss"]) and learner.version == 2


class WithLogs(Wrapped):
    """Its agent's updates with other logs, and params that are changed."""

    def __init__(self, agent, logs, factor=1.0, only=False):
        super().__init__(agent, logs, factor, only)
        self.logs, self.factor, self.only = logs, factor, only

    def learner_step(self, params, learner_state, batch):
        params, state, output = super().learner_step(params, learner_state, batch)
        params = jax.tree.map(lambda x: x * self.factor, params)
        logs = {**({} if self.only else output.logs), **self.logs}
        return params, state, output._replace(logs=logs)


class WithEpochLogs(WrappedEpochs):
    """The same for the logs of one with epochs."""

    def batch_logs(self, rows):
        return {**super().batch_logs(rows), "distance": jnp.inf}


@pytest.mark.parametrize(
    ("name", "wrap", "minibatches"),
    [
        ("dqn", lambda agent: WithLogs(agent, {"distance": jnp.nan}), "auto"),
        ("ppo-separate", WithEpochLogs, "calls"),
    ],
)
def test_a_log_that_is_no_part_of_the_loss_stops_nothing(name, wrap, minibatches):
    cfg, agent = LearnerConfig(minibatches=minibatches), wrap(case(name).agent)
    learner = Learner(cfg, agent, Replay(sample()), jax.random.PRNGKey(0))
    before = jax.tree.leaves(learner.params)[0]
    logs = learner.step(sample(name))
    assert not np.isfinite(logs["distance"]) and np.isfinite(logs["loss"])
    assert learner.version == 1
    assert not np.array_equal(before, jax.tree.leaves(learner.params)[0])


def test_a_compiled_loop_keeps_an_update_with_such_a_log_and_drops_one_with_infinite_params():
    c = case("dqn")
    batch, state = c.batch, c.agent.initial_learner_state(jax.random.PRNGKey(1), c.params)
    before = Learning(c.params, state, jnp.zeros((), jnp.int32))

    @quick_jit
    def learn(factor):
        agent = WithLogs(c.agent, {"distance": jnp.inf}, factor, only=True)
        updater = Updater(agent, devices=Devices())
        return updater.update(before, updater.none(before, batch), lambda: batch)

    for factor, fails in ((1.0, False), (jnp.inf, True)):
        after, updates, _ = learn(factor)
        assert bool(updates.failed) is fails and after.version == 1 - fails
        unchanged = np.array_equal(*(x.params["torso/linear"]["w"] for x in (before, after)))
        assert unchanged is fails


@pytest.mark.parametrize("logs", [{}, {"loss": 0.5}, {"grad_norm": 1.0}])
def test_params_are_checked_if_an_agent_logs_no_loss_or_no_norm(logs):
    agent = WithLogs(case("dqn").agent, logs, factor=np.inf, only=True)
    learner = Learner(LearnerConfig(), agent, Replay(sample()), jax.random.PRNGKey(0))
    before = jax.tree.map(np.array, learner.save())
    with pytest.raises(NonFiniteError, match="update 1 gave non-finite params"):
        learner.step(sample())
    assert_close(learner.save(), before, atol=0, rtol=0)


def test_the_loss_of_each_part_decides_whether_an_update_is_kept():
    logs = {"loss": 0.5, "grad_norm": 1.0, "predictor_loss": np.inf}
    agent = WithLogs(case("dqn").agent, logs, only=True)
    learner = Learner(LearnerConfig(), agent, Replay(sample()), jax.random.PRNGKey(0))
    with pytest.raises(NonFiniteError, match="update 1 gave non-finite predictor_loss"):
        learner.step(sample())


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize("name", ["dqn", "ppo-lstm", "sac", "r2d2"])
def test_it_begins_with_what_the_agent_gives_bit_for_bit_in_memory_of_its_own(name):
    agent = case(name).agent
    params_key, learner_key = jax.random.split(jax.random.PRNGKey(3))
    # Quick tests compile without optimization, which rounds differently; the learner does not.
    options = {"xla_backend_optimization_level": 1}
    params = jax.jit(agent.initial_params, compiler_options=options)(params_key)
    state = jax.jit(agent.initial_learner_state, compiler_options=options)(learner_key, params)
    learner = make(name, seed=3)
    begun = learner.params, learner.learner_state
    assert_close(begun, (params, state), atol=0, rtol=0)
    places = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(begun) if x.size]
    assert len(set(places)) == len(places)  # the state is donated


def shapes(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), batch)


@pytest.mark.parametrize("name", ["dqn", "ppo-separate"])
def test_an_update_that_compiles_while_the_params_are_made_is_the_same(name, compilations):
    agent, key = case(name).agent, jax.random.PRNGKey(0)
    with compilations() as compiled:
        early = Learner(
            LearnerConfig(), agent, Replay(sample(name)), key, shapes(sample(name).batch)
        )
        early.compile(shapes(sample(name).batch))
        early.step(sample(name))
    assert compiled.count("jit(_packed)") == 1  # and not again by the first update
    later = make(name, Replay(sample(name)))
    later.step(sample(name))
    assert_close(early.save(), later.save(), atol=0, rtol=0)


def test_what_fails_to_compile_beside_the_params_is_an_error_of_compile():
    agent, batch = case("dqn").agent, shapes(sample().batch)
    wrong = batch._replace(weights=jax.ShapeDtypeStruct((3, 5), np.float32))
    learner = Learner(LearnerConfig(), agent, None, jax.random.PRNGKey(0), wrong)
    with pytest.raises((TypeError, ValueError)):
        learner.compile(wrong)


def test_the_check_can_be_left_out():
    learner = make(check_finite=False)
    assert np.isnan(learner.step(poisoned())["loss"]) and learner.version == 1


def test_run_takes_what_there_is_or_stops_when_told():
    replay, logger = Replay(sample(), times=3), InMemoryLogger()
    learner = make(replay=replay)
    learner.run(logger=logger)
    assert learner.version == replay.version == 3
    assert [step for step, _ in logger.series("learner/loss")] == [1, 2, 3]
    learner.run(stop=EVENT)
    assert learner.version == 3
    learner.run(stop=functools.partial(next, iter([False, True])))
    assert learner.version == 4
    with pytest.raises(ValueError, match="replay_buffer must be given; got replay_buffer=None"):
        make().run(stop=lambda: False)


def test_a_learner_that_was_loaded_goes_on_as_the_saved_one():
    one, other = make("ppo-masked", seed=0), make("ppo-masked", seed=1)
    one.step(sample("ppo-masked"))
    other.load(jax.tree.map(np.asarray, one.save()))
    assert other.version == 1
    logs = [learner.step(sample("ppo-masked")) for learner in (one, other)]
    assert_close(*logs, atol=0, rtol=0)
    assert_close(one.save(), other.save(), atol=0, rtol=0)


def test_convolutions_on_the_cpu_are_learned_by_calls(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    from rlstack.learning import learner

    image, vector = case("ppo-image"), case("ppo-separate")
    takes = functools.partial(learner._takes_calls, LearnerConfig())
    assert takes(image.params) and not takes(vector.params)
    assert not learner._takes_calls(LearnerConfig(minibatches="scan"), image.params)
    assert learner._takes_calls(LearnerConfig(minibatches="calls"), vector.params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not takes(image.params)


def test_configs_out_of_range_are_refused():
    for changes in ({"devices": (-1,)}, {"devices": (0, 0)}, {"minibatches": "loop"}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            LearnerConfig(**changes)
    with pytest.raises(ValueError, match="devices must name devices of this machine"):
        make(devices=(len(jax.local_devices()),))


def test_the_learner_state_is_donated_and_nobody_else_holds_it():
    learner = make("dqn")  # its target params begin as the params
    published, saved = learner.params, learner.save()
    before = jax.tree.map(np.array, saved)
    held = jax.tree.leaves(learner.learner_state)
    learner.step(sample())
    assert all(leaf.is_deleted() for leaf in held)
    assert_close({**saved, "params": published}, before, atol=0, rtol=0)
    learner.load(saved)
    learner.step(sample())
    learner.load(saved)  # the learner donates its own copy of the loaded state
    assert_close(learner.save(), before, atol=0, rtol=0)


def test_a_state_that_an_update_returns_as_it_was_is_no_argument_of_the_next(monkeypatch):
    learner = make("dqn", check_finite=False)
    agent = case("dqn").agent

    def keep(params, learner_state, batch):
        return params, learner_state, agent.learner_step(params, learner_state, batch)[2]

    monkeypatch.setattr(learner._update, "_agent", type("Agent", (), {"learner_step": keep}))
    monkeypatch.setattr(learner._update._agent, "learner_step", staticmethod(keep))
    before = jax.tree.map(np.array, learner.save())
    for _ in range(2):
        learner.step(sample())
    after = learner.save()
    assert after["version"] == 2
    assert_close({**after, "version": before["version"]}, before, atol=0, rtol=0)


class Alternating(Replay):
    """A replay that overwrites its arrays with each sample, and records the order of calls."""

    def __init__(self, times, poison=0):
        super().__init__(None, times)
        self.poison, self.order = poison, []
        self.held = Sample(jax.tree.map(np.array, case("dqn").batch), KEYS.copy())

    def make_dataset(self, stop=None):
        for index in range(1, self.times + 1):
            self.order.append(f"draw {index}")
            self.held.batch.trajectory.timestep.reward[:] = index
            if index == self.poison:
                self.held.batch.trajectory.timestep.reward[:] = np.nan
            self.held.keys[:] = index
            yield self.held

    def update_priorities(self, keys, priorities):
        self.order.append(f"priorities {keys[0]}")


def test_the_next_batch_is_drawn_during_an_update_and_the_learner_learns_the_same():
    learners, replays, logger = [], [], InMemoryLogger()
    for prefetch in ("off", "on"):
        replays.append(Alternating(times=3))
        learners.append(make(replay=replays[-1], prefetch=prefetch))
        learners[-1].run(stop=lambda: False, logger=logger)
    in_turn, ahead = (replay.order for replay in replays)
    assert in_turn == [f"{what} {n}" for n in (1, 2, 3) for what in ("draw", "priorities")]
    assert ahead == ["draw 1", "draw 2", "priorities 1", "draw 3", "priorities 2", "priorities 3"]
    assert_close(*(learner.save() for learner in learners), atol=0, rtol=0)
    steps, losses = zip(*logger.series("learner/loss"), strict=True)
    assert steps == (1, 2, 3) * 2 and losses[:3] == losses[3:]
    assert learners[1].stats()["draw_seconds"] > 0


@pytest.mark.parametrize("times", [2, 3])
def test_after_a_non_finite_update_the_one_that_began_meanwhile_changes_nothing(times):
    replay = Alternating(times=times, poison=2)
    learner = make(replay=replay, prefetch="on")
    begun, start = [], learner._start
    learner._start = lambda *args: begun.append(args[2][0]) or start(*args)
    with pytest.raises(NonFiniteError, match="update 2") as caught:
        learner.run(stop=lambda: False)
    assert begun == [1, 2, 3][:times] and "priorities 2" not in replay.order
    assert np.isnan(caught.value.batch.trajectory.timestep.reward).all()
    one = make(replay=Alternating(times=1), prefetch="on")
    one.run(stop=lambda: False)
    saved = learner.save()
    assert saved["version"] == 1
    assert_close(saved, one.save(), atol=0, rtol=0)
    before = {name: saved[name] for name in ("params", "learner_state")}
    assert_close(caught.value.before, before, atol=0, rtol=0)
