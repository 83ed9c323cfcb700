"""Playing by hand: output, input, and how a session ends."""

import dataclasses
import io
import os
import re
import signal
import subprocess
import sys
import time

import dm_env
import numpy as np
import pytest
from rich.console import Console

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import RaggedTransformerConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.entity import Categorical as CategoricalAction
from rlstack.entity import (
    CategoricalMask,
    EntityType,
    Observation,
    ObsSpace,
    SelectEntity,
    SelectEntityMask,
)
from rlstack.entity.games import GAMES
from rlstack.networks import NetworkConfig
from rlstack.programs.cli import commands as cli
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.tools.play import find_game, play
from rlstack.replay import ReplayConfig
from tests.programs import running

FIELD = {"num_mines": 3, "num_robots": 3, "max_steps": 20}
SWEEPER = {"orbital_cannon": True, "cooldown_period": 1, "num_mines": 3}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of PPO on MineSweeper, with three robots."""
    directory = tmp_path_factory.mktemp("play") / "run"
    running.run(sweeper(), directory)
    return directory


def sweeper(**changes):
    return dataclasses.replace(
        Experiment(
            preset="sweeper",
            agent=PPOConfig(num_epochs=1, num_minibatches=1),
            env=EnvConfig("rlstack.entity.games:MineSweeper", num_envs=2, options=FIELD),
            network=NetworkConfig(entities=RaggedTransformerConfig(d_model=8, num_layers=1)),
            replay=ReplayConfig(sampler="fifo", batch_size=2, unroll_length=8, max_size=2),
            frames=2,  # too few to learn, so nothing is compiled
            evaluator=EvaluatorConfig(episodes=2, num_envs=2),
        ),
        **changes,
    )


def say(monkeypatch, *lines):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def played(monkeypatch, env, *lines, **options):
    """Plays with these input lines; returns the output and the returns."""
    say(monkeypatch, *lines)
    stream = io.StringIO()
    returns = play(env, console=Console(file=stream, width=200, highlight=False), **options)
    return stream.getvalue(), returns


def test_playing_an_episode_with_numbers_and_labels(monkeypatch):
    lines = ["0", "arm a", "ARM B", *["4"] * 29, "q"]
    shown, returns = played(monkeypatch, "multi-armed-bandit", *lines)
    assert returns == [2 / 32]
    assert "pull of global: 0 arm A, 1 arm B, 2 arm C, 3 arm D, 4 arm E" in shown
    assert "step 2: reward 0.03125, return so far 0.0625" in shown
    assert "step 3: reward 0, return so far 0.0625" in shown
    assert "The episode is over after 32 steps: return 0.0625." in shown
    assert "pull 31 of 32" in shown


def test_playing_several_episodes_until_the_input_ends(monkeypatch):
    shown, returns = played(monkeypatch, "rock-paper-scissors", "paper", "", "0", "", "2", "")
    assert len(returns) == 3 and set(returns) <= {0.0, 2.0}
    assert "0 (hidden)" not in shown and "1 (hidden)" in shown  # player, opponent
    assert "opponent: ?" in shown and re.search("opponent: (rock|paper|scissors)", shown)


def test_an_illegal_choice_lists_the_legal_ones(monkeypatch):
    lines = ["7", "9", "arm", "", "2", "q"]
    shown, returns = played(monkeypatch, "count", *lines, options={"masked_choices": 3}, seed=4)
    legal = re.search(r"count of Player 0: (.*)", shown)[1]
    assert f"'7' is not legal here; choose from {legal}, or q to quit." in shown
    assert f"'arm' is not a choice; choose from {legal}, or q to quit." in shown
    assert f"'' is not a choice; choose from {legal}" in shown
    assert len(returns) <= 1


def test_entities_are_chosen_by_slot_or_name_for_each_actor(monkeypatch):
    lines = ["defuse", "4", "mine 1", "4", "4", "q"]
    shown, _ = played(monkeypatch, "MineSweeper", *lines, options=SWEEPER, seed=3)
    assert "Move of Robot 0" in shown and "Move of Robot 1" in shown
    assert "Fire Orbital Cannon of Orbital Cannon 0: 0 Mine 0, 1 Mine 1" in shown
    assert shown.index("cannon's cooldown: 1") < shown.index("cannon's cooldown: 0")
    assert re.search("step 2: reward", shown)


def test_a_truncated_episode_is_reported_as_truncated(monkeypatch):
    shown, returns = played(
        monkeypatch, "TreasureHunt", "up", "down", "q", options={"max_steps": 2}, seed=1
    )
    assert "The episode is truncated after 2 steps: return 0." in shown and returns == [0.0]


class Named:
    """A game whose entities have names, and whose picture looks like markup."""

    obs_space = ObsSpace({"Dog": EntityType(("age",), capacity=2)})

    def __init__(self, picture="[bold]"):
        self.action_space = {"chase": SelectEntity(), "bark": CategoricalAction(("loud", "[b]"))}
        self._picture = picture

    def __str__(self):
        return self._picture

    def reset(self):
        return self._observe(0.0)

    def act(self, actions):
        return self._observe(float(actions["chase"].actees == ["rex"]), done=True)

    def _observe(self, reward, done=False):
        return Observation(
            {"Dog": [(1.5,), (7,)]},
            {
                "chase": SelectEntityMask(actor_ids=["fido"], actee_ids=["rex"]),
                "bark": CategoricalMask(actor_ids=["rex"]),
            },
            ids={"Dog": ["fido", "rex"]},
            reward=reward,
            done=done,
        )


class NoGame(dm_env.Environment):
    def reset(self):
        return None

    step = observation_spec = action_spec = reset


def test_a_users_environment_shows_its_entity_names(monkeypatch):
    name = f"{__name__}:Named"
    shown, returns = played(
        monkeypatch, name, "[b]", "fido", "rex", "q", options={"picture": "[i]"}
    )
    assert returns == [1.0]
    assert "bark of rex: 0 loud, 1 [b]" in shown and "chase of fido: 1 rex" in shown
    assert "'fido' is not legal here; choose from 1 rex" in shown
    assert "[i]" in shown


@pytest.mark.parametrize("name", GAMES)
def test_every_game_can_be_shown_and_quit(monkeypatch, name):
    shown, returns = played(monkeypatch, name, "q")
    assert returns == [] and "number or label: " in shown


def test_games_are_found_by_name_in_any_spelling():
    for name in ("mine-sweeper", "MineSweeper", "mine_sweeper", "minesweeper"):
        assert find_game(name) is GAMES["MineSweeper"]
    assert find_game("rlstack.entity.games:Xor") is GAMES["Xor"]


@pytest.mark.parametrize(
    ("env", "options", "hint"),
    [
        ("mine-sweper", {}, "there is no game 'mine-sweper'; did you mean 'mine-sweeper'?"),
        ("chess", {}, "treasure-hunt"),
        ("rlstack.entity.games:Xorr", {}, "did you mean 'Xor'?"),
        ("xor", {"options": {"mines": 3}}, "xor does not accept these options"),
        ("count", {"options": {"masked_choices": 12}}, "masked_choices must be in 1..10"),
        ("xor", {"agent": True}, "Add --checkpoint RUN_DIR"),
        (f"{__name__}:NoGame", {}, "must build an entity environment"),
    ],
)
def test_bad_arguments_are_refused(env, options, hint):
    with pytest.raises(ValueError) as caught:
        play(env, **options)
    assert hint in str(caught.value)


@pytest.mark.slow
@pytest.mark.chosen
def test_the_agents_probabilities_and_value_are_shown(monkeypatch, run_dir):
    lines = ["4", "4", "4", "4", "q"]
    shown, _ = played(monkeypatch, "mine-sweeper", *lines, checkpoint=run_dir)
    assert len(re.findall(r"the agent's value: -?\d+\.\d{3}", shown)) == 2
    asked = re.findall(r"^.*Move of Robot \d: (.*)$", shown, re.MULTILINE)
    assert len(asked) >= 2
    for line in asked:
        chances = [float(x) for x in re.findall(r" ([\d.]+)%", line)]
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) == pytest.approx(100, abs=0.5) and line.count("*") == 1
    assert "Move of Robot 2" in shown  # the options of the run are used


def test_enter_plays_the_agents_choice(monkeypatch, run_dir):
    lines = [""] * 12 + ["q"]
    shown, _ = played(monkeypatch, "mine-sweeper", *lines, checkpoint=run_dir, agent=True)
    assert "Enter for the agent's" in shown
    # One Enter per step, for any number of actors.
    assert shown.count("number or label") + shown.count("Enter for another") == 13
    again, _ = played(monkeypatch, "mine-sweeper", *lines, checkpoint=run_dir, agent=True)
    assert again == shown


def test_an_entity_agent_plays_with_other_numbers_of_entities(monkeypatch, run_dir):
    shown, _ = played(
        monkeypatch, "mine-sweeper", "q", checkpoint=run_dir, options={"num_mines": 9}
    )
    assert re.search(r"Move of Robot 0: \d \w+ [\d.]+%", shown)


@pytest.mark.slow
@pytest.mark.chosen
def test_a_normalised_agent_is_shown_too(monkeypatch, tmp_path):
    normalisation = NormalisationConfig(rewards="return")
    running.run(sweeper(normalisation=normalisation), tmp_path / "run")
    shown, _ = played(monkeypatch, "mine-sweeper", "q", checkpoint=tmp_path / "run")
    assert re.search(r"Move of Robot 0: \d \w+ [\d.]+%", shown)


def test_a_run_of_another_environment_is_refused(run_dir, tmp_path):
    with pytest.raises(ValueError, match="must be a run on xor; it is a run on rlstack"):
        play("xor", checkpoint=run_dir)
    with pytest.raises(ValueError, match="must be the directory of a run"):
        play("xor", checkpoint=tmp_path)


def test_the_command(monkeypatch, capsys, run_dir):
    say(monkeypatch, "paper", "q")
    assert cli.main("play", ["rock-paper-scissors", "--options", "cheat", "True"]) == 0
    assert "opponent: " in capsys.readouterr().out
    say(monkeypatch, "", "q")
    assert cli.main("play", ["MineSweeper", "--checkpoint", str(run_dir), "--agent"]) == 0
    assert "the agent's value" in capsys.readouterr().out
    say(monkeypatch)
    assert cli.main("play", ["count", "--seed", "3"]) == 0
    assert cli.main("play", ["cont"]) == 1
    assert "did you mean 'count'?" in capsys.readouterr().err


@pytest.mark.timeout(90)
def test_control_c_ends_cleanly():
    process = subprocess.Popen(
        [sys.executable, "-m", "rlstack", "play", "xor"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    try:
        shown = b""
        while b"number or label" not in shown:
            part = os.read(process.stdout.fileno(), 4096)
            assert part, process.stderr.read()
            shown += part
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert stderr == b"rlstack play: stopped by SIGINT; there was nothing to save yet.\n"
    assert np.all([b"Traceback" not in text for text in (shown, stderr)])
