"""The policies of a policy set: who plays which seats of a game, and how each of them learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlstack.agents import AGENTS
from rlstack.checks import Checked
from rlstack.configs.exploration import PolicyConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.programs.config import own_modules
from rlstack.programs.config.layouts import LAYOUTS
from rlstack.programs.config.program_config import ProgramConfig
from rlstack.references import Hook, nearest

# The config of an agent: a dataclass that is registered for one, known at run time only. For the
# parser of the command line, `experiment.agents_of` puts the union of some classes here.
if TYPE_CHECKING:
    AgentConfig = object
else:
    AgentConfig = Any


def kind_of_agent(name: str) -> type:
    """Returns the config class of this name, such as PPOConfig; imports its agent.

    Raises:
      ValueError: no agent has a config of this name.
    """
    kind = AGENTS.find(name)
    if kind is None:
        own_modules.load_entry_points(own_modules.AGENTS)
        kind = AGENTS.find(name)
    if kind is None:
        hint = f"{nearest(name, AGENTS.by_name())} One of your own needs --module MODULE."
        raise ValueError(f"unknown kind of agent {name!r}{hint}")
    return kind


@dataclasses.dataclass(frozen=True)
class HistoryConfig(Checked):
    """Earlier versions of a learning policy, as a policy that plays against it."""

    of: str = ""
    """The policy that this one plays earlier versions of; it must learn. Empty for no history."""
    draw: Literal["latest", "uniform", "prioritised"] = "uniform"
    """The version that plays an episode. latest: the newest one. uniform: each with the same
    probability. prioritised: those that the policy often loses to more often, by
    (1 - win rate)^2."""
    period: int = 10_000
    """Frames of the learning policy between two versions."""
    max_versions: int = 16
    """Number of versions that are kept. When there are more, one is dropped so that those that stay
    are spread evenly over the history; the first and the newest always stay."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_at_least(1, "period")
        self.require_at_least(2, "max_versions")


@dataclasses.dataclass(frozen=True)
class MemberConfig(Checked):
    """One policy of a policy set. What is None is as in the experiment."""

    seats: tuple[int | str, ...] = ()
    """The seats that the policy plays in each game: numbers from 0, or names that the game gives
    them. Empty for all seats that no other policy plays."""
    run: str = ""
    """Directory of a run, or of a checkpoint, whose agent plays without learning."""
    run_policy: str = ""
    """The policy of that run, if it trained several."""
    history: HistoryConfig = HistoryConfig()
    """Earlier versions of another policy of the set, which play without learning."""
    greedy: bool = False
    """Whether a policy that plays without learning takes its best action. Otherwise it samples."""
    agent: AgentConfig | None = None
    """The algorithm. A ScriptedConfig follows a rule, and a RandomConfig acts at random."""
    replay: ReplayConfig | None = None
    """The replay buffer of the policy."""
    network: NetworkConfig | None = None
    """The network of the agent."""
    network_factory: Hook | None = None
    """The network, as "module:callable"."""
    observation_processor: Hook | None = None
    """What the agent sees of an observation, as "module:callable"."""
    policy: PolicyConfig | None = None
    """Exploration."""
    normalisation: NormalisationConfig | None = None
    """Scaling of observations and rewards."""
    learner: LearnerConfig | None = None
    """Learning."""

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"run": self.run, "history.of": self.history.of, "agent": self.agent}
        found = [name for name, value in given.items() if value]
        rule = "at most one of run, history.of and agent: each says what plays"
        self.require("run", len(found) <= 1, rule)
        self.require("run_policy", bool(self.run) or not self.run_policy, "empty without run")

    @property
    def is_frozen(self) -> bool:
        """Whether the policy plays params that it did not learn in this run."""
        return bool(self.run or self.history.of)


def is_fixed(agent: object) -> bool:
    """Whether an agent of this config does not learn: it follows a rule, or acts at random."""
    entry = AGENTS.get(type(agent))
    return entry is not None and not entry.agent.learns


def check(
    policies: Mapping[str, MemberConfig],
    topology: str,
    updates: int,
    replay: ReplayConfig,
    program: ProgramConfig,
) -> None:
    """Checks the names of the policies of a set, and that they can train in the topology.

    Args:
      policies: the policies, by name.
      topology: the topology of the experiment.
      updates: the experiment's budget of updates.
      replay: the replay of policies that have no replay of their own.
      program: the experiment's nodes.

    Raises:
      ValueError: a name is invalid, or the policies cannot train in the topology.
    """
    for name in policies:
        if not name.isidentifier():
            raise ValueError(
                "Experiment: policies must have names like Python's, such as left or team_2; "
                f"got {name!r}."
            )
    if not LAYOUTS[topology].has_nodes:
        return
    replays = [replay, *(member.replay for member in policies.values())]
    in_rounds = any(own and own.min_actors for own in replays)
    if program.on_learner_loss == "restart" and (in_rounds or program.pacing == "lock_step"):
        came = "replay.min_actors" if in_rounds else "program.pacing lock_step"
        raise ValueError(
            "Experiment: program.on_learner_loss must be end with program.pacing lock_step and "
            "replay.min_actors, in which actors wait for all learners, so that no policy could go "
            f"on without one; got restart with {came}. --resume continues a run that has ended."
        )
    if updates and in_rounds:
        raise ValueError(
            "Experiment: updates must be 0 with policies and replay.min_actors, because actors "
            "would wait for params of a learner that has ended; got "
            f"{updates}. Use --frames."
        )
