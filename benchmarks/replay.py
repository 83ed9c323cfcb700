"""Replay against plain memory copies and other libraries: `python -m benchmarks.replay [--quick]`.

Steps are as in Atari: four stacked frames of 84 x 84, from 32 environments. The references:

- sample: numpy's gather of the same bytes by index, into one buffer that is reused.
- insert: numpy's copy of the same bytes into the same kind of memory. Shared memory has small pages
  on some systems (/sys/kernel/mm/transparent_hugepage/shmem_enabled), which makes copying slower;
  "anonymous" compares with ordinary memory, which has large pages.

flashbax and Stable-Baselines3 are measured too where they are installed; they are not dependencies.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.report import Rate, Result, alternate, rate
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.shared_memory import SharedMemReplayBuffer
from rlstack.replay.shared_memory.block import Block
from rlstack.types import StepType, TimeStep, Transition

NAME = "replay"
TARGET = 0.7
NUM_ENVS = 32
FRAME = (84, 84, 4)
BATCH = 256
ROWS = 300  # stored steps of each environment; 270 MB in all


class Output(NamedTuple):
    """The agent output of DQN."""

    action: np.ndarray


def make_step(seed: int) -> Transition:
    """Returns a step of all environments."""
    rng = np.random.default_rng(seed)
    zeros = np.zeros(NUM_ENVS, np.float32)
    return Transition(
        TimeStep(
            np.full(NUM_ENVS, StepType.MID, np.int32),
            zeros,
            zeros + 1,
            rng.integers(0, 256, (NUM_ENVS, *FRAME), np.uint8),
        ),
        Output(np.zeros(NUM_ENVS, np.int32)),
        (),
        np.zeros(NUM_ENVS, np.int32),
    )


def config(sampler: str, batch_size: int) -> ReplayConfig:
    """Returns a table of single transitions."""
    return ReplayConfig(
        sampler=sampler,  # type: ignore[arg-type]
        batch_size=batch_size,
        unroll_length=1,
        max_size=(ROWS - 1) * NUM_ENVS,
        starts="not_last",
    )


def make_buffer(kind: str, sampler: str, batch_size: int, stack: ExitStack) -> Any:
    """Returns a full buffer, closed with the stack."""
    step, cfg = make_step(0), config(sampler, batch_size)
    spec = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), step)
    make: Any = {"in_process": InProcessReplay, "shared_memory": SharedMemReplayBuffer}[kind]
    buffer = make(cfg, NUM_ENVS, seed=0, spec=spec)
    stack.callback(buffer.close)
    writer = buffer.handle().attach() if kind == "shared_memory" else buffer
    for _ in range(ROWS + 1):
        writer.add(None, step)
    if kind == "shared_memory":
        writer.close()
    return buffer


def ours_sampling(buffer: Any, samples: int) -> Rate:
    """Returns items per second."""

    def work() -> None:
        for _ in range(samples):
            buffer.sample()

    return lambda: rate(samples * BATCH, work)


def gathering(batch_size: int, samples: int) -> Rate:
    """Returns items per second of numpy's gather; an item has two observations."""
    ring = np.repeat(make_step(0).timestep.observation[None], ROWS, 0).reshape(-1, *FRAME)
    out = np.empty((2, batch_size, *FRAME), np.uint8)
    rng = np.random.default_rng(0)

    def work() -> None:
        for _ in range(samples):
            starts = rng.integers(0, len(ring) - NUM_ENVS, batch_size)
            np.take(ring, np.stack([starts, starts + NUM_ENVS]), axis=0, out=out, mode="clip")

    return lambda: rate(samples * batch_size, work)


def ours_inserting(buffer: Any, steps: int) -> Rate:
    """Returns environment steps per second of a writer."""
    step = make_step(1)
    if isinstance(buffer, SharedMemReplayBuffer):
        buffer = buffer.handle().attach()  # as another process would write

    def work() -> None:
        for _ in range(steps):
            buffer.add(None, step)

    return lambda: rate(steps * NUM_ENVS, work)


def copying(steps: int, shared: bool, stack: ExitStack) -> Rate:
    """Returns environment steps per second of copying their observations."""
    observation = make_step(1).timestep.observation
    shape = (ROWS, *observation.shape)
    if shared:
        block = Block.create(int(np.prod(shape)))
        stack.callback(block.unlink)
        ring: np.ndarray = np.ndarray(shape, np.uint8, block.memory)
    else:
        ring = np.zeros(shape, np.uint8)

    def work() -> None:
        for i in range(steps):
            np.copyto(ring[i % ROWS], observation)

    work()
    return lambda: rate(steps * NUM_ENVS, work)


def flashbax_rates(samples: int, steps: int) -> tuple[Rate, Rate]:
    """Returns (sampling, inserting) of flashbax's flat buffer."""
    import flashbax

    step = make_step(0)
    item = {
        "observation": jax.numpy.asarray(step.timestep.observation),
        "action": jax.numpy.asarray(step.agent_output.action),
        "reward": jax.numpy.asarray(step.timestep.reward),
        "discount": jax.numpy.asarray(step.timestep.discount),
    }
    buffer = flashbax.make_flat_buffer(
        max_length=ROWS * NUM_ENVS,
        min_length=BATCH,
        sample_batch_size=BATCH,
        add_batch_size=NUM_ENVS,
    )
    add, sample = jax.jit(buffer.add, donate_argnums=0), jax.jit(buffer.sample)
    state = buffer.init(jax.tree.map(lambda x: x[0], item))
    for _ in range(ROWS):
        state = add(state, item)
    held, key = [state], jax.random.PRNGKey(0)

    def sampling() -> None:
        for _ in range(samples):
            jax.block_until_ready(sample(held[0], key))

    def inserting() -> None:
        for _ in range(steps):
            held[0] = add(held[0], item)
        jax.block_until_ready(held[0])

    sampling()
    return (lambda: rate(samples * BATCH, sampling)), (lambda: rate(steps * NUM_ENVS, inserting))


def sb3_rates(samples: int, steps: int) -> tuple[Rate, Rate]:
    """Returns (sampling, inserting) of Stable-Baselines3's buffer; it stores each frame twice."""
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    step = make_step(0)
    observation = np.asarray(step.timestep.observation).transpose(0, 3, 1, 2)
    space = spaces.Box(0, 255, observation.shape[1:], np.uint8)
    buffer = ReplayBuffer(
        ROWS * NUM_ENVS,
        space,
        spaces.Discrete(4),
        n_envs=NUM_ENVS,
        handle_timeout_termination=False,
    )
    action = np.zeros((NUM_ENVS, 1), np.int64)
    zeros = np.zeros(NUM_ENVS, np.float32)
    infos: list[dict] = [{}] * NUM_ENVS

    def inserting(count: int = steps) -> None:
        for _ in range(count):
            buffer.add(observation, observation, action, zeros, zeros, infos)

    def sampling() -> None:
        for _ in range(samples):
            buffer.sample(BATCH)

    inserting(ROWS)
    return (lambda: rate(samples * BATCH, sampling)), (lambda: rate(steps * NUM_ENVS, inserting))


PEERS: dict[str, tuple[str, Callable[[int, int], tuple[Rate, Rate]]]] = {
    "flashbax": ("flashbax", flashbax_rates),
    "sb3": ("stable_baselines3", sb3_rates),
}


def measure(samples: int, steps: int, repeats: int) -> Result:
    """Measures all settings."""
    result = Result.empty(NAME)
    for kind in ("in_process", "shared_memory"):
        with ExitStack() as stack:
            uniform = make_buffer(kind, "uniform", BATCH, stack)
            sampling, inserting = ours_sampling(uniform, samples), ours_inserting(uniform, steps)
            limit = gathering(BATCH, samples)
            result.add(f"sample/uniform/{kind}", alternate(sampling, limit, repeats), {})
            limit = copying(steps, kind == "shared_memory", stack)
            result.add(f"insert/{kind}", alternate(inserting, limit, repeats), {})
            if kind == "shared_memory":
                limit = copying(steps, False, stack)
                inserted = alternate(inserting, limit, repeats)
                result.add(f"insert/{kind}/anonymous", inserted, {})
            for name, (package, make_rates) in PEERS.items():
                if importlib.util.find_spec(package) is not None:
                    their_sampling, their_inserting = make_rates(samples, steps)
                    sampled = alternate(sampling, their_sampling, repeats)
                    result.add(f"sample/uniform/{kind}/{name}", sampled, {})
                    inserted = alternate(inserting, their_inserting, repeats)
                    result.add(f"insert/{kind}/{name}", inserted, {})
        with ExitStack() as stack:
            prioritized = make_buffer(kind, "prioritized", BATCH, stack)
            limit = gathering(BATCH, samples)
            sampled = alternate(ours_sampling(prioritized, samples), limit, repeats)
            result.add(f"sample/prioritized/{kind}", sampled, {})
    return result


def main(arguments: list[str] | None = None) -> None:
    """Runs the benchmark; prints a table and, as the last line, a JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    args = parser.parse_args(arguments)
    result = measure(20, 100, 3) if args.quick else measure(100, 1000, 9)
    print(result.table(TARGET))
    print(result.line())


if __name__ == "__main__":
    main()
