"""Suites of tasks as data: environments, protocol, budgets, agents, and published scores.

A suite is a file ``suites/NAME.json`` with the fields of `Suite`. With a field ``like`` it has all
other fields of that suite, but for those that it states itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
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
class Score:
    """How the regret of all episodes of training becomes a score from 0 to 1; see `scores`."""

    rule: Literal["regret", "below", "found", "accuracy"]
    """regret: the share of `limit` that the mean regret leaves. below: whether the mean regret is
    below `limit`. found: the share of runs in which it is before random actions would find the
    treasure of Deep Sea. accuracy: half of regret, and half the share of right answers at the
    end."""
    limit: float
    solves: bool = False
    """Whether half the score is the share of runs with a good episode."""
    after: int = 0
    """With found: episodes that must have ended."""
    by: str = ""
    """The option whose values have scores of their own, of which the mean counts."""
    bound: bool = False
    """Whether half the score is that mean less the standard deviation of these scores."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A task of a suite."""

    name: str
    env: str = ""
    """The name of the environment; "" for that of the preset."""
    env_options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    """Options of the environment, beside those of the suite."""
    eval_options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    """Those that differ in evaluation."""
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
    episodes: int = 0
    """Episodes that count, after which a run ends if its frames have not ended it; 0 for all."""
    values: Mapping[str, tuple[Option, ...]] = dataclasses.field(default_factory=dict)
    """The values of options in its settings, which are all combinations with all seeds."""
    few: Mapping[str, tuple[Option, ...]] = dataclasses.field(default_factory=dict)
    """Those of few settings, for options with fewer values then."""
    few_seeds: int = 0
    """The seeds of few settings; 0 for all."""
    score: Score | None = None
    """How all episodes of training are scored; None for a protocol of returns."""
    tags: tuple[str, ...] = ()
    """What it tests."""
    recorded: str = ""
    """The dataset that it learns from, which is the suite's own: ``RECORDING/SET``, such as
    hopper/medium-replay. Its range is that of the random and the expert set."""
    files: tuple[str, ...] = ()
    """Files that it needs. Where one is missing, the task is left out, and a line says so."""

    @property
    def missing(self) -> list[str]:
        """The files that it needs and that are not there."""
        return [name for name in self.files if not Path(name).expanduser().is_file()]

    def settings(self, few: bool) -> dict[str, tuple[Option, ...]]:
        """Returns the values of options in all settings, or in few."""
        return {**self.values, **(self.few if few else {})}


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
class Recording:
    """A run whose checkpoints play datasets; see `rlstack.programs.run.record.record_sets`."""

    preset: str
    frames: int
    """Those of each set."""
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the run that differ from the preset: it must keep many checkpoints."""


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
    score: Literal["final", "last_100", "all"] = "final"
    """final: the mean return of the evaluation at the end of training. last_100: that of the last
    100 episodes of training, as far as lines of logs tell them apart. all: what `Task.score` makes
    of all episodes of training."""
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
            "final": f"the mean return of {self.episodes} {episodes} at the end of training"
            + ("" if self.epsilon else ", in which the policy takes its best actions"),
            "last_100": "the mean return of about the last 100 episodes of training, in which the "
            "agent explores",
            "all": "a number from 0 to 1, made of the regret of all episodes of training",
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
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the experiment, whatever the task and the agent are."""
    recordings: Mapping[str, Recording] = dataclasses.field(default_factory=dict)
    """The suite's own recorded data, by name."""
    tags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The tags of tasks in their order, with their names in pictures."""
    notes: tuple[str, ...] = ()
    """What differs from the original, in sentences."""

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

    def seeds_of(self, task: Task, few: bool = False) -> int:
        """Returns the number of seeds of each setting of a task."""
        return (task.few_seeds if few else 0) or task.seeds or self.seeds

    def runs_of(self, task: Task, few: bool = False) -> int:
        """Returns the number of runs of a task: all settings, or few, with their seeds."""
        settings = task.settings(few).values()
        return self.seeds_of(task, few) * math.prod(map(len, settings))

    def name_of(self, agent: str) -> str:
        """Returns the name of the agent, which may be left out where there is one."""
        return agent or next(iter(self.agents))

    def experiment(self, task: Task, agent: str, frames: int = 0) -> Experiment:
        """Returns the experiment of an agent on a task.

        Args:
          task: one of the tasks.
          agent: the name of an agent of the suite, or of a preset.
          frames: another budget than the suite's; the options in ``scaled`` follow it. A task with
            a smaller budget of its own keeps that.

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
                eval_options={**self.eval_options, **task.eval_options},
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
        ends = {"stop.episodes": task.episodes} if task.episodes else {}
        made = self._with(made, {**self.options, **row.options, **task.options, **ends})
        frames = min(frames or task.frames, task.frames or frames) or self.frames or made.frames
        for name in row.scaled:
            value = max(1, round(options.value_of(made, name) * frames / usual))
            made = options.replaced(made, name, value, f"benchmark {self.name}:")
        return dataclasses.replace(made, frames=frames)

    def recorded_experiment(self, name: str) -> Experiment:
        """Returns the experiment of one of the suite's recordings."""
        recording = self.recordings[name]
        return self._with(preset(recording.preset), recording.options)

    def _with(self, made: Experiment, changes: Mapping[str, Any]) -> Experiment:
        for name, value in changes.items():
            value = tuple(value) if isinstance(value, list) else value
            made = options.replaced(made, name, value, f"benchmark {self.name}:")
        return made

    def with_ranges(self, found: Mapping[str, Range]) -> Suite:
        """Returns the suite with these ranges of tasks, which are those of recorded data."""
        tasks = [dataclasses.replace(t, range=found.get(t.name, t.range)) for t in self.tasks]
        return dataclasses.replace(self, tasks=tuple(tasks))

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
    if name not in (known := names()):
        raise ValueError(
            f"benchmark: there is no suite {name!r}{nearest(name, known)} rlstack benchmark "
            "--list shows all."
        )
    tree = _tree(name)
    tree["tasks"] = tuple(_task(row) for row in tree["tasks"])
    tree["agents"] = {key: _made(AgentRow, row) for key, row in tree["agents"].items()}
    recordings = tree.get("recordings", {})
    tree["recordings"] = {key: _made(Recording, row) for key, row in recordings.items()}
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
    if score := row.get("score"):
        row["score"] = Score(**score)
    for name in ("values", "few"):
        row[name] = {key: tuple(values) for key, values in row.get(name, {}).items()}
    return _made(Task, row)


def _made(kind: type[T], row: Mapping[str, Any]) -> T:
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()})
