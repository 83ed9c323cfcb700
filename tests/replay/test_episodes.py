"""Item processors see the steps of an item's episode that the replay holds, and no others."""

import dataclasses

import jax
import numpy as np
import pytest

from rlstack.configs.replay import ReplayConfig
from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from rlstack.replay.episodes import check_processor
from tests.replay.replay_model import FIRST, LAST, MID, SPEC, config, drawn, make_transition
from tests.replay.served import backend as served

MAKE = {
    "in_process": lambda cfg, num_envs: InProcessReplay(cfg, num_envs, seed=3, spec=SPEC),
    "shared_memory": lambda cfg, num_envs: SharedMemReplayBuffer(cfg, num_envs, seed=3, spec=SPEC),
    "served": served.make,
}


class Probe:
    """Puts what it sees of the episode into the rewards: sizes, and the codes of four steps."""

    def __call__(self, rng, item, episode):
        xp, before, after = episode.xp, episode.before, episode.after
        drawn = rng.random(after.shape) * (before + after + 1)
        offset = xp.stack([-before, drawn.astype(int) - before, after, after + 7])
        codes = episode.at(offset).observation["code"]
        reward = xp.concatenate([xp.stack([before, after]), codes]).astype(np.float32)
        return item._replace(timestep=item.timestep._replace(reward=reward))


@pytest.fixture(params=MAKE)
def make(request):
    buffers = []

    def make(num_envs, **changes):
        fields = {"unroll_length": 5, "max_size": 40, "item_processor": Probe, **changes}
        buffers.append(MAKE[request.param](config(**fields), num_envs))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


class Streams:
    """The steps of some environments, by the numbers that a replay gives them."""

    def __init__(self, cfg, num_envs, rng):
        items = cfg.items_per_env(num_envs)
        self.rows, self.period = items * cfg.step_period + cfg.unroll_length, cfg.step_period
        self.steps = [{} for _ in range(num_envs)]  # number -> (type, episode)
        self.next, self.episode, self.over = [0] * num_envs, [0] * num_envs, [True] * num_envs
        self.rng = rng

    def add(self, buffer, envs):
        types = []
        for env in envs:
            begins = self.over[env]
            self.episode[env] += begins
            ends = not begins and self.rng.random() < 0.15
            types.append(FIRST if begins else LAST if ends else MID)
            self.over[env] = ends
            self.steps[env][self.next[env]] = self.episode[env]
        buffer.add(np.array(envs), make_transition(envs, [self.next[e] for e in envs], types))
        for env in envs:
            self.next[env] += 1

    def gap(self, buffer, env, restarts):
        buffer.gap(np.array([env]))
        self.next[env] = -(-self.next[env] // self.period) * self.period
        self.episode[env] += 1
        self.over[env] |= restarts

    def around(self, env, start):
        """The first and last step that are held of the episode of a step."""
        first = last = start
        steps, oldest = self.steps[env], max(0, self.next[env] - self.rows)
        while first > oldest and steps.get(first - 1) == steps[start]:
            first -= 1
        while steps.get(last + 1) == steps[start]:
            last += 1
        return first, last


def seen(sample):
    """What `Probe` saw of each item: (env, start, before, after, first, drawn, last, clipped)."""
    step = sample.batch.trajectory.timestep
    code = step.observation["code"][0]
    found = [(code // 100_000).tolist(), (code % 100_000).tolist()]
    found += np.asarray(step.reward).astype(int).tolist()
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("period", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_any_history_shows_the_steps_of_the_episode_that_are_held(make, period, seed):
    buffer = make(3, period=period, max_size=30 if period == 1 else 12, batch_size=8)
    cfg = config(unroll_length=5, period=period, max_size=30 if period == 1 else 12)
    rng = np.random.default_rng(seed)
    streams, checked, lasts = Streams(cfg, 3, rng), 0, 0
    for _ in range(250):
        envs = [e for e in range(3) if rng.random() < 0.8] or [0]
        streams.add(buffer, envs)
        if rng.random() < 0.04 and buffer.can_sample():
            buffer.sample()  # reads the steps from before the gap
            streams.gap(buffer, int(rng.integers(3)), restarts=rng.random() < 0.5)
        if rng.random() < 0.5 and buffer.can_sample():
            for env, start, before, after, *codes in seen(buffer.sample()):
                first, last = streams.around(env, start)
                assert (start - before, start + after) == (first, last)
                oldest, drawn, newest, clipped = (code - env * 100_000 for code in codes)
                assert (oldest, newest, clipped) == (first, last, last)
                assert first <= drawn <= last
                checked, lasts = checked + 1, lasts + (last > start + 5)
    assert checked > 300 and lasts > 50
    assert max(streams.next) > 3 * streams.rows


def test_steps_before_an_unseen_gap_stand_alone(make):
    """Two gaps between two draws: only the last one is known, so steps are not joined."""
    buffer = make(1)
    streams = Streams(config(unroll_length=5, max_size=40), 1, np.random.default_rng(0))
    for _ in range(3):
        for _ in range(12):
            streams.add(buffer, [0])
        streams.gap(buffer, 0, restarts=False)
    for _ in range(9):
        streams.add(buffer, [0])
    for env, start, before, after, *_ in seen(buffer.sample(64)):
        first, last = streams.around(env, start)
        assert first <= start - before and start + after <= last
        if start >= 36:
            assert (start - before, start + after) == (first, last)


def test_batches_drawn_together_and_priorities(make):
    """Keys, weights and all that the processor leaves are those of a replay without it."""
    fields = {"sampler": "prioritized", "importance_exponent": 0.7}
    plain, probed = make(2, **fields, item_processor=""), make(2, **fields)
    for buffer in (plain, probed):
        streams = Streams(config(unroll_length=5, max_size=40), 2, np.random.default_rng(1))
        for _ in range(30):
            streams.add(buffer, [0, 1])
    one, other = plain.sample(8), probed.sample(8)
    np.testing.assert_array_equal(one.keys, other.keys)
    np.testing.assert_array_equal(one.batch.weights, other.batch.weights)
    changed = other.batch.trajectory.timestep._replace(reward=one.batch.trajectory.timestep.reward)
    jax.tree.map(
        np.testing.assert_array_equal,
        one.batch.trajectory,
        other.batch.trajectory._replace(timestep=changed),
    )
    probed.update_priorities(other.keys, np.where(other.keys == other.keys[0], 1e6, 1e-3))
    again = probed.sample(64)
    assert (again.keys == other.keys[0]).mean() > 0.9
    many = getattr(probed, "sample_batches", None)
    if many is not None:
        together = many(8, 3)
        rewards = together.batch.trajectory.timestep.reward
        assert rewards.shape == (3, 6, 8)
        codes = together.batch.trajectory.timestep.observation["code"][:, 0]
        np.testing.assert_array_equal(rewards[:, 2], codes - rewards[:, 0])
        np.testing.assert_array_equal(rewards[:, 4], codes + rewards[:, 1])


def test_stored_steps_are_not_changed(make):
    buffer = make(1, batch_size=30)
    streams = Streams(config(unroll_length=5, max_size=40), 1, np.random.default_rng(2))
    for _ in range(30):
        streams.add(buffer, [0])
    buffer.sample()
    tree = buffer.save()
    reward = jax.tree.leaves(tree["steps"])[1]
    np.testing.assert_array_equal(reward[:30, 0], np.arange(30))


def test_a_loaded_replay_draws_and_sees_the_same(make):
    """Also what it knew before a gap."""
    whole, half = make(2), make(2)
    for buffer in (whole, half):
        streams = Streams(config(unroll_length=5, max_size=40), 2, np.random.default_rng(5))
        for step in range(40):
            streams.add(buffer, [0, 1])
            if step % 10 == 9:
                buffer.sample()
                streams.gap(buffer, 1, restarts=False)
    loaded = make(2)
    loaded.load(half.save())
    for _ in range(5):
        assert seen(loaded.sample()) == seen(whole.sample())
    for step in range(40, 60):
        for buffer in (whole, loaded):
            buffer.add(None, make_transition([0, 1], [step] * 2, [MID] * 2))
        assert seen(loaded.sample()) == seen(whole.sample())


class Overtaken:
    """Reads the oldest and newest steps; in its first call a writer overwrites the oldest ones."""

    calls, buffer = 0, None

    def __call__(self, rng, item, episode):
        codes = [episode.at(x).observation["code"] for x in (-episode.before, episode.after)]
        type(self).calls += 1
        if self.calls == 1:  # as another process does, which needs no lock
            writer = self.buffer._writer
            for step in range(30, 36):
                ids, leaves = writer.prepare(None, make_transition([0], [step], [MID]))
                writer.write(ids, leaves)
        reward = np.stack(codes).astype(np.float32)
        return item._replace(timestep=item.timestep._replace(reward=reward))


def test_an_item_is_drawn_again_if_a_step_that_it_read_was_overwritten():
    """The ring has 8 items of two steps, 9 rows, and 4 more for writers."""
    cfg = config(unroll_length=1, max_size=8, batch_size=4, item_processor=Overtaken)
    buffer = Overtaken.buffer = SharedMemReplayBuffer(cfg, 1, seed=0, spec=SPEC)
    try:
        for step in range(30):
            buffer.add(None, make_transition([0], [step], [MID]))
        step = buffer.sample().batch.trajectory.timestep
        assert Overtaken.calls == 2
        assert step.reward.tolist() == [[27.0] * 4, [35.0] * 4]
        assert (step.observation["code"][0] >= 27).all()
        assert int(buffer.stats()["redrawn"]) >= 4
    finally:
        buffer.close()


def takes_scale(scale):
    return lambda rng, item, episode: item._replace(
        timestep=item.timestep._replace(reward=scale * item.timestep.reward)
    )


def loses_a_leaf(rng, item, episode):
    return item._replace(timestep=item.timestep._replace(extras=()))


def loses_rows(rng, item, episode):
    return item._replace(timestep=item.timestep._replace(reward=item.timestep.reward[1:]))


def test_options_are_arguments_of_the_factory():
    cfg = config(item_processor=takes_scale, item_processor_options={"scale": 3})
    buffer = InProcessReplay(cfg, 1, seed=0)
    for step in range(6):
        buffer.add(None, make_transition([0], [step], [MID]))
    trajectory = buffer.sample().batch.trajectory
    np.testing.assert_array_equal(
        trajectory.timestep.reward, 3 * trajectory.timestep.observation["code"]
    )


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        ("json:nothing", {}, "item_processor .*has no 'nothing'"),
        (takes_scale, {}, "takes_scale must be a function .*scale"),
        (lambda: lambda rng, item: item, {}, "must be a function .*does not take"),
        (lambda: Probe, {}, "the class Probe"),
        (lambda: None, {}, "got NoneType"),
        (lambda: loses_a_leaf, {}, "must return an item like the one that it gets"),
        (lambda: loses_rows, {}, r"got \(3, 2\) instead of \(4, 2\) for .*reward"),
        (lambda: lambda rng, item, episode: 1 / 0, {}, "it raised ZeroDivisionError"),
    ],
)
def test_wrong_processors_get_errors_before_a_run(factory, options, message):
    cfg = config(item_processor=factory, item_processor_options=options)
    with pytest.raises(ValueError, match=message):
        check_processor(cfg, SPEC)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampler": "fifo"}, "item_processor must be empty with the sampler fifo"),
        ({"context": 1}, "item_processor must be empty with .*context"),
        ({"frame_stack": 4}, "item_processor must be empty with .*frame_stack"),
        (
            {"item_processor": "", "item_processor_options": {"share": 1}},
            "item_processor_options must be empty without item_processor",
        ),
    ],
)
def test_configs_without_episodes_are_refused(changes, message):
    with pytest.raises(ValueError, match=f"ReplayConfig: {message}"):
        config(**{"item_processor": Probe, **changes})


def test_a_table_on_a_server_is_chosen_or_refused(monkeypatch):
    from rlstack.programs.config.presets import preset

    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    experiment = preset("bitflip-her")
    assert experiment.replay.chosen_service == "table"
    replay = dataclasses.replace(experiment.replay, service="reverb")
    with pytest.raises(ValueError, match=r"replay.item_processor must .*--replay.service table"):
        dataclasses.replace(experiment, replay=replay, topology="distributed")


def test_a_replay_without_a_processor_saves_what_it_saved_before():
    buffer = InProcessReplay(config(), 1, seed=0)
    assert sorted(buffer.save()) == ["clock", "counters", "sampler", "steps"]
    assert isinstance(config(), ReplayConfig) and drawn is not None
