"""Acting with earlier versions of a policy, one version for each episode of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.inference import Inference
from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.configs.acting import InferencerConfig
from rlstack.families.wrapped import Frozen, FrozenParams
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.player import Player, learning_player
from rlstack.programs.build.policies.members import Division, Member
from rlstack.programs.build.policies.player import fixed_player
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.build.seeds import role_key, role_seed
from rlstack.types import EnvSpec, Params, PRNGKey, PyTree, StepType, TimeStep

Choose = Callable[[np.ndarray, int], np.ndarray]


class VersionedInferencer:
    """Acts with the version that was drawn for each row when its episode began.

    A batch takes one call of the inferencer for each version that plays in it. All calls have the
    same shape, so they are compiled once.
    """

    def __init__(
        self,
        agent: Agent,
        versions: Versions,
        choose: Choose,
        rows: int,
        rng_key: PRNGKey,
        num_envs: int,
    ) -> None:
        """Makes the inferencer and draws no versions yet.

        Args:
          agent: the agent of the policy.
          versions: the versions of the policy.
          choose: takes rows and the number of choices made before; returns the slots of the
            versions that play the next episodes of these rows.
          rows: number of rows.
          rng_key: seeds action sampling.
          num_envs: number of environments by which the agent's schedules multiply its counts.
        """
        self._versions, self._choose, self._num_envs = versions, choose, num_envs
        self._playing = np.zeros(rows, np.int64)  # the slot of the version of each row
        self._draws = 0
        self._slot = 0  # whose params the inferencer gets
        self._inferencer = Inferencer(InferencerConfig(), Frozen(agent), self, rows, rng_key)
        self._fresh = self._inferencer.save()

    def begin(self) -> None:
        """Resets to the state after construction, so that the same versions are drawn again."""
        self._inferencer.load(self._fresh)
        self._draws = 0

    @property
    def playing(self) -> np.ndarray:
        """The slot of the version that plays each row."""
        return self._playing

    def get_params(self, newer_than: int = -1) -> tuple[int, Params] | None:
        """Returns the params of the version that acts now; versions need not grow."""
        number, params = self._versions.params(self._slot)
        if number == newer_than:
            return None
        env_steps = self._versions.slot_frames[self._slot] // self._num_envs
        return number, FrozenParams(params, jnp.asarray(env_steps, jnp.int32))

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch of all rows."""
        del env_ids  # all rows in order
        begins = np.flatnonzero(np.asarray(timestep.step_type) == StepType.FIRST)
        if len(begins):
            self._playing[begins] = self._choose(begins, self._draws)
            self._draws += 1
        rows = len(self._playing)
        merged: Inference | None = None
        for slot in np.unique(self._playing).tolist():
            self._slot = slot
            own = np.flatnonzero(self._playing == slot)
            if len(own) == rows:
                return self._inferencer.inference(None, timestep)
            # Rows of other versions are padding: their agent state stays as it is.
            ids = np.full(rows, rows, np.int64)
            ids[: len(own)] = own
            taken = np.where(ids < rows, ids, 0)
            part = jax.tree.map(lambda x, taken=taken: x[taken], timestep)
            answer = self._inferencer.inference(ids, part)
            if merged is None:
                merged = jax.tree.map(np.copy, answer)
            for into, leaf in zip(jax.tree.leaves(merged), jax.tree.leaves(answer), strict=True):
                into[own] = leaf[: len(own)]
        assert merged is not None
        return merged

    def save(self) -> PyTree:
        """Returns the versions, and the state that a resumed run needs to continue acting."""
        return {
            "acting": self._inferencer.save(),
            "versions": self._versions.save(),
            "draws": np.int64(self._draws),
        }

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned; rows draw versions when their episodes begin."""
        self._inferencer.load(saved["acting"])
        self._versions.load(saved["versions"])
        self._draws = int(saved["draws"])


class HistoryPlayer(Player):
    """A policy that is the earlier versions of another one.

    Attributes:
      versions: the versions.
    """

    inferencer: VersionedInferencer
    versions: Versions

    def __init__(
        self,
        member: Member,
        inferencer: VersionedInferencer,
        versions: Versions,
        learning: Player | None = None,
    ) -> None:
        """Makes the player.

        Args:
          member: the policy.
          inferencer: acts with the version that plays each row.
          versions: the versions.
          learning: the policy whose versions they are, if it learns in this process.
        """
        super().__init__(member.experiment, None, inferencer)
        self.versions, self._member, self._of = versions, member, learning
        self._counts: np.ndarray | None = None  # whether an episode's result counts, by row
        self._returns: np.ndarray | None = None  # returns of the episodes in progress, by row

    def begin(self, env: Any) -> None:
        """Makes the actor; the games in progress have no result."""
        super().begin(env)
        self._counts = self._returns = None

    def after_learning(self) -> None:
        """Saves a version of the learning policy if one is due."""
        of = self._of
        if of is not None and of.learner is not None and self.versions.is_due(of.env_frames):
            self.forget(self.versions.add(of.env_frames, of.learner.params))

    def forget(self, slot: int) -> None:
        """Discards the results of games in progress that began with another version in a slot."""
        if self._counts is not None:
            self._counts[self.inferencer.playing == slot] = False

    def watch(self, shared: Any) -> None:
        """Adds the rewards of a step; records the results of the episodes that end.

        A seat that leaves its game before others is compared with their returns so far.

        Args:
          shared: the `rlstack.envs.seats.views.SharedPool` of all policies.
        """
        newest = shared.newest
        step_type = np.asarray(newest.step_type)
        if self._returns is None or self._counts is None:
            self._returns = np.zeros(len(step_type))
            self._counts = np.ones(len(self.inferencer.playing), bool)
        begins = np.repeat(shared.begins, shared.num_seats)
        self._returns = np.where(begins, 0.0, self._returns + newest.reward)
        own = shared.rows_of(self._member.name)
        self._counts[step_type[own] == StepType.FIRST] = True
        ended = np.flatnonzero((step_type[own] == StepType.LAST) & self._counts)
        if len(ended):
            theirs = shared.rows_of(self._member.cfg.history.of)
            games = theirs // shared.num_seats
            for i in ended:
                others = theirs[games == own[i] // shared.num_seats]
                margin = self._returns[others].mean() - self._returns[own[i]]
                self.versions.record(int(self.inferencer.playing[i]), (np.sign(margin) + 1.0) / 2.0)


def make_players(division: Division, spec: EnvSpec) -> dict[str, Player]:
    """Makes the parts of all policies in one process, in the order of the config.

    Raises:
      ValueError: an agent does not fit the environments, or a checkpoint cannot be read.
    """
    made = {member.name: learning_player(member.experiment, spec) for member in division.learning}
    for name, member in division.members.items():
        if member.kind == "history":
            of = made[member.cfg.history.of]
            assert of.learner is not None
            made[name] = versions_player(
                member, Versions(member.cfg.history, of.learner.params), spec, learning=of
            )
        elif member.kind != "learning":
            made[name] = fixed_player(member, spec)
    return {name: made[name] for name in division.members}


def versions_player(
    member: Member,
    versions: Versions,
    spec: EnvSpec,
    rank: int = 0,
    learning: Player | None = None,
) -> HistoryPlayer:
    """Makes the parts of a policy that plays these versions.

    Args:
      member: the policy.
      versions: the versions.
      spec: the spec of the environments.
      rank: number of the actor, different for each actor.
      learning: the policy whose versions they are, if it learns in this process.
    """
    inferencer = _inferencer(member, versions, spec, "inferencer", rank=rank)
    return HistoryPlayer(member, inferencer, versions, learning)


def _inferencer(
    member: Member,
    versions: Versions,
    spec: EnvSpec,
    role: str,
    rows: int | None = None,
    rank: int = 0,
) -> VersionedInferencer:
    experiment = member.experiment
    seed, draw = role_seed(experiment.seed, role, rank), member.cfg.history.draw

    def choose(begins: np.ndarray, draws: int) -> np.ndarray:
        return versions.draw(np.random.default_rng([seed, draws]), len(begins), draw)

    return VersionedInferencer(
        make_agent(experiment, spec, greedy=member.cfg.greedy),
        versions,
        choose,
        experiment.env.num_envs if rows is None else rows,
        role_key(experiment.seed, role, rank),
        experiment.total_envs,
    )


class HistoryFollower:
    """Earlier versions as the opponents in an evaluation; a `Follower`."""

    def __init__(self, member: Member, versions: Versions, spec: EnvSpec, rows: int) -> None:
        """Prepares to play this number of rows."""
        self._inferencer = _inferencer(member, versions, spec, "evaluator", rows)

    def begin(self, params: Params = None) -> None:
        """Begins an evaluation: the same versions are drawn each time."""
        del params
        self._inferencer.begin()

    def __call__(self, seats: np.ndarray | None, timestep: TimeStep) -> PyTree:
        """Returns actions."""
        return self._inferencer.inference(seats, timestep).agent_output.action
