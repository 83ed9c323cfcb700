"""Episodic novelty: by hand, and against a list of observations in plain Python."""

import jax.numpy as jnp
import numpy as np

from rlstack.math.episodic_novelty import emptied, episodic_novelty, initial_memory


def test_the_novelty_of_a_line_by_hand():
    # The observations 0, 3, 3 and 1 of one environment, with the nearest neighbour only.
    memory = initial_memory(1, 4, 1)
    found = []
    for x in (0.0, 3.0, 3.0, 1.0):
        novelty, memory = episodic_novelty(memory, jnp.full((1, 1), x), 1)
        found.append(float(novelty[0]))
    # The first has no neighbour. The second has one at 9, the mean of which is 9: distance 1,
    # minus the cluster distance 0.008.
    assert found[0] == 0
    np.testing.assert_allclose(found[1], 1 / (np.sqrt(1e-4 / 0.9921) + 1e-3), rtol=1e-4)
    # The third was seen: its kernel is 1.
    np.testing.assert_allclose(found[2], 1 / 1.001, rtol=1e-5)
    # The fourth has its neighbour at 1, where the mean of 9, 0 and 1 is 10/3: distance 0.3.
    np.testing.assert_allclose(found[3], 1 / (np.sqrt(1e-4 / 0.2921) + 1e-3), rtol=1e-4)
    assert memory.num_seen[0] == 4 and memory.num_distances[0] == 3
    np.testing.assert_allclose(memory.distance[0], 10 / 3, rtol=1e-6)


def test_a_new_episode_has_an_empty_memory_and_keeps_the_mean_distance():
    memory = initial_memory(2, 3, 1)
    for x in (0.0, 2.0):
        _, memory = episodic_novelty(memory, jnp.full((2, 1), x), 1)
    memory = emptied(memory, jnp.array([True, False]))
    assert memory.num_seen.tolist() == [0, 2] and memory.distance.tolist() == [4, 4]
    assert not memory.embeddings[0].any() and memory.embeddings[1].any()
    novelty, _ = episodic_novelty(memory, jnp.full((2, 1), 2.0), 1)
    assert novelty[0] == 0
    np.testing.assert_allclose(novelty[1], 1 / 1.001, rtol=1e-5)


def _in_python(observations, size, neighbours):
    """The novelty of each observation of one environment, with lists."""
    seen, means, found = [], [], []
    for x in observations:
        nearest = sorted(float(((x - y) ** 2).sum()) for y in seen[-size:])[:neighbours]
        seen.append(x)
        if not nearest:
            found.append(0.0)
            continue
        means.append(np.mean(nearest))
        scaled = [max(d / np.mean(means) - 0.008, 0.0) for d in nearest]
        kernel = np.mean([1e-4 / (d + 1e-4) for d in scaled])
        similarity = np.sqrt(neighbours * kernel) + 1e-3
        found.append(1 / similarity if similarity <= 8 else 0.0)
    return found


def test_it_is_that_of_lists_also_beyond_the_memory():
    rng = np.random.default_rng(0)
    observations = rng.integers(0, 3, (12, 3, 2)).astype(np.float32)  # some come again
    memory, found = initial_memory(3, 5, 2), []
    for x in observations:
        novelty, memory = episodic_novelty(memory, jnp.asarray(x), 4)
        found.append(novelty)
    for row in range(3):
        wanted = _in_python(list(observations[:, row]), size=5, neighbours=4)
        np.testing.assert_allclose(np.stack(found)[:, row], wanted, rtol=1e-4)


def test_similarities_beyond_the_largest_have_no_novelty():
    memory = initial_memory(1, 100, 1)
    for _ in range(3):  # one observation again and again: sqrt(100) is beyond 8
        novelty, memory = episodic_novelty(memory, jnp.ones((1, 1)), 100)
    assert novelty[0] == 0
