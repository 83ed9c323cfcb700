"""Agents that do not learn: one that acts at random and one that follows a rule.

Their returns are baselines for other agents. They also record data for cloning or off-policy
learning (`rlstack record`). They run wherever other agents run; their ``learner_step`` changes
nothing, and their params are empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from dm_env import specs

from rlstack import distributions
from rlstack.agent import Agent
from rlstack.agents.registry import register
from rlstack.checks import Checked
from rlstack.networks import Network
from rlstack.networks.torsos import action_mask
from rlstack.references import load_hook
from rlstack.specs import has_finite_bounds
from rlstack.types import (
    AgentState,
    Array,
    Batch,
    LearnerOutput,
    LearnerState,
    Params,
    PRNGKey,
    PyTree,
    TimeStep,
)


@dataclasses.dataclass(frozen=True)
class RandomConfig:
    """The config of a random agent, which has no options."""


@dataclasses.dataclass(frozen=True)
class ScriptedConfig(Checked):
    """The rule of a scripted agent."""

    rule: str
    """ "module:callable" (observation [B, ...]) -> action [B, ...]. It is jitted, so it must use
    JAX functions. Row i of its result must depend only on row i."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("rule", ":" in self.rule, 'of the form "module:callable"')


class FixedOutput(NamedTuple):
    """The output of acting: only the action."""

    action: PyTree  # [B, ...]


class FixedLearnerState(NamedTuple):
    """The learner's state."""

    rng_key: PRNGKey


class Fixed(Agent):
    """The base class of agents that do not learn."""

    learns = False

    def initial_params(self, rng_key: PRNGKey) -> Params:
        """Returns (): there is nothing to learn."""
        del rng_key
        return ()

    def initial_learner_state(self, rng_key: PRNGKey, params: Params) -> FixedLearnerState:
        """Returns the learner's key, which nothing uses."""
        del params
        return FixedLearnerState(rng_key)

    def learner_step(
        self, params: Params, learner_state: LearnerState, batch: Batch
    ) -> tuple[Params, LearnerState, LearnerOutput]:
        """Changes nothing."""
        del batch
        return params, learner_state, LearnerOutput({})


def no_network(obs_spec: PyTree, action_spec: PyTree, cfg: Any = None) -> Network:
    """Returns a network without parameters or output, for agents that need none."""
    del obs_spec, action_spec, cfg

    def apply(rng_key: Any, params: Params, timestep: TimeStep, state: AgentState) -> Any:
        del rng_key, params, timestep
        return (), state

    return Network(lambda rng_key: (), apply, apply, lambda batch_size: ())


@register(RandomConfig, network=no_network)
class Random(Fixed):
    """Acts uniformly at random, in evaluation too.

    Discrete actions are drawn uniformly from the legal choices, and real numbers uniformly between
    their bounds. Real numbers without finite bounds are drawn from a standard normal.
    """

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[FixedOutput, AgentState]:
        """Draws actions for ``[B, ...]`` steps."""
        leaves, treedef = jax.tree.flatten(self.action_spec)
        mask = action_mask(timestep.observation)
        masks = [None] * len(leaves) if mask is None else treedef.flatten_up_to(mask)
        batch_size = timestep.step_type.shape[0]
        drawn = [
            _draw(key, spec, leaf_mask, batch_size)
            for key, spec, leaf_mask in zip(
                jax.random.split(rng_key, len(leaves)), leaves, masks, strict=True
            )
        ]
        return FixedOutput(jax.tree.unflatten(treedef, drawn)), state


@register(ScriptedConfig, network=no_network)
class Scripted(Fixed):
    """Follows a rule, in training and in evaluation."""

    cfg: ScriptedConfig

    def __init__(self, cfg: ScriptedConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._rule: Callable[[PyTree], PyTree] = load_hook("ScriptedConfig: rule", cfg.rule)

    def actor_step(
        self, rng_key: PRNGKey, params: Params, timestep: TimeStep, state: AgentState
    ) -> tuple[FixedOutput, AgentState]:
        """Applies the rule to ``[B, ...]`` steps.

        Raises:
          ValueError: the action does not have the spec's structure and shape.
        """
        answer = self._rule(timestep.observation)
        batch_size = timestep.step_type.shape[0]
        wanted = jax.tree.map(lambda spec: (batch_size, *spec.shape), self.action_spec)
        shapes = jax.tree.map(jnp.shape, answer)
        if shapes != wanted:
            raise ValueError(
                f"Scripted: {self.cfg.rule} must answer a batch with actions of shape {wanted}; "
                f"got {shapes}."
            )
        action = jax.tree.map(
            lambda spec, x: jnp.asarray(x).astype(spec.dtype), self.action_spec, answer
        )
        return FixedOutput(action), state


def _draw(rng_key: PRNGKey, spec: specs.Array, mask: Array | None, batch_size: int) -> Array:
    """Draws one leaf of an action, [B, *shape]."""
    if np.issubdtype(spec.dtype, np.integer):
        parameters = jnp.zeros((batch_size, distributions.num_parameters(spec)))
        choices = distributions.from_parameters(spec, parameters, mask)
        return choices.sample(rng_key).astype(spec.dtype)
    shape = (batch_size, *spec.shape)
    if isinstance(spec, specs.BoundedArray) and has_finite_bounds(spec):
        return jax.random.uniform(rng_key, shape, spec.dtype, spec.minimum, spec.maximum)
    return jax.random.normal(rng_key, shape, spec.dtype)
