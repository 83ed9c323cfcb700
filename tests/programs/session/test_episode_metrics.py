"""The numbers of finished episodes reach the logs in every topology."""

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rlstack.agents.ppo import PPOConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import on_policy_replay
from tests.programs.running import TOPOLOGIES, metrics, nothing_left, run, series, small

_LATER = [pytest.mark.slow, pytest.mark.chosen]
RUNS = [
    pytest.param("single_process", "for_loop"),
    pytest.param("single_process", "process", marks=_LATER),
    *(pytest.param(name, "process", marks=_LATER) for name in TOPOLOGIES),
]


def experiment(topology, env_type):
    found = Experiment(
        preset="informing",
        agent=PPOConfig(num_epochs=1, num_minibatches=1),
        env=EnvConfig("tests.envs.informing:Informing", num_envs=4, type=env_type, num_workers=2),
        replay=on_policy_replay(4, 16),
        frames=1000,
    )
    return small(found, topology, 1000)


def scalars(directory):
    """The points in a directory's TensorBoard file: name -> values."""
    (path,) = directory.iterdir()
    data, points = path.read_bytes(), {}
    while data:
        size = int.from_bytes(data[:8], "little")
        for value in Event.FromString(data[12 : 12 + size]).summary.value:
            points.setdefault(value.tag, []).append(value.simple_value)
        data = data[16 + size :]
    return points


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.parametrize(("topology", "env_type"), RUNS)
@pytest.mark.timeout(120, method="thread")
def test_the_numbers_of_episodes_are_logged_as_means(tmp_path, topology, env_type):
    with nothing_left():
        run(experiment(topology, env_type), tmp_path / "run")
    lines = [line for line in metrics(tmp_path / "run") if "actor/episode_return" in line]
    assert lines and all("episode/score" in line for line in lines)
    for line in lines:
        assert line["episode/steps/made"] == pytest.approx(line["actor/episode_length"])
    assert 0 < np.mean([line["episode/won"] for line in lines]) < 1
    assert set(series(tmp_path / "run", "episode/bonus")) == {7}
    assert "episode/text" not in lines[0]
    written = scalars(tmp_path / "run" / "tensorboard")
    assert written["episode/score"] == pytest.approx(
        [line["episode/score"] for line in lines], rel=1e-6
    )
