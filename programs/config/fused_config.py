"""The options of the topology fused, and what does not run in it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from rlstack.checks import Checked
from rlstack.configs.learner import LearnerConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.programs.config.env_config import EnvConfig
from rlstack.references import Hook

_Limit = tuple[str, object, str, str]  # the name of a field, its value, the rule, the way out
Learning = tuple[str, ReplayConfig, LearnerConfig]  # a policy's name, its replay and its learner
_OTHER = "Use --topology single_process, which takes the same environments."
_NO_PYTHON = "empty, because the loop calls no Python"


@dataclasses.dataclass(frozen=True)
class FusedConfig(Checked):
    """The compiled loop of the topology fused."""

    call_seconds: float = 0.3
    """Seconds that one call of the compiled loop should take. Logs, Ctrl-C and time budgets are
    looked at between calls only. Raise it if calls cost noticeable time, as with an accelerator."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("call_seconds", 0 < self.call_seconds < math.inf, "positive and finite")


def check(env: EnvConfig, replay: ReplayConfig, learner: LearnerConfig, processor: Hook) -> None:
    """Checks that the topology fused can run an experiment with these settings.

    Raises:
      ValueError: the topology cannot; the message says why, and what to change.
    """
    _refuse(_acting_limits(env, processor))
    _refuse(_learning_limits(replay, learner, env.num_envs))


def check_several(env: EnvConfig, processor: Hook, learning: Sequence[Learning]) -> None:
    """Checks that the topology fused can run several policies with these settings.

    Args:
      env: the environments.
      processor: the experiment's step processor.
      learning: the name, replay and learner of each policy that learns. Each has rows of its own,
        whose number is known only from the game, and is checked with it.

    Raises:
      ValueError: the topology cannot; the message says why, and what to change.
    """
    _refuse(_acting_limits(env, processor))
    for name, replay, learner in learning:
        where = f"policies.{name}: "
        if learner.devices:
            rule = "empty with several policies, which share one device"
            _refuse([("learner.devices", learner.devices, rule, _OTHER)], where)
        _refuse(_learning_limits(replay, learner), where)


def _refuse(limits: Iterable[_Limit], where: str = "") -> None:
    """Raises an error for the first of these limits."""
    for field, came, rule, way_out in limits:
        raise ValueError(
            f"{where}Experiment: {field} must be {rule} in the topology fused; got {came!r}. "
            f"{way_out}"
        )


def _acting_limits(env: EnvConfig, processor: Hook) -> Iterator[_Limit]:
    """Yields each field that does not fit: its name, its value, the rule and the way out."""
    if env.type != "jax":
        yield (
            "env.type",
            env.type,
            "jax",
            "Add --env.type jax if the environment is written in JAX; else use another topology.",
        )
    if env.wait_num:
        yield "env.wait_num", env.wait_num, "0, because all environments step together", _OTHER
    if env.opponents.runs:
        yield "env.opponents.runs", env.opponents.runs, "empty, because none can be loaded", _OTHER
    if processor:
        yield "step_processor", processor, _NO_PYTHON, _OTHER


def _learning_limits(
    replay: ReplayConfig, learner: LearnerConfig, num_envs: int | None = None
) -> Iterator[_Limit]:
    """Yields likewise what does not fit in learning from this number of environments, if known."""
    if replay.sampler_factory:
        yield "replay.sampler_factory", replay.sampler_factory, _NO_PYTHON, _OTHER
    for name in ("frame_stack", "min_actors"):
        if getattr(replay, name):
            yield f"replay.{name}", getattr(replay, name), "0", _OTHER
    rows = {"env.num_envs": num_envs or 0, "replay.batch_size": replay.batch_size}
    for name, divided in rows.items():
        if divided % max(1, len(learner.devices)):
            rule = f"a multiple of the {len(learner.devices)} devices of learner.devices"
            yield name, divided, rule, "Change one of them."
    if learner.minibatches == "calls":
        yield "learner.minibatches", "calls", "auto or scan", _OTHER
    if replay.sampler == "fifo":
        yield from _queue_limits(replay, num_envs)
    else:
        if replay.times_limit:
            yield "replay.max_times_sampled", replay.times_limit, "0 or None", _OTHER
        if replay.samples_per_insert is None:
            rule = "given, because it says how many updates follow a step"
            yield "replay.samples_per_insert", None, rule, "Add --replay.samples-per-insert N."


def _queue_limits(replay: ReplayConfig, num_envs: int | None) -> Iterator[_Limit]:
    if num_envs and replay.batch_size % num_envs and num_envs % replay.batch_size:
        rule = f"a multiple or a divisor of env.num_envs ({num_envs})"
        yield "replay.batch_size", replay.batch_size, rule, "Change one of them."
    if replay.step_period != replay.unroll_length:
        yield "replay.period", replay.period, "None with the sampler fifo", _OTHER
    defaults = {"context": 0, "min_size": 1, "samples_per_insert": None, "starts": "any"}
    for name, default in defaults.items():
        if (came := getattr(replay, name)) != default:
            yield f"replay.{name}", came, f"{default} with the sampler fifo", _OTHER
    if replay.times_limit != 1:
        yield "replay.max_times_sampled", replay.times_limit, "1 or None with fifo", _OTHER
    behind = max(1, (num_envs or 0) // replay.batch_size) - 1
    if replay.max_staleness is not None and replay.max_staleness < behind:
        rule = f"at least {behind} or None, because a batch has some of the environments only"
        yield "replay.max_staleness", replay.max_staleness, rule, "Raise replay.batch_size."
