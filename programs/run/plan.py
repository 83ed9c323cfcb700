"""What a run would do, without doing it: ``rlstack train PRESET --dry-run``."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax
import numpy as np

from rlstack.learning.learner import in_micro_batches
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import check_devices, check_free
from rlstack.programs.build.environments import check_opponents, environment_spec
from rlstack.programs.build.hooks import check_hooks
from rlstack.programs.build.policies.members import divide
from rlstack.programs.build.replay import (
    batch_spec,
    check_place,
    on_learners_device,
    replay_bytes,
)
from rlstack.programs.config.encoding import to_json
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.pictures.training_videos import check_videos
from rlstack.programs.program.base import Setup
from rlstack.programs.program.topologies import graph_of
from rlstack.programs.run.launch import check_packages, transport_name
from rlstack.programs.run.train import resolved
from rlstack.programs.session.own_loggers import is_own
from rlstack.programs.session.run_dir import RunDir, check_writable
from rlstack.references import name_of
from rlstack.types import EnvSpec, PyTree, Transition


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run would do; ``str`` gives it as text."""

    experiment: Experiment
    """The resolved config."""
    devices: str
    """Where it would learn and act."""
    nodes: tuple[str, ...]
    """The nodes of its program; empty for a topology of one process."""
    replay_bytes: int
    """Memory of the replay, at most; 0 for recorded data."""
    params_bytes: int
    """Memory of the params."""
    device_bytes: int
    """Memory on the device that learns, at least: params before and after an update, learner state,
    a batch and, where the replay is on the device, the replay."""
    checkpoint_bytes: int
    """Size of one checkpoint, at most, without that of a replay service."""
    run_dir: str
    """The directory of the run."""
    files: tuple[tuple[str, str], ...]
    """What it would write there: names, and what they are."""

    def __str__(self) -> str:
        experiment = self.experiment
        rows = [
            ("experiment", f"{experiment.preset}, {_players(experiment)}"),
            ("environments", _environments(experiment)),
            ("budget", _budget(experiment)),
            ("topology", experiment.topology),
            ("devices", self.devices),
            ("nodes", ", ".join(self.nodes) or "none: this process does everything"),
            ("replay", f"{self.replay_bytes:,} bytes at most"),
            ("params", f"{self.params_bytes:,} bytes"),
            ("learner's device", f"{self.device_bytes:,} bytes at least"),
            (
                "checkpoint",
                f"{self.checkpoint_bytes:,} bytes at most; {experiment.checkpoints_kept} are kept",
            ),
            ("run directory", self.run_dir),
        ]
        if self.nodes:
            program = experiment.program
            how = f"{program.launch}, transport {transport_name(program)}, {program.pacing}"
            rows.insert(6, ("launch", how))
        if not experiment.acts:
            rows = [row for row in rows if row[0] != "replay"]
        if experiment.data:
            rows.append(("data", experiment.data))
        rows += [(f"  {name}", what) for name, what in self.files]
        lines = [f"{name:20} {what}" for name, what in rows]
        return "\n".join([*lines, "", "config.json:", to_json(experiment)])


def plan(
    experiment: Experiment, run_dir: str | os.PathLike[str] | None = None, runs: int = 1
) -> Plan:
    """Checks an experiment as `rlstack.programs.run.train.run` does, and says what it would do.

    One environment is made and closed. Nothing is trained or written.

    Args:
      experiment: the experiment to check.
      run_dir: the run's directory; by default a new one under ``runs/``.
      runs: number of such runs at the same time, whose memory is told together.

    Raises:
      ValueError: the config contradicts itself, the environment or this machine, the device that
        learns has less free memory than that, or the directory cannot be written or is not empty.
    """
    experiment = resolved(experiment)
    check_hooks(experiment)
    check_opponents(experiment)
    devices = check_devices(experiment)
    check_videos(experiment)
    check_place(experiment)
    directory = RunDir.at(run_dir or f"runs/{experiment.preset}-s{experiment.seed}")
    if run_dir is None:
        check_writable(directory.path.parent)
    else:
        directory.check_free()
    spec = environment_spec(experiment)
    setup = Setup(experiment, directory, spec)
    if not experiment.in_one_process:
        check_packages(experiment)
    learning = [experiment]
    if experiment.policies:
        learning = [member.experiment for member in divide(experiment).learning]
    steps = [Setup(one, directory, spec).step for one in learning]
    learned = [_learned(one, spec, step) for one, step in zip(learning, steps, strict=True)]
    params, learner_state, batch = (sum(sizes) for sizes in zip(*learned, strict=True))
    replay = 0
    if experiment.acts:
        pairs = zip(learning, steps, strict=True)
        replay = sum(replay_bytes(one, step, runs) for one, step in pairs)
    on_device = runs * (2 * params + learner_state + batch)
    on_device += replay if on_learners_device(learning[0]) else 0
    check_free(experiment, on_device)
    saved = replay if experiment.checkpoint_replay and not _is_served(experiment) else 0
    return Plan(
        experiment,
        devices,
        () if experiment.in_one_process else tuple(node.name for node in graph_of(setup).nodes),
        replay,
        params,
        on_device,
        params + learner_state + saved // runs,
        f"{directory.name}{'' if run_dir else '-DATE-TIME'}",
        tuple(_files(experiment)),
    )


def _learned(experiment: Experiment, spec: EnvSpec, step: Transition) -> tuple[int, int, int]:
    """Traces an update, for its errors; returns the bytes of params, learner state and batch."""
    agent = make_agent(experiment, spec)
    key = jax.eval_shape(jax.random.PRNGKey, 0)
    params = jax.eval_shape(agent.initial_params, key)
    state = jax.eval_shape(agent.initial_learner_state, key, params)
    if not experiment.replay.min_actors:  # else the size of batches varies
        update = in_micro_batches(agent, experiment.learner).learner_step
        jax.eval_shape(update, params, state, batch_spec(experiment.replay, step))
    return _bytes(params), _bytes(state), _bytes(batch_spec(experiment.replay, step))


def _bytes(tree: PyTree) -> int:
    leaves: list[Any] = jax.tree.leaves(tree)
    return sum(int(np.prod(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf in leaves)


def _is_served(experiment: Experiment) -> bool:
    return experiment.layout.has_replay_node


def _players(experiment: Experiment) -> str:
    """Returns the kind of the agent, or of each policy."""
    if not experiment.policies:
        return type(experiment.agent).__name__
    kinds = {
        member.name: type(member.experiment.agent).__name__
        if member.kind in ("learning", "fixed")
        else member.kind
        for member in divide(experiment).members.values()
    }
    return ", ".join(f"{name}: {kind}" for name, kind in kinds.items())


def _environments(experiment: Experiment) -> str:
    cfg, actors = experiment.env, experiment.num_actors
    kind = f"type {cfg.type}" + (f", batches of {cfg.wait_num}" if cfg.wait_num else "")
    count = f"{cfg.num_envs:,} of {cfg.name}, {kind}"
    return count if actors == 1 else f"{actors} actors with {count} each"


def _budget(experiment: Experiment) -> str:
    parts = [f"{experiment.frames:,} frames"]
    if experiment.updates:
        parts.append(f"{experiment.updates:,} updates")
    if experiment.hours:
        parts.append(f"{experiment.hours:g} hours")
    first = ", whichever is spent first" if len(parts) > 1 else ""
    before = f"{experiment.offline_updates:,} updates from data, then "
    return before * bool(experiment.offline_updates) + " or ".join(parts) + first


def _files(experiment: Experiment) -> list[tuple[str, str]]:
    period = experiment.evaluation_period
    when = f"every {period:,} frames and " if 0 < period < experiment.frames else ""
    files = [("config.json", "the config below")]
    if "jsonl" in experiment.loggers:
        files.append(("metrics.jsonl", f"a line every {experiment.log_period:,} frames"))
    if "tensorboard" in experiment.loggers:
        files.append(("tensorboard/", "the same for TensorBoard"))
    files += [(name_of(logger), "a logger") for logger in experiment.loggers if is_own(logger)]
    files += [
        ("checkpoints/", f"every {experiment.checkpoint_period:,} frames and at the end"),
        ("checkpoints/best/", f"the params with the best evaluation; one is made {when}at the end"),
        ("result.json", "at the end"),
    ]
    if every := experiment.evaluator.video:
        files.append(("videos/", f"an episode for every evaluation of number {every}"))
    if not experiment.in_one_process:
        files += [("logs/", "the output of each node")]
    if _is_served(experiment):
        files.append(("replay/", "the checkpoints of the replay service"))
    return files
