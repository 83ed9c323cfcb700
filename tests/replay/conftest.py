"""The backends that the contract suite runs on."""

import pytest

from rlstack.replay import InProcessReplay

# name -> (cfg, num_envs, seed) -> ReplayBuffer
BACKENDS = {"in_process": lambda cfg, num_envs, seed=0: InProcessReplay(cfg, num_envs, seed=seed)}


@pytest.fixture(params=BACKENDS.values(), ids=BACKENDS, scope="module")
def make(request):
    return request.param
