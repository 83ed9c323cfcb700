"""A policy of a set as an opponent in the evaluation of another one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.configs.acting import InferencerConfig
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.policies.history import HistoryFollower
from rlstack.programs.build.policies.members import Member
from rlstack.programs.build.policies.player import fixed_agent
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.build.seeds import role_key
from rlstack.types import EnvSpec, Params, PRNGKey, PyTree, TimeStep


class _Newest:
    """The params that an evaluation uses, as a source for an Inferencer."""

    params: Params = None

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        return (0, self.params) if newer_than < 0 else None


class Follower:
    """Plays some rows of an evaluation; an `rlstack.envs.opponents.Opponent`.

    Attributes:
      agent: the agent of the policy.
    """

    def __init__(self, agent: Agent, params: Params, rows: int, rng_key: PRNGKey) -> None:
        """Prepares to play.

        Args:
          agent: the agent of the policy.
          params: its params, if they never change.
          rows: number of rows.
          rng_key: the acting key; every evaluation starts with this key.
        """
        self.agent, self._params = agent, jax.tree.map(jnp.asarray, params)
        self._source = _Newest()
        self._inferencer = Inferencer(InferencerConfig(), agent, self._source, rows, rng_key)
        self._fresh = self._inferencer.save()

    def begin(self, params: Params = None) -> None:
        """Begins an evaluation, with these params if they are given."""
        self._source.params = self._params if params is None else params
        self._inferencer.load(self._fresh)

    def __call__(self, seats: np.ndarray | None, timestep: TimeStep) -> PyTree:
        """Returns actions."""
        return self._inferencer.inference(seats, timestep).agent_output.action


def follower(
    member: Member, spec: EnvSpec, rows: int, versions: Versions | None = None
) -> Follower | HistoryFollower:
    """Makes the follower of a policy: as evaluations do if it learns, otherwise as its config says.

    Args:
      member: the policy.
      spec: of the environments.
      rows: number of rows.
      versions: the earlier versions, for a policy that plays them.

    Raises:
      ValueError: its agent does not fit the environments.
    """
    if versions is not None:
        return HistoryFollower(member, versions, spec, rows)
    rng_key = role_key(member.experiment.seed, "evaluator", 1)
    if member.kind == "learning":
        return Follower(make_agent(member.experiment, spec, evaluating=True), (), rows, rng_key)
    agent, params = fixed_agent(member, spec)
    return Follower(agent, params, rows, rng_key)
