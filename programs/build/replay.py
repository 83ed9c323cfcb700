"""Makes the replay of one process, and says how much memory a replay takes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

import jax
import numpy as np

from rlstack.configs.replay import ReplayConfig
from rlstack.programs.build.seeds import role_seed
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.layouts import Layout
from rlstack.programs.config.member_config import is_fixed
from rlstack.replay import InProcessReplay, ReplayBuffer
from rlstack.replay.memory import check_memory, spec_bytes
from rlstack.types import Batch, StartSpec, Transition

if TYPE_CHECKING:  # imported by experiments with stacked frames
    from rlstack.replay.frame_stack import FrameStacks


def make_replay(experiment: Experiment, spec: Transition) -> ReplayBuffer:
    """Makes the replay of a single process in the host's memory, for steps of this spec."""
    stored = Stored.of(experiment, spec)
    num_envs, seed = experiment.env.num_envs, role_seed(experiment.seed, "replay")
    return stored.stacked(InProcessReplay(stored.cfg, num_envs, seed=seed, spec=stored.spec))


def on_learners_device(experiment: Experiment) -> bool:
    """Whether the replay is a ring on the device that learns."""
    wanted = experiment.layout.is_compiled or experiment.replay.place == "device"
    return wanted and experiment.replay.sampler != "fifo"


def check_place(experiment: Experiment) -> None:
    """Checks that the replay can be where `ReplayConfig.place` says.

    Raises:
      ValueError: it cannot; the message says why, and what to change.
    """
    learning = [experiment]
    if experiment.policies:
        names = [name for name, m in experiment.policies.items() if not m.is_frozen]
        learning = [experiment.of_policy(name) for name in names]
    for one in learning:
        if one.replay.place == "host" or experiment.layout.is_compiled or is_fixed(one.agent):
            continue
        for field, came, rule in _place_limits(one):
            raise ValueError(
                f"Experiment: {field} must be {rule} with replay.place device; got {came!r}. "
                "Change it, or use --replay.place host."
            )


def _place_limits(experiment: Experiment) -> Iterator[tuple[str, object, str]]:
    """Yields each field that does not fit a replay on a device, its value, and the rule."""
    replay, learner = experiment.replay, experiment.learner
    if experiment.layout != Layout():
        rule = "single_process or fused, because actors in other nodes write to the host's memory"
        yield "topology", experiment.topology, rule
    if experiment.data:
        yield "data", experiment.data, "empty, because recorded steps are read on the host"
    if replay.sampler == "fifo":
        rule = "uniform or prioritized, because steps that are learned from once gain nothing"
        yield "replay.sampler", replay.sampler, rule
    if replay.sampler_factory:
        rule = "empty, because the compiled update draws the items and calls no Python for it"
        yield "replay.sampler_factory", replay.sampler_factory, rule
    if replay.times_limit:
        yield "replay.max_times_sampled", replay.times_limit, "0 or None"
    if replay.samples_per_insert is None:
        rule = "given, because it says how many updates follow a step"
        yield "replay.samples_per_insert", None, rule
    if experiment.env.wait_num:
        rule = "0, because the steps of all environments are written together"
        yield "env.wait_num", experiment.env.wait_num, rule
    if experiment.step_processor:
        rule = "empty, because it may delay the steps of some environments"
        yield "step_processor", experiment.step_processor, rule
    if len(learner.devices) > 1:
        yield "learner.devices", learner.devices, "one device at most"
    if learner.minibatches == "calls":
        yield "learner.minibatches", "calls", "auto or scan"


def check_pace(experiment: Experiment) -> None:
    """Checks a run that acts and learns by turns: it must act again, and learn from all items.

    Raises:
      ValueError: nothing limits the updates between two steps, or a fifo cannot hold the items
        that are completed between two updates.
    """
    alone = experiment.topology == "single_process"
    by_turns = alone or experiment.program.pacing == "lock_step"
    if not (by_turns and experiment.acts) or experiment.layout.is_compiled:
        return
    own = [experiment]
    if experiment.policies:
        from rlstack.programs.build.policies.members import divide

        own = [member.experiment for member in divide(experiment).learning]
    for one in own:
        replay, endless = one.replay, not experiment.updates
        if is_fixed(one.agent):
            continue
        if endless and not (replay.times_limit or replay.samples_per_insert):
            raise ValueError(
                "Experiment: replay.samples_per_insert must be given with the sampler "
                f"{replay.sampler} where acting and learning take turns, because a run would "
                "learn from its first items for ever. Add --replay.samples-per-insert N, the "
                f"number of items sampled for each item inserted; N = {replay.batch_size}, the "
                "batch size, is an update for each step."
            )
        if alone and replay.sampler == "fifo":
            _check_fifo(one)


def _check_fifo(experiment: Experiment) -> None:
    """Checks that a fifo has room for the items of the environments between two updates.

    Items that did not fill a batch of the last update are there, too.
    """
    replay, env = experiment.replay, experiment.env
    of_each = math.ceil(experiment.steps_per_update / replay.step_period)
    completed = (env.wait_num or env.num_envs) * of_each
    needed = completed + replay.batch_size - math.gcd(completed, replay.batch_size)
    if replay.max_size < needed:
        raise ValueError(
            f"Experiment: replay.max_size must be at least {needed}, because {completed} items are "
            f"completed between two updates and a fifo drops those beyond max_size; got "
            f"{replay.max_size}. Add --replay.batch-size {completed} --replay.max-size "
            f"{2 * completed}."
        )


def announce_replay(
    experiment: Experiment, spec: Transition, stream: TextIO, runs: int = 1
) -> None:
    """Prints how much memory the replay takes, before it is allocated.

    Args:
      experiment: the experiment, which configures the replay.
      spec: the spec of one environment's step, from `rlstack.acting.actor.transition_spec`.
      stream: receives the text.
      runs: number of runs in this process; each has its own replay.

    Raises:
      ValueError: the machine has less memory than that.
    """
    size = replay_bytes(experiment, spec, runs)
    print(f"replay: {size:,} bytes at most", file=stream, flush=True)


def replay_bytes(experiment: Experiment, spec: Transition, runs: int = 1) -> int:
    """Returns the bytes that the replay takes at most; arguments as in `announce_replay`.

    Raises:
      ValueError: the machine has less memory than that (a replay on a device checks it when it is
        made), or the item processor or `ReplayConfig.place` does not fit.
    """
    stored, num_envs = Stored.of(experiment, spec), experiment.total_envs
    if stored.cfg.item_processor:
        from rlstack.replay.episodes import check_processor

        check_processor(stored.cfg, stored.spec)
    layout = experiment.layout
    if on_learners_device(experiment):
        from rlstack.learning.device_replay import device_bytes

        check_place(experiment)
        return runs * device_bytes(stored.cfg, num_envs, stored.spec, stored.stacks)
    in_shared_memory = layout.has_nodes and not layout.has_replay_node
    is_served = layout.has_replay_node and experiment.replay.chosen_service == "table"
    if in_shared_memory or is_served:
        from rlstack.replay.shared_memory.block import FOLDER
        from rlstack.replay.shared_memory.steps import total_bytes

        steps, others = total_bytes(stored.cfg, num_envs, stored.spec)
        if in_shared_memory:
            check_memory(steps, "replay", FOLDER)
        size = steps + others
    else:
        size = spec_bytes(stored.cfg, stored.spec, num_envs)
    size *= runs
    check_memory(size, "replay")
    return size


def batch_spec(cfg: ReplayConfig, spec: Transition) -> Batch:
    """Returns the shapes of a batch of ``batch_size`` items; ``spec`` is the `transition_spec`."""

    def batched(leaf: Any) -> jax.ShapeDtypeStruct:
        steps = 1 if isinstance(leaf, StartSpec) else cfg.unroll_length + 1
        return jax.ShapeDtypeStruct((steps, cfg.batch_size, *leaf.shape), leaf.dtype)

    trajectory = jax.tree.map(batched, spec)
    weights: Any = jax.ShapeDtypeStruct((cfg.batch_size,), np.float32)
    return Batch(trajectory, weights)


def stored_spec(experiment: Experiment, spec: Transition) -> tuple[ReplayConfig, Transition]:
    """Returns the replay's config and the spec of its stored steps, for this `transition_spec`.

    They differ from the experiment's config and this spec where stacked frames are stored once.
    """
    stored = Stored.of(experiment, spec)
    return stored.cfg, stored.spec


class Stored(NamedTuple):
    """What a replay stores: whole steps, or steps whose stacked frames are split."""

    cfg: ReplayConfig
    spec: Transition
    stacks: FrameStacks | None

    @classmethod
    def of(cls, experiment: Experiment, spec: Transition) -> Stored:
        """Returns what the replay of an experiment stores, for steps of this spec."""
        cfg = in_rounds(experiment)
        if not cfg.frame_stack:
            return cls(cfg, spec, None)
        from rlstack.replay.frame_stack import FrameStacks

        stacks = FrameStacks(cfg, experiment.total_envs, spec)
        return cls(stacks.cfg, stacks.spec, stacks)

    def stacked(self, buffer: Any) -> Any:
        """Wraps a buffer or a writer, so that its users see whole stacks."""
        if self.stacks is None:
            return buffer
        from rlstack.replay.frame_stack import StackedReplay

        return StackedReplay(self.stacks, buffer)


def in_rounds(experiment: Experiment) -> ReplayConfig:
    """Returns the config of the replay, with what rounds need in this program."""
    cfg = experiment.replay
    if not cfg.min_actors:
        return cfg
    # Room for one item of each environment that is late and one of the newest version. With less,
    # actors would wait for space and report late.
    cfg = dataclasses.replace(cfg, max_size=max(cfg.max_size, 2 * experiment.total_envs))
    if experiment.program.pacing == "lock_step":
        cfg = dataclasses.replace(cfg, grace_seconds=0.0)  # the barrier waits instead
    return cfg
