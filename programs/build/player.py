"""The parts of one policy in a process: how it acts and, if it learns, how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from rlstack.acting.actor import Actor, transition_spec
from rlstack.acting.inference import Inference
from rlstack.acting.inferencer import Inferencer
from rlstack.agent import Agent
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.devices import learner_device, single_process_device
from rlstack.programs.build.environments import Pool, make_env
from rlstack.programs.build.hooks import make_step_processor
from rlstack.programs.build.replay import Stored, check_place, make_replay
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.programs.config.env_config import EnvConfig
from rlstack.programs.config.experiment import Experiment
from rlstack.replay import ReplayBuffer
from rlstack.types import EnvSpec, PyTree, TimeStep, Transition

if TYPE_CHECKING:  # a run of one policy does not import these
    from rlstack.programs.build.policies.members import Division
    from rlstack.programs.build.policies.versions import Versions


class Acting(Protocol):
    """What chooses the actions of a policy, with a state that checkpoints hold."""

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch."""

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""


class LearningParts(NamedTuple):
    """The parts that a learning policy has in addition to its inferencer."""

    spec: Transition  # shapes and dtypes of one row's step
    replay: ReplayBuffer
    learner: Learner


class Player:
    """One policy in training.

    Attributes:
      inferencer: chooses the policy's actions.
      learner: the policy's learner; None if it does not learn.
      replay: the policy's replay; None if it does not learn.
      actor: steps the policy's environments, or its rows of the games; made by `begin`.
      versions: the earlier versions that a policy of kind "history" plays; None for others.
    """

    actor: Actor
    versions: Versions | None = None

    def __init__(
        self, experiment: Experiment, learning: LearningParts | None, inferencer: Acting
    ) -> None:
        self._experiment, self._learning, self.inferencer = experiment, learning, inferencer
        self.learner = learning.learner if learning else None
        self.replay = learning.replay if learning else None
        self._base_frames = 0

    @property
    def step_spec(self) -> Transition:
        """Shapes and dtypes of one row's step, of a policy that learns."""
        assert self._learning is not None
        return self._learning.spec

    @property
    def env_frames(self) -> int:
        """Steps so far, of this run and of those that it resumes."""
        return self._base_frames + self.actor.env_frames

    def count(self, frames: int) -> None:
        """Counts frames that the policy has learned from without acting."""
        self._base_frames += frames

    def begin(self, env: Any) -> None:
        """Makes the actor, which resets the environments; the replay keeps what it has.

        Args:
          env: a pool, or the view of the policy's rows of one.
        """
        if hasattr(self, "actor"):
            self._base_frames = self.env_frames
        processor = make_step_processor(self._experiment) if self.replay is not None else None
        self.actor = Actor(env, self.inferencer, self.replay, step_processor=processor)

    def gap(self) -> None:
        """Ends the items in progress: the next steps do not follow the ones before."""
        if self.replay is not None:
            self.replay.gap(None)

    def after_learning(self) -> None:
        """Called when the learners have learned from a step; a history may save a version."""

    def watch(self, shared: Any) -> None:
        """Called when all rows have received a step; a history records who won."""

    def save(self) -> dict[str, PyTree]:
        """Returns the state of acting, and the replay if checkpoints hold it."""
        holds = self.replay is not None and self._experiment.checkpoint_replay
        replay = self.replay.save() if holds and self.replay is not None else ()
        frames = np.int64(self.env_frames)
        return {"inferencer": self.inferencer.save(), "replay": replay, "env_frames": frames}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned, except for acting, which follows new episodes."""
        self._base_frames, self.actor.env_frames = int(saved["env_frames"]), 0
        if self.replay is not None and self._experiment.checkpoint_replay:
            self.replay.load(saved["replay"])

    def close(self) -> None:
        """Closes the replay."""
        if self.replay is not None:
            self.replay.close()


def learning_player(experiment: Experiment, spec: EnvSpec) -> Player:
    """Makes the parts of a policy that learns, from the experiment of this policy alone.

    Raises:
      ValueError: the policy's agent does not fit the environments.
    """
    agent = make_agent(experiment, spec)
    step_spec = transition_spec(agent, spec)
    replay, learner = _replay_and_learner(experiment, agent, step_spec)
    inferencer = Inferencer(
        experiment.inferencer,
        agent,
        learner,
        experiment.env.num_envs,
        acting_key(experiment.seed, rank=0),
        device=single_process_device(experiment),
    )
    return Player(experiment, LearningParts(step_spec, replay, learner), inferencer)


def _replay_and_learner(
    experiment: Experiment, agent: Agent, spec: Transition
) -> tuple[ReplayBuffer, Learner]:
    """Makes a replay of the host or of the learner's device, and what learns from it.

    Raises:
      ValueError: there is not enough memory, or `check_place` refuses the experiment.
    """
    cfg, rng_key = experiment.learner, role_key(experiment.seed, "learner")
    if experiment.replay.place == "host":
        replay = make_replay(experiment, spec)
        return replay, Learner(cfg, agent, replay, rng_key)
    from rlstack.learning.device_learner import DeviceLearner
    from rlstack.learning.device_replay import DeviceReplay

    check_place(experiment)
    stored = Stored.of(experiment, spec)
    held = DeviceReplay(
        stored.cfg,
        experiment.env.num_envs,
        rng_key=role_key(experiment.seed, "replay"),
        spec=stored.spec,
        stacks=stored.stacks,
        device=learner_device(experiment),
    )
    return stored.stacked(held), DeviceLearner(cfg, agent, held, rng_key)


class Shared(Protocol):
    """A pool, and the part of it that each policy plays."""

    @property
    def pool(self) -> Pool:
        """All environments."""

    @property
    def views(self) -> Mapping[str, Any]:
        """The environments of each policy, by policy name."""

    def close(self) -> None:
        """Closes the pool."""


class WholePool(NamedTuple):
    """A pool that one policy plays alone."""

    pool: Pool

    @property
    def views(self) -> Mapping[str, Any]:
        """The pool, for the policy without a name."""
        return {"": self.pool}

    def close(self) -> None:
        """Closes the pool."""
        self.pool.close()


def make_shared(
    experiment: Experiment, division: Division | None, cfg: EnvConfig, seed: int, seating_seed: int
) -> Shared:
    """Makes the environments of one actor, for one policy or divided among several.

    Args:
      experiment: the experiment of all policies.
      division: the experiment's policies and their seats; None for one policy.
      cfg: the config of the environments.
      seed: seed of the environments.
      seating_seed: seed of the seat assignment, if seats are drawn at random.

    Raises:
      ValueError: see `rlstack.programs.build.environments.make_env`.
    """
    if division is None:
        return WholePool(make_env(cfg, seed, step_info=bool(experiment.step_processor)))
    from rlstack.programs.build.policies.members import share_games

    return share_games(experiment, division, cfg, seed, seating_seed)
