"""The agent of a finished run as a policy that acts in any loop: ``rlstack.load(run_dir)``."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack.acting.batches import padded_sizes
from rlstack.acting.inferencer import acting_options
from rlstack.agent import Agent
from rlstack.agents import AGENTS
from rlstack.checks import WrongKindError
from rlstack.distributions import Categorical, Joint, MultiCategorical
from rlstack.envs.nest import Nest
from rlstack.envs.values import fitted, own
from rlstack.exploration import RunCounts
from rlstack.families.q_learning import TargetNetworkAgent
from rlstack.networks.torsos import critic_entry, has_critic_state, without_critic_state
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.environments import environment_spec
from rlstack.programs.build.policies.members import counts_of, of_one
from rlstack.programs.build.restored import Which, chosen_checkpoint, read_params
from rlstack.programs.build.seeds import role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_config import read_config
from rlstack.programs.session.run_dir import RunDir
from rlstack.storage import checkpoint
from rlstack.types import (
    ActionDistribution,
    AgentState,
    Array,
    EnvSpec,
    Params,
    PRNGKey,
    PyTree,
    StepType,
    TimeStep,
)

_SIZES = (1, *padded_sizes((), 1 << 20, 1 << 20))  # batch sizes to which batches are padded
_REWARD = specs.Array((), np.float32)


class Prediction(NamedTuple):
    """An agent's action and its estimates at one step; batches have a leading axis [B]."""

    action: PyTree  # has the structure of the action spec
    # By action type, or "action" if there is only one: float32 [rows, n]; empty if continuous.
    probabilities: Mapping[str, np.ndarray]
    # For agents that learn action values, these values, in the same form; otherwise empty.
    action_values: Mapping[str, np.ndarray]
    # Expected return of the rest of the episode, float or [B]; None without a critic, and without
    # the state that the critic sees.
    value: Any


class Policy:
    """The agent of a run with its params; it keeps the recurrent state from call to call.

    One thread at a time may call it.

    Attributes:
      experiment: the config of the run.
      spec: the spec of one observation and of one action. Discrete values start where the
        environment's own values start.
      seen_spec: the spec of the observation without what only a critic sees.
      env_frames: the environment steps that the params have learned from.
      agent: the run's agent, greedy or exploring.
      params: the agent's params.
      pad_batches: True to compile for a few batch sizes only and pad other batches to one of them,
        for callers whose batches have many sizes.
    """

    def __init__(
        self,
        experiment: Experiment,
        spec: EnvSpec,
        params: Params,
        *,
        greedy: bool = True,
        seed: int = 0,
        env_frames: int = 0,
        after: RunCounts = RunCounts(),  # noqa: B008  (immutable)
    ) -> None:
        """Makes the policy. Call `load` instead, which reads the params of a run.

        Args:
          experiment: the config of the run.
          spec: the spec of the run's environments. Pass `rlstack.envs.values.from_zero` of it for
            discrete values that count from 0, as in pools.
          params: the agent's params.
          greedy: True to take the best action; False to explore as in training, at ``after``.
          seed: seed of the random actions.
          env_frames: the environment steps that the params have learned from.
          after: steps and episodes of each environment of the run, for exploration schedules.
        """
        self.experiment, self.spec, self.env_frames = experiment, spec, env_frames
        self.agent = make_agent(experiment, spec, greedy=greedy, after=after)
        self.params = params
        self.pad_batches = False
        self._key = role_key(seed, "policy")
        self._observation, self._action = Nest(spec.observation), Nest(spec.action)
        self._hidden = critic_entry(experiment.network)
        self.seen_spec = without_critic_state(spec.observation, self._hidden)
        self._needed = Nest(self.seen_spec)
        self._state: AgentState = ()
        self._first = np.zeros(0, bool)  # the rows whose next step begins an episode; [] at first
        has_values = issubclass(AGENTS[type(experiment.agent)].agent, TargetNetworkAgent)
        options = acting_options(self.agent)
        self._act = jax.jit(functools.partial(_act, self.agent), compiler_options=options)
        self._predict = jax.jit(
            functools.partial(_predict, self.agent, has_values), compiler_options=options
        )

    def act(self, observation: PyTree, reward: Array | float = 0.0) -> PyTree:
        """Returns the action for one observation, or the actions for a batch of them.

        Args:
          observation: the environment's observation, with the structure of ``spec.observation``
            or ``seen_spec``. Each array has the shape of its spec, or one more leading axis [B] for
            B environments, which must then be the same ones in every call until `reset`. Discrete
            values are the environment's own: those of ``Discrete(3, start=5)`` are 5, 6 and 7.
          reward: the reward of the last action, for networks that read it.

        Returns:
          Arrays in the structure of ``spec.action``, within its bounds. Discrete actions are the
          environment's own; they are int32, or int64 where int32 cannot hold them.

        Raises:
          WrongKindError: the observation has another structure, or real numbers instead of
            integers.
          ValueError: an array has another shape, an integer is outside of its space, a number is
            not finite (unless the run has ``env.check_finite`` off), or the number of environments
            has changed and the agent has a state.
        """
        timestep, batched = self._timestep(observation, reward)
        self._key, self._state, action = self._act(self._key, self.params, timestep, self._state)
        return self._bounded(action, batched)

    def predict(self, observation: PyTree, reward: Array | float = 0.0) -> Prediction:
        """Acts as `act` does, and also returns probabilities and the value."""
        blind = self._lacks_critic_state(observation)
        timestep, batched = self._timestep(observation, reward)
        self._key, self._state, action, *details = self._predict(
            self._key, self.params, timestep, self._state
        )
        chances, values, value = jax.tree.map(np.asarray, details)
        rows = slice(len(self._first)) if batched else 0
        chances, values, value = jax.tree.map(lambda x: x[rows], (chances, values, value))
        if not batched:
            value = None if value is None else float(value)
        value = None if blind else value
        return Prediction(self._bounded(action, batched), chances, values, value)

    def reset(self, rows: Any = None) -> None:
        """Starts new episodes with the next observation.

        Args:
          rows: bool [B], the environments of the batch whose episode has ended; all by default,
            and then the next call may have another number of environments.

        Raises:
          ValueError: ``rows`` has another length than the last batch.
        """
        if rows is None:
            self._state, self._first = (), np.zeros(0, bool)
            return
        rows = np.asarray(rows, bool)
        if rows.shape != self._first.shape:
            raise ValueError(
                f"Policy.reset: rows must have shape {self._first.shape}, one entry for each "
                f"environment of the last batch; got {rows.shape}."
            )
        self._first = self._first | rows

    def twin(self, seed: int) -> Policy:
        """Returns this policy with a state and random numbers of its own.

        What is compiled is shared, so a twin costs nothing.
        """
        twin = copy.copy(self)
        twin._key = role_key(seed, "policy")
        twin.reset()
        return twin

    def _timestep(self, observation: PyTree, reward: Array | float) -> tuple[TimeStep, bool]:
        """Returns the step ``[B, ...]``, and whether the observation is a batch."""
        blind = self._lacks_critic_state(observation)
        nest = self._needed if blind else self._observation
        try:
            leaves = nest.flatten(observation, "Policy.act: observation")
        except TypeError as error:
            raise WrongKindError(f"{error}{_hint(observation)}") from None
        finite = self.experiment.env.check_finite
        arrays = [
            _array(leaf, spec, f"Policy.act: observation{path}", finite)
            for leaf, spec, path in zip(leaves, nest.leaves, nest.paths, strict=True)
        ]
        batched = arrays[0].ndim > len(nest.leaves[0].shape)
        arrays = arrays if batched else [array[None] for array in arrays]
        rows = len(arrays[0])
        for array, spec, path in zip(arrays, nest.leaves, nest.paths, strict=True):
            if array.shape != (rows, *spec.shape):
                raise ValueError(
                    f"Policy.act: observation{path} must have shape {spec.shape}, or (B, *shape) "
                    f"as all arrays of a batch; got {array.shape if batched else array.shape[1:]}."
                )
        rewards = _array(reward, _REWARD, "Policy.act: reward", finite)
        if rewards.shape not in ((), (rows,)):
            raise ValueError(
                f"Policy.act: reward must be a number, or one for each of the {rows} environments; "
                f"got shape {rewards.shape}."
            )
        first = self._begin(rows)
        timestep = self.completed(
            TimeStep(
                np.where(first, StepType.FIRST, StepType.MID).astype(np.int32),
                np.broadcast_to(rewards, rows),
                np.ones(rows, np.float32),
                nest.unflatten(arrays),
            )
        )
        if more := self._size(rows) - rows:  # repeats of the first row are valid data
            timestep = jax.tree.map(
                lambda x: np.concatenate([x, np.repeat(x[:1], more, axis=0)]), timestep
            )
        return self.agent.lay_out(timestep), batched

    def completed(self, timestep: TimeStep) -> TimeStep:
        """Returns steps ``[B, ...]`` with zeros for what they lack: extras, what a critic sees."""
        rows = timestep.step_type.shape[0]

        def blank(spec: PyTree) -> PyTree:
            return jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), spec)

        if self.spec.extras and not timestep.extras:
            timestep = timestep._replace(extras=blank(self.spec.extras))
        if not self._lacks_critic_state(timestep.observation):
            return timestep
        hidden = blank(self.spec.observation[self._hidden])
        return timestep._replace(observation={**timestep.observation, self._hidden: hidden})

    def _lacks_critic_state(self, observation: Any) -> bool:
        shows = has_critic_state(self.spec.observation, self._hidden)
        return shows and not has_critic_state(observation, self._hidden)

    def _size(self, rows: int) -> int:
        """Returns the size of the batch that is computed for these rows."""
        return next((n for n in _SIZES if n >= rows), rows) if self.pad_batches else rows

    def _begin(self, rows: int) -> np.ndarray:
        """Returns the rows that begin an episode; makes the state of the first batch."""
        if len(self._first) != rows and not jax.tree.leaves(self._state):
            self._first = np.zeros(0, bool)  # there is no state to keep
        if not self._first.size:
            self._state = self.agent.initial_state(self._size(rows))
            self._first = np.ones(rows, bool)
        if len(self._first) != rows:
            raise ValueError(
                f"Policy.act: must have the {len(self._first)} environments of the last call, "
                f"whose state it keeps; got {rows}. Call reset() first."
            )
        first, self._first = self._first, np.zeros(rows, bool)
        return first

    def _bounded(self, action: PyTree, batched: bool) -> PyTree:
        """Returns the environment's own action; Gaussian policies overshoot bounds by design."""
        leaves = []
        for leaf, spec in zip(
            self._action.flatten(action, "action"), self._action.leaves, strict=True
        ):
            array = np.asarray(leaf)[: len(self._first)] if batched else np.asarray(leaf)[0]
            if isinstance(spec, specs.BoundedArray) and np.issubdtype(spec.dtype, np.floating):
                array = np.clip(array, spec.minimum, spec.maximum)
            leaves.append(own(array, spec))
        return self._action.unflatten(leaves)


def load(
    run_dir: str | os.PathLike[str],
    *,
    params: Which = "last",
    greedy: bool = True,
    seed: int = 0,
    spec: EnvSpec | None = None,
    policy: str = "",
) -> Policy:
    """Returns the policy of a run, to act in a loop of your own.

    Args:
      run_dir: the directory of a run with a checkpoint.
      params: "last" for the newest params, "best" for those with the best return in an evaluation.
      greedy: True to take the best action; False to explore as at the end of training.
      seed: seed of the random actions.
      spec: the spec of the environments. By default one environment of the run is made to read its
        spec, and closed. Observations and actions are then the environment's own values. With the
        spec of a pool from `rlstack.envs.values.from_zero`, discrete values count from 0.
      policy: name of the policy to load, if the run trained several.

    Raises:
      ValueError: there is no run or no checkpoint, or it was trained on another spec.
    """
    directory = RunDir.open(run_dir)
    of_all = read_config(directory, several=True)
    experiment = of_one(of_all, policy, directory.path)
    path = chosen_checkpoint(directory, experiment, params)
    if spec is None:
        spec = environment_spec(experiment)
        if experiment.env.levels:  # outside of training nobody chooses them
            from rlstack.families.levels import without_level

            spec = without_level(spec)
    return Policy(
        experiment,
        spec,
        read_params(path, experiment, spec, policy=policy),
        greedy=greedy,
        seed=seed,
        env_frames=int(checkpoint.read_metadata(path)["env_frames"]),
        after=counts_of(path, of_all),
    )


def _act(
    agent: Agent, key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
) -> tuple[PRNGKey, AgentState, PyTree]:
    key, step_key = jax.random.split(key)
    state = agent.reset_state(state, timestep.first())
    output, state = agent.actor_step(step_key, params, timestep, state)
    return key, state, output.action


def _predict(
    agent: Agent,
    has_values: bool,
    key: PRNGKey,
    params: Params,
    timestep: TimeStep,
    state: AgentState,
) -> tuple[PRNGKey, AgentState, PyTree, dict[str, Array], dict[str, Array], Array | None]:
    key, step_key = jax.random.split(key)
    state = agent.reset_state(state, timestep.first())
    distribution = agent.action_distribution(step_key, params, timestep, state)
    output, state = agent.actor_step(step_key, params, timestep, state)
    logits = _logits(distribution)
    chances: dict[str, Array] = {
        name: jax.nn.softmax(rows, axis=-1) for name, rows in logits.items()
    }
    value = getattr(output, "value", None)
    if has_values and value is None and len(logits) == 1:
        (rows,) = logits.values()
        value = rows.max(axis=(1, 2))
    return key, state, output.action, chances, logits if has_values else {}, value


def _logits(distribution: ActionDistribution | None) -> dict[str, Array]:
    """Returns the logits of the discrete action types, float32 [B, rows, n]."""
    components = distribution.components if isinstance(distribution, Joint) else distribution
    named = components if isinstance(components, dict) else {"action": components}
    return {
        name: component.logits.reshape((len(component.logits), -1, component.logits.shape[-1]))
        for name, component in named.items()
        if isinstance(component, Categorical | MultiCategorical)
    }


def _array(leaf: Any, spec: specs.Array, where: str, finite: bool = True) -> np.ndarray:
    """Returns a caller's array as the agent takes it; see `rlstack.envs.values.fitted`."""
    try:
        array = np.asarray(leaf)
    except ValueError as error:  # lists of different lengths
        raise ValueError(f"{where} must be an array of one shape; {error}.") from None
    if array.dtype.kind not in "biuf":
        raise WrongKindError(f"{where} must hold numbers; got {type(leaf).__name__} {leaf!r:.80}.")
    return fitted(array, spec, where, finite=finite)


def _hint(observation: Any) -> str:
    """Returns the way out for an observation of a game, which is no array yet."""
    if not hasattr(observation, "features"):
        return ""
    return (
        " The policy takes the arrays of rlstack.entity.as_dm_env(game). "
        "rlstack.programs.tools.game_agent.from_run returns a player that takes the game's "
        "observations."
    )
