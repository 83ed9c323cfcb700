"""The parts of one policy of a set: how it acts and, if it learns, how it learns."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from rlstack.acting.actor import Actor, transition_spec
from rlstack.acting.inference import Inference
from rlstack.acting.inferencer import Inferencer
from rlstack.acting.params import FixedParams
from rlstack.agent import Agent
from rlstack.envs.seats.views import SharedPool, View
from rlstack.learning.learner import Learner
from rlstack.programs.build.agent import make_agent
from rlstack.programs.build.hooks import make_step_processor
from rlstack.programs.build.policies.members import Member, frozen_experiment
from rlstack.programs.build.replay import make_replay
from rlstack.programs.build.restored import read_params
from rlstack.programs.build.seeds import acting_key, role_key
from rlstack.replay import ReplayBuffer
from rlstack.types import EnvSpec, Params, PRNGKey, PyTree, TimeStep, Transition


class Acting(Protocol):
    """What chooses the actions of a policy, with a state that checkpoints hold."""

    def inference(self, env_ids: np.ndarray | None, timestep: TimeStep) -> Inference:
        """Acts on one batch."""

    def save(self) -> PyTree:
        """Returns the state that a resumed run needs."""

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned."""


class LearningParts(NamedTuple):
    """The parts that a learning policy has in addition to its actor."""

    spec: Transition  # shapes and dtypes of one row's step
    replay: ReplayBuffer
    learner: Learner


class Player:
    """One policy in training.

    Attributes:
      member: the policy.
      learning: the policy's replay and learner; None if the policy does not learn.
      acting: the inferencer that chooses the policy's actions.
      actor: steps the policy's rows; created by `begin`.
    """

    actor: Actor

    def __init__(self, member: Member, learning: LearningParts | None, acting: Acting) -> None:
        self.member, self.learning, self.acting = member, learning, acting
        self._base_frames = 0

    @property
    def env_frames(self) -> int:
        """Steps of its rows so far, of this run and of those that it resumes."""
        return self._base_frames + (self.actor.env_frames if hasattr(self, "actor") else 0)

    def begin(self, view: View) -> None:
        """Makes the actor, which resets its rows; the replay keeps what it has."""
        self._base_frames = self.env_frames
        replay = self.learning.replay if self.learning else None
        processor = make_step_processor(self.member.experiment) if replay is not None else None
        self.actor = Actor(view, self.acting, replay, step_processor=processor)

    def keep(self, frames: int, params: Params) -> None:
        """Receives another policy's newest params, after this number of its frames."""

    def watch(self, shared: SharedPool) -> None:
        """Processes the step that all rows have received."""

    def save(self) -> PyTree:
        """Returns the state of acting, and the replay if checkpoints hold it."""
        holds = self.learning is not None and self.member.experiment.checkpoint_replay
        replay = self.learning.replay.save() if holds and self.learning else ()
        frames = np.int64(self.env_frames)
        return {"inferencer": self.acting.save(), "replay": replay, "env_frames": frames}

    def load(self, saved: PyTree) -> None:
        """Restores what `save` returned, except for acting, which follows new episodes."""
        self._base_frames, self.actor.env_frames = int(saved["env_frames"]), 0
        if self.learning is not None and self.member.experiment.checkpoint_replay:
            self.learning.replay.load(saved["replay"])

    def close(self) -> None:
        """Closes the replay."""
        if self.learning is not None:
            self.learning.replay.close()


def learning_player(member: Member, spec: EnvSpec) -> Player:
    """Makes the parts of a policy that learns.

    Raises:
      ValueError: the policy's agent does not fit the environments.
    """
    experiment = member.experiment
    agent = make_agent(experiment, spec)
    step_spec = transition_spec(agent, spec)
    replay = make_replay(experiment, step_spec)
    learner = Learner(experiment.learner, agent, replay, role_key(experiment.seed, "learner"))
    key = acting_key(experiment.seed, rank=0)
    inferencer = Inferencer(experiment.inferencer, agent, learner, experiment.env.num_envs, key)
    return Player(member, LearningParts(step_spec, replay, learner), inferencer)


def fixed_player(member: Member, spec: EnvSpec) -> Player:
    """Makes the parts of a policy that does not learn.

    Raises:
      ValueError: the policy's agent does not fit the environments, or the checkpoint cannot be
        read.
    """
    key = acting_key(member.experiment.seed, rank=0)
    return Player(member, None, fixed_inferencer(member, spec, key))


def fixed_inferencer(member: Member, spec: EnvSpec, rng_key: PRNGKey) -> Inferencer:
    """Makes what acts for a policy that does not learn; errors as for `fixed_player`."""
    experiment = member.experiment
    agent, params = fixed_agent(member, spec)
    source = FixedParams(jax.tree.map(jnp.asarray, params))
    return Inferencer(experiment.inferencer, agent, source, experiment.env.num_envs, rng_key)


def fixed_agent(
    member: Member, spec: EnvSpec, *, greedy: bool | None = None
) -> tuple[Agent, Params]:
    """Returns the agent of a policy that does not learn, and its params, in numpy.

    Args:
      member: the policy, of kind "fixed" or "frozen".
      spec: the spec of the environments.
      greedy: True to take the best action, False to explore; by default the setting in the
        policy's config. An agent of kind "fixed" never explores.

    Raises:
      ValueError: the policy's agent does not fit the environments, or the checkpoint cannot be
        read.
    """
    greedy = member.cfg.greedy if greedy is None else greedy
    if member.kind == "fixed":
        return make_agent(member.experiment, spec, greedy=True), ()  # without exploration
    experiment, after = frozen_experiment(member.cfg)
    try:
        params = read_params(
            Path(member.cfg.run), experiment, spec, on_host=True, policy=member.cfg.run_policy
        )
        return make_agent(experiment, spec, greedy=greedy, after=after), params
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"policies.{member.name}: {member.cfg.run} must have an agent that fits these "
            f"environments; {error}"
        ) from error
