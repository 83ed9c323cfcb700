"""The parts of a policy that does not learn: a rule, or the agent of a finished run."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agent import Agent
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.player import Player
from rlstack.programs.build.policies.members import Member, frozen_experiment
from rlstack.programs.build.restored import read_params
from rlstack.programs.build.seeds import acting_key
from rlstack.types import EnvSpec, Params, PRNGKey


def fixed_player(member: Member, spec: EnvSpec) -> Player:
    """Makes the parts of a policy that does not learn.

    Raises:
      ValueError: the policy's agent does not fit the environments, or the checkpoint cannot be
        read.
    """
    key = acting_key(member.experiment.seed, rank=0)
    return Player(member.experiment, None, fixed_inferencer(member, spec, key))


def fixed_inferencer(member: Member, spec: EnvSpec, rng_key: PRNGKey) -> Inferencer:
    """Makes what acts for a policy that does not learn; errors as for `fixed_player`."""
    experiment = member.experiment
    agent, params = fixed_agent(member, spec)
    source = FixedParams(jax.tree.map(jnp.asarray, params))
    return Inferencer(experiment.inferencer, agent, source, experiment.env.num_envs, rng_key)


def fixed_agent(
    member: Member, spec: EnvSpec, *, greedy: bool | None = None
) -> tuple[Agent, Params]:
    """Returns the agent of a policy that does not learn, and its params, in numpy.

    Args:
      member: the policy, of kind "fixed" or "frozen".
      spec: the spec of the environments.
      greedy: True to take the best action, False to explore; by default the setting in the
        policy's config. An agent of kind "fixed" never explores.

    Raises:
      ValueError: the policy's agent does not fit the environments, or the checkpoint cannot be
        read.
    """
    greedy = member.cfg.greedy if greedy is None else greedy
    if member.kind == "fixed":
        return make_agent(member.experiment, spec, greedy=True), ()  # without exploration
    experiment, after = frozen_experiment(member.cfg)
    try:
        params = read_params(
            Path(member.cfg.run), experiment, spec, on_host=True, policy=member.cfg.run_policy
        )
        return make_agent(experiment, spec, greedy=greedy, after=after), params
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"policies.{member.name}: {member.cfg.run} must have an agent that fits these "
            f"environments; {error}"
        ) from error
