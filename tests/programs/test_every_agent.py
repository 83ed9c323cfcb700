"""Every agent runs unchanged in every topology: one small run with one preset per agent."""

import dataclasses

import numpy as np
import pytest

from rlstack.agents import AGENTS
from rlstack.programs.config.presets import PRESETS, preset
from tests.programs.running import TOPOLOGIES, nothing_left, run, series, small, with_recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180, method="thread"),
]


def presets():
    """The first preset of each agent that learns by acting, on small environments."""
    found = {}
    for name in PRESETS:
        kind = type(preset(name).agent)
        if not AGENTS[kind].offline and not preset(name).may_convolve:
            found.setdefault(kind, name)
    return found


def tiny(name, topology):
    """A preset with few frames; its learner starts without waiting for a filled replay."""
    experiment = preset(name)
    replay = experiment.replay
    if replay.sampler != "fifo":
        replay = dataclasses.replace(
            replay, batch_size=16, min_size=100, max_size=2000, samples_per_insert=1.0
        )
    experiment = dataclasses.replace(experiment, replay=replay)
    frames = max(1500, 4 * experiment.env.num_envs * replay.unroll_length)
    return small(experiment, topology, frames)


def test_every_agent_has_a_preset_that_is_run_here():
    assert set(presets()) == {kind for kind, entry in AGENTS.items() if not entry.offline}


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("name", presets().values())
def test_the_agent_runs_in_the_topology(tmp_path, name, topology):
    with nothing_left():
        result = run(with_recorded(tiny(name, topology), tmp_path / "data"), tmp_path / "run")
    assert result.env_frames >= 1500
    losses = series(tmp_path / "run", "learner/loss")
    assert losses or name in ("cartpole-random", "cartpole-scripted")  # these do not learn
    assert np.isfinite(losses).all()
