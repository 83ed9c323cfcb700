"""The rules by which a sample must wait, in words and numbers that all backends share."""

from __future__ import annotations

from typing import NamedTuple

from rlstack.replay.base import ReplayConfig


class Counts(NamedTuple):
    """What a table and its reader have counted."""

    inserts: int  # items inserted, ever
    samples: int  # items sampled, ever
    held: int  # items that can be sampled
    version: int  # the newest params version


def exceeds_samples_per_insert(
    cfg: ReplayConfig, inserts: int, samples: int, batch_size: int
) -> bool:
    """Whether so many more samples would exceed the rate limit."""
    if cfg.samples_per_insert is None:
        return False
    allowed = cfg.samples_per_insert * (inserts - cfg.min_size) + cfg.tolerance
    return samples + batch_size > allowed


def explain_rule(cfg: ReplayConfig, rule: str, batch_size: int, counted: Counts) -> str:
    """Returns the rule that a sample of this size would break, what came, and the way out.

    Args:
      cfg: the table.
      rule: "min_size", "items", "round" or "samples_per_insert".
      batch_size: items asked for.
      counted: the table's counters.
    """
    return {
        "min_size": f"{cfg.min_size} items must have been inserted (min_size); got "
        f"{counted.inserts}. Add more, or lower min_size.",
        "items": f"batch_size ({batch_size}) must be covered by the items held; got "
        f"{counted.held}. Add more, or lower batch_size.",
        "round": f"min_actors ({cfg.min_actors}) must have an item of params version "
        f"{counted.version} of each of their environments, and the others grace_seconds "
        f"({cfg.grace_seconds:g}) to follow; got {counted.held} items in all. Add more, or lower "
        "min_actors.",
        "samples_per_insert": f"{batch_size} more than the {counted.samples} items sampled so far "
        f"would exceed samples_per_insert for {counted.inserts} inserts. Add more, or raise "
        "samples_per_insert or its tolerance.",
    }[rule]
