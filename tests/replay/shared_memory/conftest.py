"""Makes shared buffers."""

import os

import pytest

from rlstack.replay import SharedMemReplayBuffer
from rlstack.replay.shared_memory.block import FOLDER
from tests.replay.replay_model import SPEC, config


@pytest.fixture
def make():
    """Makes buffers, and closes them."""
    made = []

    def make(num_envs, sampler="uniform", num_actors=1, **changes):
        cfg = config(sampler, **{"timeout_seconds": 10.0, **changes})
        made.append(SharedMemReplayBuffer(cfg, num_envs, seed=0, spec=SPEC, num_actors=num_actors))
        return made[-1]

    yield make
    for buffer in made:
        buffer.close()
    assert not [name for name in os.listdir(FOLDER) if name.startswith(f"rlstack-{os.getpid()}-")]
    files = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    assert not [fd for fd in files if os.path.lexists(fd) and f"{FOLDER}/#" in os.readlink(fd)]
