"""Pools whose environments are one Rust program."""

import subprocess
import sys
import time
from collections import deque

import numpy as np
import psutil
import pytest

from rlstack.checks import EnvCrash, EnvError
from rlstack.entity.environment import CategoricalAction
from rlstack.entity.games.multi_snake import BODY, MultiSnake
from rlstack.envs import AsyncEnv, SyncEnv
from rlstack.types import StepType
from tests.entity.native.programs import frame, hello, program, row
from tests.entity.rust_crate import NEEDS_CARGO
from tests.entity.rust_crate import examples as examples  # a fixture

pytestmark = [pytest.mark.timeout(120)]
SNAKES = {"num_snakes": 2, "max_snake_length": 4, "board_size": 5}


def legal(rng, timestep):
    """Random legal actions."""
    chosen = {}
    for name, actors in timestep.observation["actors"].items():
        mask = timestep.observation["action_mask"][name].reshape(*actors.shape, -1)
        drawn = rng.random(mask.shape) + 1e-3
        chosen[name] = (mask * drawn).argmax(axis=-1).astype(np.int32)
    return chosen


def rust_process():
    """The process below the guard of this process."""
    (guard,) = psutil.Process().children()
    (game,) = guard.children()
    return game


def beans(path, size, seed, workers):
    with SyncEnv(f"rust:{path}", size, seed=seed, num_workers=workers) as env:
        found = [env.reset().observation["count"]["Bean"].copy()]
        for _ in range(40):
            found.append(env.step({"count": found[-1][:, None]}).observation["count"]["Bean"])
    return np.stack(found)


@pytest.mark.slow
@pytest.mark.chosen
@NEEDS_CARGO
def test_environments_have_seeds_of_their_own(examples):
    """Numbers that the threads do not divide; each row depends only on its environment's seed."""
    path = examples / "count_env"
    seven = beans(path, 7, 100, 3)
    assert len({tuple(column) for column in seven.T}) == 7
    np.testing.assert_array_equal(beans(path, 7, 100, 1), seven)
    np.testing.assert_array_equal(beans(path, 2, 104, 5), seven[:, 4:6])


@NEEDS_CARGO
def test_episodes_end_and_begin_by_the_time_rules(examples):
    rng = np.random.default_rng(0)
    with SyncEnv(f"rust:{examples / 'count_env'}", 5, num_workers=2) as env:
        timestep = env.reset()
        for _ in range(50):
            assert timestep.first().all() and timestep.discount.all() and not timestep.reward.any()
            actions = legal(rng, timestep)
            shown = timestep.observation["count"]["Bean"]
            timestep = env.step(actions)
            assert timestep.last().all() and not timestep.discount.any()
            np.testing.assert_array_equal(timestep.reward == 1, actions["count"][:, 0] == shown)
            np.testing.assert_array_equal(timestep.observation["count"]["Bean"], shown)
            timestep = env.step(actions)
        assert env.stats() == {"restarts": 0, "masks_without_choice": 0}


@NEEDS_CARGO
def test_an_asynchronous_pool_steps_some_at_a_time(examples):
    rng = np.random.default_rng(0)
    with AsyncEnv(f"rust:{examples / 'multi_snake'}", 7, 3, options=SNAKES) as env:
        env.async_reset()
        over, counts = np.ones(7, bool), np.zeros(7, int)
        for _ in range(120):
            ids, timestep = env.recv()
            np.testing.assert_array_equal(timestep.first(), over[ids])
            over[ids] = timestep.last()
            counts[ids] += 1
            env.send(ids, legal(rng, timestep))
        assert counts.min() > 40


@NEEDS_CARGO
def test_multi_snake_has_the_spaces_and_rules_of_the_python_game(examples):
    """After each step of the Rust games, the Python game makes it from the same position."""
    rng, python, size = np.random.default_rng(0), MultiSnake(**SNAKES), 20
    options, ends, grown = {"options": SNAKES}, 0, 0
    with SyncEnv("rlstack.entity.games:MultiSnake", 1, **options) as wanted:
        spec = wanted.spec
    with SyncEnv(f"rust:{examples / 'multi_snake'}", size, **options) as env:
        assert repr(env.spec) == repr(spec)
        before = env.reset()
        for _ in range(60):
            actions = legal(rng, before)
            after = env.step(actions)
            for i in np.flatnonzero(~before.last()).tolist():
                place(python, before.observation, i)
                moves = CategoricalAction([], actions["move"][i], [])
                shown = python.act({"move": moves})
                assert after.reward[i] == pytest.approx(shown.reward)
                assert after.last()[i] == shown.done
                for kind in ("SnakeHead", "SnakeBody"):
                    assert rows_of(after.observation, kind, i) == list(
                        map(tuple, shown.features[kind])
                    )
                ends, grown = ends + shown.done, grown + (shown.reward > 0)
            before = after
    assert ends > 20 and grown > 20


def rows_of(observation, kind, i):
    count = observation["count"][kind][i]
    return [tuple(row) for row in observation["features"][kind][i, :count].astype(int).tolist()]


def place(game, observation, i):
    """Puts the Python game into the position that environment i shows."""
    body, heads = rows_of(observation, "SnakeBody", i), rows_of(observation, "SnakeHead", i)
    cells = [[(x, y) for x, y, c in [*body, head] if c == head[2]] for head in heads]
    game._snakes = [deque(snake) for snake in cells]
    game._cells = {cell: BODY for snake in cells for cell in snake}
    game._food = [(x, y) for x, y, _ in rows_of(observation, "Food", i)]
    game._cells.update({cell: colour for colour, cell in enumerate(game._food)})
    game._step = int(observation["features"]["__global__"][i, 0, 0])


@NEEDS_CARGO
def test_a_killed_program_truncates_its_episodes_and_is_restarted(examples):
    name, rng = f"rust:{examples / 'multi_snake'}", np.random.default_rng(0)
    with SyncEnv(name, 4, options={"num_steps": 9}, max_restarts=1) as env:
        before = env.reset()
        before = env.step(legal(rng, before))
        for kill in range(2):
            rust_process().kill()
            if kill:
                with pytest.raises(EnvCrash, match=r"at most 1 restarts.*lost once more"):
                    env.step(legal(rng, before))
                break
            after = env.step(legal(rng, before))
            going_on = ~before.last()
            np.testing.assert_array_equal(after.last(), going_on)
            np.testing.assert_array_equal(after.first(), ~going_on)
            assert after.discount.all() and not after.reward.any()
            np.testing.assert_array_equal(
                after.observation["features"]["Food"][going_on],
                before.observation["features"]["Food"][going_on],
            )
            before = env.step(legal(rng, after))
            np.testing.assert_array_equal(before.first(), going_on)
            assert env.stats() == {"restarts": 1, "masks_without_choice": 0}
            assert "ended" in env.last_restart or "disconnected" in env.last_restart
    assert not psutil.Process().children()


@NEEDS_CARGO
def test_environments_that_the_caller_holds_are_truncated_too(examples):
    """In an asynchronous pool, some environments are not stepped while the program is lost."""
    rng = np.random.default_rng(0)
    with AsyncEnv(f"rust:{examples / 'multi_snake'}", 6, 3) as env:
        env.async_reset()
        held, shown = env.recv()
        others, timestep = env.recv()
        rust_process().kill()
        env.send(others, legal(rng, timestep))
        ids, ended = env.recv()
        assert ids.tolist() == others.tolist() and ended.last().all()
        env.send(held, legal(rng, shown))
        ids, ended = env.recv()
        assert ids.tolist() == held.tolist() and ended.last().all() and ended.discount.all()
        env.send(env.env_ids, {"move": np.zeros((6, 1), np.int32)})
        for _ in range(2):
            assert env.recv()[1].first().all()


@NEEDS_CARGO
def test_wrong_names_and_options_are_refused(examples):
    name = f"rust:{examples / 'multi_snake'}"
    with pytest.raises(ValueError, match=r"must name a program that can be run.*cargo build"):
        SyncEnv("rust:nothing/here", 2)
    with pytest.raises(ValueError, match=r"multi_snake: the game has no option \"colour\"\."):
        SyncEnv(name, 2, options={"colour": 1})
    with pytest.raises(ValueError, match="the option extras must be left out, because the rows of"):
        SyncEnv(name, 2, options={"extras": ["score"]})
    with pytest.raises(ValueError, match="board_size must leave room"):
        SyncEnv(name, 2, options={"board_size": 3})
    with pytest.raises(ValueError, match="steps its environments itself, so type must be 'auto'"):
        SyncEnv(name, 2, "process")
    with pytest.raises(ValueError, match=r"must fit 16777216 bytes.*Lower num_envs"):
        SyncEnv(name, 500_000)
    with pytest.raises(EnvError, match="plays one game; make it the command of"):
        SyncEnv(f"rust:{examples / 'count'}", 2)
    assert not psutil.Process().children()


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ([hello(version=7)], EnvCrash, "version must be 1; the game has version 7"),
        ([hello(refusal="no such map")], ValueError, "program: no such map"),
        ([hello(spaces=b"\xff" * 9)], EnvError, "must have"),
        ([frame(8, b"HTTP/1.1")], EnvCrash, "must begin with b'RLGP'"),
        ([], EnvCrash, r"ended with code 0"),
        ([hello(), frame(7, b"\2\0\0\0no")], EnvCrash, "it reports: no"),
        ([hello(), frame(99)], EnvCrash, "kind must be 1 to 11; got 99"),
        ([hello(), frame(4)], EnvCrash, "must be answered by one row"),
        ([hello(), b"\xff" * 64], EnvCrash, "a frame must have 1 to"),
        ([hello(), row(), row()[:20]], EnvCrash, "must be answered by one row"),
        ([hello(), row(kind=3)], EnvCrash, r"must be in 0\.\.2; got 3"),
        ([hello(), row(count=2)], EnvCrash, r"must be in 0\.\.1; got 2"),
        ([hello(), row(actor=1)], EnvCrash, r"must be in -1\.\.0; got 1"),
        ([hello(), row(flags=(1, 2, 1))], EnvCrash, "a flag must be 0 or 1; got 2"),
        ([hello(), row(flags=(1, 0, 0))], EnvCrash, "'go': each actor must have a legal choice"),
        ([hello(), row(kind=1)], EnvCrash, "a first step must come after a reset"),
        ([hello(), row(reward=1.0)], EnvCrash, "the reward of a first step must be 0"),
        ([hello(), row(discount=0.5)], EnvCrash, "a discount must be 1, or 0 at the end"),
        ([hello(), row(discount=float("nan"))], EnvCrash, "a discount must be 1"),
        ([hello(), row(rest=b"\1")], EnvCrash, "must end here"),
    ],
)
def test_programs_that_do_not_follow_the_protocol_are_refused(tmp_path, said, error, message):
    with pytest.raises(error, match=message):  # noqa: SIM117
        with SyncEnv(program(tmp_path, *said), 1, max_restarts=0, start_timeout=5) as env:
            env.reset()
            env.step({"go": np.zeros((1, 1), np.int32)})
    assert not psutil.Process().children()


def test_a_silent_program_is_lost(tmp_path):
    silent = program(tmp_path, hello(), row(), b"", b"")
    with SyncEnv(silent, 1, step_timeout=0.3, max_restarts=1) as env:
        assert env.reset().step_type == StepType.FIRST
        assert env.step({"go": np.zeros((1, 1), np.int32)}).last()
        assert "silent for 0.3 s" in env.last_restart


@NEEDS_CARGO
@pytest.mark.slow
@pytest.mark.chosen
def test_the_program_ends_with_a_killed_trainer(examples):
    code = (
        "from rlstack.envs import SyncEnv\n"
        f"env = SyncEnv('rust:{examples / 'count_env'}', 3); env.reset(); print('up', flush=True)\n"
        "input()"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with trainer:
        assert trainer.stdout.readline() == "up\n"
        below = psutil.Process(trainer.pid).children(recursive=True)
        assert [p.name() for p in below if "count_env" in p.name()]
        trainer.kill()
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in below):
        assert time.monotonic() < deadline
        time.sleep(0.05)
