"""Converts a `ReplayConfig` to a Reverb table: pure functions of the config and of counters."""

from __future__ import annotations

from typing import NamedTuple

from rlstack.configs.replay import ReplayConfig
from rlstack.replay.base import exceeds_samples_per_insert

UNLIMITED = 1e300
LARGEST_BATCHED = 65_536  # bytes of an item
SMALL_ITEM = 8192  # bytes; a few times Reverb's own overhead for an item


class TableInfo(NamedTuple):
    """The counters of a Reverb table."""

    size: int  # items held
    inserts: int  # items inserted, ever
    samples: int  # items sampled, ever, by all readers, including prefetched ones


class RateLimits(NamedTuple):
    """Arguments of Reverb's rate limiter, which limits ``inserts * samples_per_insert - samples``.

    That difference must stay at or above ``min_diff`` after a sample, and at or below ``max_diff``
    after an insert.
    """

    samples_per_insert: float
    min_diff: float
    max_diff: float


def rate_limits(cfg: ReplayConfig, num_envs: int) -> RateLimits:
    """Returns the rate limiter that enforces the config.

    fifo: a queue of N items; insert N + 1 waits. With samples_per_insert the queue drops its oldest
    items instead; otherwise a reader that may not sample and a writer with a full queue would wait
    for each other.

    uniform, prioritized: sampling stops where `ReplayConfig` says. Inserting stops when it is ahead
    of the ratio by the tolerance, but not before a batch can be sampled. If max_times_sampled
    removes items before the ratio is reached, inserting is not limited.
    """
    ratio = cfg.samples_per_insert
    if cfg.sampler == "fifo":
        drops = ratio is not None
        return RateLimits(
            1.0, *((-UNLIMITED, UNLIMITED) if drops else (0.0, capacity(cfg, num_envs)))
        )
    if ratio is None:
        return RateLimits(1.0, -UNLIMITED, UNLIMITED)
    low = ratio * cfg.min_size - cfg.tolerance
    if cfg.times_limit and ratio >= cfg.times_limit:
        return RateLimits(ratio, low, UNLIMITED)
    # Items are inserted one by one. When the next one is refused, a whole batch must be available.
    width = max(2 * cfg.tolerance, cfg.batch_size + ratio, 2 * max(1.0, ratio))
    return RateLimits(ratio, low, max(low + width, cfg.batch_size + ratio))


def capacity(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns the number of items that the table can hold, of all environments together."""
    items = cfg.items_per_env(num_envs) * num_envs
    return min(items, cfg.max_size) if cfg.sampler == "fifo" else items


def is_whole(cfg: ReplayConfig, step_bytes: int) -> bool:
    """Whether each item is written as one piece, instead of references to steps stored once.

    One piece is written and sampled faster, and can be sampled immediately, but repeats the steps
    that items share. For small steps it takes less memory than references. Measured with steps of
    CartPole, one item per step, 100k items: for T = 8, writing at 79k items a second (references:
    37k), sampling at 280k (115k), 196 MB (198); for T = 80, writing at 62k (6k), sampling at 175k
    (21k), 350 MB (652). For large steps memory decides: Atari frames, T = 80, period 40 take 169 kB
    per item (references: 86). Items of a fifo must be available immediately; otherwise learner and
    actors could wait for each other.
    """
    if cfg.sampler == "fifo" or cfg.unroll_length == cfg.step_period > 1:
        return True
    length = cfg.unroll_length + 1
    if length * step_bytes <= SMALL_ITEM:
        return True
    return length / cfg.step_period <= (2.1 if step_bytes <= 1024 else 1.25)


def is_batched(cfg: ReplayConfig, step_bytes: int) -> bool:
    """Whether readers that prefetch receive whole batches from the server's process.

    See `rlstack.replay.reverb.server`. A fifo does not use them, because its reader chooses
    items one by one, by params version and environment. Large items do not use them, because a
    batch has few of them, and Reverb sends them compressed.
    """
    return cfg.sampler != "fifo" and (cfg.unroll_length + 1) * step_bytes <= LARGEST_BATCHED


def default_prefetch(cfg: ReplayConfig) -> int:
    """Returns the number of items that a reader prefetches by default.

    It is four batches, because a message of several batches costs little more than a message of
    one. It is two batches if priorities or params versions make new samples more valuable.
    """
    return max(64, (4 if cfg.sampler == "uniform" else 2) * cfg.batch_size)


def server_prefetch(cfg: ReplayConfig) -> int:
    """Returns the number of items that Reverb's threads prefetch in the server's process.

    It is eight batches, because waking threads for little work costs more than the work. It is one
    batch if new samples are more valuable.
    """
    return max(64, (8 if cfg.sampler == "uniform" and never_runs_out(cfg) else 1) * cfg.batch_size)


def never_runs_out(cfg: ReplayConfig) -> bool:
    """Whether there is always another item to sample after the first one."""
    return cfg.sampler != "fifo" and not cfg.times_limit and cfg.samples_per_insert is None


def before_min_size(cfg: ReplayConfig, max_items: int, info: TableInfo) -> bool:
    """Whether sampling must still wait for min_size.

    A full fifo makes its writers wait, so it can be sampled even below min_size.

    Args:
      cfg: the rules of the table.
      max_items: number of items that the table can hold; see `capacity`.
      info: the counters; ``size`` is the number of items that no reader has received yet.
    """
    writers_wait = cfg.sampler == "fifo" and cfg.samples_per_insert is None
    full = writers_wait and info.size >= max_items
    return info.inserts < cfg.min_size and not full


def blocking_rule(cfg: ReplayConfig, info: TableInfo, missing: int) -> str:
    """Returns the rule that blocks sampling ``missing`` more items now, or ""."""
    if info.size < (missing if cfg.sampler == "fifo" else 1):
        return "items"
    if cfg.sampler == "fifo":
        return ""
    # Items that were replaced before their last sample count as if they were still held.
    if cfg.times_limit and info.inserts * cfg.times_limit - info.samples < missing:
        return "items"
    if exceeds_samples_per_insert(cfg, info.inserts, info.samples, missing):
        return "samples_per_insert"
    return ""
