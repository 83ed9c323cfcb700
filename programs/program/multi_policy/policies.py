"""The policies of a program as its coordinator counts them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rlstack.programs.build.policies.members import divide
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.program.base import LEARNER, NodeStatus
from rlstack.programs.program.heartbeat import Silences
from rlstack.programs.session import timing

FRAMES = "env_frames"  # what an actor reports of each policy, behind its name


class Policies:
    """The policies of a program that learn.

    Attributes:
      learners: the names of the learners.
      nodes: the names of the learners' nodes; a learner may have several processes.
      num_envs: rows of one actor whose steps are frames.
      unroll: frames of an actor in its longest unroll.
    """

    def __init__(self, experiment: Experiment) -> None:
        """Resolves the policies.

        Raises:
          ValueError: see `divide`.
        """
        # Rows of one actor that each learning policy plays; empty with a single policy.
        self._rows: dict[str, int] = {}
        self._frames: Counter[str] = Counter()  # frames of each policy in this command
        self.num_envs, length = experiment.env.num_envs, experiment.replay.unroll_length
        if experiment.policies:
            learning = divide(experiment).learning
            self._rows = {member.name: member.experiment.env.num_envs for member in learning}
            self.num_envs = sum(self._rows.values())
            length = max(member.experiment.replay.unroll_length for member in learning)
        self.unroll = length * self.num_envs
        self.learners = [f"{LEARNER}/{name}" for name in self._rows] or [LEARNER]
        processes = experiment.learner.processes
        several = [f"{LEARNER}/{index}" for index in range(processes)] if processes > 1 else []
        self.nodes = frozenset(several or self.learners)
        self._restarts = bool(self._rows) and experiment.program.on_learner_loss == "restart"

    def add_frames(self, counts: Mapping[str, float], before: Mapping[str, float]) -> None:
        """Adds the frames of each policy between two reports of an actor.

        Args:
          counts: the totals of the newer report.
          before: the totals of the report before it, of the same incarnation.
        """
        for name in self._rows:
            total = f"{name}/{FRAMES}"
            self._frames[name] += int(counts.get(total, 0) - before.get(total, 0))

    def learner_of(self, node: str) -> str:
        """Returns the learner of which a node reports the updates."""
        return node if node in self.learners else LEARNER  # a process of the only learner

    def present(self, nodes: Mapping[str, NodeStatus], silences: Silences) -> dict[str, int]:
        """Returns the incarnation of each learner that is there, if learners may restart.

        A learner is there once its `run` has begun, and until it is silent.
        """
        if not self._restarts:
            return {}
        return {
            name: nodes[name].incarnation
            for name in self.learners
            if name in nodes
            and "learner_steps" in nodes[name].counts
            and silences.of(name) < timing.LEARNER_ABSENT
        }

    def in_use(self, learner: str, nodes: Mapping[str, NodeStatus]) -> int:
        """Returns the newest version of a learner's params that a node acts with; -1 for none.

        A learner may be killed after it published a version and before it reported this version.

        Args:
          learner: the learner's name.
          nodes: the status of all nodes, by name.
        """
        gauge = f"{learner.partition('/')[2]}/params/version"
        return int(max((node.gauges.get(gauge, -1) for node in nodes.values()), default=-1))

    def counters(
        self, env_frames: int, learner_steps: Mapping[str, int]
    ) -> dict[str, dict[str, float]]:
        """Returns the counters of each of several policies, for the result.

        The frames of earlier commands are divided in proportion to the rows of the policies. In
        games whose seats leave, a policy may have made fewer of them.

        Args:
          env_frames: frames of the run so far, of all its commands.
          learner_steps: updates of each learner, by the name of its node.
        """
        earlier = max(0, env_frames - self._frames.total())
        return {
            name: {
                "env_frames": earlier * rows // self.num_envs + self._frames[name],
                "learner_steps": learner_steps[f"{LEARNER}/{name}"],
            }
            for name, rows in self._rows.items()
        }

    def logs(self, learner_steps: Mapping[str, int]) -> dict[str, float]:
        """Returns the updates of each of several policies, by the names of logs."""
        return {f"{name}/learner/steps": learner_steps[f"{LEARNER}/{name}"] for name in self._rows}
