"""The experiment config: one frozen dataclass with every setting of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import operator
from collections.abc import Iterator
from typing import Any, Literal

from rlstack.agents import AGENTS
from rlstack.checks import Checked, WrongKindError, hints_of_class, is_config
from rlstack.configs.acting import EvaluatorConfig, InferencerConfig, ServiceConfig
from rlstack.configs.exploration import PolicyConfig
from rlstack.configs.learner import LearnerConfig
from rlstack.configs.levels import LevelsConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import NO_FACTORY, ReplayConfig
from rlstack.programs.config import fused_config, member_config, program_config
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.layouts import LAYOUTS, Layout, Topology
from rlstack.programs.config.member_config import MemberConfig, is_fixed
from rlstack.programs.config.program_config import ProgramConfig
from rlstack.programs.config.stop_config import StopConfig
from rlstack.references import Hook

_TIMES, _LEAST_PERIOD = 10, 5_000  # number and smallest period of automatic evaluations


@contextlib.contextmanager
def agents_of(experiment: Experiment) -> Iterator[None]:
    """In the body, restricts the type of agent fields to an experiment's agents, for parsers.

    Elsewhere the type is Any, so that only the agents of an experiment are imported.
    """
    agents = experiment.agent, *(member.agent for member in experiment.policies.values())
    kinds = [type(agent) for agent in agents if agent is not None]
    for config in (Experiment, MemberConfig):
        hints_of_class(config)  # checks of values keep the general type
    union = functools.reduce(operator.or_, dict.fromkeys(kinds))
    module: Any = member_config
    module.AgentConfig = union
    try:
        yield
    finally:
        module.AgentConfig = Any


@dataclasses.dataclass(frozen=True)
class Experiment(Checked):
    """One experiment: what runs, for how long, and in which topology."""

    preset: str
    """The name of the experiment in run directories and results."""
    agent: member_config.AgentConfig
    """The algorithm and its hyperparameters."""
    env: EnvConfig
    """The environments."""
    replay: ReplayConfig
    """The replay buffer between actors and learner."""
    frames: int
    """Budget: environment steps in training, of all environments together.
    One Atari step is four emulator frames."""
    updates: int = 0
    """Budget: updates of the learner; 0 is no limit. The run ends with the budget, among frames,
    updates and hours, that is spent first."""
    hours: float = 0.0
    """Budget: hours of training, over all commands of the run; 0 is no limit."""
    data: str = ""
    """Directory of a dataset to learn from, without acting; `rlstack record` writes one, and
    minari:NAME is one of Minari. frames then counts the steps learned from, with repetitions."""
    offline_updates: int = 0
    """Updates from data after which the run acts, for frames. 0: it does not act with data."""
    seed: int = 1
    """Seed of all random numbers of the run."""
    topology: Topology = "single_process"
    """How acting and learning are divided. single_process: one process alternates between them.
    fused: one compiled program with environments in JAX (--env.type jax).
    heavy_env: actors compute their own actions. light_env: actors share inference services.
    distributed: as light_env, with a replay server; nodes may be on several machines."""
    network: NetworkConfig = NetworkConfig()
    """The agent's default network."""
    network_factory: Hook = ""
    """The network, as "module:callable" of a function (obs_spec, action_spec) -> Network.
    By default the agent's own, described by the options of network."""
    policy_factory: Hook = ""
    """The policy in training, as "module:callable" of a function () -> Policy: how actions are
    chosen. By default the agent's own. Evaluation always takes the greedy action."""
    observation_processor: Hook = ""
    """What the agent sees of an observation, as "module:callable" of a function (observation) ->
    observation, for one step and with jax.numpy. Use it to leave out features. By default all."""
    step_processor: Hook = ""
    """Changes the steps between the environments and the replay, as "module:callable" of a function
    (num_envs) -> processor; see `rlstack.acting.step_processor`. Use it to shape or delay rewards.
    With one, means of the numbers in each step's info are logged."""
    policy: PolicyConfig = PolicyConfig()
    """Replaces the agent's own exploration policy by one of rlstack's."""
    normalisation: NormalisationConfig = NormalisationConfig()
    """Scaling of the observations and rewards that the agent sees."""
    inferencer: InferencerConfig = InferencerConfig()
    """Acting, where actors compute their own actions (single_process and heavy_env)."""
    learner: LearnerConfig = LearnerConfig()
    """Learning."""
    levels: LevelsConfig = LevelsConfig()
    """Which levels the learner chooses, among those of env.levels."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """Evaluation with the greedy policy."""
    stop: StopConfig = StopConfig()
    """When training ends before its budget."""
    loggers: tuple[Hook, ...] = ("jsonl", "tensorboard", "terminal")
    """What receives the logs: jsonl (metrics.jsonl), tensorboard, terminal (the lines of progress),
    wandb, mlflow, trackio, and your own, as "module:callable" of a function (run_dir) -> Logger."""
    program: ProgramConfig = ProgramConfig()
    """The nodes of a topology of several processes. The others ignore these options."""
    fused: fused_config.FusedConfig = fused_config.FusedConfig()
    """The compiled loop of the topology fused."""
    service: ServiceConfig = ServiceConfig()
    """Acting in inference services (light_env and distributed)."""
    policies: dict[str, MemberConfig] = dataclasses.field(default_factory=dict)
    """Several policies that play the seats of one game, by name; see docs/policies.md. Empty for
    one policy, the agent. env.num_envs is then the number of seats of all games, frames counts the
    steps of the policies that learn, and updates counts those of each learner."""
    seating: Literal["fixed", "drawn"] = "fixed"
    """Which policy plays a seat, with several policies. fixed: the one that names the seat.
    drawn: the policies of a game change seats in each episode, at random."""
    steps_per_update: int = 1
    """Steps of every environment between two attempts to learn, in a single process."""
    log_period: int = 2000
    """Environment steps between two lines of logs."""
    checkpoint_period: int = 100_000
    """Environment steps between two checkpoints. The last one is always written at the end."""
    checkpoints_kept: int = 3
    """Number of checkpoints that are kept, the newest. `rlstack record --sets` plays them all."""
    checkpoint_replay: bool = True
    """Whether checkpoints include the content of the replay, so that a run resumes exactly."""
    modules: tuple[str, ...] = ()
    """Modules that a run imports before it reads its config, for agents of your own.
    `--module NAME` sets it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_agent()
        self._check_levels()
        self.require_at_least(1, "frames", "steps_per_update", "log_period")
        self.require_at_least(1, "checkpoint_period", "checkpoints_kept")
        if self.replay.min_actors > self.num_actors:
            raise ValueError(
                f"Experiment: replay.min_actors must be at most the {self.num_actors} actors of "
                f"{self.topology}; got {self.replay.min_actors}."
            )
        program_config.check(
            self.topology, self.program, self.replay, self.learner, tuple(self.policies)
        )
        if (own := self.replay.needs_table) and self.replay.service == "reverb":
            raise ValueError(
                f"Experiment: replay.{own} must be left out with replay.service reverb, "
                f"{NO_FACTORY}. Use --replay.service table."
            )
        if self.step_processor:
            self.require("data", not self.data, "empty with step_processor: nothing is acted")
            if self.normalisation.rewards == "return":
                raise ValueError(
                    "Experiment: normalisation.rewards must not be return with step_processor, "
                    "because returns are measured on the environment's own rewards. Use "
                    "--normalisation.rewards reward."
                )
        if self.policies:
            self._check_policies()
        if self.layout.is_compiled and not self.data and not self.policies:
            fused_config.check(self.env, self.replay, self.learner, self.step_processor)
        fits = not self.data or self.layout == Layout() or (self.layout.has_nodes and self.acts)
        self.require("topology", fits, "single_process with data, or of nodes with offline_updates")
        fits = self.offline_updates == 0 or (self.offline_updates > 0 and self.data != "")
        self.require("offline_updates", fits, "at least 0, and 0 without data")
        self.require("seed", 0 <= self.seed < 2**31, "in [0, 2^31)")
        if self.network_factory and self.network.dtype != "float32":
            raise ValueError(
                "Experiment: network.dtype must be float32 with network_factory, because a network "
                f"of your own computes in its own types; got {self.network.dtype}. Cast in your "
                "factory, with hk.mixed_precision or astype."
            )
        if self.policy_factory and self.policy.kind != "agent":
            raise ValueError(
                "Experiment: policy.kind must be agent with policy_factory, because there is one "
                f"policy; got {self.policy.kind}. Give one of them."
            )
        if (entry := AGENTS.get(type(self.agent))) is not None:
            entry.check(self.policy, self.network)
        self.require("updates", self.updates >= 0, "at least 0")
        self.require("hours", 0 <= self.hours < math.inf, "at least 0 and finite")
        judges = self.stop.return_reached is not None or self.stop.patience
        if judges and not self.evaluator.fixed_period:
            raise ValueError(
                "Experiment: evaluator.period must be positive with stop.return_reached and "
                "stop.patience, which judge evaluations during training; got "
                f"{self.evaluator.period}. Add --evaluator.period FRAMES."
            )

    def _check_agent(self) -> None:
        """Checks that the agent is the config of one, and not a class."""
        if not is_config(self.agent):
            advice = f". Write {self.agent.__name__}()" if isinstance(self.agent, type) else ""
            raise WrongKindError(
                "Experiment: agent must be the config of an agent, such as PPOConfig(); got "
                f"{self.agent!r:.80}{advice}"
            )

    def _check_levels(self) -> None:
        """Checks what levels that the learner chooses exclude."""
        excluded = {
            "policies": self.policies,
            "data": self.data,
            "env.opponents.runs": self.env.opponents.runs,
            "replay.demonstrations": self.replay.demonstrations,
            "network.critic_observation level": self.network.critic_observation == "level",
        }
        self.levels.check(self.env.levels, excluded)

    def _check_policies(self) -> None:
        """Checks what several policies exclude."""
        member_config.check(self.policies, self.topology, self.updates, self.replay, self.program)
        self.require("data", not self.data, "empty with policies: nothing is acted")
        if self.env.wait_num:
            raise ValueError(
                "Experiment: env.wait_num must be 0 with policies, because seats step "
                f"together; got {self.env.wait_num}."
            )
        if self.env.opponents.runs or self.env.eval_opponents.runs:
            raise ValueError(
                "Experiment: env.opponents and env.eval_opponents must be empty with policies. Add "
                "a policy with `run` for each of them instead."
            )
        learning = []
        for name, member in self.policies.items():
            try:
                own = self.of_policy(name)
                if own.learner.processes > 1:
                    raise ValueError("learner.processes must be 1 with several policies.")
            except ValueError as error:
                raise ValueError(f"policies.{name}: {error}") from error
            if not member.is_frozen and not is_fixed(own.agent):
                learning.append((name, own.replay, own.learner))
        if self.layout.is_compiled:
            fused_config.check_several(self.env, self.step_processor, learning)

    def of_policy(self, name: str) -> Experiment:
        """Returns the experiment of one of several policies, as if it played all seats.

        In the topology fused it is that of a single process: the rules of fused depend on the rows
        that the policy plays.
        """
        member = self.policies[name]
        own = {field.name for field in dataclasses.fields(self)}
        given = {field.name: getattr(member, field.name) for field in dataclasses.fields(member)}
        changed = {k: v for k, v in given.items() if k in own and v is not None}
        if self.layout.is_compiled:
            changed["topology"] = "single_process"
        return dataclasses.replace(self, policies={}, **changed)

    @property
    def may_convolve(self) -> bool:
        """Whether the network may have convolutions. Assumed for a user's own network."""
        return bool(self.network_factory) or self.network.convolves

    @property
    def older_runtime(self) -> bool:
        """Whether XLA's older CPU runtime suits the network: it is faster for small dense ones.

        That runtime cannot compile large matrix products with random numbers, as in dropout.
        """
        if self.policies:
            every = all(self.of_policy(name).older_runtime for name in self.policies)
            return every and not self.layout.is_compiled
        entry = AGENTS.get(type(self.agent))
        both = self.network, self.network.of_critic()
        low = any(network.dropout or network.dtype != "float32" for network in both)
        small = not (self.may_convolve or low or self.layout.is_compiled)
        return small and self.replay.place == "host" and (entry is None or entry.older_runtime)

    @property
    def acts(self) -> bool:
        """Whether the run acts, and does not only learn from data."""
        return not self.data or self.offline_updates > 0

    @property
    def all_frames(self) -> int:
        """The budget of frames, with the steps learned from before the run acts."""
        before = self.offline_updates * self.replay.batch_size * self.replay.unroll_length
        return self.frames + before

    @property
    def evaluation_period(self) -> int:
        """Frames between evaluations during training; 0 for none."""
        if self.evaluator.period == "auto":
            return max(self.all_frames // _TIMES, _LEAST_PERIOD)
        return self.evaluator.fixed_period

    @property
    def layout(self) -> Layout:
        """How the topology divides acting and learning."""
        return LAYOUTS[self.topology]

    @property
    def in_one_process(self) -> bool:
        """Whether the topology has no nodes."""
        return not self.layout.has_nodes

    @property
    def num_actors(self) -> int:
        """The number of actors of the topology."""
        return 1 if self.in_one_process else self.program.num_actors

    @property
    def total_envs(self) -> int:
        """The number of environments of all actors."""
        return self.num_actors * self.env.num_envs

    @property
    def evaluation_env(self) -> EnvConfig:
        """The config of the environments of evaluation."""
        cfg = self.env
        return dataclasses.replace(
            cfg,
            num_envs=self.evaluator.num_envs,
            wait_num=0,
            levels=0,
            options={**cfg.options, **cfg.eval_options},
            opponents=cfg.eval_opponents,
        )

    def env_ids(self, rank: int) -> range:
        """Returns the ids of one actor's environments, among those of all actors."""
        return range(rank * self.env.num_envs, (rank + 1) * self.env.num_envs)
