"""Checks that an environment does what agents rely on, in every pool: ``rlstack check env``."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlstack.checks import no_exits
from rlstack.envs.cpp import library
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.run.check.report import NotApplicableError, Report, RuleError, run_rules
from rlstack.references import name_of
from rlstack.specs.masks import COUNTER
from rlstack.types import EnvSpec, PyTree, StepType, TimeStep

FIRST, MID, LAST = map(int, (StepType.FIRST, StepType.MID, StepType.LAST))
_SIZE, _SEED = 3, 1
_POOLS = ("for_loop", "thread", "process")  # of environments in Python


@no_exits()
def check_env(env: str | EnvConfig, *, steps: int = 500) -> Report:
    """Checks an environment with the rules that the project's own environments are tested with.

    Actions are drawn at random from the action spec, among the legal ones if there is a mask.

    Args:
      env: its name, as in `EnvConfig.name`, or a config, whose number of environments is not used.
      steps: number of steps of each of three environments; whole episodes should fit.

    Returns:
      What holds, and for each rule that fails one sentence.

    Raises:
      ValueError: there is no such environment.
    """
    cfg = EnvConfig(env) if isinstance(env, str) else env
    cfg = dataclasses.replace(cfg, num_envs=_SIZE, wait_num=0, num_workers=0)
    subject = _Subject(cfg, steps)
    return run_rules(f"{name_of(cfg.name)}, type {cfg.type}", RULES, subject)


class _Subject:
    """An environment, and what happened when three of them were stepped."""

    def __init__(self, cfg: EnvConfig, steps: int) -> None:
        self.cfg, self.steps = cfg, steps
        with make_env(cfg, _SEED) as env:
            self.spec = env.spec

    @functools.cached_property
    def history(self) -> list[TimeStep]:
        """The steps ``[B, ...]`` of the pool of the config."""
        return self.play(self.cfg)[0]

    def play(
        self, cfg: EnvConfig, seed: int = _SEED, steps: int | None = None
    ) -> tuple[list[TimeStep], float, dict[str, Any]]:
        """Steps a pool; returns the steps, frames/s, and the counters of the pool."""
        env: Any
        rng = np.random.default_rng(0)
        with make_env(cfg, seed) as env:
            found = [_copied(env.reset())]
            began = time.monotonic()
            for _ in range(self.steps if steps is None else steps):
                found.append(_copied(env.step(random_actions(rng, self.spec, found[-1]))))
            seconds = time.monotonic() - began
            return found, cfg.num_envs * len(found) / max(seconds, 1e-9), dict(env.stats())


def random_actions(rng: np.random.Generator, spec: EnvSpec, timestep: TimeStep) -> PyTree:
    """Returns actions ``[B, ...]`` drawn at random, among the legal ones if there is a mask.

    The first rows do not depend on the number of rows, up to 8.
    """
    observation, rows = timestep.observation, len(timestep.reward)
    mask = observation.get("action_mask") if isinstance(observation, dict) else None
    if mask is not None and hasattr(spec.action, "num_values"):
        scores = rng.random((max(rows, 8), spec.action.num_values))[:rows]
        chosen = np.argmax(np.where(np.asarray(mask, bool), scores, -1.0), -1)
        return chosen.astype(spec.action.dtype)
    return jax.tree.map(lambda one: _drawn(rng, one, max(rows, 8))[:rows], spec.action)


def _drawn(rng: np.random.Generator, spec: Any, rows: int) -> np.ndarray:
    shape = (rows, *spec.shape)
    low, high = (np.broadcast_to(bound, spec.shape) for bound in (spec.minimum, spec.maximum))
    if np.issubdtype(spec.dtype, np.integer):
        return rng.integers(low, high, shape, endpoint=True).astype(spec.dtype)
    finite = np.clip(low, -10.0, None), np.clip(high, None, 10.0)
    return rng.uniform(*finite, shape).astype(spec.dtype)


def _copied(timestep: TimeStep) -> TimeStep:
    return jax.tree.map(np.array, timestep)


def _difference(one: Sequence[TimeStep], two: Sequence[TimeStep]) -> str:
    """Returns where two histories first differ; "" if nowhere."""
    for step, (a, b) in enumerate(zip(one, two, strict=True)):
        leaves = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
        for (path, x), y in leaves:
            if not np.array_equal(x, y, equal_nan=np.issubdtype(x.dtype, np.floating)):
                return f"{jax.tree_util.keystr(path).lstrip('.')} at step {step}"
    return ""


def _spaces(s: _Subject) -> None:
    for step, timestep in enumerate(s.history):

        def check(spec: Any, x: np.ndarray, step: int = step) -> None:
            if x.shape != (_SIZE, *spec.shape) or x.dtype != spec.dtype:
                raise RuleError(
                    f"the observation at step {step} must be {spec.shape} {spec.dtype}; got "
                    f"{x.shape[1:]} {x.dtype}."
                )
            low, high = getattr(spec, "minimum", None), getattr(spec, "maximum", None)
            if low is not None and not ((x >= low) & (x <= high)).all():
                where = np.argwhere(~((x >= low) & (x <= high)))[0].tolist()
                raise RuleError(
                    f"the observation at step {step} must lie in its space; entry {where[1:]} of "
                    f"environment {where[0]} is {x[tuple(where)]}, outside of {spec}."
                )

        jax.tree.map(check, s.spec.observation, timestep.observation)
        if not np.isfinite(timestep.reward).all():
            raise RuleError(f"the reward at step {step} must be finite; got {timestep.reward}.")


def _boundaries(s: _Subject) -> None:
    before: np.ndarray | None = None
    for step, timestep in enumerate(s.history):
        kind = np.asarray(timestep.step_type)
        if before is None and not (kind == FIRST).all():
            raise RuleError("the steps after reset must be FIRST.")
        if before is not None and ((before == LAST) & (kind != FIRST)).any():
            raise RuleError(f"the step after LAST must be FIRST; at step {step} it is not.")
        begins = kind == FIRST
        if timestep.reward[begins].any() or (timestep.discount[begins] != 1).any():
            raise RuleError(f"FIRST must have reward 0 and discount 1; at step {step} it has not.")
        before = kind


def _ends(s: _Subject) -> str:
    ends = [(t.discount[t.step_type == LAST] == 0).tolist() for t in s.history]
    found = [end for row in ends for end in row]
    if not found:
        raise NotApplicableError(
            f"no episode ended in {s.steps} steps; with time limits, give more --steps."
        )
    return f"{sum(found)} terminations, {len(found) - sum(found)} time limits"


def _seeds(s: _Subject) -> None:
    again = s.play(s.cfg)[0]
    if found := _difference(s.history, again):
        raise RuleError(
            f"the same seed and actions must give the same steps; {found} differs. Draw all random "
            "numbers from a generator that reset(seed=...) makes."
        )


def _other_seeds(s: _Subject) -> None:
    one = s.play(s.cfg, _SEED + 1000, 50)[0]
    if not _difference(s.history[: len(one)], one):
        raise NotApplicableError(
            "another seed gives the same steps, as in an environment without chance."
        )


def _separate(s: _Subject) -> None:
    few = min(s.steps, 100)
    together = s.history[: few + 1]
    alone = s.play(dataclasses.replace(s.cfg, num_envs=1), steps=few)[0]
    first = [jax.tree.map(lambda x: x[:1], timestep) for timestep in together]
    if found := _difference(first, alone):
        raise RuleError(
            f"an environment must do alone what it does beside others; {found} differs. State that "
            "environments share, such as np.random or class attributes, is one reason."
        )


def _buffers(s: _Subject) -> None:
    env: Any
    rng = np.random.default_rng(0)
    with make_env(s.cfg, _SEED) as env:
        kept = [env.reset()]
        copies = [_copied(kept[0])]
        for _ in range(20):
            kept.append(env.step(random_actions(rng, s.spec, kept[-1])))
            copies.append(_copied(kept[-1]))
    if found := _difference([_copied(one) for one in kept], copies):
        raise RuleError(f"arrays that were returned must stay as they are; {found} changed later.")


def _resets(s: _Subject) -> None:
    rng = np.random.default_rng(0)
    env: Any
    with make_env(s.cfg, _SEED) as env:
        first = env.reset()
        env.step(random_actions(rng, s.spec, first))
        if not (np.asarray(env.reset().step_type) == FIRST).all():
            raise RuleError("reset in the middle of an episode must give FIRST.")


def _masks(s: _Subject) -> None:
    observation = s.spec.observation
    if not isinstance(observation, dict) or "action_mask" not in observation:
        raise NotApplicableError("there is no action_mask in the observation.")
    if number := s.play(s.cfg)[2].get(COUNTER, 0):
        raise RuleError(f"each step must have a legal action; {number} steps had none.")


def _pools(s: _Subject) -> str:
    name = str(s.cfg.name)
    is_native = name.startswith("rust:") or name in library.names()
    if s.cfg.type in ("cpp", "jax") or (s.cfg.type == "auto" and is_native):
        speed = s.play(s.cfg)[1]
        return f"{speed:,.0f} frames/s"
    few, rates = min(s.steps, 200), []
    alone = dataclasses.replace(s.cfg, type="for_loop", num_envs=1)
    rates.append(f"one alone {s.play(alone, steps=few)[1]:,.0f}")
    for pool in _POOLS:
        history, speed, _ = s.play(dataclasses.replace(s.cfg, type=pool), steps=few)  # type: ignore[arg-type]
        if found := _difference(s.history[: few + 1], history):
            raise RuleError(
                f"a pool of type {pool} must give the steps of {s.cfg.type}; {found} differs. "
                "Threads and processes must not share state."
            )
        rates.append(f"{pool} {speed:,.0f}")
    return f"frames/s of {_SIZE}: {', '.join(rates)}"


RULES: list[tuple[str, Callable[[Any], Any]]] = [
    ("observations and rewards lie in their spaces", _spaces),
    ("LAST is followed by FIRST, with reward 0 and discount 1", _boundaries),
    ("episodes end", _ends),
    ("the same seed and actions give the same steps", _seeds),
    ("another seed gives other steps", _other_seeds),
    ("environments do not share state", _separate),
    ("returned arrays stay as they are", _buffers),
    ("reset works in the middle of an episode", _resets),
    ("each step has a legal action", _masks),
    ("all pools give the same steps", _pools),
]
