"""The experiment config: everything a run is made of, in one frozen dataclass that JSON holds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import cattrs
from cattrs.preconf.json import make_converter

from agents import AGENTS, AgentConfig
from programs.cluster_config import RayConfig
from rlstack.acting.evaluator import EvaluatorConfig
from rlstack.acting.inference_service import ServiceConfig
from rlstack.acting.inferencer import InferencerConfig
from rlstack.checks import Checked
from rlstack.families.normalised import NormalisationConfig
from rlstack.learning.learner import LearnerConfig
from rlstack.networks import NetworkConfig
from rlstack.references import nearest
from rlstack.replay import ReplayConfig

Option = int | float | bool | str
Topology = Literal["single_process", "heavy_env", "light_env", "distributed"]


@dataclasses.dataclass(frozen=True)
class OpponentsConfig(Checked):
    """Who else plays in games of several agents, those with an option `agents`."""

    runs: tuple[str, ...] = ()
    """Run directories, or single checkpoints of runs, whose params play as they are; they take
    turns from game to game. None: the learner plays all places."""
    share: float = 1.0
    """Share of the environments that play against them; the others play among themselves."""
    greedy: bool = False
    """Whether opponents take their best actions, or sample as in training."""

    def __post_init__(self) -> None:
        self.require("share", 0 < self.share <= 1, "in (0, 1]")


@dataclasses.dataclass(frozen=True)
class EnvConfig(Checked):
    """Which environments, how many, and how they run side by side."""

    name: str
    """An EnvPool or Gymnasium id, or "module:callable" for a builder of your own."""
    num_envs: int = 8
    """Environments of one actor."""
    type: Literal["auto", "cpp", "for_loop", "thread", "process"] = "auto"
    """Who runs them; auto takes EnvPool's C++ pool where it has the name, else a Python loop."""
    wait_num: int = 0
    """Environments answered at a time by an asynchronous pool; 0 for a synchronous one."""
    num_workers: int = 0
    """Threads or processes of the pool; 0 chooses by the number of cores."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Passed on to whoever makes the environments."""
    eval_options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """What evaluation changes in them, such as whole episodes instead of single lives."""
    opponents: OpponentsConfig = OpponentsConfig()
    """Whom training plays against; num_envs are the learner's own."""
    eval_opponents: OpponentsConfig = OpponentsConfig()
    """Whom evaluation plays against; results are told by opponent."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "num_envs")
        fits = 0 <= self.wait_num <= self.num_envs
        self.require("wait_num", fits, f"in 0..num_envs ({self.num_envs})")


@dataclasses.dataclass(frozen=True)
class ProgramConfig(Checked):
    """The nodes of a topology of several processes, and how they keep step."""

    num_actors: int = 2
    """Actors, each with env.num_envs environments."""
    num_inferencers: int = 1
    """Inference services, over which the actors are spread (light_env and distributed)."""
    launch: Literal["processes", "threads", "ray"] = "processes"
    """threads: all nodes in this process, so that a debugger stops in any of them; ray: on the
    hosts of a Ray cluster (distributed only)."""
    pacing: Literal["asynchronous", "lock_step"] = "asynchronous"
    """lock_step: actors wait while the learner learns, as in a single process: the lag is 0 and a
    run can be repeated."""
    params_interval: float = 0.02
    """Seconds between two looks for newer params, where these are pulled in the background."""
    max_restarts: int = 10
    """Restarts of one actor or inference service after which the program gives up."""
    interface: str = ""
    """Where servers answer: an IPv4 address or interface of the host, such as eth0, or 0.0.0.0 for
    all; by default loopback, and under Ray the address by which the cluster knows the host."""
    ray: RayConfig = RayConfig()
    """The cluster, where Ray launches."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "num_actors", "num_inferencers")
        self.require_at_least(0, "max_restarts")
        rule = f"at most num_actors ({self.num_actors}), or some would have nothing to do"
        self.require("num_inferencers", self.num_inferencers <= self.num_actors, rule)
        self.require("params_interval", self.params_interval > 0, "positive")


@dataclasses.dataclass(frozen=True)
class Experiment(Checked):
    """One experiment: what is run, for how long, and in which topology."""

    preset: str
    """The name that results are filed under."""
    agent: AgentConfig
    """The algorithm and its hyperparameters."""
    env: EnvConfig
    """The environments."""
    replay: ReplayConfig
    """What the learner learns from."""
    frames: int
    """Environment steps to train for, of all environments together; one Atari step is four
    emulator frames."""
    data: str = ""
    """Directory of recorded steps to learn from instead of acting (`rlstack record` makes one);
    frames then counts the steps learned from, each time they are."""
    seed: int = 1
    """Every random draw of the run derives from it."""
    topology: Topology = "single_process"
    """How the parts are spread over processes."""
    network: NetworkConfig = NetworkConfig()
    """The agent's own kind of network."""
    network_factory: str = ""
    """ "module:callable" (obs_spec, action_spec) -> Network, instead of the agent's own kind."""
    normalisation: NormalisationConfig = NormalisationConfig()
    """What the agent sees of observations and rewards."""
    inferencer: InferencerConfig = InferencerConfig()
    """Acting."""
    learner: LearnerConfig = LearnerConfig()
    """Learning."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """Judging."""
    program: ProgramConfig = ProgramConfig()
    """Actors, services and their pace; a single process ignores it."""
    service: ServiceConfig = ServiceConfig()
    """Acting in inference services (light_env and distributed)."""
    steps_per_update: int = 1
    """Actor steps between two looks at the replay."""
    log_period: int = 2000
    """Frames between two lines of logs."""
    checkpoint_period: int = 100_000
    """Frames between two checkpoints; there is always one at the end."""
    checkpoint_replay: bool = True
    """Whether checkpoints hold the replay's content, so that a resumed run goes on exactly."""

    def __post_init__(self) -> None:
        self.require_at_least(1, "frames", "steps_per_update", "log_period", "checkpoint_period")
        if self.replay.min_actors > self.num_actors:
            raise ValueError(
                f"Experiment: replay.min_actors must be at most the {self.num_actors} actors of "
                f"{self.topology}; got {self.replay.min_actors}."
            )
        if self.program.launch == "ray" and self.topology != "distributed":
            raise ValueError(
                "Experiment: topology must be distributed where Ray launches, since nodes of the "
                f"others share memory; got {self.topology}. Say --topology distributed."
            )
        alone = not self.data or self.topology == "single_process"
        self.require("topology", alone, "single_process with data, since nobody acts")
        self.require("seed", 0 <= self.seed < 2**31, "in [0, 2^31)")

    @property
    def may_convolve(self) -> bool:
        """Whether the network may have convolutions; of a user's own nothing is known."""
        return bool(self.network_factory) or self.network.torso != "mlp"

    @property
    def older_runtime(self) -> bool:
        """Whether XLA's older CPU runtime, which is for small dense networks, will do."""
        entry = AGENTS.get(type(self.agent))
        return not self.may_convolve and (entry is None or entry.older_runtime)

    @property
    def num_actors(self) -> int:
        """Actors of the topology."""
        return 1 if self.topology == "single_process" else self.program.num_actors

    @property
    def total_envs(self) -> int:
        """Environments of all actors."""
        return self.num_actors * self.env.num_envs

    @property
    def evaluation_env(self) -> EnvConfig:
        """The environments' config as evaluation has it."""
        cfg = self.env
        return dataclasses.replace(
            cfg,
            num_envs=self.evaluator.num_envs,
            wait_num=0,
            options={**cfg.options, **cfg.eval_options},
            opponents=cfg.eval_opponents,
        )

    def env_ids(self, rank: int) -> range:
        """The environments of the actor of this rank, among those of all actors."""
        return range(rank * self.env.num_envs, (rank + 1) * self.env.num_envs)


def to_json(experiment: Experiment) -> str:
    """Returns the experiment as JSON text, which `from_json` takes back."""
    return json.dumps(_converter().unstructure(experiment), indent=2) + "\n"


def from_json(text: str, where: str | Path = "from_json") -> Experiment:
    """Returns the experiment of a JSON text.

    Raises:
      ValueError: the text is no experiment; says which field is wrong.
    """
    try:
        return _converter().structure(json.loads(text), Experiment)
    except cattrs.BaseValidationError as error:
        reasons = "; ".join(cattrs.transform_error(error, "config", _reason))
        raise ValueError(f"{where}: not the config of an experiment: {reasons}") from error


def _reason(error: BaseException, kind: type | None) -> str:
    """Keeps the text of our own errors, which say the rule; others are put in words by cattrs."""
    return str(error) if type(error) is ValueError else cattrs.v.format_exception(error, kind)


def _converter() -> cattrs.Converter:
    converter = make_converter(forbid_extra_keys=True)
    kinds = {kind.__name__: kind for kind in AGENTS}

    def structure_agent(value: Mapping[str, Any], _: object) -> Any:
        fields = dict(value)
        name = fields.pop("kind", "")
        if name not in kinds:
            raise ValueError(f"unknown kind of agent {name!r}{nearest(name, kinds)}")
        return converter.structure(fields, kinds[name])

    # Registered by predicate: the annotation is a union, which cattrs would try to tell apart.
    converter.register_structure_hook_func(lambda kind: kind == AgentConfig, structure_agent)
    converter.register_unstructure_hook_func(
        lambda kind: kind == AgentConfig,
        lambda value: {"kind": type(value).__name__, **converter.unstructure(value, type(value))},
    )
    return converter
