"""Running statistics against numpy."""

import jax
import numpy as np
import pytest
from dm_env import specs

from rlstack.math.running_statistics import initial_statistics, normalise, update_statistics

SPEC = {
    "image": specs.BoundedArray((2, 2, 1), np.uint8, 0, 255),
    "place": specs.Array((3,), np.float32),
    "speed": specs.Array((), np.float32),
}


def observations(leading, seed):
    rng = np.random.default_rng(seed)
    return {
        "image": rng.integers(0, 256, (*leading, 2, 2, 1)).astype(np.uint8),
        "place": (rng.normal(size=(*leading, 3)) * [1, 10, 0.1] + [5, -50, 0]).astype(np.float32),
        "speed": rng.uniform(size=leading).astype(np.float32),
    }


def test_batches_of_any_size_add_up_to_the_moments_of_all():
    batches = [observations(leading, i) for i, leading in enumerate([(7,), (1,), (5, 4), (64,)])]
    stats = initial_statistics(SPEC)
    update = jax.jit(update_statistics)
    for batch in batches:
        stats = update(stats, batch)
    assert stats.num_seen == 7 + 1 + 20 + 64
    for i, (name, size) in enumerate((("place", (3,)), ("speed", ()))):
        rows = np.concatenate([batch[name].reshape((-1, *size)) for batch in batches])
        np.testing.assert_allclose(stats.mean[i], rows.mean(0), rtol=1e-4)
        np.testing.assert_allclose(stats.variance[i], rows.var(0), rtol=1e-3)


def test_the_first_batch_replaces_the_prior():
    batch = observations((16,), 0)
    stats = update_statistics(initial_statistics(SPEC), batch)
    np.testing.assert_allclose(stats.mean[0], batch["place"].mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats.variance[0], batch["place"].var(0), rtol=1e-4)


def test_merging_is_the_same_in_one_or_many_parts():
    whole = observations((60,), 3)
    once = update_statistics(initial_statistics(SPEC), whole)
    stats = initial_statistics(SPEC)
    for start, stop in ((0, 1), (1, 20), (20, 60)):
        part = jax.tree.map(lambda x, a=start, b=stop: x[a:b], whole)
        stats = update_statistics(stats, part)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), once, stats)


def test_floats_are_standardised_and_clipped_and_others_pass():
    batch = observations((200,), 1)
    stats = update_statistics(initial_statistics(SPEC), batch)
    out = normalise(stats, batch)
    assert out["image"] is batch["image"]
    np.testing.assert_allclose(out["place"].mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(out["place"].std(0), 1, rtol=1e-3)
    np.testing.assert_allclose(out["speed"].std(), 1, rtol=1e-3)
    far = {**batch, "speed": batch["speed"] + 1e6}
    assert np.all(normalise(stats, far)["speed"] == 10)
    assert np.all(normalise(stats, far, clip=2.0)["speed"] == 2)


def test_before_any_observation_nothing_moves():
    batch = observations((4,), 2)
    place = normalise(initial_statistics(SPEC), batch, clip=1e9)["place"]
    np.testing.assert_allclose(place, batch["place"], rtol=1e-6)


@pytest.mark.parametrize("spec", [SPEC["image"], specs.DiscreteArray(3)])
def test_an_observation_without_floats_needs_no_statistics(spec):
    stats = initial_statistics(spec)
    x = np.zeros((2, *spec.shape), spec.dtype)
    assert update_statistics(stats, x) == stats and normalise(stats, x) is x
