"""Checks that an agent keeps the contract of `rlstack.agent.Agent`: ``rlstack check agent``.

The data are observations of the experiment's environment, with rewards, ends and boundaries of
episodes placed where a rule needs them.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import pickle
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent
from rlstack.agents import AGENTS
from rlstack.checks import no_exits
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.families.intrinsic import Intrinsic
from rlstack.families.wrapped import Wrapped
from rlstack.networks.torsos import action_mask
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import make_env
from rlstack.programs.config.experiment import EnvConfig, Experiment, ProgramConfig
from rlstack.programs.run import train
from rlstack.programs.run.check.env import random_actions
from rlstack.programs.run.check.report import NotApplicableError, Report, RuleError, run_rules
from rlstack.stateful_params import has_state
from rlstack.storage import checkpoint
from rlstack.types import Batch, PyTree, StepType, TimeStep, Transition

FIRST, MID, LAST = map(int, (StepType.FIRST, StepType.MID, StepType.LAST))
BATCH = 4
# [T+1, B]: no boundary, FIRST at the start, an end inside, an end at the end.
STEP_TYPES = np.array(
    [
        [MID, FIRST, MID, FIRST],
        [MID, MID, MID, MID],
        [MID, MID, LAST, MID],
        [MID, MID, FIRST, MID],
        [MID, MID, MID, MID],
        [MID, MID, MID, LAST],
    ],
    np.int32,
)


@no_exits()
def check_agent(
    agent: Any, env: str | EnvConfig = "CartPole-v1", *, topologies: bool = True
) -> Report:
    """Checks an agent with the rules that the project's own agents are tested with.

    Args:
      agent: the config of a registered agent, or an `Experiment`.
      env: the environment whose observations the agent sees; not used with an `Experiment`.
      topologies: whether to train it for some updates in a single process and in a program in
        lock-step, which must give the same params. It takes most of the time.

    Returns:
      What holds, and for each rule that fails one sentence with its place in the agent's file.

    Raises:
      ValueError: it is no config of a registered agent, or the agent cannot be made for this
        environment.
    """
    if not isinstance(agent, Experiment):
        cfg = EnvConfig(env, num_envs=BATCH) if isinstance(env, str) else env
        replay = ReplayConfig(
            sampler="fifo", batch_size=cfg.num_envs, unroll_length=8, max_size=2 * cfg.num_envs
        )
        entry = AGENTS.get(type(agent))
        if entry is not None and entry.agent.writes_back:  # a fifo draws nothing twice
            replay = dataclasses.replace(replay, sampler="uniform", samples_per_insert=1.0)
        agent = Experiment(preset="check", agent=agent, env=cfg, replay=replay, frames=1000)
    rules = [*RULES, TOPOLOGIES] if topologies else RULES
    subject = _Subject(agent)
    return run_rules(f"{type(subject.own).__name__} in {agent.env.name}", rules, subject)


class _Subject:
    """An agent, with its functions compiled once, and data for it."""

    def __init__(self, experiment: Experiment) -> None:
        # Statistics of observations and rewards count all steps, also those that a rule changes.
        plain = dataclasses.replace(experiment, normalisation=NormalisationConfig())
        self.experiment = experiment
        with make_env(dataclasses.replace(experiment.env, num_envs=BATCH, wait_num=0), 1) as env:
            self.spec = env.spec
            self.agent = make_agent(plain, self.spec)
            self.greedy = make_agent(plain, self.spec, greedy=True)
            self.key = jax.random.PRNGKey(3)
            self.act, self.learn = jax.jit(self.agent.actor_step), jax.jit(self.agent.learner_step)
            self.params = jax.jit(self.agent.initial_params)(self.key)
            self.learner_state = self.agent.initial_learner_state(self.key, self.params)
            # Sequences with a burn-in need their full length; the end is in the part learned from.
            replay = experiment.replay
            more = 0 if replay.sampler == "fifo" else max(0, replay.unroll_length - 5)
            self.types = np.concatenate(
                [STEP_TYPES[:1], np.full((more, BATCH), MID, np.int32), STEP_TYPES[1:]]
            )
            self._shown = self._play(env)
        self.initial = self.params, self.learner_state
        self._warm_up()
        self.parts = [self.agent]
        while isinstance(self.parts[-1], Wrapped):
            self.parts.append(self.parts[-1].agent)
        users = (part for part in self.parts if not type(part).__module__.startswith("rlstack."))
        self.own = next(users, self.parts[-1])

    def _play(self, env: Any) -> list[PyTree]:
        """Returns observations and extras ``[B, ...]`` of as many steps as a rule needs."""
        rng, timesteps = np.random.default_rng(0), [env.reset()]
        state = self.agent.initial_state(BATCH)
        for key in jax.random.split(self.key, len(self.types) + 20):
            try:  # only the agent's network knows some masks
                output, state = self.act(key, self.params, timesteps[-1], state)
                timesteps.append(env.step(jax.tree.map(np.asarray, output.action)))
            except Exception:  # a mistake of the agent, which a rule finds
                timesteps.append(env.step(random_actions(rng, self.spec, timesteps[-1])))
        return [jax.tree.map(np.array, (t.observation, t.extras)) for t in timesteps]

    def _warm_up(self) -> None:
        """Makes some updates: with a last layer that starts at zero, values would all be equal."""
        try:
            for _ in range(3):
                params, learner_state, _ = self.learn(self.params, self.learner_state, self.batch)
                del self.batch
                self.params, self.learner_state = params, learner_state
        except Exception:  # a mistake of the agent, which a rule finds
            self.params, self.learner_state = self.initial
            vars(self).pop("batch", None)

    @property
    def end(self) -> tuple[int, int]:
        """The time and the row of the LAST inside the batch."""
        return len(self.types) - 4, 2

    def step(self, time: int) -> TimeStep:
        """Returns one step ``[B]`` in the middle of episodes."""
        one = self.steps(np.full((1, BATCH), MID, np.int32), time)
        return jax.tree.map(lambda x: x[0], one)

    def steps(self, step_types: np.ndarray, start: int = 0) -> TimeStep:
        """Returns steps ``[T+1, B]`` of these types; ends are terminations."""
        rng = np.random.default_rng(start)
        length = len(step_types)
        shown = jax.tree.map(lambda *x: np.stack(x), *self._shown[start : start + length])
        # Small, because clipped losses have the same gradient for all large errors.
        reward = np.where(step_types == FIRST, 0, 0.1 * rng.normal(size=step_types.shape))
        discount = np.where(step_types == LAST, 0, 1)
        numbers = reward.astype(np.float32), discount.astype(np.float32)
        return TimeStep(step_types, *numbers, *shown)

    @functools.cached_property
    def batch(self) -> Batch:
        """A batch as from actor and replay: the agent acts on the steps."""
        timesteps = self.steps(self.types)
        # The first state is not the initial one: most unrolls begin within an episode.
        initial = self.agent.initial_state(BATCH)
        _, state = self.act(self.key, self.params, self.step(7), initial)
        rows = []
        for t, key in enumerate(jax.random.split(jax.random.PRNGKey(0), len(self.types))):
            timestep = jax.tree.map(lambda x, t=t: x[t], timesteps)
            state = self.agent.reset_state(state, jnp.asarray(timestep.first()))
            output, after = self.act(key, self.params, timestep, state)
            rows.append(Transition(timestep, output, state, np.zeros(BATCH, np.int32)))
            state = after
        trajectory = jax.tree.map(lambda *x: np.stack([np.asarray(one) for one in x]), *rows)
        return Batch(trajectory, np.ones(BATCH, np.float32))

    @functools.cached_property
    def learned(self) -> Any:
        """The result of the update on `batch`."""
        return self.learn(self.params, self.learner_state, self.batch)

    def changed(self, batch: Batch, than: Batch | None = None, tolerance: float = 1e-4) -> str:
        """Returns what another batch changes in params and learner state; "" for nothing.

        Args:
          batch: the other batch.
          than: the batch to compare with; by default the unchanged one.
          tolerance: the difference that counts as rounding, relative to what an update changes.
        """
        before = self.params, self.learner_state
        of_one = self.learned if than is None else self.learn(*before, than)
        of_other = self.learn(*before, batch)
        leaves = zip(
            jax.tree_util.tree_leaves_with_path(of_one[:2]),
            *map(jax.tree.leaves, (of_other[:2], before)),
            strict=True,
        )
        for (path, x), y, start in leaves:
            if not np.issubdtype(np.asarray(x).dtype, np.floating) or not np.size(x):
                continue
            size = float(np.abs(np.asarray(x, np.float64) - start).max())
            if float(np.abs(np.asarray(x, np.float64) - y).max()) > tolerance * size:
                return ("the params", "the learner state")[path[0].idx] + jax.tree_util.keystr(
                    path[1:]
                )
        return ""

    def where(self, method: str) -> str:
        """Returns the place of a method of the user's class, or of the class if it has none."""
        own = type(self.own)
        owner = next((cls for cls in own.__mro__ if method in vars(cls)), own)
        if owner.__module__.startswith("rlstack.") or not callable(vars(owner).get(method)):
            owner, method = own, ""
        found: Any = vars(owner).get(method, owner)
        try:
            return f"{inspect.getsourcefile(owner)}:{inspect.getsourcelines(found)[1]}"
        except (OSError, TypeError):  # a class that was made in a console
            return f"{own.__module__}.{own.__qualname__}"

    def fail(self, method: str, text: str) -> RuleError:
        """Returns the failure of a method."""
        return RuleError(f"{method} {text}", self.where(method))


def _shapes(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)


def _differ(a: PyTree, b: PyTree, atol: float = 0.0, rtol: float = 0.0) -> str:
    """Returns the first leaf in which two trees differ; "" for equal trees."""
    if jax.tree.structure(a) != jax.tree.structure(b):
        return "the structure"
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True
    ):
        if not np.allclose(np.asarray(x), np.asarray(y), atol=atol, rtol=rtol, equal_nan=True):
            return jax.tree_util.keystr(path) or "the value"
    return ""


def _acts(s: _Subject) -> None:
    state = s.agent.initial_state(BATCH)
    timestep = s.step(0)
    output, after = s.act(s.key, s.params, timestep, state)
    if getattr(type(output), "_fields", ("",))[0] != "action":
        raise s.fail("actor_step", "must return a NamedTuple whose first field is action.")

    def check(spec: Any, action: Any) -> None:
        if action.shape != (BATCH, *spec.shape) or action.dtype != spec.dtype:
            raise s.fail(
                "actor_step",
                f"must return actions {(BATCH, *spec.shape)} {spec.dtype}; got {action.shape} "
                f"{action.dtype}.",
            )
        if np.issubdtype(spec.dtype, np.integer):
            for row in np.asarray(action):
                try:
                    spec.validate(row)
                except ValueError:
                    raise s.fail(
                        "actor_step", f"must return actions within {spec}; got {row}."
                    ) from None

    jax.tree.map(check, s.spec.action, output.action)
    for path, leaf in jax.tree_util.tree_leaves_with_path(output):
        if np.shape(leaf)[:1] != (BATCH,):
            raise s.fail(
                "actor_step",
                f"must return one row for each environment; {jax.tree_util.keystr(path)} has shape "
                f"{np.shape(leaf)}, not ({BATCH}, ...).",
            )
    if _shapes(after) != _shapes(state):
        raise s.fail("actor_step", "must return a state of the shapes and dtypes it got.")
    if _shapes(s.agent.reset_state(state, np.ones(BATCH, bool))) != _shapes(state):
        raise s.fail("reset_state", "must return a state of the shapes and dtypes it got.")


def _sets_nothing(s: _Subject) -> None:
    source = textwrap.dedent(inspect.getsource(type(s.own)))
    line = inspect.getsourcelines(type(s.own))[1]
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef) or function.name == "__init__":
            continue
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, type(node.ctx)) == ("self", ast.Store)
            ):
                where = f"{inspect.getsourcefile(type(s.own))}:{line + node.lineno - 1}"
                raise RuleError(
                    f"{function.name} must not set self.{node.attr}: an agent has no state of its "
                    "own. Put it into the acting state or the learner state.",
                    where,
                )
    before = dict(vars(s.own))
    _ = s.learned
    after = vars(s.own)
    changed = [name for name in after if after[name] is not before.get(name, s)]
    if changed:
        raise s.fail("learner_step", f"must not change attributes of the agent: {changed}.")


def _repeats(s: _Subject) -> None:
    timestep = s.step(0)
    arguments = s.key, s.params, timestep, s.agent.initial_state(BATCH)
    with jax.disable_jit():
        acted, again = (s.agent.actor_step(*arguments) for _ in range(2))
        learned = s.agent.learner_step(s.params, s.learner_state, s.batch)
    if found := _differ(acted, again):
        raise s.fail("actor_step", f"must give the same for the same arguments; {found} differs.")
    if found := _differ(acted, s.act(*arguments), 1e-4, 1e-3):
        raise s.fail("actor_step", f"must give the same with jax.jit; {found} differs.")
    if found := _differ(learned, s.learned, 1e-3, 1e-2):
        raise s.fail("learner_step", f"must give the same with jax.jit; {found} differs.")


def _rows(s: _Subject) -> None:
    # Random draws have the shape of the batch, so it keeps its size and the other rows change.
    here, other = s.step(0), s.step(9)
    _, state = s.act(s.key, s.params, other, s.agent.initial_state(BATCH))
    mixed = jax.tree.map(lambda x, y: np.concatenate([x[:1], y[1:]]), here, other)
    changed = jax.tree.map(lambda x: jnp.concatenate([x[:1], x[:0:-1]]), state)
    first = s.act(s.key, s.params, here, state)
    second = s.act(s.key, s.params, mixed, changed)
    row = [jax.tree.map(lambda x: np.asarray(x)[:1], one) for one in (first, second)]
    if found := _differ(row[0], row[1], 1e-5, 1e-4):
        raise s.fail(
            "actor_step",
            f"must compute each row from the same row of its arguments; {found} of row 0 changed "
            "with the other rows.",
        )


def _memory(s: _Subject) -> None:
    agent = s.greedy  # schedules of exploration count over episodes
    if not jax.tree.leaves(agent.initial_state(1)):
        raise NotApplicableError("the acting state is empty.")
    act = jax.jit(agent.actor_step)
    types = np.full((6, BATCH), MID, np.int32)
    types[2], types[3] = LAST, FIRST
    timesteps = s.steps(types)

    def played(start: int) -> list[Any]:
        state, outputs = agent.initial_state(BATCH), []
        for t in range(start, len(types)):
            timestep = jax.tree.map(lambda x, t=t: x[t], timesteps)
            state = agent.reset_state(state, jnp.asarray(timestep.first()))
            output, state = act(s.key, s.params, timestep, state)
            outputs.append(output)
        return outputs

    if found := _differ(played(0)[3:], played(3), 1e-5, 1e-4):
        raise s.fail(
            "reset_state",
            f"must make rows at FIRST act as at the start of an episode played alone; {found} "
            "differs, so something is remembered from the episode before.",
        )


def _initial(s: _Subject) -> None:
    init = s.agent.initial_params
    if found := _differ(init(s.key), s.initial[0], 1e-6, 1e-6):
        raise s.fail("initial_params", f"must depend on the key only; {found} differs.")
    leaves = jax.tree.leaves(s.params)
    if leaves and s.agent.learns and not _differ(init(jax.random.PRNGKey(4)), s.initial[0]):
        raise s.fail("initial_params", "must depend on the key; two keys gave the same params.")
    state = s.agent.initial_learner_state(s.key, s.initial[0])
    if found := _differ(state, s.initial[1]):
        raise s.fail("initial_learner_state", f"must depend on its arguments; {found} differs.")


def _learns(s: _Subject) -> None:
    params, learner_state, output = s.learned
    for name, before, after in (
        ("params", s.params, params),
        ("learner state", s.learner_state, learner_state),
    ):
        if jax.tree.structure(before) != jax.tree.structure(after):
            raise s.fail("learner_step", f"must keep the structure of the {name}.")
        if _shapes(before) != _shapes(after):
            raise s.fail("learner_step", f"must keep shapes and dtypes of the {name}.")
        for path, leaf in jax.tree_util.tree_leaves_with_path(after):
            if not np.isfinite(np.asarray(leaf, np.float64)).all():
                raise s.fail(
                    "learner_step", f"gave NaN or infinity in {name}{jax.tree_util.keystr(path)}."
                )
    if s.agent.learns and jax.tree.leaves(params) and not _differ(params, s.params):
        raise s.fail("learner_step", "must change the params; the update changed nothing.")
    for name, value in output.logs.items():
        if np.shape(value) != () or not np.isfinite(value):
            raise s.fail("learner_step", f"must log finite scalars; {name} is {value!r:.60}.")
    given = output.priorities is not None
    if given and np.shape(output.priorities) != (BATCH,):
        raise s.fail(
            "learner_step",
            f"must give one priority for each item, ({BATCH},); got {np.shape(output.priorities)}.",
        )
    writes = output.updates is not None
    if s.agent.learns and writes != s.agent.writes_back:
        wrong = f"must be {writes}: learner_step returns {'updates' if writes else 'none'}."
        raise s.fail("writes_back", wrong)
    if s.agent.learns and given != s.agent.has_priorities:
        raise s.fail(
            "has_priorities", f"must be {given}: learner_step returns "
            f"{'priorities' if given else 'none'}."
        )  # fmt: skip


def _reads_states(s: _Subject) -> None:
    trajectory = s.batch.trajectory
    once = s.agent.read_once(trajectory.agent_state)
    if not any(jax.tree.leaves(once)):
        raise NotApplicableError("the agent may read its state at every step.")
    state = jax.tree.map(lambda x, o: x[:1] if o else x, trajectory.agent_state, once)
    try:
        batch = s.batch._replace(trajectory=trajectory._replace(agent_state=state))
        found = s.changed(batch)
    except Exception as error:
        found = f"it raised {type(error).__name__}: {error}"[:200]
    if found:
        raise s.fail(
            "learner_step",
            "must read agent_state at index 0 only, because the agent says reads_first_state; "
            f"without the states of the other steps, [1, B, ...], got another result: {found}. "
            "Read agent_state before slicing the trajectory, or leave reads_first_state False.",
        )


def _replaced(s: _Subject, **fields: Callable[[np.ndarray], np.ndarray]) -> Batch:
    """Returns the batch with fields of its timesteps changed."""
    trajectory = s.batch.trajectory
    timestep = trajectory.timestep
    changes = {name: change(np.array(getattr(timestep, name))) for name, change in fields.items()}
    return s.batch._replace(trajectory=trajectory._replace(timestep=timestep._replace(**changes)))


def _at(time: int, row: int, value: Any) -> Callable[[np.ndarray], np.ndarray]:
    def change(x: np.ndarray) -> np.ndarray:
        x[time, row] = value
        return x

    return change


def _boundary(s: _Subject) -> None:
    if not s.agent.learns:
        raise NotApplicableError("the agent does not learn.")
    end, row = s.end
    changed = {
        "the reward at FIRST": _replaced(s, reward=_at(end + 1, row, 7.0)),
        "the discount at FIRST": _replaced(s, discount=_at(end + 1, row, 0.3)),
        "the action at LAST, which is ignored,": _other_action(s, end, row),
    }
    for name, batch in changed.items():
        if found := s.changed(batch):
            raise s.fail(
                "learner_step",
                "must not learn from the step between LAST and FIRST, which is no transition; "
                f"{name} changed {found}. Mask it with ~trajectory.timestep.first()[1:].",
            )


def _other_action(s: _Subject, time: int, row: int) -> Batch:
    trajectory = s.batch.trajectory

    def other(spec: Any, action: np.ndarray) -> np.ndarray:
        action = np.array(action)
        if np.issubdtype(action.dtype, np.integer):
            low, high = np.asarray(spec.minimum), np.asarray(spec.maximum)
            action[time, row] = low + high - action[time, row]
        else:
            action[time, row] = -0.5 * action[time, row] + 0.1
        return action

    action = jax.tree.map(other, s.spec.action, trajectory.agent_output.action)
    output = trajectory.agent_output._replace(action=action)
    return s.batch._replace(trajectory=trajectory._replace(agent_output=output))


def _uses_discount(s: _Subject) -> None:
    if not s.agent.learns:
        raise NotApplicableError("the agent does not learn.")
    rows = (0, 1, 3)
    if not any(s.changed(_replaced(s, discount=_at(s.end[0], r, 0.0)), tolerance=0) for r in rows):
        raise NotApplicableError("the update does not depend on discounts.")


def _other_end(s: _Subject, batch: Batch) -> Batch:
    """Returns the batch with another last observation, and other records of acting on it."""
    (end, row), trajectory = s.end, batch.trajectory
    other = s.step(len(s.types) + 6).observation

    def replaced(x: np.ndarray, value: Any) -> np.ndarray:
        x = np.array(x)
        x[end, row] = value
        return x

    observation = jax.tree.map(
        lambda x, y: replaced(x, y[row]), trajectory.timestep.observation, other
    )
    timestep = trajectory.timestep._replace(observation=observation)
    output = {
        name: jax.tree.map(lambda x: replaced(x, 0.5 * x[end, row] + 1.0), value)
        for name, value in trajectory.agent_output._asdict().items()
        if name not in ("action", "episode_return")  # a return is of rewards, not of this step
        and all(np.issubdtype(x.dtype, np.floating) for x in jax.tree.leaves(value))
    }
    return batch._replace(
        trajectory=trajectory._replace(
            timestep=timestep, agent_output=trajectory.agent_output._replace(**output)
        )
    )


def _termination(s: _Subject) -> None:
    _uses_discount(s)
    if has_state(s.agent.network):
        raise NotApplicableError("the network has statistics of all steps of a batch.")
    if any(isinstance(part, Intrinsic) for part in s.parts):
        raise NotApplicableError("the bonus of a transition depends on the observation after it.")
    if found := s.changed(_other_end(s, s.batch)):
        raise s.fail(
            "learner_step",
            "must not bootstrap from the last observation of a terminated episode, whose discount "
            f"is 0; it changed {found}. A bonus that the agent adds for that observation changes it"
            " too, and is right.",
        )


def _time_limit(s: _Subject) -> None:
    _uses_discount(s)
    cut = _replaced(s, discount=_at(*s.end, 1.0))
    if not s.changed(cut, tolerance=0):
        raise s.fail(
            "learner_step",
            "must learn other params from a time limit (LAST with discount 1) than from a "
            "termination (discount 0); both gave the same. Multiply by timestep.discount, "
            "not by ~last().",
        )
    if not s.changed(_other_end(s, cut), than=cut, tolerance=0):
        raise s.fail(
            "learner_step",
            "must bootstrap from the observation at a time limit; it changed nothing.",
        )


def _legal(s: _Subject) -> None:
    timesteps = s.steps(np.full((8, BATCH), MID, np.int32))
    mask = action_mask(timesteps.observation)
    if mask is None or not hasattr(s.spec.action, "num_values"):
        raise NotApplicableError("the environment has no mask of legal actions.")
    for agent in (s.agent, s.greedy):
        state = agent.initial_state(BATCH)
        for t, key in enumerate(jax.random.split(s.key, len(mask))):
            timestep = jax.tree.map(lambda x, t=t: x[t], timesteps)
            output, state = agent.actor_step(key, s.params, timestep, state)
            legal = np.take_along_axis(np.asarray(mask[t]), np.asarray(output.action)[:, None], -1)
            if not legal.all() and np.asarray(mask[t]).any(axis=-1).all():
                raise s.fail("actor_step", "must take only legal actions; it took an illegal one.")


def _pickles(s: _Subject) -> None:
    try:
        copy: Agent = pickle.loads(pickle.dumps(s.agent))
    except Exception as error:
        raise s.fail("__init__", f"must get arguments that can be pickled: {error}") from error
    timestep = s.step(0)
    state = s.agent.initial_state(BATCH)
    acted = jax.jit(copy.actor_step)(s.key, s.params, timestep, state)
    if found := _differ(acted, s.act(s.key, s.params, timestep, state)):
        raise s.fail(
            "__init__", f"must make the same agent from the same arguments; {found} differs."
        )


def _resumes(s: _Subject) -> None:
    params, learner_state, _ = s.learned
    saved = {"params": params, "learner_state": learner_state}
    with tempfile.TemporaryDirectory() as directory:
        path = checkpoint.save(directory, 1, saved, {})
        found = checkpoint.restore(path, jax.tree.map(jnp.zeros_like, saved))
    again = s.learn(found["params"], found["learner_state"], s.batch)
    if leaf := _differ(again, s.learn(params, learner_state, s.batch)):
        raise s.fail(
            "learner_step",
            f"must go on from a checkpoint as if never interrupted; {leaf} differs.",
        )


def _topologies(s: _Subject) -> None:
    experiment = s.experiment
    if not s.agent.learns or experiment.data or experiment.policies:
        raise NotApplicableError("it trains without acting, not at all, or with other policies.")
    lock_step = ProgramConfig(num_actors=1, launch="threads", pacing="lock_step")
    rows = experiment.env.num_envs * experiment.replay.unroll_length
    small = dataclasses.replace(
        experiment,
        frames=max(4 * rows, experiment.replay.min_size + 2 * rows),
        evaluator=dataclasses.replace(experiment.evaluator, episodes=1, num_envs=1),
        replay=dataclasses.replace(experiment.replay, service="table"),
        loggers=(),
        program=lock_step,
    )
    with tempfile.TemporaryDirectory() as directory:
        found = {}
        for topology in ("single_process", "heavy_env"):
            path = Path(directory) / topology
            one = dataclasses.replace(small, topology=topology)
            result = train.run(one, path, stream=io.StringIO())
            target = {"learner": {"params": s.params}}
            newest = checkpoint.latest(path / "checkpoints")
            assert newest is not None
            saved = checkpoint.restore(newest, target, partial=True)
            found[topology] = saved["learner"]["params"], result.learner_steps
    (one_process, updates), (program, its_updates) = found.values()
    if not updates:
        raise NotApplicableError(f"no update was made in {small.frames:,} frames.")
    if updates != its_updates or _differ(one_process, program):
        raise s.fail(
            "learner_step",
            "must learn the same in a single process and in a program in lock-step; after "
            f"{updates} and {its_updates} updates {_differ(one_process, program) or 'nothing'} "
            "differs.",
        )


RULES = [
    ("actions and states have their shapes, dtypes and ranges", _acts),
    ("no attribute is set after __init__", _sets_nothing),
    ("the same arguments give the same results, with jit and without", _repeats),
    ("a row does not depend on the other rows", _rows),
    ("memory is reset where episodes begin", _memory),
    ("initial params and learner state depend on the key only", _initial),
    ("an update keeps shapes, changes params, and is finite", _learns),
    ("states are read at the first step only, if the agent says so", _reads_states),
    ("nothing is learned from the step between two episodes", _boundary),
    ("a termination is not bootstrapped from", _termination),
    ("a time limit is bootstrapped from", _time_limit),
    ("only legal actions are taken", _legal),
    ("the agent can be pickled", _pickles),
    ("a resumed learner goes on bit for bit", _resumes),
]
TOPOLOGIES = ("a program in lock-step learns what a single process learns", _topologies)
