"""The rules that block a sample, for all backends: checks and explanations."""

from __future__ import annotations

from typing import NamedTuple

from rlstack.configs.replay import ReplayConfig


class Counts(NamedTuple):
    """Counters of a table and its reader."""

    inserts: int  # items inserted, ever
    samples: int  # items sampled, ever
    held: int  # items held now
    version: int  # the newest params version


def exceeds_samples_per_insert(
    cfg: ReplayConfig, inserts: int, samples: int, batch_size: int
) -> bool:
    """Whether ``batch_size`` more samples would exceed the rate limit."""
    if cfg.samples_per_insert is None:
        return False
    allowed = cfg.samples_per_insert * (inserts - cfg.min_size) + cfg.tolerance
    return samples + batch_size > allowed


def explain_rule(cfg: ReplayConfig, rule: str, batch_size: int, counts: Counts) -> str:
    """Describes a blocking rule in words, with its counters and possible remedies.

    Args:
      cfg: the rules of the table.
      rule: "min_size", "items", "round" or "samples_per_insert".
      batch_size: number of requested items.
      counts: the table's counters.
    """
    return {
        "min_size": f"{cfg.min_size} items must have been inserted (min_size); got "
        f"{counts.inserts}. Add more, or lower min_size.",
        "items": f"the table must hold enough items for batch_size ({batch_size}); got "
        f"{counts.held}. Add more, or lower batch_size.",
        "round": f"min_actors ({cfg.min_actors}) must have an item of params version "
        f"{counts.version} of each of their environments, and grace_seconds "
        f"({cfg.grace_seconds:g}) must pass or the other actors follow; got {counts.held} items in "
        "all. Add more, or lower min_actors.",
        "samples_per_insert": f"{batch_size} more than the {counts.samples} items sampled so far "
        f"would exceed samples_per_insert for {counts.inserts} inserts. Add more, or raise "
        "samples_per_insert or its tolerance.",
    }[rule]
