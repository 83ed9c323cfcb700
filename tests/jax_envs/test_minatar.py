"""MinAtar's games in JAX, step by step beside the package MinAtar, with the same draws."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlstack.envs import SyncEnv
from rlstack.jax_envs.factory import make_batch, make_jax_env
from rlstack.jax_envs.seaquest import Seaquest
from rlstack.programs.config.presets import preset
from rlstack.programs.run.plan import plan
from rlstack.types import StepType
from tests.agent_cases import quick_jit

NOTHING, LEFT, UP, RIGHT, DOWN, FIRE = range(6)
KEY = jax.random.PRNGKey(0)
# How a game begins, and the weights of its six actions.
SITUATIONS = [
    ({}, (1, 1, 1, 1, 1, 1)),
    ({}, (1, 1, 0.2, 1, 3, 4)),
    # At the surface no enemy comes: the board fills.
    ({"enemy_period": 1, "move_period": 2, "ramp": 19}, (1, 1, 0, 1, 0, 4)),
    ({"enemy_period": 1, "move_period": 2, "ramp": 19}, (0.5, 2, 1.5, 2, 2, 4)),
    ({"y": 1, "rescued": 6, "surfaced": False, "oxygen": 120}, (1, 1, 6, 1, 6, 1)),
    ({"y": 1, "rescued": -1, "surfaced": False}, (0, 0, 6, 0, 6, 1)),
    ({"y": 4, "rescued": 5, "surfaced": False, "enemy_period": 6}, (1, 3, 2, 3, 2, 5)),
    ({"y": 5, "rescued": 5, "surfaced": False, "enemy_period": 20}, (1, 3, 2, 3, 2, 1)),
    ({"y": 5, "surfaced": False, "oxygen": 9, "enemy_period": 3}, (1, 1, 0, 1, 1, 4)),
    ({"y": 8, "surfaced": False, "enemy_period": 2, "move_period": 3}, (1, 2, 1, 2, 1, 4)),
]


class Draws:
    """Random numbers that a game of the package draws."""

    def __init__(self, numbers):
        self.numbers = list(numbers)

    def rand(self):
        return self.numbers.pop(0)

    def randint(self, low, high=None):
        low, high = (0, low) if high is None else (low, high)
        return low + int(self.numbers.pop(0) * (high - low))


def begun(change):
    """The first state of a game, with some fields changed."""
    state, _ = Seaquest().reset(KEY)
    return state._replace(**{k: jnp.asarray(v, getattr(state, k).dtype) for k, v in change.items()})


def played(env, first, actions, keys):
    """Steps from states ``[N]``: states before and outcomes ``[T, N]``; a game begins again."""
    first = jax.tree.map(lambda *x: jnp.stack([jnp.asarray(y) for y in x]), *first)

    def step(state, inputs):
        action, key = inputs
        outcome = jax.vmap(env.step)(key, state, action)
        again = jax.tree.map(
            lambda x, y: jax.vmap(jnp.where)(outcome.terminated, x, y.astype(x.dtype)),
            first,
            outcome.state,
        )
        return again, (state, outcome)

    run = quick_jit(lambda first: jax.lax.scan(step, first, (actions, keys))[1])
    return jax.tree.map(np.asarray, run(first))


def at(tree, *index):
    return jax.tree.map(lambda x: x[index], tree)


def of_package(state):
    """The package's game in a state."""
    from minatar.environments.seaquest import Env

    game = Env()
    game.sub_x, game.sub_y, game.sub_or = int(state.x), int(state.y), bool(state.right)
    game.diver_count, game.oxygen = int(state.rescued), int(state.oxygen)
    game.surface, game.shot_timer = bool(state.surfaced), int(state.reload)
    game.e_spawn_timer, game.d_spawn_timer = int(state.enemy_timer), int(state.diver_timer)
    game.e_spawn_speed, game.move_speed = int(state.enemy_period), int(state.move_period)
    game.ramp_index = int(state.ramp)
    return game


def numbers_of(game):
    """The state of a game of the package, as lists."""
    return [
        *(game.sub_x, game.sub_y, game.sub_or, game.diver_count, game.oxygen, game.surface),
        *(game.shot_timer, game.e_spawn_timer, game.d_spawn_timer, game.e_spawn_speed),
        *(game.move_speed, game.ramp_index, game.f_bullets, game.divers, game.e_fish),
        *(game.e_subs, sorted(map(list, {tuple(bullet) for bullet in game.e_bullets}))),
    ]


def numbers(state):
    """The same of a state in JAX."""

    def rows(things, *fields, keep=True):
        there = (things.y >= 0) & keep
        columns = (getattr(things, name)[there].tolist() for name in ("x", "y", "right", *fields))
        return [list(row) for row in zip(*columns, strict=True)]

    enemies = state.enemies
    bullets = [
        [x, y, right]
        for side, right in zip(state.bullets, (True, False), strict=True)
        for y in range(10)
        for x in range(10)
        if int(side[y]) >> x & 1
    ]
    scalars = (state.x, state.y, state.right, state.rescued, state.oxygen, state.surfaced)
    scalars += (state.reload, state.enemy_timer, state.diver_timer, state.enemy_period)
    return [
        *(x.item() for x in (*scalars, state.move_period, state.ramp)),
        *(rows(state.shots), rows(state.divers, "timer")),
        rows(enemies, "timer", keep=~enemies.sub),
        rows(enemies, "timer", "reload", keep=enemies.sub),
        sorted(bullets),
    ]


def same_steps(seed, steps, act=lambda game, action: game.act(action)):
    """Plays a game in each situation here and in the package; returns the number of ends."""
    rng = np.random.default_rng(seed)
    weights = [np.array(weights) / sum(weights) for _, weights in SITUATIONS]
    actions = np.stack([rng.choice(6, steps, p=p) for p in weights], 1).astype(np.int32)
    keys = jax.random.split(jax.random.PRNGKey(seed), (steps, len(SITUATIONS)))
    env = Seaquest(max_steps_in_episode=10**9)
    states, outcomes = played(env, [begun(change) for change, _ in SITUATIONS], actions, keys)
    draws = np.asarray(jax.vmap(jax.vmap(lambda key: jax.random.uniform(key, (5,))))(keys))
    ends = 0
    for lane in range(len(SITUATIONS)):
        game = of_package(at(states, 0, lane))
        for t in range(steps):
            # The package draws only what it needs.
            enemy = draws[t, lane, :3] if game.e_spawn_timer == 0 else ()
            diver = draws[t, lane, 3:] if game.d_spawn_timer == 0 else ()
            game.random = Draws([*map(float, enemy), *map(float, diver)])
            reward, over = act(game, actions[t, lane])
            assert not game.random.numbers, "the package draws as many"
            found = at(outcomes, t, lane)
            where = f"situation {lane}, step {t}"
            assert (float(found.reward), bool(found.terminated)) == (reward, over), where
            assert numbers(found.state) == numbers_of(game), where
            np.testing.assert_array_equal(found.observation, game.state(), where)
            if over:
                ends += 1
                game = of_package(at(states, 0, lane))
    return ends


def test_seaquest_makes_the_steps_of_the_package_and_all_its_rules_are_met():
    pytest.importorskip("minatar")
    from minatar.environments.seaquest import Env

    rules = {f.__code__ for f in (Env.act, Env._surface, Env._spawn_enemy, Env._spawn_diver)}
    met = set()

    def trace(frame, event, argument):
        if frame.f_code not in rules:
            return None
        met.add(frame.f_lineno)
        return trace

    def act(game, action):
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return game.act(action)
        finally:
            sys.settrace(before)

    assert same_steps(2, 300, act) > 50
    lines = {line for rule in rules for _, _, line in rule.co_lines() if line}
    source = Path(Env.act.__code__.co_filename).read_text().splitlines()
    # A game that is over is not asked for a step.
    assert [source[line - 1].strip() for line in lines - met] == ["return r, self.terminal"]


@pytest.mark.slow
@pytest.mark.chosen
def test_seaquest_makes_a_hundred_thousand_steps_of_the_package():
    pytest.importorskip("minatar")
    assert same_steps(seed=3, steps=10_000) > 1_000


def test_seaquest_is_named_like_the_other_games():
    assert isinstance(make_jax_env("Seaquest-MinAtar", {"ramping": False}), Seaquest)
    with SyncEnv("Seaquest-MinAtar", 2, "jax", options={"max_steps_in_episode": 3}) as env:
        assert env.spec.action.num_values == 6
        steps = [env.reset(), *(env.step(np.zeros(2, np.int32)) for _ in range(4))]
    found = [int(s.step_type[0]) for s in steps]
    assert found == [StepType.FIRST, StepType.MID, StepType.MID, StepType.LAST, StepType.FIRST]
    assert steps[3].discount.tolist() == [1.0, 1.0]
    # At the start: the player at (0, 5) looks to the left, all oxygen, and no diver.
    board = np.zeros((10, 10, 10))
    board[0, 5, 0] = board[0, 6, 1] = 1
    board[9, :, 7] = 1
    np.testing.assert_array_equal(steps[0].observation[0], board)
    picture = Seaquest().render(begun({}))
    assert picture.shape == (10, 10, 3) and len(np.unique(picture.reshape(-1, 3), axis=0)) == 4
    with pytest.raises(ValueError, match="max_steps_in_episode must be at least 1; got 0"):
        make_batch("Seaquest-MinAtar", {"max_steps_in_episode": 0})
    with pytest.raises(ValueError, match=r"Seaquest-MinAtar.*use_minimal"):
        make_batch("Seaquest-MinAtar", {"use_minimal_action_set": True})


@pytest.mark.parametrize("agent", ["ppo", "pqn", "dqn"])
def test_its_presets_have_networks_for_ten_channels(agent, tmp_path):
    planned = plan(preset(f"minatar-seaquest-{agent}"), tmp_path / "run")
    # 16 kernels of 3 x 3 x 10 cells, a dense layer of 16 x 8 x 8 by 128, and less for the heads.
    least = 4 * (16 * 3 * 3 * 10 + 16 * 8 * 8 * 128)
    assert least < planned.params_bytes < 1.1 * least


def test_without_ramping_the_game_stays_as_it_is():
    state = begun({"y": 1, "rescued": 2, "surfaced": False, "ramp": 1})
    for env, periods in ((Seaquest(ramping=False), [20, 5, 1]), (Seaquest(), [19, 4, 2])):
        after = quick_jit(env.step)(KEY, state, UP).state
        found = [int(x) for x in (after.enemy_period, after.move_period, after.ramp)]
        assert found == periods and int(after.rescued) == 1 and int(after.oxygen) == 200


# Each of these puts a state of gymnax's game into the package's game.


def breakout(game, state):
    game.ball_x, game.ball_y, game.ball_dir = map(int, (state.ball_x, state.ball_y, state.ball_dir))
    game.last_x, game.last_y, game.pos = map(int, (state.last_x, state.last_y, state.pos))
    game.brick_map, game.strike = state.brick_map.copy(), bool(state.strike)


def freeway(game, state):
    game.cars = [list(map(int, car)) for car in state.cars]
    game.pos, game.move_timer = int(state.pos), int(state.move_timer)


def space_invaders(game, state):
    game.f_bullet_map, game.e_bullet_map = state.f_bullet_map.copy(), state.e_bullet_map.copy()
    game.alien_map = state.alien_map.copy()
    for name in ("pos", "alien_dir", "enemy_move_interval", "alien_move_timer"):
        setattr(game, name, int(getattr(state, name)))
    for name in ("alien_shot_timer", "ramp_index", "shot_timer"):
        setattr(game, name, int(getattr(state, name)))


def asterix(game, state):
    for name in ("player_x", "player_y", "spawn_speed", "spawn_timer", "move_speed"):
        setattr(game, name, int(getattr(state, name)))
    for name in ("move_timer", "ramp_timer", "ramp_index"):
        setattr(game, name, int(getattr(state, name)))
    game.entities = [
        [int(x), int(y), bool(right), bool(gold)] if there else None
        for x, y, right, gold, there in state.entities
    ]


def differing(name, build, changes, draws=None, steps=1_500):
    """Compares each step of gymnax's game with the package's from the same state.

    Returns:
      The differing steps: what differs, the state before, and the package's game after.
    """
    pytest.importorskip("minatar")
    pytest.importorskip("gymnax")
    from importlib import import_module

    module = import_module(f"minatar.environments.{build.__name__}")
    options = {"max_steps_in_episode": 10**9, "use_minimal_action_set": False}
    env = make_jax_env(f"{name}-MinAtar", options)
    first, _ = quick_jit(env.reset)(KEY)
    keys = jax.random.split(KEY, (steps, len(changes)))
    actions = np.random.default_rng(0).integers(0, 6, (steps, len(changes)), np.int32)
    states, outcomes = played(env, [first.replace(**c) for c in changes], actions, keys)
    found = []
    for t, lane in np.ndindex(steps, len(changes)):
        state, outcome, game = at(states, t, lane), at(outcomes, t, lane), module.Env()
        build(game, state)
        if draws is not None:
            game.random = draws(game, state, outcome.state, keys[t, lane])
        reward, over = game.act(actions[t, lane])
        same = {
            "reward": reward == outcome.reward,
            "end": bool(over) == outcome.terminated,
            "observation": (outcome.observation == game.state()).all(),
        }
        if wrong := {what for what, equal in same.items() if not equal}:
            found.append((wrong, state, game))
    return found


class OfCars:
    """The random numbers of Freeway that gave cars these speeds."""

    def __init__(self, speeds):
        self.speeds = speeds

    def randint(self, low, high, size):
        return np.abs(self.speeds)

    def rand(self, size):
        return np.where(self.speeds > 0, 0.9, 0.1)


@pytest.mark.slow
def test_breakout_and_freeway_of_gymnax_are_those_of_the_package():
    one_brick = np.zeros((10, 10), np.float32)
    one_brick[1, 3] = 1
    assert not differing("Breakout", breakout, [{}, {"brick_map": one_brick}])

    def draws(game, state, after, key):
        return OfCars(after.cars[:, 3])

    assert not differing("Freeway", freeway, [{}, {"pos": 1}], draws)


@pytest.mark.slow
def test_space_invaders_of_gymnax_differs_as_the_benchmark_says():
    """It begins with more aliens, and bullets hit the place from which the player moves."""
    few, low = np.zeros((2, 10, 10), np.float32)
    few[0, 5] = low[5:8, 2:5] = 1
    found = differing("SpaceInvaders", space_invaders, [{}, {"alien_map": few}, {"alien_map": low}])
    assert found
    for wrong, before, game in found:
        assert wrong == {"end"}
        # A bullet comes to the last row where the player was or is, and it moved.
        assert before.pos != game.pos
        assert before.e_bullet_map[8, before.pos] != before.e_bullet_map[8, game.pos]
    board = make_jax_env("SpaceInvaders-MinAtar").reset(KEY)[1]
    from minatar.environments.space_invaders import Env

    assert (int(board[..., 1].sum()), int(Env().state()[..., 1].sum())) == (28, 24)


@pytest.mark.slow
def test_asterix_of_gymnax_differs_as_the_benchmark_says():
    """A new thing takes a thing away where no row is free, and sometimes where one is."""
    spawn = pytest.importorskip("gymnax.environments.minatar.asterix").spawn_entity
    spawned = jax.jit(spawn)
    counts = {"none free": 0, "one free": 0, "missed": 0}

    def draws(game, state, after, key):
        game.missed = False
        if game.spawn_timer:
            return None
        (_, _, right, gold, there), slot = jax.tree.map(np.asarray, spawned(key, state))
        free = [i for i, thing in enumerate(game.entities) if thing is None]
        counts["none free"] += not free
        counts["one free"] += len(free) == 1
        game.missed = not there
        counts["missed"] += bool(free) and game.missed
        chosen = free.index(slot) if there else 0
        return Draws(
            [0.1 if right else 0.9, 0.1 if gold else 0.9, (chosen + 0.5) / max(len(free), 1)]
        )

    changes = [{}, {"spawn_speed": 2, "spawn_timer": 0, "player_y": 1}]
    found = differing("Asterix", asterix, changes, draws)
    assert found and counts["none free"] > 50 and counts["missed"]
    assert 1 / 16 < counts["missed"] / counts["one free"] < 1 / 4
    assert all(game.missed for _, _, game in found)
