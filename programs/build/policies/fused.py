"""A compiled loop in which several policies act and learn, and the versions that some play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlstack.families.wrapped import Frozen, FrozenParams
from rlstack.fused.acting import Actors
from rlstack.fused.history import HistoryActors, VersionTable
from rlstack.fused.loop import LoopState
from rlstack.fused.multi_policy import Learns, SetLoop
from rlstack.fused.seats import Player, SetActing, SetKeys
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.fused import Keys, Parts, make_learning_agent, untrained
from rlstack.programs.build.policies.members import Division, Member
from rlstack.programs.build.policies.player import fixed_agent
from rlstack.programs.build.policies.versions import FORGETTING, PRIOR, Versions
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.types import Params, PRNGKey, PyTree


def make_parts(experiment: Experiment, division: Division, env: BatchedEnv) -> Parts:
    """Makes the agents of a set of policies, and their loop.

    Raises:
      ValueError: an agent does not fit the environment, or a checkpoint cannot be read.
    """
    if len(division.members) == 1 and experiment.seating == "fixed":
        # Another program, even for the same computation, would round otherwise.
        ((name, member),) = division.members.items()
        return Parts(member.experiment, env, name)
    return SetParts(experiment, division, env)


class SetParts(Parts):
    """A compiled loop of several policies, and its components; its state has dicts by policy."""

    def __init__(self, experiment: Experiment, division: Division, env: BatchedEnv) -> None:
        """Makes the agents and the loop.

        Raises:
          ValueError: an agent does not fit the environment, or a checkpoint cannot be read.
        """
        self._members = division.members
        self._drawn = experiment.seating == "drawn"
        self._given: dict[str, PyTree] = {}  # params of fixed policies
        self.agents, self.step_specs = {}, {}
        learns: dict[str, Learns] = {}
        others: dict[str, Player] = {}
        number = experiment.env.num_envs
        rows = {name: one.rows(number, division.num_seats) for name, one in self._members.items()}
        for name, member in self._members.items():
            own = member.experiment
            if member.kind == "learning":
                agent, self.step_specs[name] = make_learning_agent(own, env.spec)
                self.agents[name] = agent
                learns[name] = Learns(agent, own.replay, own.learner.check_finite)
            elif member.kind == "history":
                others[name] = _history(member, env, len(rows[name]))
            else:
                agent, self._given[name] = fixed_agent(member, env.spec)
                others[name] = Actors(agent, env, len(rows[name]))
        self.loop = SetLoop(
            learns,
            others,
            rows,
            env,
            num_seats=division.num_seats,
            steps_per_update=experiment.steps_per_update,
            check_steps=experiment.env.check_finite,
        )

    def by_name(self, tree: PyTree) -> dict[str, Any]:
        """Returns the argument, which is a dict by policy."""
        return tree

    def joined(self, by_name: Mapping[str, Any]) -> Any:
        """Returns the argument."""
        return by_name

    def unchanging(self, acting: SetActing) -> SetActing:
        """Returns the acting state for checkpoints, without what `with_the_rest` adds."""
        return acting._replace(given={}, scores=())

    def with_the_rest(self, saved: SetActing, fresh: SetActing) -> SetActing:
        """Returns a state that `unchanging` returned, with what it left out.

        Scores of games in progress are the returns of the episodes, so those of seats that have
        left are lost. Checkpoints of earlier versions have no scores.
        """
        return saved._replace(given=fresh.given, scores=saved.returns + saved.timestep.reward)

    def keys(self, experiment: Experiment, env_keys: PRNGKey) -> Keys:
        """Returns the keys of a run with the seeds of the policies."""
        seeds = {name: member.experiment.seed for name, member in self._members.items()}
        acting = SetKeys(
            {name: acting_key(seed, 0) for name, seed in seeds.items()},
            self._given,
            role_key(experiment.seed, "seating") if self._drawn else None,
        )

        def of_role(role: str) -> dict[str, PRNGKey]:
            return {name: role_key(seeds[name], role) for name in self.agents}

        return Keys(of_role("learner"), env_keys, acting, of_role("replay"))

    def begin(self, keys: Keys) -> LoopState:
        """Returns the state at the start of a run, with newly initialised params; pure."""
        learning = {name: untrained(one, keys.learner[name]) for name, one in self.agents.items()}
        given = dict(keys.acting.given)
        for name, member in self._members.items():
            if member.kind == "history":
                cfg = member.cfg.history
                given[name] = _first_version(learning[cfg.of].params, cfg.max_versions)
        return self.loop.start(learning, keys.env, keys.acting._replace(given=given), keys.replay)


def with_versions(
    state: LoopState, member: Member, versions: Versions, slot: int | None = None
) -> LoopState:
    """Returns the state of a loop with the saved versions of a policy, and their results.

    Args:
      state: the state.
      member: the policy that plays the versions.
      versions: the versions.
      slot: the slot of a new version, if any. Games that the slot's previous version is still
        playing do not count.
    """
    name, acting = member.name, state.acting
    # Copies, because the host writes to its own arrays, and the loop donates those that it has.
    table = VersionTable(
        FrozenParams(
            jax.tree.map(jnp.array, versions.every),
            jnp.array(versions.slot_frames // member.experiment.total_envs, jnp.int32),
        ),
        jnp.array(versions.numbers, jnp.int32),
    )
    played = acting.agent[name]
    games, wins = (jnp.array(x, jnp.float32) for x in versions.results)
    counts = played.counts if slot is None else played.counts & (played.slots != slot)
    agent = {**acting.agent, name: played._replace(counts=counts, games=games, wins=wins)}
    acting = acting._replace(agent=agent, given={**acting.given, name: table})
    return state._replace(acting=acting)


def _history(member: Member, env: BatchedEnv, places: int) -> Player:
    agent = make_agent(member.experiment, env.spec, greedy=member.cfg.greedy)
    cfg = member.cfg.history
    return HistoryActors(
        Actors(Frozen(agent), env, places),
        cfg.of,
        cfg.draw,
        cfg.max_versions,
        forgetting=FORGETTING,
        prior=PRIOR,
    )


def _first_version(params: Params, slots: int) -> VersionTable:
    """Returns the versions that `Versions` begins with: the initial params."""
    table = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype).at[0].set(x), params)
    none = jnp.zeros(slots, jnp.int32)
    return VersionTable(FrozenParams(table, none), none.at[0].set(1))
