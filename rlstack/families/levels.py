"""A wrapper that lets any agent choose the levels of its environments, as its config says.

The levels and their scores are in the learner's state, and the probabilities that follow from them
in the params. So they reach what acts where params do, and checkpoints hold them. With each action
the wrapper draws a level, which the environment begins if it resets at that step. Which level a
step belongs to is in its extras, so scores are of the levels that were played, in any order.

Prioritised level replay (``plr``) is Jiang et al. (2021a), https://arxiv.org/abs/2010.03934, and
``robust_plr`` is Jiang et al. (2021b), https://arxiv.org/abs/2110.02439: there, the agent learns
from episodes of replayed levels only. Scores are from the second paper (section 3 and appendix):
positive value loss, the mean of the positive parts of the advantages by GAE, and MaxMC, the highest
return so far minus the mean value. Names and constants are those of JaxUED (Coward et al. 2024,
https://arxiv.org/abs/2403.13091). Deviations: each environment draws its level by itself when its
episode ends, instead of all at once; scores are means over the steps of a level, also of episodes
that have not ended; for MaxMC a new level is kept only when an episode of it has ended, as there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlstack.agent import Agent, EpochAgent
from rlstack.configs.levels import LevelsConfig
from rlstack.families.policy_gradient import masked_mean
from rlstack.families.wrapped import Wrapped, WrappedEpochs
from rlstack.math import levels, returns
from rlstack.references import check_callable, load_hook, name_of
from rlstack.specs import ACTION, LEVEL, own_action
from rlstack.types import (
    ActionDistribution,
    AgentOut,
    AgentState,
    Array,
    Batch,
    EnvSpec,
    LearnerOutput,
    LearnerState,
    Logs,
    Params,
    PRNGKey,
    PyTree,
    StepType,
    TimeStep,
    Trajectory,
)

_LAMBDA = 0.95  # trace of the advantages of scores, for agents without gae_lambda
_RULE = "Experiment: levels.rule"


class LevelsParams(NamedTuple):
    """The params that the learner publishes."""

    agent: Params
    levels: levels.Sampling


class LevelsLearnerState(NamedTuple):
    """The learner's state."""

    agent: LearnerState
    table: levels.LevelTable


class LevelsState(NamedTuple):
    """The acting state."""

    agent: AgentState
    drawn: Array  # [B] int32, the level of the next episode if it begins at the next step
    replays: Array  # [B] bool, whether that level was drawn to be replayed
    replayed: Array  # [B] bool, whether the level of this episode was
    episode_return: Array  # [B] float32, of the episode so far, undiscounted


class LevelsOutput(NamedTuple):
    """The outputs of acting."""

    action: PyTree  # the agent's and the level, see `rlstack.specs`
    agent: AgentOut  # the other outputs of the agent
    replayed: Array  # [B] bool, see `LevelsState`
    episode_return: Array  # [B] float32, with the reward of this step


class Levels(Wrapped):
    """An agent that chooses levels."""

    def __init__(self, agent: Agent, cfg: LevelsConfig, number: int, chooses: bool) -> None:
        """Wraps an agent. Call `choosing_levels` instead, which chooses the class."""
        super().__init__(agent, cfg, number, chooses)
        self.levels, self._number, self._chooses = cfg, number, chooses
        self._size = 0 if cfg.kind == "uniform" else min(cfg.max_size, number)
        self._rule: Any = None
        if cfg.kind == "rule":
            self._rule = load_rule(cfg)
            if number > cfg.max_size:
                raise ValueError(
                    f"Experiment: env.levels must be at most levels.max_size "
                    f"({cfg.max_size}) with levels.kind rule, which gives each level a weight; "
                    f"got {number}. Raise --levels.max-size or lower --env.levels."
                )
        elif self._size and not agent.has_values:
            raise ValueError(
                f"Experiment: levels.kind must be uniform or rule with {type(agent).__name__}, "
                f"which gives no values to score levels with; got {cfg.kind}. Give the agent "
                "has_values and trajectory_values, see docs/levels.md, and do not use "
                "--normalisation.rewards centred."
            )
        if agent.writes_back:
            raise ValueError(
                f"Experiment: env.levels must be 0 with {type(agent).__name__}, which writes back "
                f"to the steps in replay; got {number}."
            )

    def read_once(self, state: AgentState) -> PyTree:
        """Returns what the agent says of its state; learning reads nothing else of it."""
        if not self._chooses:
            return self.agent.read_once(state)
        return LevelsState(self.agent.read_once(state.agent), *(True,) * 4)  # type: ignore[arg-type]

    def initial_params(self, rng_key: PRNGKey) -> LevelsParams:
        """Returns the agent's newly initialised parameters, with the levels of an empty table."""
        return LevelsParams(self.agent.initial_params(rng_key), self._sampling(self._table()))

    def initial_state(self, batch_size: int) -> AgentState:
        """Returns the agent's initial state, with no level drawn."""
        state = self.agent.initial_state(batch_size)
        if not self._chooses:
            return state
        no = jnp.zeros(batch_size, bool)
        return LevelsState(
            state, jnp.zeros(batch_size, jnp.int32), no, no, jnp.zeros(batch_size, jnp.float32)
        )

    def reset_state(self, state: AgentState, first: Array) -> AgentState:
        """Resets the agent's state; the first step of an episode needs the level that was drawn."""
        if not self._chooses:
            return self.agent.reset_state(state, first)
        return state._replace(agent=self.agent.reset_state(state.agent, first))

    def initial_learner_state(self, rng_key: PRNGKey, params: LevelsParams) -> LevelsLearnerState:
        """Returns the agent's initial learner state, and a table without scores."""
        agent = self.agent.initial_learner_state(rng_key, params.agent)
        return LevelsLearnerState(agent, self._table())

    def action_distribution(
        self, rng_key: PRNGKey, params: LevelsParams, timestep: TimeStep, state: AgentState
    ) -> ActionDistribution | None:
        """Returns the agent's distribution."""
        state = state.agent if self._chooses else state
        return self.agent.action_distribution(rng_key, params.agent, timestep, state)

    def trajectory_values(self, params: LevelsParams, trajectory: Trajectory) -> Array:
        """Returns the agent's values."""
        return self.agent.trajectory_values(params.agent, self._own(trajectory))

    def actor_step(
        self, rng_key: PRNGKey, params: LevelsParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOut, AgentState]:
        """Acts as the agent on ``[B, ...]`` steps, and draws a level for each environment."""
        if not self._chooses:
            return self.agent.actor_step(rng_key, params.agent, timestep, state)
        agent_key, level_key = jax.random.split(rng_key)
        output, agent_state = self.agent.actor_step(agent_key, params.agent, timestep, state.agent)
        first = timestep.first()
        # An environment that was restarted begins with a level of its own.
        as_drawn = state.replays & (timestep.extras[LEVEL] == state.drawn)
        replayed = jnp.where(first, as_drawn, state.replayed)
        so_far = jnp.where(first, 0.0, state.episode_return) + timestep.reward
        drawn, replays = levels.draw(level_key, params.levels, self._number, len(so_far))
        action = {ACTION: output.action, LEVEL: drawn}
        made = LevelsOutput(action, output._replace(action=()), replayed, so_far)
        return made, LevelsState(agent_state, drawn, replays, replayed, so_far)

    def learner_step(
        self, params: LevelsParams, learner_state: LevelsLearnerState, batch: Batch
    ) -> tuple[LevelsParams, LevelsLearnerState, LearnerOutput]:
        """Scores the levels of the batch, and updates the agent from it."""
        table, batch, logs = self._take(params, learner_state, batch)
        agent, state, output = self.agent.learner_step(params.agent, learner_state.agent, batch)
        params = LevelsParams(agent, self._sampling(table))
        output = output._replace(logs={**output.logs, **logs})
        return params, LevelsLearnerState(state, table), output

    def _own(self, trajectory: Trajectory) -> Trajectory:
        """Returns the agent's own part of a trajectory."""
        output = trajectory.agent_output
        return trajectory._replace(
            agent_output=output.agent._replace(action=output.action[ACTION]),
            agent_state=trajectory.agent_state.agent,
        )

    def _take(
        self, params: LevelsParams, learner_state: LevelsLearnerState, batch: Batch
    ) -> tuple[levels.LevelTable, Batch, Logs]:
        """Returns the table with the batch in it, the agent's batch, and logs."""
        output, table = batch.trajectory.agent_output, learner_state.table
        trajectory = self._own(batch.trajectory)
        replayed, timestep = jnp.asarray(output.replayed), trajectory.timestep
        present = ~jnp.asarray(timestep.first())[1:]
        logs: Logs = {"levels_replayed": masked_mean(replayed[1:] * 1.0, present)}
        if self._size:
            seen = levels.by_level(
                timestep.extras[LEVEL][1:],
                present,
                self._amounts(params.agent, trajectory, present),
                timestep.last()[1:],
                output.episode_return[1:],
            )
            cfg = self.levels
            table = levels.updated(
                table,
                seen,
                cfg.temperature,
                cfg.staleness_coeff,
                from_max_return=cfg.score_function == "MaxMC",
            )
            held = table.score > levels.LOWEST
            logs["levels_held"] = held.sum().astype(jnp.float32)
            logs["levels_score"] = masked_mean(jnp.where(held, table.score, 0.0), held)
        if self.levels.kind == "robust_plr":
            trajectory = trajectory._replace(timestep=only(replayed, timestep))
        return table, batch._replace(trajectory=trajectory), logs

    def _amounts(self, params: Params, trajectory: Trajectory, present: Array) -> Array:
        """Returns what is averaged to the score of a level, ``[T, B]``."""
        if not self.agent.has_values:
            return jnp.zeros(present.shape)
        values = self.agent.trajectory_values(params, trajectory)
        if self.levels.score_function == "MaxMC":
            return -values[:-1]
        after = jax.tree.map(lambda x: x[1:], trajectory.timestep)
        advantages, _ = returns.gae(
            rewards=after.reward,
            discounts=after.discount * self.agent.cfg.discount,
            values=values,
            gae_lambda=getattr(self.agent.cfg, "gae_lambda", _LAMBDA),
            mask=present,
        )
        return jnp.maximum(advantages, 0.0)

    def _table(self) -> levels.LevelTable:
        return levels.initial_table(self._size, full=self.levels.kind == "rule")

    def _sampling(self, table: levels.LevelTable) -> levels.Sampling:
        cfg = self.levels
        if cfg.kind == "rule":
            return levels.sampling(table, jnp.maximum(self._rule(table), 0.0), 1.0)
        if not self._size:
            return levels.Sampling(table.level, table.score, jnp.zeros(()))
        filled = (table.level >= 0).mean() >= cfg.minimum_fill_ratio
        weights = levels.level_weights(table, cfg.temperature, cfg.staleness_coeff)
        return levels.sampling(table, weights, jnp.where(filled, cfg.replay_prob, 0.0))


class LevelsEpochs(Levels, WrappedEpochs):
    """An epoch agent that chooses levels, whose scores are computed once per batch."""

    def prepare(
        self, params: LevelsParams, learner_state: LevelsLearnerState, batch: Batch
    ) -> tuple[LevelsLearnerState, PyTree, Array]:
        """Scores the levels, and calls the agent's ``prepare``."""
        table, batch, _ = self._take(params, learner_state, batch)
        state, rows, schedule = self.agent.prepare(params.agent, learner_state.agent, batch)
        return LevelsLearnerState(state, table), rows, schedule

    def update(
        self, params: LevelsParams, learner_state: LevelsLearnerState, minibatch: PyTree
    ) -> tuple[LevelsParams, LevelsLearnerState, LearnerOutput]:
        """Makes a gradient step of the agent; the levels do not change."""
        agent, state, output = self.agent.update(params.agent, learner_state.agent, minibatch)
        return params._replace(agent=agent), learner_state._replace(agent=state), output

    def finish(
        self, params: LevelsParams, learner_state: LevelsLearnerState
    ) -> tuple[LevelsParams, LevelsLearnerState]:
        """Ends the batch of the agent, and publishes the new probabilities of levels."""
        agent, state = self.agent.finish(params.agent, learner_state.agent)
        after = LevelsParams(agent, self._sampling(learner_state.table))
        return after, learner_state._replace(agent=state)

    learner_step = Levels.learner_step


def without_level(spec: EnvSpec) -> EnvSpec:
    """Returns the spec of environments with the agent's own actions, if it has a level."""
    return spec._replace(action=own_action(spec.action))


def only(kept: Array, timestep: TimeStep) -> TimeStep:
    """Returns steps in which those that are not kept are FIRST, so they make no transition.

    Args:
      kept: ``[T+1, B]`` bool, the same for all steps of an episode.
      timestep: ``[T+1, B, ...]``.
    """
    return timestep._replace(
        step_type=jnp.where(kept, timestep.step_type, int(StepType.FIRST)),
        reward=jnp.where(kept, timestep.reward, 0.0),
        discount=jnp.where(kept, timestep.discount, 1.0),
    )


def load_rule(cfg: LevelsConfig) -> Any:
    """Returns the user's rule, and checks its signature.

    Raises:
      ValueError: the function cannot be imported.
      WrongKindError: the hook is not a function of one argument.
    """
    rule = load_hook(_RULE, cfg.rule)
    wanted = "(table) -> weights of the levels, with jax.numpy"
    check_callable(f"{_RULE} {name_of(cfg.rule)} must be a function {wanted}", rule, None)
    return rule


def choosing_levels(agent: Agent, cfg: LevelsConfig, number: int, *, chooses: bool = True) -> Agent:
    """Returns the agent that chooses among levels.

    Args:
      agent: an agent for the environment's own actions.
      cfg: how levels are chosen.
      number: the number of levels, of ``env.levels``.
      chooses: False to act with the same params in environments that choose their levels
        themselves, as in evaluations. Such an agent does not learn.

    Raises:
      ValueError: the agent gives no values, and the config needs some; or a rule has more levels
        than fit.
    """
    kind = LevelsEpochs if isinstance(agent, EpochAgent) else Levels
    return kind(agent, cfg, number, chooses)
