"""What a worker process does beside stepping; its pools are tested in the contract."""

import threading

import pytest

from rlstack.envs.adapters import EnvError
from rlstack.envs.worker import _ahead


class Waiting:
    """Where a step is in progress, until it is interrupted."""

    def __init__(self):
        self.interrupted = threading.Event()
        self.interrupt = self.interrupted.set


@pytest.mark.timeout(20)
def test_orders_taken_ahead_come_in_their_order_and_their_end_ends_what_waits():
    episode = Waiting()
    with _ahead(iter([[1, 2], [3]]), [episode]) as batches:
        assert list(batches) == [[1, 2], [3]]
    assert episode.interrupted.wait(5)


@pytest.mark.timeout(20)
def test_an_order_that_cannot_be_announced_is_the_error_of_the_step_that_waits():
    def batches():
        yield [1]
        raise EnvError("no such choice")

    episode = Waiting()
    with pytest.raises(EnvError, match="no such choice"), _ahead(batches(), [episode]) as taken:
        assert next(taken) == [1]
        assert episode.interrupted.wait(5)
        raise RuntimeError("the step was interrupted")
