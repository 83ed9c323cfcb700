"""Samplers of the user's own: what they see, which items they choose, and what is refused."""

import numpy as np
import pytest

from rlstack.checks import WrongKindError
from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from tests.replay.replay_model import FIRST, LAST, MID, SPEC, config, drawn, feed, make_transition


class Geometric:
    """Chooses the i-th newest item with probability 2^-(i + 1), and the oldest with the rest."""

    def __call__(self, rng, items, batch_size):
        age = np.minimum(rng.geometric(0.5, batch_size) - 1, len(items) - 1)
        return len(items) - 1 - age


class Recorder:
    """Chooses the newest items, and records what it saw."""

    def __init__(self):
        self.seen, self.priorities = [], {}

    def __call__(self, rng, items, batch_size):
        self.seen.append(items)
        return np.full(batch_size, len(items) - 1), np.full(batch_size, 1.0 / len(items))

    def update_priorities(self, keys, priorities):
        self.priorities.update(zip(keys.tolist(), priorities.tolist(), strict=True))

    def save(self):
        return np.array(len(self.seen))

    def load(self, tree):
        self.seen = [None] * int(tree)


def in_process(cfg, num_envs):
    return InProcessReplay(cfg, num_envs, seed=3)


def shared_memory(cfg, num_envs):
    return SharedMemReplayBuffer(cfg, num_envs, seed=3, spec=SPEC)


@pytest.fixture(params=[in_process, shared_memory], ids=lambda kind: kind.__name__)
def make(request):
    buffers = []

    def make(num_envs=1, **changes):
        buffers.append(request.param(config(**changes), num_envs))
        return buffers[-1]

    yield make
    for buffer in buffers:
        buffer.close()


def test_items_are_sampled_as_often_as_the_sampler_chooses_them(make):
    buffer = make(2, sampler_factory=Geometric, max_size=12)
    feed(buffer, 2, 0, 30)  # 6 items of each environment: the starts 21 to 26
    counts = {}
    for _ in range(200):
        for item in drawn(buffer.sample(100)):
            counts[item] = counts.get(item, 0) + 1
    newest_first = [(env, 26 - i) for i in range(6) for env in (1, 0)]
    expected = 20_000 * np.array([*0.5 ** np.arange(1, 12), 0.5**11])
    found = np.array([counts.pop(item, 0) for item in newest_first])
    assert not counts
    assert ((found - expected) ** 2 / expected).sum() < 31.3  # 0.999 quantile, 11 degrees


def test_items_are_in_the_order_of_their_insertion(make):
    recorder = Recorder()
    buffer = make(2, sampler_factory=lambda: recorder)
    for t in range(20):  # the second environment starts late
        for env in (0, 1):
            if env == 0 or t >= 8:
                at = t if env == 0 else t - 8
                buffer.add(np.array([env]), make_transition([env], [at], [MID], [t]))
        if t > 3:
            buffer.sample()
    items = recorder.seen[-1]
    assert len(items) == 8
    assert items.env_ids.tolist() == [0, 1] * 4
    assert items.inserted.tolist() == list(range(18, 26))
    assert items.params_versions.tolist() == [14, 14, 15, 15, 16, 16, 17, 17]


def test_items_know_the_return_of_their_episode(make):
    lengths = [3, 6, 4, 20]  # steps 0-3, 4-10, 11-15, 16-
    recorder = Recorder()
    buffer = make(2, sampler_factory=lambda: recorder, max_size=40)
    types = [kind for n in lengths for kind in (FIRST, *[MID] * (n - 1), LAST)][:22]
    for t, kind in enumerate(types):
        buffer.add(None, make_transition([0, 1], [t, t], [kind, kind]))
        if t == 12:
            buffer.sample()
            assert not np.isnan(recorder.seen[-1].episode_returns[:20]).any()
            buffer.gap(np.array([1]))
        if t == 9:
            buffer.sample()
            assert recorder.seen[-1].episode_returns[:8:2].tolist() == [6.0] * 4
            assert np.isnan(recorder.seen[-1].episode_returns[8:]).all()
    buffer.sample()
    items = recorder.seen[-1]
    found = {env: items.episode_returns[items.env_ids == env].tolist() for env in (0, 1)}
    first, second, third = 0 + 1 + 2 + 3, sum(range(4, 11)), sum(range(11, 16))
    unknown = [np.nan] * 3
    expected = [first] * 4 + [second] * 7 + [third] * 5 + unknown
    # FIRST's reward is 0 in a run; here every step has its place as a reward.
    np.testing.assert_allclose(found[0], expected, equal_nan=True)
    code = 100_000
    expected = [first + 4 * code] * 4 + [second + 7 * code] * 6  # 10 starts before the gap
    np.testing.assert_allclose(found[1][:10], expected)
    assert np.isnan(found[1][10:]).all()  # the gap hides the start of the third episode
    assert len(found[1]) == 16


def test_probabilities_give_importance_weights_and_priorities_reach_the_sampler(make):
    recorder = Recorder()
    buffer = make(1, sampler_factory=lambda: recorder, importance_exponent=0.5)
    feed(buffer, 1, 0, 8)
    sample = buffer.sample()
    assert sample.batch.weights.tolist() == [1.0] * 4
    gone = np.array([999], np.uint64)
    buffer.update_priorities(np.concatenate([sample.keys, gone]), np.arange(5.0))
    assert recorder.priorities == {int(sample.keys[0]): 3.0}


@pytest.mark.parametrize("kind", [Geometric, Recorder])
def test_a_loaded_buffer_goes_on_as_if_never_interrupted(make, kind):
    changes = {"sampler_factory": kind, "max_size": 12}
    buffer, other = make(2, **changes), make(2, **changes)
    feed(buffer, 2, 0, 12)
    buffer.sample()
    other.load(buffer.save())
    for each in (buffer, other):
        feed(each, 2, 12, 14)
    for _ in range(5):
        left, right = buffer.sample(), other.sample()
        assert left.keys.tolist() == right.keys.tolist()
        np.testing.assert_array_equal(left.batch.weights, right.batch.weights)


@pytest.mark.parametrize(
    "factory, text",
    [
        ("no_module_of_this_name:f", "no module"),
        ("math:nothing", "has no 'nothing'"),
        (3, "must be"),
        (lambda cfg: None, "does not take these arguments"),
        (lambda: 3, "got int 3"),
        (lambda: Geometric, "not an object of it"),
        (lambda: lambda items, batch_size: None, "too many positional arguments"),
    ],
)
def test_what_is_no_sampler_is_refused_at_once(factory, text):
    with pytest.raises(ValueError, match=text) as caught:
        in_process(config(sampler_factory=factory), 1)
    assert "sampler_factory" in str(caught.value) or ":" in factory


@pytest.mark.parametrize(
    "chosen, text",
    [
        ([0.0] * 4, r"ints in 0\.\.4"),
        ([0, 1, 2], r"\[4\] ints"),
        ([0, 1, 2, 5], r"0\.\.4"),
        ([0, 1, 2, -1], r"0\.\.4"),
        (([0, 1, 2, 3], [1.0, 1.0, 0.0, 1.0]), "positive probabilities"),
        (([0, 1, 2, 3], [1.0]), "positive probabilities"),
    ],
)
def test_what_are_no_indices_is_refused_by_name(chosen, text):
    def always():
        return lambda rng, items, batch_size: chosen

    buffer = in_process(config(sampler_factory=always), 1)
    feed(buffer, 1, 0, 8)
    with pytest.raises(WrongKindError, match=text) as caught:
        buffer.sample()
    assert "always" in str(caught.value)


@pytest.mark.parametrize(
    "changes, text",
    [({"sampler": "fifo"}, "empty with the sampler fifo"), ({"max_times_sampled": 2}, "repeat")],
)
def test_tables_that_cannot_have_a_sampler_refuse_it(changes, text):
    with pytest.raises(ValueError, match=text):
        config(**{"sampler_factory": Geometric, **changes})


@pytest.mark.launchpad
def test_a_reverb_table_refuses_it():
    from rlstack.replay.reverb import ReverbServer

    with pytest.raises(ValueError, match="C\\+\\+"):
        ReverbServer(config(sampler_factory=Geometric), 1, SPEC)
