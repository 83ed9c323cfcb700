"""Suites of tasks as data: environments, protocol, budgets, agents, and published scores.

A suite is a file ``suites/NAME.json`` with the fields of `Suite`. With a field ``like`` it has all
other fields of that suite, but for those that it states itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from rlstack.programs.config import options
from rlstack.programs.config.env_config import Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.layouts import Topology
from rlstack.programs.config.presets import preset
from rlstack.programs.tools.report.normalisation import Normalisation, Range, simple_name
from rlstack.references import nearest
from rlstack.storage import files

_FOLDER = Path(__file__).with_name("suites")
PoolType = Literal["auto", "cpp", "jax"]
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Band:
    """What the runs of a task reached when it was recorded, for `watch`."""

    area: tuple[float, float]
    """The least and the greatest mean over seeds of the area under the learning curve."""
    final: float
    """The least mean over seeds of the greedy return at the end."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a suite."""

    name: str
    env: str = ""
    """The name of the environment; "" for that of the preset."""
    env_options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    """Options of the environment, beside those of the suite."""
    slug: str = ""
    """What stands for ``{slug}`` in the names of presets."""
    presets: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The presets of this task where they are not those of the agent, by agent."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the experiment, such as ``agent.discount``, whatever the agent is."""
    range: Range | None = None
    """The returns that become 0 and 1; None if no source has them, for no normalised score."""
    frames: int = 0
    """Its budget; 0 for that of the suite."""
    seeds: int = 0
    """Its number of seeds; 0 for that of the suite."""
    band: Band | None = None


@dataclasses.dataclass(frozen=True)
class AgentRow:
    """An agent of a suite: the preset that it starts from, and what differs from it."""

    preset: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scaled: tuple[str, ...] = ()
    """Options that are proportional to the frames, such as the steps of a learning rate's fall."""
    rate: float = 0.0
    """Frames of all seeds in a second, once measured; 0 if nothing is stored."""
    machine: str = ""
    """Where and how the rate was measured."""


@dataclasses.dataclass(frozen=True)
class Reference:
    """Published scores of the tasks."""

    name: str
    source: str
    """An address, or a paper with its table."""
    protocol: str
    """How they were measured, as far as it differs from the suite's protocol."""
    scores: Mapping[str, float]
    """By task; tasks that the source does not have are left out."""
    unit: Literal["return", "score"] = "return"
    """score: the numbers are normalised."""


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How a suite measures."""

    name: str
    score: Literal["final", "last_100"] = "final"
    """final: the mean return of the evaluation at the end of training. last_100: that of the last
    100 episodes of training, as far as lines of logs tell them apart."""
    episodes: int = 20
    """Whole episodes of the final evaluation."""
    num_envs: int = 10
    """Environments of the final evaluation."""
    epsilon: float = 0.0
    """Probability of a random action in evaluations."""
    sticky_actions: float | None = None
    """Atari: the probability that the last action is repeated. None where this has no meaning."""
    frame_skip: int = 1
    """Frames of the game in a frame of the budget."""
    whole_games: bool = True
    """Whether an evaluated episode is a whole game, and not a life."""

    def __str__(self) -> str:
        """Returns the protocol as sentences."""
        of_games = "whole games" if self.whole_games else "lives"
        episodes = "episodes" if self.frame_skip == 1 else of_games
        what = {
            "final": f"the mean return of {self.episodes} {episodes} of the policy at the end of "
            + ("training" if self.epsilon else "training, which takes its best actions"),
            "last_100": "the mean return of about the last 100 episodes of training, in which the "
            "agent explores",
        }[self.score]
        parts = [f"{self.name}. A score is {what}."]
        if self.epsilon:
            parts.append(f"In evaluation an action is random with probability {self.epsilon:g}.")
        if self.sticky_actions is not None:
            chance = f"{self.sticky_actions:g}" if self.sticky_actions else "0, so never"
            parts.append(f"Actions are sticky with probability {chance}.")
        if self.frame_skip > 1:
            parts.append(
                f"A frame of the budget is a step of the agent, {self.frame_skip} frames of the "
                "game."
            )
        return " ".join(parts)


@dataclasses.dataclass(frozen=True)
class Suite:
    """A benchmark."""

    name: str
    title: str
    text: str
    """What it is, in one or two sentences."""
    source: str
    """Who made it."""
    frames: int
    """The budget of a run; 0 for that of the preset."""
    protocol: Protocol
    tasks: tuple[Task, ...]
    agents: Mapping[str, AgentRow]
    seeds: int = 5
    """How many seeds a task has: ten where one compiled program trains all of them."""
    env_type: PoolType = "auto"
    env_options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    eval_options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    topology: Topology | None = None
    """The topology; None for that of the preset."""
    needs: tuple[str, ...] = ()
    """Modules that its environments need."""
    ranges: str = ""
    """What 0 and 1 are in normalised scores, with the source; "" if tasks have no ranges."""
    references: tuple[Reference, ...] = ()

    def agent(self, name: str) -> AgentRow:
        """Returns an agent of the suite, or one that starts from any preset.

        Raises:
          ValueError: no agent is named and the suite has several.
        """
        if not name and len(self.agents) == 1:
            (name,) = self.agents
        if not name:
            raise ValueError(
                f"benchmark {self.name}: --agent must be one of {', '.join(self.agents)}, or the "
                "name of a preset, whose environment is replaced; none was given."
            )
        return self.agents.get(name) or AgentRow(name)

    def name_of(self, agent: str) -> str:
        """Returns the name of the agent, which may be left out where there is one."""
        return agent or next(iter(self.agents))

    def experiment(self, task: Task, agent: str, frames: int = 0) -> Experiment:
        """Returns the experiment of an agent on a task.

        Args:
          task: one of the tasks.
          agent: the name of an agent of the suite, or of a preset.
          frames: another budget than the suite's; the options in ``scaled`` follow it.

        Raises:
          ValueError: there is no such preset, or it does not take the suite's options.
        """
        row = self.agent(agent)
        made = preset(task.presets.get(agent) or row.preset.format(slug=task.slug))
        usual = made.frames
        if task.env:
            env = dataclasses.replace(
                made.env,
                name=task.env,
                type=self.env_type,
                options={**self.env_options, **task.env_options},
                eval_options=dict(self.eval_options),
            )
            made = dataclasses.replace(made, env=env)
        if self.topology is not None:
            made = dataclasses.replace(made, topology=self.topology)
        protocol = self.protocol
        evaluator = dataclasses.replace(
            made.evaluator,
            episodes=protocol.episodes,
            num_envs=protocol.num_envs,
            epsilon=protocol.epsilon,
        )
        made = dataclasses.replace(made, evaluator=evaluator)
        for name, value in {**row.options, **task.options}.items():
            value = tuple(value) if isinstance(value, list) else value
            made = options.replaced(made, name, value, f"benchmark {self.name}:")
        frames = frames or task.frames or self.frames or made.frames
        for name in row.scaled:
            value = max(1, round(options.value_of(made, name) * frames / usual))
            made = options.replaced(made, name, value, f"benchmark {self.name}:")
        return dataclasses.replace(made, frames=frames)

    @property
    def normalisation(self) -> Normalisation | None:
        """The map of returns to scores, of tasks with a range; None if the suite has no ranges."""
        found = {simple_name(t.env or t.name): t.range for t in self.tasks if t.range is not None}
        return Normalisation(f"normalised: {self.ranges}", found) if self.ranges else None


def names() -> list[str]:
    """Returns the names of all suites."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read(name: str) -> Suite:
    """Returns a suite.

    Raises:
      ValueError: there is no such suite.
    """
    if name not in (known := dict.fromkeys(names())):
        raise ValueError(
            f"benchmark: there is no suite {name!r}{nearest(name, known)}. rlstack benchmark "
            "--list shows all."
        )
    tree = _tree(name)
    tree["tasks"] = tuple(_task(row) for row in tree["tasks"])
    tree["agents"] = {key: _made(AgentRow, row) for key, row in tree["agents"].items()}
    tree["references"] = tuple(_made(Reference, row) for row in tree.get("references", ()))
    tree["protocol"] = _made(Protocol, tree["protocol"])
    return _made(Suite, {**tree, "name": name})


def missing(suite: Suite) -> list[str]:
    """Returns the modules that the environments of a suite need and that are not installed."""
    return [module for module in suite.needs if importlib.util.find_spec(module) is None]


def _tree(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = files.read_json(_FOLDER / f"{name}.json")
    if base := tree.pop("like", ""):
        return {**_tree(base), **tree}
    return tree


def _task(row: Mapping[str, Any]) -> Task:
    row = dict(row)
    if band := row.get("band"):
        row["band"] = Band(tuple(band["area"]), band["final"])
    if ends := row.get("range"):
        row["range"] = tuple(ends)
    return _made(Task, row)


def _made(kind: type[T], row: Mapping[str, Any]) -> T:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
