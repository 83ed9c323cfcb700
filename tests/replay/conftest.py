"""The backends that the contract suite runs on."""

import pytest

from rlstack.replay import InProcessReplay, SharedMemReplayBuffer
from rlstack.replay.reverb import table_config
from tests.replay.replay_model import SPEC
from tests.replay.reverb import backend
from tests.replay.reverb.backend import no_reverb_server_left, pytest_collection_modifyitems
from tests.replay.served import backend as served_backend

__all__ = ["make", "no_reverb_server_left", "pytest_collection_modifyitems"]


def make_shared_memory(cfg, num_envs, seed=0):
    return SharedMemReplayBuffer(cfg, num_envs, seed=seed, spec=SPEC)


make_shared_memory.waits = True  # while the buffer is full; other backends drop items

# name -> (cfg, num_envs, seed) -> ReplayBuffer
BACKENDS = {
    "in_process": lambda cfg, num_envs, seed=0: InProcessReplay(
        cfg, num_envs, seed=seed, spec=SPEC
    ),
    "shared_memory": make_shared_memory,
}
BACKENDS["served"] = served_backend.make
BACKENDS["reverb"] = backend.make


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS, scope="module")
def make(request):
    with pytest.MonkeyPatch.context() as patch:
        # The suite's items are small: each would be one piece, and none would be made of steps.
        patch.setattr(table_config, "SMALL_ITEM", 0)
        yield request.param


@pytest.fixture(scope="module")
def waits(make):
    """Whether ``add`` waits while a fifo is full or ahead of the ratio, instead of dropping."""
    return getattr(make, "waits", False)
