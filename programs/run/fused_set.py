"""A policy set in the topology fused: one compiled loop in which several policies act and learn."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.agent import Agent
from rlstack.families.frozen import Frozen, FrozenParams
from rlstack.fused.acting import Actors
from rlstack.fused.history import HistoryActors, VersionTable
from rlstack.fused.loop import LoopState, Report
from rlstack.fused.ring import RingState
from rlstack.fused.seats import Player, SetKeys, unchanging, with_the_rest
from rlstack.fused.several import Alone, Learns, SetLoop
from rlstack.jax_envs.environment import BatchedEnv
from rlstack.jax_envs.factory import make_batch
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.policies.members import Division, Member, divide
from rlstack.programs.build.policies.player import fixed_agent
from rlstack.programs.build.policies.versions import FORGETTING, PRIOR, Versions
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.run.calls import Calls, Phase, log_call
from rlstack.programs.run.fused_run import (
    Learned,
    failed_update,
    make_learning_agent,
    make_parts,
    ring_stats,
    untrained,
)
from rlstack.programs.run.policy_set import PolicySet
from rlstack.programs.session.periodic import PeriodicActions
from rlstack.types import Params, PRNGKey, PyTree, Transition


class _Keys(NamedTuple):
    """The random keys that a run begins with."""

    learner: dict[str, PRNGKey]
    env: PRNGKey  # [B, ...]
    acting: SetKeys
    replay: dict[str, PRNGKey]


class _Parts(NamedTuple):
    """A compiled loop of several policies, and its components; the dicts are by policy name."""

    loop: SetLoop | Alone
    agents: dict[str, Agent]  # agents of the learning policies
    step_specs: dict[str, Transition]  # spec of one step of each learning policy
    given: dict[str, PyTree]  # params of the other policies, except those that play versions
    histories: dict[str, tuple[str, int]]  # versions: the policy they are of, and their number


class FusedSet(PolicySet, Calls):
    """The policies of an experiment in one compiled loop, and the calls of it.

    Attributes:
      division: which policy plays which seats.
      frames: environment steps of each policy so far, in this run and those that it resumes.
    """

    division: Division

    def __init__(self, experiment: Experiment, phase: Phase = contextlib.nullcontext) -> None:
        """Makes the parts.

        Args:
          experiment: what to run.
          phase: called with a text about what may take long, and entered while it lasts.

        Raises:
          ValueError: the environment is no game in JAX, the policies do not fit its seats, or an
            agent does not fit it.
        """
        self.division = divide(experiment)
        env = make_batch(experiment.env.name, experiment.env.options)
        super().__init__(experiment, env)
        self._parts = _make_parts(experiment, self.division, env)
        self._learned = {name: Learned() for name in self._parts.agents}
        self.learners = self._learned
        self.frames = dict.fromkeys(self.division.members, 0)
        self._new: dict[str, int] = {}  # updates of each policy in the last call
        begin = functools.partial(_begin, self._parts)
        self.compile(self._parts.loop, begin, self._keys(), phase)
        self._take(self._state.learning)
        self._versions = {
            member.name: Versions(member.cfg.history, self._learned[member.cfg.history.of].params)
            for member in self._of_kind("history")
        }
        self._make_evaluator(env.spec)

    def _of_kind(self, kind: str) -> list[Member]:
        return [member for member in self.division.members.values() if member.kind == kind]

    def _keys(self) -> _Keys:
        members = self.division.members.values()
        seeds = {member.name: member.experiment.seed for member in members}
        drawn = self.experiment.seating == "drawn"
        acting = SetKeys(
            {name: acting_key(seed, 0) for name, seed in seeds.items()},
            self._parts.given,
            role_key(self.experiment.seed, "seating") if drawn else None,
        )
        learning = {name: seeds[name] for name in self._parts.agents}
        return _Keys(
            {name: role_key(seed, "learner") for name, seed in learning.items()},
            self.env_keys,
            acting,
            {name: role_key(seed, "replay") for name, seed in learning.items()},
        )

    def until_due(self, periodic: PeriodicActions) -> int:
        """Returns the frames until something is due, also a version of a policy."""
        due = super().until_due(periodic)
        seats = sum(len(member.seats) for member in self.division.learning)
        for name, versions in self._versions.items():
            of = self.division.members[self.division.members[name].cfg.history.of]
            # Steps of games until then; all seats of a game make the same steps.
            steps = -(-(versions.next_due - self.frames[of.name]) // len(of.seats))
            due = min(due, steps * seats)
        return due

    def accept(self, learning: Any, report: Report, seconds: float) -> None:
        """Records the result of a call; see `CompiledRun.accept`."""
        before = {name: learned.version for name, learned in self._learned.items()}
        self._take(learning)
        self._new = {n: self._learned[n].version - version for n, version in before.items()}
        self._seconds = seconds
        for i, name in enumerate(self.frames):
            self.frames[name] += int(report.tally.frames[i])
        updates: Any = report.updates
        for name, learned in self._learned.items():
            if updates[name].failed:
                error = failed_update(learned, updates[name], self._loop.log_names[name])
                error.before["policy"] = name  # for `rlstack rerun`
                raise error
        self.check_envs(report)
        for name, versions in self._versions.items():
            versions.results = self._agent_state(name).games, self._agent_state(name).wins
            of = self.division.members[name].cfg.history.of
            if versions.is_due(self.frames[of]):
                self._give(name, versions.add(self.frames[of], self._learned[of].params))

    def _take(self, learning: Any) -> None:
        for name, learned in self._learned.items():
            learned.take(learning[name])

    def _agent_state(self, name: str) -> Any:
        return self._state.acting.agent[name]

    def _give(self, name: str, slot: int | None = None) -> None:
        """Passes the saved versions of a policy, and their results, to the compiled loop.

        Args:
          name: the policy that plays the versions.
          slot: the slot of a new version, if any. Games that the slot's previous version is still
            playing do not count.
        """
        versions, acting = self._versions[name], self._state.acting
        # Copies, because the host writes to its own arrays, and the loop donates those that it has.
        own = self.division.members[name].experiment
        table = VersionTable(
            FrozenParams(
                jax.tree.map(jnp.array, versions.every),
                jnp.array(versions.slot_frames // own.total_envs, jnp.int32),
            ),
            jnp.array(versions.numbers, jnp.int32),
        )
        state = self._agent_state(name)
        games, wins = (jnp.array(x, jnp.float32) for x in versions.results)
        counts = state.counts if slot is None else state.counts & (state.slots != slot)
        agent = {**acting.agent, name: state._replace(counts=counts, games=games, wins=wins)}
        acting = acting._replace(agent=agent, given={**acting.given, name: table})
        self._state = self._state._replace(acting=acting)

    def log(self, periodic: PeriodicActions, report: Report) -> None:
        """Logs the means over a call; see `log_call`."""
        updates: Any = report.updates
        for i, name in enumerate(self.frames):
            tally = report.tally.numbers(operator.itemgetter(i))
            if name not in self._learned:
                log_call(periodic, tally, (f"{name}/actor/",), None)
                continue
            names = self._loop.log_names[name]
            learned = updates[name], self._new[name], names, f"{name}/learner/"
            log_call(periodic, tally, (f"{name}/actor/", "actor/"), learned)

    def frames_of(self, name: str) -> int:
        """Returns the steps of a policy, of this run and of those that it resumes."""
        return self.frames[name]

    def _step_spec(self, name: str) -> Transition:
        return self._parts.step_specs[name]

    def _replay_stats(self, name: str) -> Mapping[str, object]:
        ring = self._state.replay[name]
        if not isinstance(ring, RingState):
            return {}
        return ring_stats(ring.held, ring.inserts, ring.drawn)

    def stats(self) -> dict[str, object]:
        """Returns the counters to log."""
        return super().stats() | {"fused/call_seconds": self._seconds, **self.env_stats}

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs, for `rlstack.storage.checkpoint`."""
        state = self._state
        return {
            "learner": self.learner.save(),
            "acting": jax.tree.leaves(unchanging(state.acting)),
            "replay": {
                name: jax.tree.leaves(state.replay[name]) if self._keeps(state, name) else ()
                for name in self._learned
            },
            # Where `read_versions` finds them, as in the other topologies.
            "policies": {
                name: {"inferencer": {"versions": versions.save()}}
                for name, versions in self._versions.items()
            },
            "counters": {
                "env_frames": {name: np.int64(frames) for name, frames in self.frames.items()},
                "restarts": np.int64(self._restarts),
            },
        }

    def template(self) -> PyTree:
        """Returns the structure of a saved state, for `rlstack.storage.checkpoint.restore`."""
        return self.save()

    def load(self, saved: PyTree) -> None:
        """Restores a state that `save` returned; the episodes go on where they were."""
        fresh = self._state
        frames = saved["counters"]["env_frames"]
        self.frames = {name: int(frames[name]) for name in self.frames}
        self._restarts = int(saved["counters"]["restarts"])
        self.learner.load(saved["learner"])
        learning = {name: learned.learning for name, learned in self._learned.items()}
        replay = dict(fresh.replay)
        for name in self._learned:
            if self._keeps(fresh, name):
                structure = jax.tree.structure(fresh.replay[name])
                replay[name] = jax.tree.unflatten(structure, saved["replay"][name])
        structure = jax.tree.structure(unchanging(fresh.acting))
        acting = with_the_rest(jax.tree.unflatten(structure, saved["acting"]), fresh.acting)
        # Copies, because an array must not be donated twice.
        self.state = jax.tree.map(jnp.array, LoopState(learning, acting, replay))
        self._take(self._state.learning)
        for name, versions in self._versions.items():
            versions.load(saved["policies"][name]["inferencer"]["versions"])
            self._give(name)

    def _keeps(self, state: LoopState, name: str) -> bool:
        """Whether checkpoints contain a policy's replay; an unroll in progress is always saved."""
        return self.experiment.checkpoint_replay or not isinstance(state.replay[name], RingState)


def _make_parts(experiment: Experiment, division: Division, env: BatchedEnv) -> _Parts:
    """Makes the agents and the loop.

    Raises:
      ValueError: an agent does not fit the environment, or a checkpoint cannot be read.
    """
    learns: dict[str, Learns] = {}
    others: dict[str, Player] = {}
    step_specs: dict[str, Transition] = {}
    given: dict[str, PyTree] = {}
    histories: dict[str, tuple[str, int]] = {}
    number = experiment.env.num_envs
    rows = {
        name: member.rows(number, division.num_seats) for name, member in division.members.items()
    }
    for name, member in division.members.items():
        own = member.experiment
        if member.kind == "learning":
            agent, step_specs[name] = make_learning_agent(own, env.spec)
            learns[name] = Learns(agent, own.replay, own.learner.check_finite)
        elif member.kind == "history":
            others[name] = _history(member, env, len(rows[name]))
            histories[name] = member.cfg.history.of, member.cfg.history.max_versions
        else:
            agent, given[name] = fixed_agent(member, env.spec)
            others[name] = Actors(agent, env, len(rows[name]))
    agents = {name: one.agent for name, one in learns.items()}
    loop: SetLoop | Alone
    if len(rows) == 1 and experiment.seating == "fixed":
        (name,) = rows
        loop = Alone(name, make_parts(division.members[name].experiment, env).loop)
    else:
        loop = SetLoop(
            learns,
            others,
            rows,
            env,
            num_seats=division.num_seats,
            steps_per_update=experiment.steps_per_update,
            check_steps=experiment.env.check_finite,
        )
    return _Parts(loop, agents, step_specs, given, histories)


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


def _begin(parts: _Parts, keys: _Keys) -> LoopState:
    """Returns the state at the start of a run, with newly initialised params; pure."""
    learning: Any = {
        name: untrained(agent, keys.learner[name]) for name, agent in parts.agents.items()
    }
    given = dict(keys.acting.given)
    for name, (of, slots) in parts.histories.items():
        given[name] = _first_version(learning[of].params, slots)
    acting = keys.acting._replace(given=given)
    return parts.loop.start(learning, keys.env, acting, keys.replay)


def _first_version(params: Params, slots: int) -> VersionTable:
    """Returns the versions that `Versions` begins with: the initial params."""
    table = jax.tree.map(lambda x: jnp.zeros((slots, *x.shape), x.dtype).at[0].set(x), params)
    none = jnp.zeros(slots, jnp.int32)
    return VersionTable(FrozenParams(table, none), none.at[0].set(1))
