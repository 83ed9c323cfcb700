"""The sampling frequency and the weight of each item, on every backend."""

import numpy as np
import pytest

from tests.replay.replay_model import LAST, MID, config, drawn, feed


def test_uniform_is_uniform(make):
    buffer = make(config("uniform", max_size=40, starts="not_last"), 4)
    feed(
        buffer, 4, 0, 60, step_types=lambda t: [LAST if (t + e) % 5 == 0 else MID for e in range(4)]
    )
    held, counts, draws = int(buffer.stats()["size"]), {}, 200
    for _ in range(draws):
        for key in buffer.sample(100).keys.tolist():
            counts[key] = counts.get(key, 0) + 1
    assert held == 32 and len(counts) == held
    expected = draws * 100 / held
    chi_square = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi_square < 61.1  # 0.999 quantile, 31 degrees of freedom


def test_prioritized_frequencies_and_weights_follow_the_formula(make):
    alpha, beta = 0.7, 0.5
    cfg = config("prioritized", max_size=24, priority_exponent=alpha, importance_exponent=beta)
    buffer, rng = make(cfg, 4), np.random.default_rng(0)
    feed(buffer, 4, 0, 9)  # 6 items per environment
    keys = np.unique(np.concatenate([buffer.sample(200).keys for _ in range(3)]))
    assert len(keys) == 24
    priorities = rng.uniform(0.1, 5, 24)
    buffer.update_priorities(keys, priorities)
    probability = priorities**alpha / (priorities**alpha).sum()
    counts = np.zeros(24)
    for _ in range(200):
        sample = buffer.sample(100)
        which = np.searchsorted(keys, sample.keys)
        np.add.at(counts, which, 1)
        weights = (24 * probability[which]) ** -beta
        np.testing.assert_allclose(sample.batch.weights, weights / weights.max(), rtol=1e-5)
    expected = 20_000 * probability
    assert ((counts - expected) ** 2 / expected).sum() < 49.7  # 0.999 quantile, 23 degrees


def test_prioritized_new_items_come_in_with_the_largest_priority(make):
    buffer = make(config("prioritized", max_size=4, priority_exponent=1.0), 1)
    feed(buffer, 1, 0, 6)  # items 0, 1, 2
    keys = np.unique(buffer.sample(100).keys)
    buffer.update_priorities(keys, np.array([1.0, 2.0, 7.0]))
    feed(buffer, 1, 6, 7)
    items = [item for _ in range(100) for item in drawn(buffer.sample(100))]
    share = items.count((0, 3)) / len(items)
    assert abs(share - 7 / 17) < 0.025


def test_prioritized_keys_of_items_that_left_are_ignored(make):
    buffer = make(config("prioritized", max_size=4, priority_exponent=1.0), 1)
    feed(buffer, 1, 0, 7)
    keys = np.unique(buffer.sample(100).keys)
    feed(buffer, 1, 7, 9)  # two of the four items are removed
    buffer.update_priorities(keys, np.array([3.0, 3.0, 1.0, 1.0]))
    np.testing.assert_array_equal(buffer.sample(100).batch.weights, np.ones(100))


def test_prioritized_importance_exponent_is_annealed(make):
    cfg = config("prioritized", max_size=2, batch_size=2, importance_anneal_samples=400)
    buffer = make(cfg, 1)
    feed(buffer, 1, 0, 5)
    keys = np.unique(buffer.sample(200).keys)
    buffer.update_priorities(keys, np.array([1.0, 4.0]))
    halfway, over = (buffer.sample(200).batch.weights.min() for _ in range(2))
    ratio = 4**-0.6
    np.testing.assert_allclose([halfway, over], [ratio**0.7, ratio**1.0], rtol=1e-5)


@pytest.mark.parametrize("sampler", ["uniform", "prioritized"])
def test_no_item_is_sampled_more_often_than_allowed(make, sampler):
    buffer = make(config(sampler, max_size=12, max_times_sampled=3), 2)
    feed(buffer, 2, 0, 9)  # 12 items
    keys = np.concatenate([buffer.sample(4).keys for _ in range(9)])
    assert sorted(np.unique(keys, return_counts=True)[1]) == [3] * 12
    assert not buffer.can_sample(1) and buffer.stats()["size"] == 0
