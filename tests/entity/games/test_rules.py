"""Rules of the games without a board, by scripted episodes, and checks for every game."""

import math

import numpy as np
import pytest

from rlstack.entity.games import GAMES
from rlstack.entity.scripted import SCRIPTED_POLICIES, RandomPolicy, as_actions, legal_choices, play
from tests.entity.games.cases import act, make


def test_bandit_pays_arm_a_and_ends_after_exactly_32_pulls():
    game = make("MultiArmedBandit")
    seen = [game.reset()]
    for step in range(32):
        assert not seen[-1].done
        seen.append(act(game, seen[-1], pull=[step % 5]))
    assert [o.reward for o in seen[1:]] == [1 / 32 if i % 5 == 0 else 0 for i in range(32)]
    assert [o.global_features for o in seen] == [(i,) for i in range(33)]
    assert seen[-1].done and not seen[-1].truncated
    assert game.reset().global_features == (0,)


def test_the_spaceship_thrusts_before_it_moves():
    game = make("MoveToOrigin")
    observation = game.reset()
    ((x, y, dx, dy, step),) = observation.features["Spaceship"]
    assert (dx, dy, step) == (0, 0, 0) and math.hypot(x, y) == pytest.approx(1)
    for choice, thrust in enumerate((0.01, 0.001, 0, -0.001, -0.01)):
        before = x, y, dx, dy
        observation = act(
            game, observation, horizontal_thruster=[choice], vertical_thruster=[4 - choice]
        )
        ((x, y, dx, dy, step),) = observation.features["Spaceship"]
        assert (dx, dy) == pytest.approx((before[2] + thrust, before[3] - thrust))
        assert (x, y) == pytest.approx((before[0] + dx, before[1] + dy))
        gain = math.hypot(*before[:2]) - math.hypot(x, y)
        assert observation.reward == pytest.approx(gain)
    assert step == 5
    total, length, truncated = play(game, RandomPolicy(game))
    assert (length, truncated) == (32, False)
    assert total == pytest.approx(1 - math.hypot(game._x, game._y))


def test_hotdogs_have_two_types_and_the_unused_action_has_no_actor():
    game, kinds = make("NotHotdog"), []
    for _ in range(200):
        observation = game.reset()
        assert observation.features["Player"] == [(0,)]
        assert list(observation.actions) == ["classify"]
        plain = "Hotdog" in observation.features
        kinds.append("Hotdog" if plain else observation.features["Object"][0][0])
        last = act(game, observation, classify=[len(kinds) % 2])
        assert last.done and last.features["Player"] == [(1,)]
        assert last.reward == (len(kinds) % 2 == (plain or kinds[-1] == 1.0))
    shares = [kinds.count(kind) / 200 for kind in (0.0, 1.0, "Hotdog")]
    assert shares == pytest.approx([0.5, 0.25, 0.25], abs=0.13)
    assert game.action_space["classify"].choices == ("not hotdog", "hotdog")


@pytest.mark.parametrize("choices", [1, 2, 5, 10])
def test_beans_are_among_the_legal_numbers(choices):
    game, counted, sizes = make("Count", masked_choices=choices), set(), set()
    for _ in range(300):
        observation = game.reset()
        beans = observation.features["Bean"]
        (legal,) = legal_choices(game, observation, "count")
        assert beans in legal and max(legal) < choices
        counted.add(beans)
        sizes.add(len(legal))
        answer = legal[len(counted) % len(legal)]
        last = act(game, observation, count=[answer])
        assert last.done and last.reward == (answer == beans)
    assert counted == set(range(choices)) and sizes == set(range(1, choices + 1))


def test_xor_is_of_three_bits():
    game, seen = make("Xor"), set()
    for i in range(100):
        observation = game.reset()
        (first,), (second,) = observation.features["Input"]
        (negate,) = observation.global_features
        seen.add((first, second, negate))
        last = act(game, observation, output=[i % 2])
        assert last.done and last.reward == (i % 2 == (first + second + negate) % 2)
    assert len(seen) == 8


def test_the_player_jumps_to_high_ground():
    game, shown = make("FloorIsLava"), set()
    labels = {"n": (0, 1), "e": (1, 0), "s": (0, -1), "w": (-1, 0)}
    assert game.action_space["move"].choices == ("n", "ne", "e", "se", "s", "sw", "w", "nw")
    for i in range(300):
        observation = game.reset()
        features = observation.features
        ((x, y),), ((a, b),) = features["Player"], features["HighGround"]
        assert max(abs(x), abs(y)) <= 1000 and max(abs(a - x), abs(b - y)) == 1
        cells = {(a, b), *features["Lava"]}
        assert len(cells) == 1 + len(features["Lava"]) and (x, y) not in cells
        assert all(max(abs(c - x), abs(d - y)) == 1 for c, d in cells)
        shown.add(len(cells))
        # The actor is the Player, not the first row of all entities.
        actions = as_actions(game, observation, {"move": [i % 8]})
        assert actions["move"].actors == [("Player", 0)]
        last = game.act(actions)
        ((c, d),) = last.features["Player"]
        if actions["move"].labels[0] in labels:
            assert (c - x, d - y) == labels[actions["move"].labels[0]]
        assert last.done and last.reward == ((c, d) == (a, b))
    assert shown == set(range(1, 9))


def test_cherries_disappear_and_the_better_half_sums_to_one():
    game = make("CherryPick")
    observation = game.reset()
    qualities = [q for (q,) in observation.features["Cherry"]]
    assert sum(sorted(qualities)[16:]) == pytest.approx(1)
    for step in range(16):
        assert not observation.done
        observation = act(game, observation, pick=[("Cherry", step % 3)])
        assert observation.reward == pytest.approx(qualities.pop(step % 3))
        assert [q for (q,) in observation.features["Cherry"]] == qualities
    assert observation.done and len(qualities) == 16
    # Pick the top half, in any order.
    observation, total = game.reset(), 0.0
    while not observation.done:
        qualities = [q for (q,) in observation.features["Cherry"]]
        top = sorted(qualities)[-16 + 32 - len(qualities) :]
        observation = act(game, observation, pick=[("Cherry", qualities.index(min(top)))])
        total += observation.reward
    assert total == pytest.approx(1)


def balls(colours, **options):
    game = make("PickMatchingBalls", max_balls=len(colours), **options)
    observation = game.reset()
    game._colours = list(colours)
    return game, observation


def pick_rows(game, observation, rows):
    rewards = []
    for row in rows:
        assert not observation.done
        observation = act(game, observation, pick=[("Ball", row)])
        rewards.append(observation.reward)
    return rewards, observation


@pytest.mark.parametrize(
    ("colours", "rows", "reward"),
    [
        ([0, 1, 1, 1, 2], [0, 1], 1 / 3),
        ([0, 1, 1, 1, 2], [1, 3, 4], 2 / 3),
        ([0, 1, 1, 1, 2], [1, 3, 2, 4], 1.0),
        ([3, 3, 3], [0, 1, 2], 1.0),
        ([3, 3, 4], [1, 0, 2], 1.0),
        ([3, 3, 4], [2, 0], 0.5),
    ],
)
def test_balls_pay_at_the_second_colour_or_when_all_are_picked(colours, rows, reward):
    game, observation = balls(colours)
    rewards, last = pick_rows(game, observation, rows)
    assert last.done and rewards == pytest.approx([0] * (len(rows) - 1) + [reward])
    assert np.flatnonzero(last.features["Ball"][:, 6]).tolist() == sorted(rows)
    assert observation.features["Ball"][:, 6].sum() == 0  # earlier observations do not change


def test_a_picked_ball_cannot_be_picked_again():
    game, observation = balls([1, 1, 1, 2])
    _, observation = pick_rows(game, observation, [1])
    assert legal_choices(game, observation, "pick") == [[("Ball", 0), ("Ball", 2), ("Ball", 3)]]


def test_balls_show_their_colours():
    one_hot = make("PickMatchingBalls", seed=3).reset().features["Ball"]
    scalar = make("PickMatchingBalls", seed=3, one_hot=False).reset().features["Ball"]
    assert one_hot.shape == (32, 7) and (one_hot[:, :6].sum(axis=1) == 1).all()
    assert np.array_equal(one_hot[:, :6].argmax(axis=1)[:, None].repeat(6, 1), scalar[:, :6])
    game = make("PickMatchingBalls", randomize=True, max_balls=6)
    assert {len(game.reset().features["Ball"]) for _ in range(60)} == {3, 4, 5, 6}


def place(game, x, y, heading, target, mines=()):
    game.reset()
    game._x, game._y, game._heading = x, y, heading
    game._target, game._mines = target, list(mines)
    return game._observe()


def test_the_vehicle_turns_and_drives():
    game = make("Minefield")
    observation = place(game, 0.0, 0.0, 0.0, (50.0, 0.0))
    observation = act(game, observation, steer=[2])
    assert observation.features["Vehicle"] == [(0.0, 0.0, math.pi / 8, 1)]
    observation = act(game, observation, steer=[1])
    ((x, y, _, _),) = observation.features["Vehicle"]
    assert (x, y) == pytest.approx((3 * math.cos(math.pi / 8), 3 * math.sin(math.pi / 8)))
    observation = act(game, observation, steer=[0])
    assert observation.features["Vehicle"][0][2] == 0.0
    assert (observation.reward, observation.done) == (0.0, False)


@pytest.mark.parametrize(
    ("target", "mines", "reward"),
    [
        ((8.0, 0.0), [], 1.0),
        ((8.0, 0.0), [(7.0, 0.0)], 1.0),  # the target counts first
        ((50.0, 0.0), [(3.0, 5.0)], 0.0),
    ],
)
def test_a_drive_ends_at_the_target_or_at_a_mine(target, mines, reward):
    game = make("Minefield")
    last = act(game, place(game, 0.0, 0.0, 0.0, target, mines), steer=[1])
    assert last.done and not last.truncated and last.reward == reward


def test_a_drive_ends_after_200_steps():
    game = make("Minefield")
    observation = place(game, 0.0, 0.0, 0.0, (99.0, 0.0))
    for _ in range(200):
        assert not observation.done
        observation = act(game, observation, steer=[2])
    assert observation.done and observation.reward == 0


def test_mines_keep_apart_and_a_drive_may_be_over_at_once():
    game, at_once, counts = make("Minefield"), 0, []
    for _ in range(3000):
        observation = game.reset()
        features = observation.features
        places = [features["Vehicle"][0][:2], features["Target"][0], *features["Mine"]]
        counts.append(len(places) - 2)
        assert all(math.dist(p, q) >= 15 for i, p in enumerate(places[2:], 2) for q in places[:i])
        near = math.dist(*places[:2]) <= 5
        assert (observation.done, observation.reward) == (near, float(near))
        at_once += near
    assert 0 < at_once < 20 and max(counts) == 10 and min(counts) < 10


@pytest.mark.parametrize("cheat", [False, True])
def test_the_opponent_is_hidden_without_cheat(cheat):
    game, seen = make("RockPaperScissors", cheat=cheat), []
    for i in range(400):
        observation = game.reset()
        (one_hot,) = observation.features["Opponent"]
        opponent = one_hot.index(True)
        seen.append(opponent)
        assert observation.visible == {"Opponent": [cheat]}
        assert ("?" in str(game)) is not cheat
        last = act(game, observation, throw=[i % 3])
        assert last.done and last.reward == (2 if i % 3 == (opponent + 1) % 3 else 0)
    shares = np.bincount(seen) / 400
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.1)
    assert game.action_space["throw"].choices == ("rock", "paper", "scissors")


@pytest.mark.parametrize("name", GAMES)
def test_a_seed_decides_the_game_and_a_picture_shows_it(name):
    def episode(seed):
        game = make(name, seed=seed)
        rule, observation, seen = RandomPolicy(game, 1), game.reset(), []
        for _ in range(60):
            seen.append(
                (str(game), observation.reward, repr(observation.features),
                 repr(observation.global_features))
            )  # fmt: skip
            if observation.done:
                observation = game.reset()
            else:
                observation = game.act(as_actions(game, observation, rule(observation)))
        return seen

    assert episode(4) == episode(4)
    assert name == "MultiArmedBandit" or episode(4) != episode(5)
    assert len({picture for picture, *_ in episode(4)}) > 1
    assert SCRIPTED_POLICIES.keys() == GAMES.keys()


@pytest.mark.parametrize(
    ("name", "options", "rule"),
    [
        ("MultiArmedBandit", {"num_steps": 0}, "num_steps must be at least 1"),
        ("Count", {"masked_choices": 11}, "masked_choices must be in 1..10"),
        ("CherryPick", {"num_cherries": 3}, "num_cherries must be even"),
        ("PickMatchingBalls", {"max_balls": 2}, "max_balls must be at least 3"),
        ("MineSweeper", {"num_robots": 32}, "num_robots must be in 1..31"),
        ("MultiSnake", {"num_snakes": 3, "num_players": 2}, "must be a multiple of num_players, 2"),
        ("MultiSnake", {"num_snakes": 9}, "board_size must leave room"),
        ("TreasureHunt", {"num_traps": 61}, "num_traps must be in 0..60"),
    ],
)
def test_options_out_of_range_are_refused(name, options, rule):
    with pytest.raises(ValueError, match=rule):
        make(name, **options)
