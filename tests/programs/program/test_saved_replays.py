"""Checkpoints of the replay service and of the learner are pairs, whichever write fails."""

import shutil

import pytest

from rlstack.programs.program.saved_replays import SavedReplays
from rlstack.programs.session.progress import resume_point
from rlstack.programs.session.run_dir import RunDir
from rlstack.replay.served import checkpoints
from rlstack.storage import checkpoint


class Server:
    """Writes checkpoints as a Reverb server with a checkpoint_dir does."""

    def __init__(self, directory):
        self.directory, self.value, self.full = directory, 0, False

    def checkpoint(self, *, keep):
        assert keep is None
        path = checkpoints.prepare(self.directory) / "2020-01-01T00:00:00"
        path.mkdir()
        (path / "chunks.tfrecord").write_bytes(bytes([self.value] * 100))
        if self.full:
            raise checkpoints.ReplayCheckpointError("No space left on device")
        (path / "DONE").write_bytes(b"")
        return str(checkpoints.take(self.directory, path))


class Program:
    """Saves as the learner's node does."""

    def __init__(self, directory):
        self.directory, self.saved = directory, SavedReplays(directory)
        self.server = Server(directory.replay)

    def save(self, step, value, before_rename=None):
        self.server.value = value
        told = self.saved.save(self.server)
        try:
            checkpoint.save(
                self.directory.checkpoints, step, {}, {"env_frames": step, **told}, keep=2,
                before_rename=before_rename or self.directory.check_claim,
            )  # fmt: skip
        finally:
            self.saved.clean()

    def start(self):
        """The value of the replay that a resumed program starts from."""
        path = self.saved.belonging_to(resume_point(self.directory))
        return (path / "chunks.tfrecord").read_bytes()[0]

    def kept(self):
        return [(p / "chunks.tfrecord").read_bytes()[0] for p in self.replays()]

    def replays(self):
        return checkpoints.numbered(self.directory.replay)


@pytest.fixture
def program(tmp_path):
    with RunDir(tmp_path).claimed() as directory:
        yield Program(directory)


def full():
    raise OSError(28, "No space left on device")


def test_a_new_run_starts_without_a_replay(program):
    assert resume_point(program.directory) is None
    assert program.saved.belonging_to(None) is None


def test_what_is_referenced_is_kept(program):
    for step in (1, 2, 3, 4):
        program.save(step, value=step)
    assert program.kept() == [3, 4]
    assert program.start() == 4


def test_a_failed_save_of_the_learner_leaves_the_earlier_pair(program):
    program.save(900, value=9)
    with pytest.raises(OSError, match="No space"):
        program.save(1000, value=10, before_rename=full)
    assert program.kept() == [9]
    assert program.start() == 9


def test_a_failed_save_of_the_replay_leaves_the_earlier_pair(program):
    program.save(900, value=9)
    program.server.full = True
    with pytest.raises(OSError, match="No space"):
        program.save(1000, value=10)
    assert program.kept() == [9]
    assert list((program.directory.replay / "written").iterdir()) == []
    assert program.start() == 9


@pytest.mark.parametrize("damage", ["DONE is missing", "a bit", "a missing file", "everything"])
def test_a_damaged_replay_makes_the_pair_before_it_the_newest(program, damage, caplog):
    program.save(1, value=1)
    program.save(2, value=2)
    newest = program.replays()[-1]
    if damage == "DONE is missing":
        (newest / "DONE").unlink()
    elif damage == "a bit":
        (newest / "chunks.tfrecord").write_bytes(bytes([2] * 99 + [6]))
    elif damage == "a missing file":
        (newest / "chunks.tfrecord").unlink()
    else:
        shutil.rmtree(newest)
    assert program.start() == 1
    assert "step_000000000002 is damaged" in caplog.text
    assert str(newest) in caplog.text
    program.save(2, value=7)  # the resumed program makes the frames again
    assert program.start() == 7


def test_what_a_killed_learner_left_is_removed_at_the_start(program):
    program.save(1, value=1)
    program.server.value = 5
    program.saved.save(program.server)  # and then it is killed
    assert program.kept() == [1, 5]
    program.saved.clean()
    assert program.kept() == [1]
    shutil.rmtree(program.directory.checkpoints)  # a program that is restarted from nothing
    program.saved.clean()
    assert program.kept() == []


def test_nothing_is_removed_after_another_command_took_over(program):
    program.save(1, value=1)
    orphan = program.server.checkpoint(keep=None)
    program.directory.claim.path.write_text('{"token": "other"}')
    program.saved.clean()
    assert orphan == str(program.replays()[-1])
    with pytest.raises(OSError, match="must not write"):
        program.saved.save(program.server)


def test_a_checkpoint_of_the_other_service_is_refused(program):
    program.save(1, value=1)
    path = resume_point(program.directory)
    with pytest.raises(ValueError, match=r"service table; got one of reverb.*config\.json"):
        program.saved.belonging_to(path, "table")


def test_the_replay_of_earlier_versions_is_found_and_kept_while_needed(program):
    old = program.directory.replay / "2025-01-01T00:00:00.5+00:00"
    old.mkdir(parents=True)
    (old / "chunks.tfrecord").write_bytes(b"\x03")
    checkpoint.save(program.directory.checkpoints, 1, {}, {"env_frames": 1})
    with pytest.raises(ValueError, match="must be a complete checkpoint"):
        program.start()
    (old / "DONE").write_bytes(b"")
    assert program.start() == 3
    program.save(2, value=2)
    assert old.exists()
    program.save(3, value=3)
    assert not old.exists()
    assert program.start() == 3
