"""A person in one seat of a game: when they are asked, what they see, and how it ends."""

import io
import re
import sys

import pytest
from rich.console import Console

import rlstack
from rlstack.envs.seats.connect_four import ConnectFour
from rlstack.programs.__main__ import main
from rlstack.programs.tools.seats.play import play
from tests.entity.inverted import test_game_agent as inverted
from tests.programs import running
from tests.programs.multi_policy import cases
from tests.programs.tools.seats import games
from tests.programs.tools.test_play import say

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A run of Connect Four."""
    return games.leave_run(tmp_path_factory.mktemp("play") / "four", games.connect_four())


@pytest.fixture(scope="module")
def take(tmp_path_factory):
    """A run of the game of stones, whose seats act in turn."""
    return games.leave_run(tmp_path_factory.mktemp("play") / "take", games.take())


def played(monkeypatch, run, seat, *lines, **options):
    """Plays with these input lines; returns the output and the games."""
    say(monkeypatch, *lines)
    stream = io.StringIO()
    found = play(run, seat, console=Console(file=stream, width=200, highlight=False), **options)
    return stream.getvalue(), found


def test_a_person_is_asked_only_for_moves_of_their_own(monkeypatch, four):
    policy, game = rlstack.load(four), ConnectFour()
    seen, last, others, own = game.reset(), False, [], []
    while not last:  # the same game, without the code under test
        theirs = int(policy.act(seen[0]))
        mine = 7
        if seen[1]["turn"]:
            mine = next(i for i in (3, 2, 4, 1, 5, 0, 6) if seen[1]["action_mask"][i])
            own.append("abcdefg"[mine])
        else:
            others.append("abcdefg"[theirs])
        step = game.step([theirs, mine])
        seen, last = step.observations, step.last
    shown, found = played(monkeypatch, four, "second", *own, "q")
    assert [one.returns for one in found] == [tuple(step.rewards)]
    assert re.findall(r"first \(four\): (\w)\n", shown) == others
    assert shown.count("number or label: ") == len(own)
    assert "second (you): 0 a, 1 b, 2 c, 3 d, 4 e, 5 f, 6 g\n" in shown
    assert shown.count("a b c d e f g") == len(own) + 1  # the board, and the last one
    verdict = {1.0: "you win", -1.0: "you lose", 0.0: "a draw"}[step.rewards[1]]
    ended = f"The game is over after {found[0].length} steps: first (four) {step.rewards[0]:g}, "
    assert f"{ended}second (you) {step.rewards[1]:g}; {verdict}." in shown


def test_bad_input_is_explained_and_the_end_of_input_ends(monkeypatch, four):
    shown, found = played(monkeypatch, four, "0", "wait", "h", "", "A", "7")
    listed = "choose from 0 a, 1 b, 2 c, 3 d, 4 e, 5 f, 6 g, or q to quit."
    assert f"'wait' is not legal here; {listed}" in shown
    assert f"'h' is not a choice; {listed}" in shown and f"'' is not a choice; {listed}" in shown
    assert "'7' is not legal here" in shown and found == []


def test_a_person_and_a_policy_take_turns(monkeypatch, take):
    # Of five stones the person leaves three; whoever then has one left has no choice.
    shown, found = played(monkeypatch, take, "first", "two", "one", "q")
    shown = shown[: shown.index("Enter for another")]
    assert "5 stones" in shown and "0 stones" in shown and "3 stones" not in shown
    assert shown.count("first (you): 0 one, 1 two\n") == shown.count("number or label: ")
    theirs = re.search(r"second \(take\): (one|two)\n", shown)[1]
    if theirs == "two":  # one stone is left, which nobody is asked about
        assert shown.count("number or label: ") == 1 and found[0].returns == (1.0, -1.0)
        assert "you win." in shown
    else:  # the person takes one of two, and the other one is left
        assert shown.count("number or label: ") == 2 and found[0].returns == (-1.0, 1.0)
        assert "you lose." in shown


def test_seats_that_act_together_reveal_nothing_before(monkeypatch, tmp_path):
    run = games.leave_run(tmp_path / "throws", cases.selfplay())
    lines = ["paper", "", "rock", "", "scissors", "q"]
    shown, found = played(monkeypatch, run, "1", *lines, greedy=False)
    assert [one.length for one in found] == [1, 1, 1]
    throws = re.findall(r"first \(throws\): (\w+)", shown)
    assert len(throws) == 3 and shown.index("number or label") < shown.index("first (throws):")
    wins = {("rock", "scissors"), ("scissors", "paper"), ("paper", "rock")}
    for theirs, mine, one in zip(throws, ("paper", "rock", "scissors"), found, strict=True):
        result = 1.0 if (mine, theirs) in wins else -1.0 if (theirs, mine) in wins else 0.0
        assert one.returns == (-result, result)
        assert f"{theirs} against {mine}" in shown


def test_enter_plays_what_the_agent_would(monkeypatch, four):
    shown, found = played(monkeypatch, four, "first", *[""] * 30, agent=True)
    assert len(re.findall(r"the agent's value: -?\d+\.\d{3}", shown)) == shown.count("number or")
    chances = re.findall(r" ([\d.]+)%", re.search(r"first \(you\): (.*)", shown)[1])
    assert sum(map(float, chances)) == pytest.approx(100, abs=0.5) and len(chances) == 7
    policy, game, last = rlstack.load(four), ConnectFour(), False
    other, seen = rlstack.load(four), game.reset()
    while not last:
        step = game.step([policy.act(seen[0]), other.act(seen[1])])
        seen, last = step.observations, step.last
    assert found[0].returns == tuple(step.rewards)


def test_an_agent_of_a_game_that_owns_its_loop(monkeypatch, tmp_path):
    run = games.leave_run(tmp_path / "bids", inverted.BIDDING, seed=6)
    shown, found = played(monkeypatch, run, "0", "2", "1", "2", "0", "q")
    assert [one.length for one in found] == [4] and found[0].returns[0] == 5.0
    assert "seat 0 (you) bid of Me 0: 0, 1, 2" in shown
    assert re.search(r"seat 1 \(bids\): bid of Me 0: [012]\n", shown)


@pytest.mark.parametrize(
    ("make", "seat", "text"),
    [
        (games.connect_four, "third", "one of the seats, by name or number: 0 first, 1 second;"),
        (lambda: running.ppo("single_process"), "0", "needs a run of a game of several seats"),
        (games.against_rule, "a", "must be discrete choices to be played by hand"),
    ],
)
def test_seats_that_nobody_can_have_are_refused(tmp_path, make, seat, text):
    run = games.leave_run(tmp_path / "run", make())
    with pytest.raises(ValueError, match=text):
        play(run, seat)


def test_the_command(monkeypatch, capsys, four, tmp_path):
    say(monkeypatch, "d")
    assert main(["play", str(four), "--seat", "first"]) == 0
    assert "first (you): 0 a" in capsys.readouterr().out
    assert main(["play", str(four)]) == 2
    assert "--seat must say which seat of its game is yours" in capsys.readouterr().err
    assert main(["play", str(four), "--seat", "0", "--checkpoint", str(four)]) == 2
    assert main(["play", str(tmp_path / "nothing"), "--seat", "0"]) == 1
    assert "no such directory" in capsys.readouterr().err

    class Interrupts(io.StringIO):
        def readline(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupts())
    assert main(["play", str(four), "--seat", "0"]) == 130
    assert "stopped by SIGINT" in capsys.readouterr().err
