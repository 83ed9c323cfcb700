"""Checkpoints of a replay service."""

from __future__ import annotations

import pytest

from rlstack.replay.served import ReplayService, ServedReplayBuffer, checkpoints
from tests.replay.replay_model import SPEC, config, drawn, feed
from tests.replay.served.backend import Caller


def start(directory, start_from=None, **fields):
    cfg = config(**{"sampler": "prioritized", "max_size": 32, **fields})
    service = ReplayService(
        cfg, 2, seed=1, spec=SPEC, checkpoint_dir=directory, start_from=start_from
    )
    buffer = ServedReplayBuffer(cfg, 2, Caller(service), SPEC, prefetch=0, max_pending=0)
    return service, buffer


def test_a_service_goes_on_from_its_checkpoint(tmp_path):
    _, one = start(tmp_path)
    feed(one, 2, 0, 9)
    first = one.sample()
    one.update_priorities(first.keys, [5.0, 1.0, 2.0, 3.0])  # sent with the checkpoint
    path = one.checkpoint(keep=None)
    _, two = start(tmp_path, path)
    assert one.stats() == two.stats() | {n: one.stats()[n] for n in ("lag_min", "lag_mean")}
    for _ in range(3):
        a, b = one.sample(), two.sample()
        assert drawn(a) == drawn(b)
        assert (a.batch.weights == b.batch.weights).all()
    feed(two, 2, 20, 24)  # a new writer: the streams are broken
    assert two.stats()["inserts"] == 14


def test_checkpoints_are_numbered_and_the_last_ones_kept(tmp_path):
    _, buffer = start(tmp_path)
    feed(buffer, 2, 0, 9)
    paths = [buffer.checkpoint(keep=2) for _ in range(3)]
    assert [str(path) for path in checkpoints.numbered(tmp_path)] == paths[1:]
    assert all(checkpoints.is_table(path) for path in checkpoints.numbered(tmp_path))
    assert checkpoints.is_complete(checkpoints.newest(tmp_path))


def test_what_cannot_be_written_is_removed_and_what_cannot_be_read_is_refused(
    tmp_path, monkeypatch
):
    _, buffer = start(tmp_path)
    feed(buffer, 2, 0, 9)
    good = buffer.checkpoint(keep=None)
    with monkeypatch.context() as patch:

        def full(*_, **__):
            raise OSError(28, "No space left on device")

        patch.setattr(checkpoints.np, "save", full)
        with pytest.raises(checkpoints.ReplayCheckpointError, match=r"No space left.*intact"):
            buffer.checkpoint(keep=None)
    assert list((tmp_path / checkpoints.WRITTEN).iterdir()) == []
    assert [str(path) for path in checkpoints.numbered(tmp_path)] == [good]
    with pytest.raises(ValueError, match=r"no checkpoint of this table.*same config"):
        start(tmp_path, good, unroll_length=2)
    with pytest.raises(ValueError, match="checkpoint_dir"):
        start(None)[1].checkpoint()
    next(iter(checkpoints.numbered(tmp_path)[0].glob("*.npy"))).unlink()
    with pytest.raises(ValueError, match="no checkpoint of this table"):
        start(tmp_path, good)
