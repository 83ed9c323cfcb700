"""Self-play ends near a mixed equilibrium, and beats its own past."""

import io

import numpy as np
import pytest

import rlstack
from programs.policy_sets.tournament import tournament
from programs.presets import preset
from programs.run import train
from rlstack.envs.seats.connect_four import ConnectFour
from rlstack.envs.seats.rock_paper_scissors import exploitability


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_rock_paper_scissors_ends_near_its_equilibrium(tmp_path):
    train.run(preset("rock-paper-scissors-selfplay"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run", policy="learner")
    probabilities = policy.predict(np.ones(1, np.float32)).probabilities["action"].ravel()
    assert exploitability(probabilities, rock=2.0) <= 0.12  # 0.33 for a third each


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_connect_four_beats_random_moves_and_its_own_past(tmp_path):
    train.run(preset("connect-four-selfplay"), tmp_path / "run", stream=io.StringIO())
    policy = rlstack.load(tmp_path / "run", policy="learner")
    rng, won = np.random.default_rng(1), []
    for number in range(400):
        game, seat, last = ConnectFour(), number % 2, False
        seen = game.reset()
        while not last:
            own = policy.act(seen[seat])
            other = rng.choice(np.flatnonzero(seen[1 - seat]["action_mask"]))
            step = game.step([own, other] if seat == 0 else [other, own])
            seen, last = step.observations, step.last
        won.append(step.rewards[seat] == 1)
    assert np.mean(won) >= 0.93  # 0.955 of 1,000 games on seed 1
    found = tournament(tmp_path / "run", games=100)
    assert np.mean(found.win_rates[-1, :-1]) >= 0.7
