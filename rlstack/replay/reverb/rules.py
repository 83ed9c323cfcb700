"""The rules of a table, as Reverb's tables keep them: pure functions of config and counters."""

from __future__ import annotations

from typing import NamedTuple

from rlstack.replay.base import ReplayConfig
from rlstack.replay.limits import exceeds_samples_per_insert

ENDLESS = 1e300
LARGEST_BATCHED = 65_536  # bytes of an item
SMALL_ITEM = 8192  # bytes, a few times what Reverb spends on any


class TableInfo(NamedTuple):
    """What a table has counted."""

    size: int  # items held
    inserts: int  # items inserted, ever
    samples: int  # items sampled, ever, by all readers; what they prefetch included


class Limits(NamedTuple):
    """Reverb's rate limiter. Its measure is ``inserts * samples_per_insert - samples``."""

    samples_per_insert: float
    min_diff: float  # a sample may not take the measure below
    max_diff: float  # an insert may not take it above


def limits(cfg: ReplayConfig, num_envs: int) -> Limits:
    """Returns the rate limiter that means what the config says.

    A fifo with room for N is a queue: the N+1st insert waits. With samples_per_insert it loses its
    oldest items instead, because a reader that may not sample and a writer without room would wait
    for each other. The other samplers: sampling stops where ``ReplayConfig`` says; inserting stops
    as many items ahead of the ratio as the tolerance, but never so early that a batch could not be
    sampled. Where items wear out before the ratio is reached, inserting is free.
    """
    ratio = cfg.samples_per_insert
    if cfg.sampler == "fifo":
        endless = ratio is not None
        return Limits(1.0, *((-ENDLESS, ENDLESS) if endless else (0.0, capacity(cfg, num_envs))))
    if ratio is None:
        return Limits(1.0, -ENDLESS, ENDLESS)
    low = ratio * cfg.min_size - cfg.tolerance
    if cfg.times_limit and ratio >= cfg.times_limit:
        return Limits(ratio, low, ENDLESS)
    # Items come in one by one: where one more has no room, a batch must be there to be taken.
    width = max(2 * cfg.tolerance, cfg.batch_size + ratio, 2 * max(1.0, ratio))
    return Limits(ratio, low, max(low + width, cfg.batch_size + ratio))


def capacity(cfg: ReplayConfig, num_envs: int) -> int:
    """Returns how many items the table holds, of all environments together."""
    items = cfg.items_per_env(num_envs) * num_envs
    return min(items, cfg.max_size) if cfg.sampler == "fifo" else items


def is_whole(cfg: ReplayConfig, step_bytes: int) -> bool:
    """Whether items are written as one piece each, not as references to steps stored once.

    One piece is written and sampled faster and is visible at once. It repeats the steps that items
    share. Of small steps that costs less than the references would (one item a step, steps of
    CartPole, 100k items: with T = 8 in at 79k a second against 37k, out at 280k against 115k, in
    196 MB against 198; with T = 80 at 62k against 6k, 175k against 21k, 350 MB against 652). For
    large steps the memory decides (Atari frames, T = 80, period 40: 169 kB an item against 86). A
    fifo must show its items at once, or learner and actors could wait for each other.
    """
    if cfg.sampler == "fifo" or cfg.unroll_length == cfg.step_period > 1:
        return True
    length = cfg.unroll_length + 1
    if length * step_bytes <= SMALL_ITEM:
        return True
    return length / cfg.step_period <= (2.1 if step_bytes <= 1024 else 1.25)


def is_batched(cfg: ReplayConfig, step_bytes: int) -> bool:
    """Whether readers that sample ahead get whole batches from the server's process.

    See `rlstack.replay.reverb.batches`. Not a fifo's: its reader decides item by item, by their age
    and writer. Of large items few make a batch, and Reverb sends them compressed.
    """
    return cfg.sampler != "fifo" and (cfg.unroll_length + 1) * step_bytes <= LARGEST_BATCHED


def default_prefetch(cfg: ReplayConfig) -> int:
    """Returns how many items a reader samples ahead unless told.

    Four batches, since a message of several costs little more than one of one; two where it
    matters that what is sampled is sampled late, by priority or by age.
    """
    return max(64, (4 if cfg.sampler == "uniform" else 2) * cfg.batch_size)


def in_flight(cfg: ReplayConfig) -> int:
    """Returns how many items Reverb's own threads sample ahead in the server's process.

    Eight batches, since threads that wake each other for less work spend the more on it; one where
    it matters that what is sampled is sampled late.
    """
    return max(64, (8 if cfg.sampler == "uniform" and is_plentiful(cfg) else 1) * cfg.batch_size)


def is_plentiful(cfg: ReplayConfig) -> bool:
    """Whether there is always another item to sample, once there is one."""
    return cfg.sampler != "fifo" and not cfg.times_limit and cfg.samples_per_insert is None


def is_early(cfg: ReplayConfig, room: int, info: TableInfo) -> bool:
    """Whether min_size is still to come; a full fifo waits for its reader, and it comes no more.

    Args:
      cfg: the table.
      room: items that the table holds; see `capacity`.
      info: what it has counted; its size is that of what nobody was handed yet.
    """
    waits = cfg.sampler == "fifo" and cfg.samples_per_insert is None
    full = waits and info.size >= room
    return info.inserts < cfg.min_size and not full


def shortage(cfg: ReplayConfig, info: TableInfo, missing: int) -> str:
    """Returns why the table would not give so many more items now, or nothing."""
    if info.size < (missing if cfg.sampler == "fifo" else 1):
        return "items"
    if cfg.sampler == "fifo":
        return ""
    # Items that were pushed out before their last draw count here as if they were there.
    if cfg.times_limit and info.inserts * cfg.times_limit - info.samples < missing:
        return "items"
    if exceeds_samples_per_insert(cfg, info.inserts, info.samples, missing):
        return "samples_per_insert"
    return ""
