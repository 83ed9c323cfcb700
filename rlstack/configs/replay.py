"""The options of a replay: the rules of one table."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Literal

from rlstack.checks import Checked
from rlstack.references import Hook

# Why a Reverb table takes nothing that `ReplayConfig.needs_table` names.
NO_FACTORY = (
    "because Reverb's server, which is written in C++, draws the items and calls no Python for it"
)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig(Checked):
    """The rules of one table."""

    sampler: Literal["fifo", "uniform", "prioritized"]
    """Which items are sampled. fifo: each item once, in order of completion, for on-policy methods.
    uniform: with replacement. prioritized: with replacement, in proportion to
    priority ** priority_exponent."""
    batch_size: int
    """Items in one sample."""
    unroll_length: int
    """Transitions in one item (T). The item has T + 1 steps."""
    max_size: int
    """Largest number of items held. When the table is full, a new item replaces the oldest one. A
    fifo makes its writers wait instead. In a single process, a fifo replaces the oldest item too,
    and counts it as dropped. uniform and prioritized round the number up to a multiple of the
    number of environments."""
    max_size_per_env: int | None = None
    """Largest number of items held of one environment. Memory grows with it. Default: an even share
    of max_size; twice that for fifo, where environments of different speeds share the queue."""
    period: int | None = None
    """Steps between the starts of two items. Default: unroll_length for fifo (the last step of an
    item is the first of the next, so no transition is lost), 1 for the other samplers."""
    starts: Literal["any", "not_last"] = "any"
    """Steps at which items may start. any: every step that `period` allows. not_last: all of these
    except the last step of an episode. Choose not_last for one-step and n-step methods, because
    LAST -> FIRST is not a transition. The loss must mask episode boundaries that come later in an
    item."""
    context: int = 0
    """Steps at the beginning of every item, included in unroll_length, that only provide context,
    such as earlier frames. `starts` and an item's params version refer to the step after them."""
    frame_stack: int = 0
    """Number of frames in each stacked observation (k). Every frame is then stored only once; see
    `rlstack.replay.frame_stack`. 0: observations are stored unchanged."""
    min_size: int = 1
    """Items that must be inserted before the first sample."""
    samples_per_insert: float | None = None
    """Largest number of items sampled for each item inserted after min_size. None: no limit. Lower
    it if the learner reuses data too much."""
    samples_per_insert_tolerance: float | None = None
    """Number of sampled items by which readers or writers may be ahead of samples_per_insert before
    they wait. Default: batch_size. Raise it if either side waits too often."""
    max_times_sampled: int | None = None
    """Number of samples after which an item is removed. 0: no limit. Default: 1 for fifo, 0
    otherwise."""
    max_staleness: int | None = None
    """fifo only. Largest number of params versions that an item may be behind the newest version.
    Older items are dropped and counted. None: no limit."""
    min_actors: int = 0
    """fifo only. 0: batches have batch_size items. Above 0: batches are *rounds*. An actor has
    reported when each of its environments has an item of the newest params version; it then waits
    for newer params. A round is sampled when all actors have reported, or grace_seconds after this
    many have. It contains their items, and older ones that came too late for an earlier round."""
    grace_seconds: float = 1.0
    """Seconds that a round waits for the other actors after min_actors have reported. Raise it if
    most items come too late for their round (`replay/late` in the logs)."""
    timeout_seconds: float = 300.0
    """Longest time in seconds that `add` or `sample` waits, unless the call gives a timeout."""
    priority_exponent: float = 0.6
    """Exponent of priorities in sampling; 0 is uniform (alpha; Schaul et al. 2016, table 3)."""
    importance_exponent: float = 0.4
    """Initial exponent of importance weights; 1 corrects fully (beta; Schaul et al. 2016,
    table 3)."""
    importance_exponent_final: float = 1.0
    """Exponent of importance weights after importance_anneal_samples."""
    importance_anneal_samples: int = 0
    """Items sampled while importance_exponent moves linearly to its final value; 0: never."""
    demonstrations: str = ""
    """Directory of a dataset whose steps are in every batch besides those of the replay; `rlstack
    record` writes one. Batch.demonstrated tells them apart. Not for fifo."""
    demonstration_share: float = 0.5
    """Share of demonstrations in a batch, added to its batch_size items. 0.5 doubles the batch."""
    newest_share: float = 0.0
    """Share of each batch that is the items inserted last, with the weights of drawn ones. Not for
    fifo, nor with sampler_factory or max_times_sampled."""
    sampler_factory: Hook = ""
    """A sampler of your own instead of uniform or prioritized, as "module:callable" of a function
    () -> sampler, which chooses among the items held; see `rlstack.replay.custom`, and service."""
    item_processor: Hook = ""
    """What changes items where they are drawn, such as their goals in hindsight, as
    "module:callable" of a function (**options) -> processor; see `rlstack.replay.episodes`. Not for
    fifo. A Reverb server has none; see service."""
    item_processor_options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Arguments for item_processor, as names and values."""
    place: Literal["host", "device"] = "host"
    """Where the topology single_process has the steps. device: in the memory of the learner's
    device, where batches are drawn in the update; not for fifo. fused always has them there."""
    service: Literal["auto", "reverb", "table"] = "auto"
    """What holds the items in the topology distributed. reverb: a Reverb server. table: rlstack's
    own table in a node of its own; it draws with the run's seed, so that a run in lock-step equals
    a single process. auto: reverb where Reverb is installed, without sampler_factory,
    item_processor and newest_share; else table."""

    def __post_init__(self) -> None:
        """Checks every range.

        Raises:
          ValueError: a field is out of range, or two fields contradict each other.
        """
        super().__post_init__()
        require, fifo = self.require, self.sampler == "fifo"
        self.require_at_least(1, "batch_size", "unroll_length", "max_size", "min_size")
        fits = self.period is None or 1 <= self.period <= self.unroll_length
        require("period", fits, f"in 1..unroll_length ({self.unroll_length}), or None")
        if self.max_size_per_env is not None:
            require("max_size_per_env", self.max_size_per_env >= 1, "at least 1, or None")
        fits = 0 <= self.context < self.unroll_length
        require("context", fits, f"in 0..unroll_length - 1 ({self.unroll_length - 1})")
        require("frame_stack", self.frame_stack == 0 or self.frame_stack > 1, "0, or at least 2")
        fits = self.max_size >= self.batch_size
        require("max_size", fits, f"at least batch_size ({self.batch_size})")
        if self.samples_per_insert is not None:
            positive = self.samples_per_insert > 0
            require("samples_per_insert", positive, "positive, or None for no limit")
        require("samples_per_insert_tolerance", self.tolerance >= 0, "at least 0, or None")
        rule = "at least 1 for fifo; otherwise the queue never drains" if fifo else "at least 0"
        require("max_times_sampled", self.times_limit >= fifo, rule)
        if self.max_staleness is not None:
            require("max_staleness", fifo, "None unless the sampler is fifo")
            require("max_staleness", self.max_staleness >= 0, "at least 0, or None")
        require("min_actors", fifo or not self.min_actors, "0 unless the sampler is fifo")
        free = self.min_size == 1 and self.samples_per_insert is None
        rule = "0 with min_size or samples_per_insert, because actors wait for the next round"
        require("min_actors", free or not self.min_actors, rule)
        for name in ("min_actors", "grace_seconds"):
            require(name, 0 <= getattr(self, name) < math.inf, "finite and at least 0")
        lasts = 0 < self.timeout_seconds < math.inf
        require(
            "timeout_seconds", lasts, "positive and finite; otherwise a run could wait for ever"
        )
        for name in ("priority_exponent", "importance_exponent", "importance_exponent_final"):
            require(name, 0 <= getattr(self, name) <= 1, "in 0..1")
        self.require_at_least(0, "importance_anneal_samples")
        require("demonstration_share", 0 < self.demonstration_share < 1, "in (0, 1)")
        rule = "empty with the sampler fifo, because on-policy agents learn from their own steps"
        require("demonstrations", not (self.demonstrations and fifo), rule)
        if self.sampler_factory:
            fits = isinstance(self.sampler_factory, str) or callable(self.sampler_factory)
            require("sampler_factory", fits, '"module:callable", or a callable')
            rule = "empty with the sampler fifo, which samples each item once, in order"
            require("sampler_factory", not fifo, rule)
            rule = "0 or None with sampler_factory, whose draws may repeat an item"
            require("max_times_sampled", not self.times_limit, rule)
        most = 0 if fifo or self.sampler_factory or self.times_limit else 1
        rule = "in [0, 1], and 0 with the sampler fifo, sampler_factory or max_times_sampled"
        require("newest_share", 0 <= self.newest_share <= most, rule)
        plain = not (self.item_processor and (fifo or self.context or self.frame_stack))
        require("item_processor", plain, "empty with the sampler fifo, context or frame_stack")
        fits = self.item_processor != "" or not self.item_processor_options
        require("item_processor_options", fits, "empty without item_processor")

    @property
    def needs_table(self) -> str:
        """The first given field that only rlstack's own tables have, "" for none."""
        names = "sampler_factory", "item_processor", "newest_share"
        return next((name for name in names if getattr(self, name)), "")

    @property
    def step_period(self) -> int:
        """Steps between the starts of two items, with the default filled in."""
        if self.period is not None:
            return self.period
        return self.unroll_length if self.sampler == "fifo" else 1

    @property
    def times_limit(self) -> int:
        """Number of samples until an item is removed (0: no limit), with the default filled in."""
        if self.max_times_sampled is not None:
            return self.max_times_sampled
        return 1 if self.sampler == "fifo" else 0

    @property
    def chosen_service(self) -> Literal["reverb", "table"]:
        """The service for this machine in the topology distributed, with auto resolved."""
        if self.service != "auto":
            return self.service
        found = importlib.util.find_spec("reverb") is not None
        return "reverb" if found and not self.needs_table else "table"

    @property
    def tolerance(self) -> float:
        """The tolerance in sampled items, with the default filled in."""
        if self.samples_per_insert_tolerance is not None:
            return self.samples_per_insert_tolerance
        return float(self.batch_size)

    def items_per_env(self, num_envs: int) -> int:
        """Largest number of items held of one environment, with the default filled in."""
        if self.max_size_per_env is not None:
            return min(self.max_size_per_env, self.max_size)
        share = -(-self.max_size // num_envs)
        return min(2 * share, self.max_size) if self.sampler == "fifo" else share
