"""Earlier versions of a policy in a program: its learner stores them, actors hold copies."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from rlstack.acting.packing import OnHost
from rlstack.agent import Agent
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.policies.members import Member
from rlstack.programs.build.policies.versions import Versions
from rlstack.programs.config.member_config import HistoryConfig
from rlstack.programs.program.base import Setup
from rlstack.programs.program.multi_policy.clients import SoonLost, learner_of
from rlstack.programs.session import timing
from rlstack.rpc import RemoteObject, UnavailableError, codec
from rlstack.types import Params, PyTree

Results = Sequence[tuple[int, int, float]]  # slot, number of the version, score of the policy


class KeptVersions:
    """The earlier versions of a policy, as its learner keeps them; safe to use from many threads.

    Several policies of a set may be versions of one policy, each with its own choice of them.
    """

    def __init__(self, histories: Mapping[str, HistoryConfig], params: Params) -> None:
        """Saves the initial params as the first version.

        Args:
          histories: which versions to keep, by the name of the policy that plays them.
          params: the initial params of the policy.
        """
        self._lock = threading.Lock()
        self._versions = {name: Versions(cfg, params) for name, cfg in histories.items()}
        self._on_host = OnHost()

    def keep(self, frames: int, params: Params) -> None:
        """Saves a version for each policy that plays versions and for which one is due.

        Args:
          frames: environment steps of the learning policy so far.
          params: the policy's current params.
        """
        for versions in self._versions.values():
            if versions.is_due(frames):
                found = self._on_host(params)
                with self._lock:
                    versions.add(frames, found)

    def exchange(self, name: str, known: np.ndarray, results: Results) -> bytes:
        """Records results of games; returns the versions that a copy lacks, encoded.

        Args:
          name: the policy that plays the versions.
          known: ``[max_versions]``, the version numbers in the copy; see `Versions.news`.
          results: results of the games since the last exchange: (slot, version number, score).
        """
        versions = self._versions[name]
        with self._lock:
            for slot, number, score in results:
                if versions.number_of(slot) == number:  # else another version has its slot
                    versions.record(slot, score)
            return codec.encode(versions.news(known))

    def save(self) -> PyTree:
        """Returns all versions, by the name of the policy that plays them."""
        with self._lock:
            return {name: versions.save() for name, versions in self._versions.items()}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""
        for name, versions in self._versions.items():
            versions.load(saved[name])


class CopiedVersions(Versions):
    """A copy of the versions that a learner keeps.

    Results that are recorded count here at once, and in the learner from the next `exchange` on.
    """

    def __init__(self, cfg: HistoryConfig, name: str, agent: Agent, learner: RemoteObject) -> None:
        """Makes an empty copy; the first `exchange` fills it.

        Args:
          cfg: the config of the history.
          name: the policy that plays the versions.
          agent: the agent of the policy whose versions they are.
          learner: a client of this policy's learner.
        """
        params = jax.eval_shape(agent.initial_params, jax.eval_shape(jax.random.PRNGKey, 0))
        super().__init__(cfg, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), params))
        self._name, self._learner = name, learner
        self._known = np.full(cfg.max_versions, -1, np.int64)
        self._results: list[tuple[int, int, float]] = []

    def record(self, slot: int, score: float) -> None:
        """Records a game, also for the next `exchange`; see `Versions.record`."""
        super().record(slot, score)
        self._results.append((slot, self.number_of(slot), float(score)))

    def exchange(self) -> np.ndarray:
        """Sends the results of games and receives new versions.

        Returns:
          The slots that have another version than before.

        Raises:
          UnavailableError: the learner does not answer; the results may be lost.
        """
        results, self._results = self._results, []
        try:
            encoded = self._learner.exchange(self._name, self._known, results)
        except UnavailableError:
            # A learner that is restarted may number other versions as those that it has lost.
            self._known = np.full_like(self._known, -1)
            raise
        changed = self.take(codec.decode(encoded))
        self._known = self.numbers
        return changed


def copied_versions(
    setup: Setup, member: Member, learners: Mapping[str, RemoteObject]
) -> CopiedVersions:
    """Returns a copy of the versions that a policy plays.

    Args:
      setup: the program's setup.
      member: the policy that plays the versions.
      learners: clients of the nodes that run the policies' learners, by policy name.
    """
    of = next(own for own in setup.learning if own.policy == member.cfg.history.of)
    agent = make_agent(of.experiment, setup.spec)
    learner = learner_of(of, learners[of.policy])
    if setup.learner_restarts:
        learner = SoonLost(learner, timing.EXCHANGE)
    return CopiedVersions(member.cfg.history, member.name, agent, learner)
