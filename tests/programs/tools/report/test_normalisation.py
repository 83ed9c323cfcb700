"""Scores of tasks on one scale: the tables, files, and what is refused."""

import json

import numpy as np
import pytest

from rlstack.programs.tools.report.normalisation import ATARI, MUJOCO, from_words


def test_the_tables_are_whole():
    assert len(ATARI) == 57
    assert len(MUJOCO) == 4
    for low, high in [*ATARI.values(), *MUJOCO.values()]:
        assert low < high


@pytest.mark.parametrize(
    "name", ["Pong-v5", "ALE/Pong-v5", "PongNoFrameskip-v4", "PongDeterministic-v4", "pong"]
)
def test_a_game_has_many_names(name):
    atari = from_words(["atari"])
    np.testing.assert_allclose(atari(name, [-20.7, 14.6]), [0, 1], atol=1e-12)
    assert "human" in atari.text


def test_more_names():
    assert from_words(["atari"])("ALE/MsPacman-v5", [6951.6]) == [1]
    assert from_words(["atari"])("ms_pacman", [307.3]) == [0]
    mujoco = from_words(["mujoco"])
    np.testing.assert_allclose(mujoco("Walker2d-v4", [1.629008, 4592.3]), [0, 1], atol=1e-12)
    assert mujoco("HalfCheetah-v4", [6000.0]) == pytest.approx(6280.178953 / 12415.178953)


def test_two_numbers_and_a_file(tmp_path):
    assert from_words([]) is from_words(["none"]) is None
    assert from_words(["-10", "10"])("any", [0.0]) == [0.5]
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"mine:Count-v0": [0, 4]}))
    mine = from_words([str(path)])
    assert mine("Count-v0", [1.0]) == [0.25]
    assert "mine.json" in mine.text
    with pytest.raises(ValueError, match=r'CartPole-v1 is not one of count(?s:.*)"CartPole-v1": '):
        mine("CartPole-v1", [1.0])


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["atori"], "got atori. It takes none, atari"),
        (["1", "2", "3"], "got 1 2 3"),
        (["500", "0"], "MIN the lower; got 500 0"),
        (["a", "b"], "must be two numbers"),
        (["none.json"], "none.json cannot be read"),
    ],
)
def test_other_words_are_refused(words, wrong):
    with pytest.raises(ValueError, match=wrong):
        from_words(words)


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}', '{"a": [1]}', '{"a": [1, "b"]}'])
def test_damaged_files_are_refused(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"mine\.json"):
        from_words([str(path)])
