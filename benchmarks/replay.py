"""Replay against plain memory copies and other libraries: `python -m benchmarks.replay [--quick]`.

Steps are as in Atari: four stacked frames of 84 x 84, from 32 environments. The references:

- sample: numpy's gather of the same bytes by index, into one buffer that is reused.
- insert: numpy's copy of the same bytes. Its source and its target have the same address modulo 64,
  which makes copying fastest. Environments seldom return such arrays; in "insert/.../unaligned" the
  source is 16 bytes further, for both sides.

A reference has memory of the buffer's kind (shared or not) and alignment, mapped beforehand. The
system decides which memory gets large pages, so both sides are allocated anew for each measurement,
and each goes first every other time.

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

from benchmarks.report import Comparison, Rate, Result, alternate, rate
from rlstack.replay import InProcessReplay, ReplayConfig
from rlstack.replay.shared_memory import SharedMemReplayBuffer
from rlstack.replay.shared_memory.block import Block
from rlstack.types import StepType, TimeStep, Transition

NAME = "replay"
TARGET = 0.8
NUM_ENVS = 32
FRAME = (84, 84, 4)
BATCH = 256
ROWS = 300  # stored steps of each environment; 270 MB in all
KINDS = ("in_process", "shared_memory")
LINE = 64  # bytes

Make = Callable[[ExitStack], Rate]  # allocates one side, freed with the stack


def renewed(ours: Make, reference: Make, allocations: int) -> Comparison:
    """Compares the medians of both sides, each measured four times with each allocation."""
    pairs = []
    for i in range(allocations):
        with ExitStack() as stack:
            if i % 2:
                second = reference(stack)
                first = ours(stack)
            else:
                first = ours(stack)
                second = reference(stack)
            pairs.append(alternate(first, second, 4).medians)
    return Comparison(
        tuple(pair["ours"] for pair in pairs), tuple(pair["reference"] for pair in pairs)
    )


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


def make_ring(kind: str, stack: ExitStack) -> np.ndarray:
    """Returns the observations of all steps in memory as the buffer's, ``[ROWS, 32, ...]``."""
    shape = (ROWS, NUM_ENVS, *FRAME)
    if kind == "shared_memory":
        block = Block.create(int(np.prod(shape)))
        stack.callback(block.unlink)
        ring: np.ndarray = np.ndarray(shape, np.uint8, block.memory)
    else:
        ring = np.zeros(shape, np.uint8)
    ring[:] = make_step(0).timestep.observation
    return ring


def gathering(kind: str, samples: int, stack: ExitStack) -> Rate:
    """Returns items per second of numpy's gather; an item has two observations."""
    ring = make_ring(kind, stack).reshape(-1, *FRAME)
    out = np.empty((2, BATCH, *FRAME), np.uint8)
    rng = np.random.default_rng(0)

    def work() -> None:
        for _ in range(samples):
            starts = rng.integers(0, len(ring) - NUM_ENVS, BATCH)
            np.take(ring, np.stack([starts, starts + NUM_ENVS]), axis=0, out=out, mode="clip")

    return lambda: rate(samples * BATCH, work)


def placed(step: Transition, address: int) -> Transition:
    """Returns a step whose observation begins at this address modulo 64."""
    observation = step.timestep.observation
    memory = np.empty(observation.nbytes + LINE, np.uint8)
    first = (address - memory.ctypes.data) % LINE
    copy = memory[first : first + observation.nbytes].reshape(observation.shape)
    copy[:] = observation
    return step._replace(timestep=step.timestep._replace(observation=copy))


def ours_inserting(buffer: Any, steps: int, step: Transition) -> Rate:
    """Returns environment steps per second of a writer."""
    if isinstance(buffer, SharedMemReplayBuffer):
        buffer = buffer.handle().attach()  # as another process would write

    def work() -> None:
        for _ in range(steps):
            buffer.add(None, step)

    return lambda: rate(steps * NUM_ENVS, work)


def inserting(kind: str, steps: int, further: int, allocations: int) -> Comparison:
    """Compares writing steps with copying their observations.

    Args:
      kind: of buffer.
      steps: of each measurement.
      further: address of the source modulo 64, minus that of the target.
      allocations: number of measurements.
    """
    with ExitStack() as stack:
        address = make_ring(kind, stack).ctypes.data  # others have the same modulo 64
    step = placed(make_step(1), address + further)

    def ours(stack: ExitStack) -> Rate:
        return ours_inserting(make_buffer(kind, "uniform", BATCH, stack), steps, step)

    def copying(stack: ExitStack) -> Rate:
        ring = make_ring(kind, stack)

        def work() -> None:
            for i in range(steps):
                np.copyto(ring[i % ROWS], step.timestep.observation)

        return lambda: rate(steps * NUM_ENVS, work)

    return renewed(ours, copying, allocations)


def sampling(kind: str, sampler: str, samples: int, allocations: int) -> Comparison:
    """Compares sampling with gathering."""
    return renewed(
        lambda stack: ours_sampling(make_buffer(kind, sampler, BATCH, stack), samples),
        lambda stack: gathering(kind, samples, stack),
        allocations,
    )


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


def compare_peers(kind: str, samples: int, steps: int, repeats: int, result: Result) -> None:
    """Adds the ratios relative to the other libraries that are installed."""
    for name, (package, make_rates) in PEERS.items():
        if importlib.util.find_spec(package) is None:
            continue
        with ExitStack() as stack:
            buffer = make_buffer(kind, "uniform", BATCH, stack)
            their_sampling, their_inserting = make_rates(samples, steps)
            sampled = alternate(ours_sampling(buffer, samples), their_sampling, repeats)
            result.add(f"sample/uniform/{kind}/{name}", sampled, {})
            ours = ours_inserting(buffer, steps, make_step(1))
            result.add(f"insert/{kind}/{name}", alternate(ours, their_inserting, repeats), {})


def measure(samples: int, steps: int, repeats: int) -> Result:
    """Measures all settings."""
    result = Result.empty(NAME)
    for kind in KINDS:
        result.add(f"insert/{kind}", inserting(kind, steps, 0, repeats), {})
        result.add(f"insert/{kind}/unaligned", inserting(kind, steps, 16, repeats), {})
        for sampler in ("uniform", "prioritized"):
            sampled = sampling(kind, sampler, samples, repeats)
            result.add(f"sample/{sampler}/{kind}", sampled, {})
        compare_peers(kind, samples, steps, repeats, result)
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
