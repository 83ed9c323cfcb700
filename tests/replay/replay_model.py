"""A slow replay in plain Python that defines what backends must do, and steps to feed both."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import jax
import numpy as np

from rlstack.replay import ReplayClosedError, ReplayConfig, Sample
from rlstack.types import StartSpec, TimeStep, Trajectory, Transition

FIRST, MID, LAST = 0, 1, 2


class Output(NamedTuple):
    action: np.ndarray
    value: np.ndarray


def make_transition(envs, ordinals, step_types, versions=None) -> Transition:
    """Steps whose every leaf encodes the environment and the position in its stream."""
    envs, ordinals = np.asarray(envs, np.int32), np.asarray(ordinals, np.int32)
    versions = np.zeros(len(envs)) if versions is None else versions
    code = envs * 100_000 + ordinals
    observation = {"code": code, "image": np.stack([code % 251, code % 241], 1).astype(np.uint8)}
    zeros = np.zeros(len(envs), np.float32)
    return Transition(
        TimeStep(
            np.asarray(step_types, np.int32),
            code.astype(np.float32),
            zeros,
            observation,
            {"cost": 0.5 * code.astype(np.float32), "level": (code % 7).astype(np.int8)},
        ),
        Output(np.stack([code, -code], 1), zeros),
        code,
        np.asarray(versions, np.int32),
    )


# One environment's step, as `rlstack.acting.actor.transition_spec` describes it for an agent that
# reads its state at the first step of an item only.
SPEC = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), make_transition([0], [0], [MID])
)._replace(agent_state=StartSpec((), np.int32))


def items_of(trajectory: Trajectory, step_types: dict) -> list[tuple[int, int]]:
    """Returns (env, ordinal of the first step) of each item, after checking all its leaves."""
    code = np.asarray(trajectory.timestep.observation["code"])
    envs, ordinals = code // 100_000, code % 100_000
    assert (envs == envs[0]).all(), "a window mixes environments"
    assert (np.diff(ordinals, axis=0) == 1).all(), "a window skips or repeats a step"
    image = np.stack([code % 251, code % 241], -1)
    np.testing.assert_array_equal(trajectory.timestep.observation["image"], image)
    np.testing.assert_array_equal(trajectory.agent_output.action, np.stack([code, -code], -1))
    np.testing.assert_array_equal(trajectory.timestep.reward, code.astype(np.float32))
    np.testing.assert_array_equal(trajectory.timestep.extras["cost"], 0.5 * code)
    np.testing.assert_array_equal(trajectory.timestep.extras["level"], code % 7)
    expected = [
        [step_types[e, o] for e, o in zip(*rows, strict=True)]
        for rows in zip(envs, ordinals, strict=True)
    ]
    np.testing.assert_array_equal(trajectory.timestep.step_type, expected)
    state = np.asarray(trajectory.agent_state)  # of all steps if the buffer was made without SPEC
    assert len(state) in (1, len(code))
    np.testing.assert_array_equal(state, code[: len(state)])
    return list(zip(envs[0].tolist(), ordinals[0].tolist(), strict=True))


def config(sampler="uniform", **changes) -> ReplayConfig:
    fields = {"sampler": sampler, "batch_size": 4, "unroll_length": 3, "max_size": 8}
    return ReplayConfig(**{**fields, **changes})


def feed(buffer, num_envs, first, last, versions=None, step_types=None):
    """Adds steps first..last-1 of every environment."""
    for t in range(first, last):
        types = [MID] * num_envs if step_types is None else step_types(t)
        version = None if versions is None else [versions(t)] * num_envs
        buffer.add(None, make_transition(range(num_envs), [t] * num_envs, types, version))


def drain(buffer):
    """Samples until no sample is available."""
    while buffer.can_sample():
        yield buffer.sample()


class _EveryStepIsMid(dict):
    def __missing__(self, key):
        return MID


def drawn(sample):
    return items_of(sample.batch.trajectory, _EveryStepIsMid())


class Item:
    def __init__(self, env: int, first: int, turn: int):
        self.env, self.first, self.turn, self.times = env, first, turn, 0


class Model:
    """The items held after a history of calls; ``waits`` as in the fixture of that name."""

    def __init__(self, cfg: ReplayConfig, num_envs: int, waits: bool = False):
        self.cfg, self.per_env = cfg, cfg.items_per_env(num_envs)
        self.waits = waits
        self.refused: int | None = None  # the batch size that can_sample refused last
        self.known: set[int] = set()  # environments that a writer has claimed
        self.step_types: dict[tuple[int, int], int] = {}
        self.ordinal = [0] * num_envs  # steps added
        self.clock = [0] * num_envs  # the same, rounded up to a multiple of the period at a gap
        self.unbroken = [0] * num_envs  # the clock after the last gap
        self.items: list[Item] = []  # in order of completion
        self.inserts = self.samples = self.dropped = 0

    def add(self, env: int, step_type: int) -> None:
        self.step_types[env, self.ordinal[env]] = step_type
        self.ordinal[env] += 1
        self._tick(env)

    def _tick(self, env: int) -> None:
        cfg = self.cfg
        start = self.clock[env] - cfg.unroll_length
        self.clock[env] += 1
        if start < 0 or start % cfg.step_period:
            return
        turn = start // cfg.step_period
        if not (self.waits and cfg.sampler == "fifo"):  # there, add has waited before this point
            self._leave([i for i in self.items if i.env == env and i.turn <= turn - self.per_env])
        first = self.ordinal[env] - 1 - cfg.unroll_length
        broken = start < self.unbroken[env]
        if broken or (cfg.starts == "not_last" and self.step_types[env, first] == LAST):
            return
        self.items.append(Item(env, first, turn))
        self.inserts += 1

    def settle(self) -> None:
        """Ends a call of add: drops the oldest items of a fifo that is too long."""
        if self.cfg.sampler == "fifo" and not self.waits:
            self._leave(self.items[: max(0, len(self.items) - self.cfg.max_size)])

    def must_wait(self, envs) -> bool:
        """Drops the items that would make add wait for ever; returns whether add waits."""
        self.known.update(envs)
        if not self.waits:
            return False
        while self._blocked(envs):
            if self.refused is None or self.can_sample(self.refused):
                return True
            if self.cfg.sampler != "fifo" or not self.items or len(self.known) < len(self.clock):
                return True
            full = [i for i in self.items if self._is_full(i)]
            self._leave(full or self.items[: len(self.clock)])
        return False

    def _is_full(self, item: Item) -> bool:
        ends = (item.turn + self.per_env) * self.cfg.step_period + self.cfg.unroll_length
        return self.clock[item.env] >= ends

    def _blocked(self, envs) -> bool:
        cfg = self.cfg
        if cfg.sampler == "fifo":
            if any(item.env in envs and self._is_full(item) for item in self.items):
                return True
            starts = [self.clock[env] - cfg.unroll_length for env in envs]
            coming = sum(start >= 0 and start % cfg.step_period == 0 for start in starts)
            held = len(self.items)
            if coming and held >= cfg.batch_size and held + coming > cfg.max_size:
                return True
        if cfg.samples_per_insert is None:
            return False
        if self.refused is not None and not self._has_items(self.refused):
            return False  # the reader waits too, but not because of the ratio
        ahead = cfg.samples_per_insert * (self.inserts - cfg.min_size) - self.samples
        batch_size = max(cfg.batch_size, self.refused or 0)
        return ahead > max(cfg.tolerance, batch_size - cfg.tolerance)

    def gap(self, env: int) -> None:
        self.known.add(env)
        self.unbroken[env] = -(-self.clock[env] // self.cfg.step_period) * self.cfg.step_period
        while self.clock[env] < self.unbroken[env]:
            self._tick(env)

    def _leave(self, items: list[Item]) -> None:
        self.items = [i for i in self.items if i not in items]
        if self.cfg.sampler == "fifo":
            self.dropped += len(items)

    def can_sample(self, batch_size: int) -> bool:
        cfg = self.cfg
        if not self._has_items(batch_size) or cfg.samples_per_insert is None:
            return self._has_items(batch_size)
        allowed = cfg.samples_per_insert * (self.inserts - cfg.min_size) + cfg.tolerance
        return self.samples + batch_size <= allowed

    def _has_items(self, batch_size: int) -> bool:
        cfg = self.cfg
        if self.inserts < cfg.min_size or not self.items:
            return False
        if cfg.sampler == "fifo" and len(self.items) < batch_size:
            return False
        left = sum(cfg.times_limit - i.times for i in self.items)
        return cfg.sampler == "fifo" or not cfg.times_limit or left >= batch_size

    def check_sample(self, sample: Sample, batch_size: int) -> None:
        got = items_of(sample.batch.trajectory, self.step_types)
        assert len(got) == batch_size and sample.keys.shape == (batch_size,)
        assert sample.keys.dtype == np.uint64 and sample.batch.weights.dtype == np.float32
        held = {(i.env, i.first): i for i in self.items}
        if self.cfg.sampler == "fifo":
            assert got == list(held)[:batch_size]
        assert set(got) <= set(held), "an item that is not held was sampled"
        if self.cfg.sampler != "prioritized":
            assert (sample.batch.weights == 1).all()
        for item in got:
            held[item].times += 1
        if self.cfg.times_limit:
            assert all(i.times <= self.cfg.times_limit for i in self.items)
            self.items = [i for i in self.items if i.times < self.cfg.times_limit]
        self.samples += batch_size


def check_close_wakes(buffer, wait):
    """Closing a buffer ends a wait in another thread within a second."""
    raised = []

    def waits():
        try:
            wait()
        except ReplayClosedError as error:
            raised.append(error)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive()
    start = time.monotonic()
    buffer.close()
    thread.join(timeout=5)
    assert raised and time.monotonic() - start < 1
