"""The options of the topology fused, and what does not run in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from programs.env_config import EnvConfig
from rlstack.checks import Checked
from rlstack.learning.learner import LearnerConfig
from rlstack.references import Hook
from rlstack.replay import ReplayConfig

_Limit = tuple[str, object, str, str]  # the name of a field, its value, the rule, the way out


@dataclasses.dataclass(frozen=True)
class FusedConfig(Checked):
    """The compiled loop of the topology fused."""

    call_seconds: float = 0.3
    """Seconds that one call of the compiled loop should take. Logs, Ctrl-C and time budgets are
    looked at between calls only. Raise it if calls cost noticeable time, as with an accelerator."""

    def __post_init__(self) -> None:
        self.require("call_seconds", 0 < self.call_seconds < math.inf, "positive and finite")


def check(env: EnvConfig, replay: ReplayConfig, learner: LearnerConfig, processor: Hook) -> None:
    """Checks that the topology fused can run an experiment with these settings.

    Raises:
      ValueError: it cannot; the message says why, and what to change.
    """
    for field, came, rule, way_out in _limits(env, replay, learner, processor):
        raise ValueError(
            f"Experiment: {field} must be {rule} in the topology fused; got {came!r}. {way_out}"
        )


def _limits(
    env: EnvConfig, replay: ReplayConfig, learner: LearnerConfig, processor: Hook
) -> Iterator[_Limit]:
    """Yields each field that does not fit: its name, its value, the rule and the way out."""
    other = "Use --topology single_process, which takes the same environments."
    if env.type != "jax":
        yield (
            "env.type",
            env.type,
            "jax",
            "Add --env.type jax if the environment is written in JAX; else use another topology.",
        )
    if env.wait_num:
        yield "env.wait_num", env.wait_num, "0, because all environments step together", other
    if env.opponents.runs:
        yield "env.opponents.runs", env.opponents.runs, "empty, because none can be loaded", other
    python = "empty, because the loop calls no Python"
    if processor:
        yield "step_processor", processor, python, other
    if replay.sampler_factory:
        yield "replay.sampler_factory", replay.sampler_factory, python, other
    for name in ("frame_stack", "min_actors"):
        if getattr(replay, name):
            yield f"replay.{name}", getattr(replay, name), "0", other
    for name, divided in (
        ("env.num_envs", env.num_envs),
        ("replay.batch_size", replay.batch_size),
    ):
        if divided % max(1, len(learner.devices)):
            rule = f"a multiple of the {len(learner.devices)} devices of learner.devices"
            yield name, divided, rule, "Change one of them."
    if learner.minibatches == "calls":
        yield "learner.minibatches", "calls", "auto or scan", other
    if replay.sampler == "fifo":
        yield from _queue_limits(replay, env.num_envs, other)
    else:
        if replay.times_limit:
            yield "replay.max_times_sampled", replay.times_limit, "0 or None", other
        if replay.samples_per_insert is None:
            rule = "given, because it says how many updates follow a step"
            yield "replay.samples_per_insert", None, rule, "Add --replay.samples-per-insert N."


def _queue_limits(replay: ReplayConfig, num_envs: int, other: str) -> Iterator[_Limit]:
    if replay.batch_size % num_envs and num_envs % replay.batch_size:
        rule = f"a multiple or a divisor of env.num_envs ({num_envs})"
        yield "replay.batch_size", replay.batch_size, rule, "Change one of them."
    if replay.step_period != replay.unroll_length:
        yield "replay.period", replay.period, "None with the sampler fifo", other
    for name, default in (
        ("context", 0),
        ("min_size", 1),
        ("samples_per_insert", None),
        ("starts", "any"),
    ):
        if getattr(replay, name) != default:
            came = getattr(replay, name)
            yield f"replay.{name}", came, f"{default} with the sampler fifo", other
    if replay.times_limit != 1:
        yield "replay.max_times_sampled", replay.times_limit, "1 or None with fifo", other
    behind = max(1, num_envs // replay.batch_size) - 1
    if replay.max_staleness is not None and replay.max_staleness < behind:
        rule = f"at least {behind} or None, because a batch has some of the environments only"
        yield "replay.max_staleness", replay.max_staleness, rule, "Raise replay.batch_size."
