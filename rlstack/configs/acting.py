"""The options of acting: in actors, in inference services and in evaluations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

from rlstack.checks import Checked, are_distinct
from rlstack.references import Hook

EvaluationPeriod = int | Literal["auto", "off"]


@dataclasses.dataclass(frozen=True)
class InferencerConfig(Checked):
    """How an Inferencer keeps up with the learner."""

    sync_interval: int = 1
    """Batches between two requests for newer params. Raise it when the params are so large that
    taking new ones slows acting down; actions are then chosen by older params."""
    devices: tuple[int, ...] = ()
    """Devices for acting, by their index in jax.local_devices(). Several actors or services take
    them in turn. By default actors act on the CPU, services on those of inferencer.devices or JAX's
    default device, and a single process on the learner's first device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "sync_interval")
        self.require("devices", are_distinct(self.devices), "distinct and at least 0")


@dataclasses.dataclass(frozen=True)
class ServiceConfig(InferencerConfig):
    """How an inference service collects requests into batches."""

    max_batch: int = 256
    """Number of environments that fill a batch. A larger request becomes a batch by itself."""
    max_wait_ms: float = 1.0
    """Longest time in milliseconds that a request waits for others before its batch is computed. It
    begins when the request has arrived and the batch before it has ended."""
    live_s: float = 1.0
    """Seconds without a call after which batches no longer wait for a client."""
    lock_step: bool = False
    """Whether every batch contains all environments. Then a run gives the same results with any
    number of actors, but each step takes as long as the slowest environment."""
    batch_sizes: tuple[int, ...] = ()
    """Sizes to which batches are padded, in ascending order, so that few sizes are compiled. By
    default the powers of two up to max_batch."""
    timeout_s: float = 60.0
    """Seconds that a request may wait for its answer before its caller gets an error."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "max_batch")
        self.require_at_least(0, "max_wait_ms", "live_s")
        self.require("timeout_s", self.timeout_s > 0, "positive")
        sizes = itertools.pairwise((0, *self.batch_sizes))
        grow = all(small < large for small, large in sizes)
        self.require("batch_sizes", grow, "positive, in growing order")


@dataclasses.dataclass(frozen=True)
class EvaluatorConfig(Checked):
    """The evaluations of a run."""

    episodes: int = 20
    """Number of whole episodes in one evaluation."""
    num_envs: int = 10
    """Number of environments in parallel. Each plays the same number of episodes."""
    period: EvaluationPeriod = "auto"
    """Environment steps between evaluations during training. auto: a tenth of the run's frames, and
    at least 5,000; each environment plays one episode, and evaluations that would take more than a
    few hundredths of the time are left out. off: evaluates at the end only."""
    max_steps: int = 30_000
    """Longest episode, in steps. A longer one is cut and counts with its return so far, because the
    environment may never end it. The default is above the 27,000 steps of Atari's longest."""
    epsilon: float = 0.0
    """Probability of a uniformly random legal action in each step, for discrete actions. By default
    every action is the best one. Set it to compare with papers on Atari: 0.001 to 0.05."""
    video: int = 0
    """Every evaluation of this number leaves a video of one episode in the folder videos of the run
    directory; 0 for none. The extra video has the packages."""
    by_index: bool = False
    """Whether episode i is the same for all params, also for another num_envs: the one that the
    environment's reset_with_index(i) starts, or without that method the first episode of an
    environment with the seed of number i. Environments are then made for each num_envs episodes.
    Turn it on to compare runs, or checkpoints, episode by episode."""
    factory: Hook = ""
    """An evaluator of your own, as "module:callable" of a function (cfg, agent, rng_key) ->
    Evaluator of rlstack, such as a subclass of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "episodes", "num_envs", "max_steps")
        self.require_at_least(0, "video")
        self.require("epsilon", 0 <= self.epsilon <= 1, "in [0, 1]")
        if not isinstance(self.period, str):
            self.require_at_least(0, "period")
        rule = f"a multiple of num_envs ({self.num_envs}), so that each plays the same number"
        self.require("episodes", self.episodes % self.num_envs == 0, rule)

    @property
    def fixed_period(self) -> int:
        """The period in environment steps; 0 if it is auto or off."""
        return self.period if isinstance(self.period, int) else 0
