"""`rlstack watch` with several runs: who plays which seat, what is printed, what is refused."""

import io

import numpy as np
import pytest
from rich.console import Console

import rlstack
from rlstack.envs.seats.connect_four import ConnectFour
from rlstack.programs.__main__ import main
from rlstack.programs.build.policies.members import seat_names
from rlstack.programs.pictures.stage import Stage
from rlstack.programs.tools.seats.match import PolicyPlayer, play_game
from rlstack.programs.tools.seats.watch import watch
from tests.entity.inverted import test_game_agent as inverted
from tests.programs import running
from tests.programs.multi_policy import cases
from tests.programs.tools.seats import games

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def fours(tmp_path_factory):
    """Two runs of Connect Four."""
    folder = tmp_path_factory.mktemp("fours")
    return [
        games.leave_run(folder / name, games.connect_four(), seed)
        for name, seed in (("four", 1), ("five", 2))
    ]


def duel(first, second):
    """Plays two policies against each other without the code under test; returns and length."""
    game, last, length = ConnectFour(), False, 0
    seen = game.reset()
    first.reset()
    second.reset()
    while not last:
        step = game.step([first.act(seen[0]), second.act(seen[1])])
        seen, last, length = step.observations, step.last, length + 1
    return tuple(step.rewards), length


@pytest.mark.slow
@pytest.mark.chosen
def test_two_runs_play_against_each_other_and_change_seats(fours, capsys):
    args = ["watch", *map(str, fours), "--episodes", "4", "--results-only"]
    assert main(args) == 0
    lines = capsys.readouterr().out.splitlines()
    four, five = (rlstack.load(run) for run in fours)
    (begins, of_first), (second, of_second) = duel(four, five), duel(five, four)
    for at in (0, 2):
        start = f"episode {at + 1}: first (four) {begins[0]:g}, second (five) {begins[1]:g}: "
        assert lines[at].startswith(start) and lines[at].endswith(f"after {of_first} steps")
        start = f"episode {at + 2}: first (five) {second[0]:g}, second (four) {second[1]:g}: "
        assert lines[at + 1].startswith(start) and lines[at + 1].endswith(f" {of_second} steps")
    won = [total for total in (begins[0], second[1]) if total > 0]
    assert lines[4].startswith(f"four: {2 * len(won)} won, 0 drawn, {4 - 2 * len(won)} lost, score")
    assert "95% interval" in lines[5] and lines[5].startswith("five: ")
    assert lines[6].startswith("2 of these episodes repeat another one") and len(lines) == 7


def test_policies_that_explore_play_other_games(fours):
    told = []
    found = watch(fours, shows=False, greedy=False, episodes=6, tell=told.append)
    assert found.frames == 0 and len(told) == 6
    assert len({one.game.moves for one in found.episodes}) > 2
    again = watch(fours, shows=False, greedy=False, episodes=6)
    assert again == found
    assert len(found.summary()) == 2 and "repeat" not in found.summary()[-1]


def test_the_terminal_shows_the_game_and_the_choices_of_who_moves(fours):
    stream = io.StringIO()
    found = watch(fours, console=Console(file=stream, width=120, highlight=False), max_steps=3)
    shown = stream.getvalue()
    assert [one.game.length for one in found.episodes] == [3, 3]
    assert all(one.game.cut and not one.winners() for one in found.episodes)
    assert "episode 2 of 2" in shown and "first: four 0, value " in shown
    assert "a b c d e f g" in shown and (shown.count("X"), shown.count("O")) == (8, 4)
    assert shown.count("* ") == 6  # a chosen column in each step
    assert "wait" not in shown  # who waits has no bars


def test_a_video_shows_a_match(fours, tmp_path):
    image = pytest.importorskip("PIL.Image")
    found = watch(fours, video=tmp_path / "match.gif", max_steps=4)
    assert found.frames == 10
    with image.open(tmp_path / "match.gif") as video:
        assert video.n_frames > 2 and video.size[0] > 300


def test_checkpoints_of_one_run_and_named_policies(tmp_path):
    run = games.leave_run(tmp_path / "throws", cases.selfplay(), seed=1, frames=100)
    games.leave_run(run, cases.selfplay(), seed=2, frames=200)
    earlier, newest = sorted((run / "checkpoints").iterdir())
    found = watch([earlier, run], shows=False, greedy=False, episodes=20)
    assert found.sides == ["throws@100", "throws@200"]
    assert {total for one in found.episodes for total in one.game.returns} <= {-1.0, 0.0, 1.0}
    left, right = found.standings()
    assert (left.wins, left.draws) == (right.losses, right.draws)
    named = watch([f"{run}:learner", newest], shows=False)
    assert named.sides == ["throws:learner", "throws"]
    assert [one.winners() for one in named.episodes] == [[0, 1]] * 2  # equal greedy params
    same = watch([run, run], shows=False)
    assert same.sides == ["throws@200 (1)", "throws@200 (2)"]
    with pytest.raises(ValueError, match=r"it has learner, past; got 'lerner'; did you mean"):
        watch([f"{run}:lerner", run])


def test_a_set_plays_its_policies_in_their_seats(tmp_path, capsys):
    run = games.leave_run(tmp_path / "set", games.against_rule())
    stage = Stage(games.against_rule(), seed=0)
    assert stage.seats == ("a", "b", "c")
    stage.close()
    assert main(["watch", str(run), "--results-only"]) == 0
    assert capsys.readouterr().out == "episode 1: a 0, b 2, c 4: 2 steps\n"
    found = watch([run, f"{run}:rule"], shows=False, episodes=2)
    assert [one.seating for one in found.episodes] == [(0, 1, 0), (1, 0, 1)]
    moves = [np.frombuffer(one.game.moves[0], np.float32).reshape(3, 2) for one in found.episodes]
    ruled = [(move == 0.5).all(axis=1).tolist() for move in moves]
    assert ruled == [[False, True, True], [True, False, True]]  # seat c has the rule in both
    assert [one.winners() for one in found.episodes] == [[0, 1], [0, 1]]  # 2 against 2


@pytest.mark.parametrize("seed", [-1, 2**31, 10**30])
def test_a_seed_that_is_none_is_refused_by_its_option(fours, tmp_path, seed, capsys):
    alone = tmp_path / "alone"
    games.leave_run(alone, running.ppo("single_process"))
    for args in (
        ["watch", str(fours[0]), "--results-only"],
        ["watch", str(alone)],
        ["play", str(fours[0]), "--seat", "first"],
        ["play", "xor"],
    ):
        assert main([*args, "--seed", str(seed)]) == 1
        line = f"rlstack {args[0]}: seed (--seed) must be in [0, 2^31); got {seed}.\n"
        assert capsys.readouterr().err == line


def test_a_name_for_the_only_policy_of_a_run_is_refused_in_a_whole_sentence(fours, capsys):
    assert main(["watch", f"{fours[0]}:nobody"]) == 1
    why = (
        f"{fours[0]} must have a policy of the name that is given; it has one without a name, so "
        "leave it out; got 'nobody'."
    )
    assert capsys.readouterr().err == f"rlstack watch: {why}\n"
    with pytest.raises(ValueError, match=r"got 'nobody'\.$"):
        rlstack.load(fours[0], policy="nobody")


class Counting(PolicyPlayer):
    """Counts its actions."""

    calls = 0

    def predict(self, observation, reward):
        self.calls += 1
        self.rewards = [*getattr(self, "rewards", []), reward]
        return super().predict(observation, reward)


@pytest.mark.parametrize("waits", [False, True])
def test_in_a_game_of_turns_a_policy_acts_where_it_acted_in_training(tmp_path, waits):
    experiment = games.take()
    if waits:
        experiment = games.one_policy(games.in_step(experiment.env))
    run = games.leave_run(tmp_path / "take", experiment)
    stage, moments = Stage(experiment, seed=0), []
    players = [Counting(rlstack.load(run, spec=stage.spec)) for _ in range(2)]
    game = play_game(stage, players, 100, moments.append)
    stage.close()
    assert sorted(game.returns) == [-1.0, 1.0] and not game.cut
    acted = [[choice is not None for choice in moment.choices] for moment in moments]
    assert acted == [[step % 2 == 0, step % 2 == 1] for step in range(game.length)] + [
        [False, False]
    ]
    turns = [(game.length + 1) // 2, game.length // 2]
    assert [one.calls for one in players] == ([game.length] * 2 if waits else turns)
    assert moments[-1].is_last and moments[-1].returns.tolist() == list(game.returns)


@pytest.mark.slow
@pytest.mark.chosen
def test_agents_of_games_that_own_their_loop_are_seats(tmp_path):
    run = games.leave_run(tmp_path / "bids", inverted.BIDDING, seed=6)
    other = games.leave_run(tmp_path / "more", inverted.BIDDING, seed=7)
    stream = io.StringIO()
    console = Console(file=stream, width=140, highlight=False)
    found = watch([run, other], console=console, episodes=3)
    assert found.seats == ("seat 0", "seat 1") and found.sides == ["bids", "more"]
    assert [one.game.length for one in found.episodes] == [4] * 3
    assert "seat 1: more bid of Me 0" in stream.getvalue()


@pytest.mark.slow
@pytest.mark.chosen
def test_seats_of_games_in_jax(tmp_path):
    env = games.EnvConfig("rlstack.jax_envs.cover:Cover", num_envs=6, type="jax")
    assert seat_names(env) == ("agent_0", "agent_1", "agent_2")
    run = games.leave_run(tmp_path / "cover", games.one_policy(env))
    found = watch([run, run, run], shows=False, episodes=1, max_steps=2)
    assert found.episodes[0].seating == (0, 1, 2) and found.episodes[0].game.cut
    assert all(total < 0 for total in found.episodes[0].game.returns)


@pytest.mark.slow
@pytest.mark.chosen
def test_runs_that_cannot_meet_are_refused(fours, tmp_path, capsys):
    throws = games.leave_run(tmp_path / "throws", cases.selfplay())
    with pytest.raises(ValueError, match=r"must be of one game; .*ConnectFour with 2 seats, and"):
        watch([fours[0], throws])
    with pytest.raises(ValueError, match="which has 2; got 3 runs"):
        watch([*fours, fours[0]])
    seen = games.EnvConfig(
        "rlstack.envs.seats.games:ConnectFour", num_envs=4, options={"seat_index": True}
    )
    indexed = games.leave_run(tmp_path / "indexed", games.one_policy(seen))
    with pytest.raises(ValueError, match="must have the same observations and actions"):
        watch([fours[0], indexed])
    assert main(["watch", str(fours[0]), str(tmp_path / "nothing")]) == 1
    assert "no such directory" in capsys.readouterr().err
    assert main(["watch"]) == 2 and main(["watch", str(fours[0]), "--episodes", "0"]) == 2
    assert "--episodes must be at least 1; got 0" in capsys.readouterr().err
    assert main(["watch", str(fours[0]), "--max-steps", "0"]) == 2
    assert "--max-steps must be at least 1; got 0" in capsys.readouterr().err
    alone = tmp_path / "alone"
    games.leave_run(alone, running.ppo("single_process"))
    assert main(["watch", str(alone), str(alone)]) == 1
    assert "which has 1; got 2 runs" in capsys.readouterr().err
    assert main(["watch", str(alone), "--results-only"]) == 2
