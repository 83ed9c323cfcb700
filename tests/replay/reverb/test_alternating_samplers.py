"""Alternating samplers return all items, and switch where Reverb's bursts end."""

from __future__ import annotations

import itertools
import time

import pytest

from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer, binding
from rlstack.replay.reverb.client import ITEMS, table_info
from rlstack.replay.reverb.server import AlternatingSamplers, _bursts
from tests.replay.replay_model import config, feed
from tests.replay.reverb import backend


class FakeSampler:
    """A sampler that counts up from its number."""

    def __init__(self, number):
        self._items = itertools.count(number)
        self.closed = False

    def GetNextTrajectory(self):  # noqa: N802 (Reverb's name)
        return next(self._items)

    def Close(self):  # noqa: N802
        self.closed = True


class FakeClient:
    """Makes samplers that count from 0, 1,000,000 and so on."""

    def __init__(self):
        self.made = []

    def NewSampler(self, table, samples, size):  # noqa: N802
        assert (table, samples) == (ITEMS, -1)
        sampler = FakeSampler(1_000_000 * len(self.made))
        self.made.append((sampler, size))
        return sampler


def test_samplers_switch_where_bursts_end():
    client = FakeClient()
    samplers = AlternatingSamplers(client, prefetch=100, samplers=2)
    assert [size for _, size in client.made] == [50, 50]
    items = [item for count in (1, 30, 20, 0, 145) for item in samplers.take(count)]
    a, b = range(98), range(1_000_000, 1_000_098)
    assert items == [*a[:48], *b[:48], *a[48:], *b[48:]]
    samplers.close()
    assert all(sampler.closed for sampler, _ in client.made)


def test_one_sampler_gives_its_items_in_order():
    client = FakeClient()
    samplers = AlternatingSamplers(client, prefetch=8, samplers=1)
    assert samplers.take(20) + samplers.take(30_000) == list(range(30_020))
    assert [size for _, size in client.made] == [8]


@pytest.mark.parametrize(
    ("most", "first"),
    [(1, [1, 1]), (15, [15, 15]), (16, [16, 16]), (50, [48, 50, 50]), (512, [496, 512, 512])],
)
def test_bursts_fill_the_queue(most, first):
    bursts = _bursts(most)
    assert list(itertools.islice(bursts, len(first))) == first
    assert all(0 < next(bursts) <= most for _ in range(40_000))


@pytest.mark.launchpad
@pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [50, 256])
def test_the_bursts_are_those_of_reverb(size):
    cfg, spec = config("uniform", max_size=40, batch_size=6), backend.spec()
    server = ReverbServer(cfg, 2, spec)
    buffer = ReverbReplayBuffer(cfg, 2, server.address, spec)
    feed(buffer, 2, 0, 20)
    buffer.flush()
    client = binding.load().Client(server.address)
    sampler = client.NewSampler(ITEMS, -1, size)

    def sampled(count):
        until = time.monotonic() + 5
        while (samples := table_info(client, server.address, 5).samples) < count:
            assert time.monotonic() < until, (samples, count)
        return samples

    as_predicted = total = 0
    bursts = list(itertools.islice(_bursts(size), 20_000 // size))
    for burst in bursts:
        total += burst
        as_predicted += sampled(total) == total
        for _ in range(burst):
            sampler.GetNextTrajectory()
    assert as_predicted > 0.95 * len(bursts)
    sampler.Close()
    buffer.close()
    server.close()
