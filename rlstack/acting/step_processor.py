"""Step processors: users' functions between an actor's environments and the replay.

A step processor is a function of a `Step`, the steps that some environments made at once. It
returns what the replay stores instead: a `Step`, several of them, or None. It may change rewards
and hold steps back, for example until their episode has ended. The agent acts on the environment's
own steps, and the logged returns are the environment's too. The arrays of a step keep their shapes:
an observation processor (`rlstack.families.observing`) leaves out features, when acting too.

The config names a function ``(num_envs) -> processor``, for example a class. Each actor has a
processor of its own, for its ``num_envs`` environments:

    class RewardAtTheEnd:
        def __init__(self, num_envs):
            self._sums = np.zeros(num_envs, np.float32)

        def __call__(self, step):
            self._sums[step.env_ids] += step.timestep.reward
            reward = np.where(step.timestep.last(), self._sums[step.env_ids], 0)
            self._sums[step.env_ids] -= reward
            return step.replace(reward=reward)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlstack.checks import WrongKindError
from rlstack.references import Hook, call_factory, check_callable, name_of
from rlstack.types import Array, Logs, PyTree, StepType, TimeStep, Transition

_WANTED = "(num_envs) -> processor, a function (step) -> Step, several of them, or None"
Info = Mapping[str, float]


class Step(NamedTuple):
    """One step of each of some environments of an actor; row i belongs to ``env_ids[i]``."""

    env_ids: np.ndarray  # [n] ints, distinct, in [0, num_envs) of the actor
    transition: Transition  # leaves [n, ...]
    infos: Sequence[Info]  # [n], the numbers in `info` by name; empty at FIRST

    @property
    def timestep(self) -> TimeStep:
        """The environments' part of the transition, ``[n, ...]``."""
        return self.transition.timestep

    def info(self, name: str, default: float = 0.0) -> np.ndarray:
        """Returns one number of the infos, ``[n]`` float32; the default where it is missing."""
        return np.array([info.get(name, default) for info in self.infos], np.float32)

    def replace(self, **fields: Any) -> Step:
        """Returns the step with other fields of its `TimeStep`, such as ``reward``."""
        return self._replace(
            transition=self.transition._replace(timestep=self.timestep._replace(**fields))
        )


Processor = Callable[[Step], Step | Iterable[Step] | None]


class WholeEpisodes:
    """A processor that holds steps back until their episode has ended.

    The function then receives the whole episode, and what it returns is stored. The steps of an
    episode that never ends are not stored, and those of a run's last episodes neither.
    """

    def __init__(self, function: Callable[[Transition, Sequence[Info]], Transition]):
        """Stores the function.

        Args:
          function: maps the steps of an episode, FIRST to LAST, leaves ``[L, ...]``, and the infos
            of these steps to the steps to store. It must not write to its arguments.
        """
        self._function = function
        self._held: dict[int, list[tuple[Transition, Info]]] = {}

    def __call__(self, step: Step) -> Iterator[Step]:
        """Yields the steps of the episodes that end with this step, one by one."""
        timestep = step.timestep
        columns = step.env_ids, timestep.first(), timestep.last()
        for row, (env, begins, ends) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            held = self._held.setdefault(env, [])
            if begins:  # after another FIRST, which was of no episode
                held.clear()
            held.append((_rows(step.transition, row), step.infos[row]))
            if ends:
                del self._held[env]
                yield from self._episode(env, *zip(*held, strict=True))

    def _episode(
        self, env: int, steps: Sequence[Transition], infos: Sequence[Info]
    ) -> Iterator[Step]:
        episode = self._function(jax.tree.map(lambda *x: np.concatenate(x), *steps), infos)
        for at in range(len(episode.timestep.reward)):
            info = infos[at] if at < len(infos) else {}
            yield Step(np.array([env]), _rows(episode, at), [info])


def _rows(transition: Transition, row: int) -> Transition:
    return jax.tree.map(lambda x: np.asarray(x)[row : row + 1], transition)


def _shapes_of_rows(transition: Transition) -> list[tuple[int, ...]]:
    """Returns the shape of one row of each array."""
    return [np.shape(x)[1:] for x in jax.tree.leaves(transition)]


def make_processor(hook: Hook, num_envs: int) -> Processor:
    """Makes the user's step processor for an actor, and checks its signature.

    Raises:
      ValueError: the factory cannot be imported.
      WrongKindError: the factory or the function that it returns has the wrong signature.
    """
    field = "Experiment: step_processor"
    made: Any = call_factory(field, hook, _WANTED, num_envs)
    rule = f"{field} {name_of(hook)} must be a function {_WANTED}; for what it returned"
    check_callable(rule, made, None)
    return made


class ProcessedSteps:
    """Runs an actor's processor, checks its steps, and averages the infos of episodes."""

    def __init__(self, processor: Processor, pool: Any):
        """Stores the processor, and the pool whose ``step_infos`` are used."""
        self._processor, self._pool = processor, pool
        self._name = name_of(processor)
        self._ids = np.arange(pool.num_envs)
        self._before = np.full(pool.num_envs, StepType.LAST, np.int32)  # step types that were made
        self._received = self._before.copy()  # and those of the pool
        # Seats of games that are FIRST several times, while they are not in their games.
        self._absent = np.zeros(pool.num_envs, bool)
        self._infos: Sequence[Info] = ()
        self._rows: list[tuple[int, ...]] = []  # the shapes of one environment's step
        self._sums: list[dict[str, tuple[float, int]]] = [{} for _ in range(pool.num_envs)]

    def receive(self, env_ids: np.ndarray | None, timestep: TimeStep) -> None:
        """Takes the infos of a batch that the pool has just returned."""
        ids = self._ids if env_ids is None else env_ids
        first = np.asarray(timestep.step_type) == StepType.FIRST
        self._absent[ids] |= first & (self._received[ids] == StepType.FIRST)
        self._received[ids] = timestep.step_type
        self._infos = [
            {} if is_first else info
            for info, is_first in zip(self._pool.step_infos(ids), first.tolist(), strict=True)
        ]
        for env, info in zip(ids.tolist(), self._infos, strict=True):
            sums = self._sums[env]
            for name, value in info.items():
                total, count = sums.get(name, (0.0, 0))
                sums[name] = total + value, count + 1

    def process(self, env_ids: np.ndarray | None, transition: Transition) -> Iterator[Step]:
        """Yields the steps to store instead of this one.

        Raises:
          WrongKindError: the processor returned something else than steps, or steps that break the
            rules of time.
        """
        ids = self._ids if env_ids is None else env_ids
        self._rows = self._rows or _shapes_of_rows(transition)
        made = self._processor(Step(ids, transition, self._infos))
        if made is None:
            return
        if not isinstance(made, Iterable):
            raise self._error("return steps or None", f"{type(made).__name__} {made!r:.80}")
        for step in [made] if isinstance(made, Step) else made:
            yield self._checked(step)

    def logs(self, ended: np.ndarray) -> Logs:
        """Returns ``info/NAME``, means over the steps of the episodes that these ids ended."""
        logs: dict[str, list[float]] = {}
        for env in ended.tolist():
            for name, (total, count) in self._sums[env].items():
                logs.setdefault(f"info/{name}", []).append(total / count)
            self._sums[env] = {}
        return {name: np.array(values) for name, values in logs.items()}

    def _checked(self, step: Any) -> Step:
        if not isinstance(step, Step):
            raise self._error("return steps", f"{type(step).__name__} {step!r:.80}")
        old = step.timestep
        timestep = old._replace(
            step_type=np.asarray(old.step_type, np.int32),
            reward=np.asarray(old.reward, np.float32),
            discount=np.asarray(old.discount, np.float32),
        )
        ids = np.asarray(step.env_ids)
        shapes = {x.shape for x in (ids, timestep.step_type, timestep.reward, timestep.discount)}
        if len(shapes) != 1 or ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise self._error("return steps with one row for each of env_ids", f"shapes {shapes}")
        if len(set(ids.tolist())) < len(ids) or not np.isin(ids, self._ids).all():
            known = f"distinct ids in 0..{len(self._ids) - 1}"
            raise self._error(f"return steps with {known}", f"{ids.tolist()!r:.80}")
        came = [np.shape(x) for x in jax.tree.leaves(step.transition)]
        expected = [(len(ids), *row) for row in self._rows]
        if came != expected:
            wanted = "return arrays of the shapes that they had, with one row for each of env_ids, "
            wanted += "because only observation_processor may leave out features"
            raise self._error(wanted, f"{came} instead of {expected}")
        self._check_time(ids, timestep)
        return Step(ids, step.transition._replace(timestep=timestep), step.infos)

    def _check_time(self, ids: np.ndarray, timestep: TimeStep) -> None:
        first, reward, discount = timestep.first(), timestep.reward, timestep.discount
        before = self._before[ids]
        again = self._absent[ids] & (before == StepType.FIRST)
        follows = (first == (before == StepType.LAST)) | (first & again)
        self._require(follows, ids, "FIRST must follow LAST and nothing else", timestep)
        rule = "the reward must be finite, and 0 at FIRST"
        self._require(np.isfinite(reward) & ((reward == 0) | ~first), ids, rule, timestep)
        # A termination is LAST with discount 0, and a truncation is LAST with another discount.
        valid = (discount >= 0) & (discount <= 1) & ((discount == 1) | ~first)
        self._require(valid, ids, "the discount must lie in [0, 1], and be 1 at FIRST", timestep)
        self._before[ids] = timestep.step_type

    def _require(self, holds: Array, ids: np.ndarray, rule: str, timestep: TimeStep) -> None:
        if not np.all(holds):
            row = int(np.flatnonzero(~np.asarray(holds))[0])
            came: PyTree = StepType(int(timestep.step_type[row])).name
            came = f"{came}, reward {timestep.reward[row]}, discount {timestep.discount[row]}"
            raise self._error(
                f"return steps that keep the rules of time: {rule}", f"{came} of env {ids[row]}"
            )

    def _error(self, wanted: str, came: str) -> WrongKindError:
        return WrongKindError(f"The step processor {self._name} must {wanted}; got {came}.")
