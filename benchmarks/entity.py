"""The cost of entities: `python -m benchmarks.entity [--quick] [--only TEXT]`.

- batching: turns a step of 256 MultiSnakes into ragged records and packed rows with numpy, over the
  whole batch, against `benchmarks.entity_loop`, which loops over environments. Both start from the
  output of a pool, so padding is not measured.
- attention: the ragged transformer on packed rows against padded rows with a mask, for environments
  of 2 to 128 entities, most of them small (log-normal). Planning the rows is measured too. The
  shares are those of entities and of padding among the places that attention computes: means over
  many batches, with the compiled (rounded up) numbers of rows and widths.
- ppo: frames/s of acting and learning in a single process, against the environments alone with
  random legal actions.
- pool: each type of pool against a plain loop over the same games.

A step is one row of one environment, including rows that begin an episode.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks import entity_loop
from benchmarks.entity_attention import passes, shares, skewed
from benchmarks.report import Rate, Result, Timers, alternate, rate
from benchmarks.single_process import Ours
from rlstack.agents.ppo import PPOConfig
from rlstack.entity import BatchView
from rlstack.entity.games import GAMES
from rlstack.entity.scripted import SCRIPTED_POLICIES
from rlstack.envs import SyncEnv
from rlstack.networks.ragged.entity_layout import read_layout
from rlstack.programs.build import xla
from rlstack.programs.config.presets import preset
from rlstack.replay import ReplayConfig
from rlstack.types import PyTree, TimeStep

NAME = "entity"
TARGETS = {"batching": 5.0, "attention": 1.0, "ppo": 0.0, "pool": 0.0}
PADDING = 0.15  # maximum share of padding in packed rows
_NEVER = 10**12  # frames


class Setting(NamedTuple):
    """One comparison."""

    kind: str
    what: str
    num_envs: int
    seconds: float  # approximate length of one measurement
    repeats: int

    @property
    def name(self) -> str:
        """The setting's name in results."""
        return f"{self.kind}/{self.what}x{self.num_envs}"


FULL = (
    Setting("batching", "MultiSnake", 256, 0.5, 9),
    Setting("attention", "forward", 256, 1.0, 9),
    Setting("attention", "gradient", 256, 2.0, 7),
    Setting("ppo", "Count", 64, 2.0, 7),
    Setting("ppo", "MultiSnake", 64, 3.0, 7),
    Setting("pool", "MultiSnake/thread", 256, 0.5, 7),
    Setting("pool", "MultiSnake/process", 256, 0.5, 7),
    Setting("pool", "Count/thread", 256, 0.5, 7),
    Setting("pool", "Count/process", 256, 0.5, 7),
)
QUICK = tuple(
    setting._replace(
        seconds=0.1, repeats=3, num_envs=64 if setting.kind == "attention" else setting.num_envs
    )
    for setting in FULL
)


class Pair(NamedTuple):
    """Two ways to do the same work; each call makes `steps` steps."""

    ours: Callable[[], object]
    reference: Callable[[], object]
    steps: int
    where: dict[str, dict[str, float]]


def batching(setting: Setting, closing: list[Callable[[], None]]) -> Pair:
    """Makes ragged records and packed rows of one step of all environments.

    Raises:
      RuntimeError: the two sides give different results.
    """
    del closing
    timestep = snakes(setting.num_envs)
    game: Any = GAMES[setting.what].game(num_snakes=2)
    view = BatchView(game.obs_space, game.action_space)

    def ours() -> PyTree:
        observed = view.vec_obs(timestep)
        return observed, observed.packing()

    def reference() -> PyTree:
        observed = entity_loop.vec_obs(view.slots, timestep)
        return observed, entity_loop.packing(observed)

    ((one, our_rows), (other, their_rows)) = ours(), reference()
    alike = jax.tree.map(np.array_equal, one, other)
    if not all(jax.tree.leaves(alike)) or len(our_rows.entities) > len(their_rows.entities):
        raise RuntimeError(f"benchmarks.entity: both sides must do the same; got {alike}.")
    return Pair(ours, reference, setting.num_envs, {})


def snakes(num_envs: int) -> TimeStep:
    """Returns a step of games of two snakes after 1 to 40 steps of a scripted player."""
    rule, rows = SCRIPTED_POLICIES["MultiSnake"], []
    for seed in range(num_envs):
        env: Any = GAMES["MultiSnake"](num_snakes=2, seed=seed)
        timestep = env.reset()
        for _ in range(1 + seed % 40):
            action = {name: np.array(x, np.int32) for name, x in rule(env.last_observation).items()}
            timestep = env.step(action)
            if timestep.last():
                break
        rows.append((int(timestep.step_type), timestep.reward, timestep.observation))
    kind, reward, observation = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    ones = np.ones(num_envs, np.float32)
    return TimeStep(kind.astype(np.int32), reward.astype(np.float32), ones, observation)


def attention(setting: Setting, closing: list[Callable[[], None]]) -> Pair:
    """Runs the network on batches, with packing against without."""
    del closing
    spec, make = skewed(setting.num_envs)
    layout, rng = read_layout(spec.observation, spec.action), np.random.default_rng(0)
    batches = [make(rng) for _ in range(3)]
    where = {"packed": shares(layout, [make(rng) for _ in range(100)])}
    return Pair(
        passes(spec, setting.what, batches, "always"),
        passes(spec, setting.what, batches, "never"),
        len(batches) * setting.num_envs,
        where,
    )


class Playing:
    """A pool of one game, played with random legal actions."""

    def __init__(self, game: str, num_envs: int, executor: str, options: dict[str, Any]):
        workers = None if executor == "for_loop" else 2
        name = f"rlstack.entity.games:{game}"
        self.env = SyncEnv(name, num_envs, executor, seed=1, options=options, num_workers=workers)
        self._rng = np.random.default_rng(0)
        self._timestep = self.env.reset()

    def steps(self, steps: int) -> None:
        """Makes this many steps."""
        for _ in range(steps):
            self._timestep = self.env.step(self._actions())

    def _actions(self) -> dict[str, np.ndarray]:
        observation: PyTree = self._timestep.observation
        chosen = {}
        for name, actors in observation["actors"].items():
            legal = observation["action_mask"][name].reshape(*actors.shape, -1)
            drawn = self._rng.random(legal.shape, np.float32) + 1e-3
            chosen[name] = (legal * drawn).argmax(axis=-1).astype(np.int32)
        return chosen


def ppo(setting: Setting, closing: list[Callable[[], None]]) -> Pair:
    """Acts and learns, against the environments alone; each call makes two unrolls."""
    unroll = 16
    found = preset(
        {"Count": "entity-count-ppo", "MultiSnake": "entity-multi-snake-ppo"}[setting.what]
    )
    assert isinstance(found.agent, PPOConfig)
    experiment = dataclasses.replace(
        found,
        agent=dataclasses.replace(found.agent, num_minibatches=4),
        env=dataclasses.replace(found.env, num_envs=setting.num_envs),
        replay=ReplayConfig(
            sampler="fifo",
            batch_size=setting.num_envs,
            unroll_length=unroll,
            max_size=2 * setting.num_envs,
        ),
        frames=_NEVER,
        checkpoint_period=_NEVER,
    )
    ours = Ours(experiment)
    closing.append(ours.program.close)
    alone = Playing(setting.what, setting.num_envs, "for_loop", dict(found.env.options))
    closing.append(alone.env.close)
    ours.train(unroll + 1)
    timers = Timers()
    with timers.on(*ours.methods()):
        start = time.perf_counter()
        ours.train(2 * unroll)
        total = time.perf_counter() - start
    where = {label: share for label, share in timers.shares(total).items() if share > 0}
    return Pair(
        functools.partial(ours.train, 2 * unroll),
        functools.partial(alone.steps, 2 * unroll),
        2 * unroll * setting.num_envs,
        {"ours": where},
    )


def pool(setting: Setting, closing: list[Callable[[], None]]) -> Pair:
    """Steps the same games in a pool of another type, against a plain loop."""
    game, executor = setting.what.split("/")
    sides = [Playing(game, setting.num_envs, kind, {}) for kind in (executor, "for_loop")]
    closing.extend(side.env.close for side in sides)
    ours, reference = (functools.partial(side.steps, 4) for side in sides)
    return Pair(ours, reference, 4 * setting.num_envs, {})


_MAKE = {"batching": batching, "attention": attention, "ppo": ppo, "pool": pool}


def measure(setting: Setting, result: Result) -> None:
    """Compares the two sides of one setting and adds the result."""
    closing: list[Callable[[], None]] = []
    try:
        pair = _MAKE[setting.kind](setting, closing)
        sides = [_rate(work, pair.steps, setting.seconds) for work in pair[:2]]
        result.add(setting.name, alternate(sides[0], sides[1], setting.repeats), pair.where)
    finally:
        for close in closing:
            close()


def _rate(work: Callable[[], object], steps: int, seconds: float) -> Rate:
    """Returns the rate of the work, repeated for about this many seconds."""
    work()  # compiles
    calls = max(1, round(seconds * rate(1, work)))

    def run() -> None:
        for _ in itertools.repeat(None, calls):
            work()

    return lambda: rate(calls * steps, run)


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; prints tables and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.entity")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--only", default="", metavar="TEXT", help="settings with TEXT in the name")
    args = parser.parse_args(arguments)
    settings = [s for s in (QUICK if args.quick else FULL) if args.only in s.name]
    if not settings:
        parser.error(f"--only: no setting has a name that contains {args.only!r}")
    xla.configure(convolutions=False)
    result = Result.empty(NAME)
    for setting in settings:
        print(f"{setting.name} ...", file=sys.stderr, flush=True)
        measure(setting, result)
    for kind, target in TARGETS.items():
        part = Result.empty(NAME)
        for field in ("ratios", "medians", "spread", "where"):
            found = getattr(result, field)
            getattr(part, field).update({k: v for k, v in found.items() if k.startswith(kind)})
        if part.ratios:
            print(part.table(target))
    print(result.line())


if __name__ == "__main__":
    main()
