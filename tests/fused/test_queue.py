"""Unrolls of a compiled loop that make several batches: which are learned from, and how many."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.fused.learning import Learning
from rlstack.fused.queue import Queue, StepQueue, StepsState
from rlstack.replay import ReplayConfig

CFG = ReplayConfig(sampler="fifo", max_size=16, batch_size=2, unroll_length=3)


class _Actors:
    num_envs = 8  # four batches of one unroll


class _Updater:
    """Counts updates, and adds up the numbers of the environments that were learned from."""

    def update(self, learning, updates, make_batch, active=True):
        seen = make_batch().trajectory["env"]
        assert seen.shape == (4, 2)
        made = jnp.asarray(active, jnp.int32)
        return (
            learning._replace(version=learning.version + made),
            updates + made * seen[0].sum(),
            None,
        )


@pytest.mark.parametrize(
    ("before", "most", "updates", "learned"),
    [
        (0, 100, 4, 28),  # environments 0 to 7
        (0, 4, 4, 28),
        (0, 3, 3, 15),  # 0 to 5
        (97, 98, 1, 1),  # 0 and 1
        (6, 6, 0, 0),
    ],
)
@pytest.mark.parametrize("kind", [Queue, StepQueue])
def test_no_update_is_made_after_the_last_one_that_was_asked_for(
    kind, before, most, updates, learned
):
    queue = kind(CFG, _Actors(), _Updater())
    assert queue.most_updates == 4
    learning = Learning((), (), jnp.int32(before))
    steps = {"env": jnp.broadcast_to(jnp.arange(8), (4, 8))}
    most, good = jnp.int32(most), jnp.ones((), bool)
    if kind is Queue:
        after, seen = queue._learn(learning, jnp.int32(0), steps, good, most)
    else:
        state = StepsState(steps, jnp.int32(4))
        after, state, seen = queue.learn(learning, state, jnp.int32(0), good, most)
        assert int(state.held) == 1
    assert (int(after.version) - before, int(seen)) == (updates, learned)


def test_a_bad_step_is_not_learned_from():
    queue = Queue(CFG, _Actors(), _Updater())
    steps = {"env": np.broadcast_to(np.arange(8), (4, 8))}
    learning = Learning((), (), jnp.int32(0))
    after, seen = queue._learn(learning, jnp.int32(0), steps, jnp.zeros((), bool), jnp.int32(9))
    assert (int(after.version), int(seen)) == (0, 0)
