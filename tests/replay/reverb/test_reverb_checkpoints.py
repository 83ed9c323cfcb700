"""A Reverb server's checkpoints: their order does not depend on the clock."""

from pathlib import Path

import pytest

from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
from rlstack.replay.reverb.client import SharedMaxima
from rlstack.replay.served import checkpoints
from tests.replay.replay_model import config, feed
from tests.replay.reverb import backend

reference = [
    pytest.mark.launchpad,
    pytest.mark.skipif(not backend.INSTALLED, reason="Reverb is not installed"),
    pytest.mark.timeout(90),
]


@pytest.fixture
def served(tmp_path):
    """Makes a server with a checkpoint_dir, and a buffer."""
    opened = []

    def make(**options):
        cfg, spec = config("uniform", max_size=400), backend.spec()
        server = ReverbServer(cfg, 2, spec, checkpoint_dir=tmp_path, **options)
        buffer = ReverbReplayBuffer(cfg, 2, server.address, spec, prefetch=0, max_pending=0)
        opened[:0] = [buffer, server]
        return buffer

    def close():
        while opened:
            opened.pop(0).close()

    make.close = close
    yield make
    close()


class TestServer:
    pytestmark = reference

    def test_a_clock_that_goes_back_loses_no_checkpoint(self, served, tmp_path):
        buffer = served()
        feed(buffer, 2, 0, 8)
        before = buffer.stats()["inserts"]
        first = Path(buffer.checkpoint())
        # As if the clock had been ahead then.
        first.rename(first.with_name("2999-01-01T00:00:00.5+00:00"))
        feed(buffer, 2, 8, 16)
        after = buffer.stats()["inserts"]
        assert after > before
        second = Path(buffer.checkpoint())
        assert (second / "DONE").exists()
        served.close()
        assert served().stats()["inserts"] == after

    def test_the_caller_chooses_how_many_are_kept_and_which_one_is_loaded(self, served):
        buffer, paths, inserts = served(), [], []
        for step in (0, 8, 16):
            feed(buffer, 2, step, step + 8)
            paths.append(Path(buffer.checkpoint(keep=None)))
            inserts.append(buffer.stats()["inserts"])
        assert [path.exists() for path in paths] == [True] * 3
        served.close()
        buffer = served(start_from=paths[1])
        assert buffer.stats()["inserts"] == inserts[1]
        newest = buffer.checkpoint()
        assert [str(p) for p in checkpoints.numbered(paths[0].parent)] == [newest]

    def test_a_checkpoint_without_its_marker_is_refused(self, served):
        path = Path(served().checkpoint())
        served.close()
        (path / "DONE").unlink()
        with pytest.raises(ValueError, match="no file DONE"):
            served(start_from=path)

    def test_one_that_nobody_took_is_found(self, served, tmp_path):
        buffer = served()
        feed(buffer, 2, 0, 8)
        inserts = buffer.stats()["inserts"]
        path = Path(buffer._reader("checkpoint").checkpoint())  # and then the client is killed
        assert path.parent == tmp_path / "written"
        served.close()
        assert served().stats()["inserts"] == inserts


def test_a_version_that_is_set_is_not_raised_by_items_of_a_lost_learner():
    maxima = SharedMaxima()
    maxima.saw_version(1000)
    assert maxima.version == 1000
    maxima.set_version(900)
    maxima.saw_version(1000)
    assert maxima.version == 900


def test_numbers_grow_beyond_nine_digits_in_order(tmp_path):
    for number in (999_999_999, 7):
        (tmp_path / f"checkpoint_{number:09d}").mkdir()
    (tmp_path / "new").mkdir()
    assert checkpoints.take(tmp_path, tmp_path / "new").name == "checkpoint_1000000000"
    assert checkpoints.numbered(tmp_path)[-1].name == "checkpoint_1000000000"
