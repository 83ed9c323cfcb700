"""Makes the agent of an experiment."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from rlstack import exploration
from rlstack.agent import Agent
from rlstack.agents import AGENTS
from rlstack.checks import ActionKindError, WrongKindError
from rlstack.families.normalised import normalised
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.member_config import is_fixed
from rlstack.references import Hook, call_factory, check_callable, load_hook, name_of, nearest
from rlstack.types import EnvSpec, PyTree


def make_agent(
    experiment: Experiment,
    spec: EnvSpec,
    *,
    greedy: bool = False,
    evaluating: bool = False,
    after: exploration.RunCounts | None = None,
) -> Agent:
    """Makes the agent, with its exploring policy or the greedy one.

    Args:
      experiment: the experiment, which configures the agent.
      spec: the spec of the environments.
      greedy: True to take the best action.
      evaluating: True to act as in evaluations: greedy, except with probability
        ``evaluator.epsilon``.
      after: the fixed counts at which exploration schedules are evaluated, for params that do not
        learn; by default the counts in the agent's own state.

    Raises:
      ValueError: the agent, its network or its policy does not fit the environment, or an extra
        that it learns from is not there.
      WrongKindError: the network or policy factory of the config is not such a function.
    """
    cfg = experiment.agent
    if experiment.env.levels:
        from rlstack.families.levels import without_level

        spec = without_level(spec)
    if type(cfg) not in AGENTS:
        raise ValueError(
            f"Experiment: agent is a {type(cfg).__name__}, which no agent is registered for"
            f"{nearest(type(cfg).__name__, AGENTS.by_name())} "
            "Decorate its class with rlstack.agents.register."
        )
    entry = AGENTS[type(cfg)]
    obs_spec, shown = _shown(experiment, spec)
    network = (
        _Factory("network_factory", experiment.network_factory)
        if experiment.network_factory
        else functools.partial(entry.network, cfg=experiment.network)
    )
    _check_epsilon(experiment, spec, evaluating or not greedy)
    policy: Callable[[], exploration.Policy] = _policy_of_training(experiment)
    if greedy or evaluating:
        epsilon = experiment.evaluator.epsilon if evaluating else 0.0
        policy = functools.partial(exploration.Greedy, epsilon)
    make = functools.partial(entry.agent, cfg, obs_spec, spec.action, network)
    try:
        agent = make(policy)
    except ActionKindError as error:
        raise ActionKindError(f"Environment {name_of(experiment.env.name)}: {error}") from error
    if after is not None and not greedy and _counts(agent):  # others see no counts in training
        agent = make(functools.partial(_after, policy, after))
    trains = not (greedy or evaluating) and after is None
    if trains:
        _check_for_training(experiment, agent)
        agent.check_extras(spec.extras)
    return _wrapped(experiment, shown(normalised(agent, experiment.normalisation)), spec, trains)


def _wrapped(experiment: Experiment, agent: Agent, spec: EnvSpec, trains: bool) -> Agent:
    """Returns the agent as one that chooses levels or learns from demonstrations, if it does."""
    if experiment.env.levels:
        from rlstack.families.levels import choosing_levels

        return choosing_levels(agent, experiment.levels, experiment.env.levels, chooses=trains)
    if not experiment.replay.demonstrations or not trains:
        return agent
    from rlstack.programs.build.recorded import demonstrated

    return demonstrated(experiment.replay, agent, spec)


def _shown(experiment: Experiment, spec: EnvSpec) -> tuple[PyTree, Callable[[Agent], Agent]]:
    """Returns the spec of what agents see of observations, and what wraps them so that they do.

    The user's observation processor comes first, then the view that shows the critic an extra.

    Raises:
      ValueError: the observation and the extras both have an entry of this name.
    """
    hook, entry = experiment.observation_processor, experiment.network.critic_observation
    if not (isinstance(spec.extras, Mapping) and entry in spec.extras):
        entry = None
    if not hook and entry is None:
        return spec.observation, lambda agent: agent
    from rlstack.families.observing import ExtraView, View, observing

    views: list[View | ExtraView] = []
    if hook:
        views.append(View(hook, spec.observation))
        spec = spec._replace(observation=views[0].seen_spec)
    if entry is not None:
        if isinstance(spec.observation, Mapping) and entry in spec.observation:
            raise ValueError(
                f"Experiment: network.critic_observation {entry!r} must be the name of one entry; "
                "both the observation and the extras have it. Rename one of them in the "
                "environment."
            )
        views.append(ExtraView(entry, spec))
    # The outermost sees the environment's steps.
    return views[-1].seen_spec, lambda agent: functools.reduce(observing, reversed(views), agent)


def _check_for_training(experiment: Experiment, agent: Agent) -> None:
    """Checks that the agent uses what the experiment sets: priorities, rewards, the policy."""
    name = type(agent).__name__
    if experiment.replay.sampler == "prioritized" and not agent.has_priorities:
        raise ValueError(
            f"Experiment: replay.sampler must not be prioritized for {name}, which gives the items "
            "of a batch no priorities. Use --replay.sampler uniform, or set has_priorities = "
            "True in the class of an agent that returns them."
        )
    if agent.writes_back:
        _check_writing_back(experiment, name)
    cfg = experiment.normalisation
    scales_rewards = cfg.rewards != "none" or cfg.reward_scale != 1 or cfg.reward_clip
    if scales_rewards and not agent.reads_rewards:
        raise ValueError(
            f"Experiment: normalisation must leave rewards as they are for {name}, which learns "
            "from others. Leave out normalisation.rewards, reward_scale and reward_clip."
        )
    if experiment.policy.counts and not _counts(agent):
        raise ValueError(
            f"Experiment: policy.schedule must be constant and policy.warm_up 0 for {name}, whose "
            f"state does not count steps; got {experiment.policy.schedule} and "
            f"{experiment.policy.warm_up}."
        )
    given = experiment.policy_factory or experiment.policy != Experiment.policy
    if given and is_fixed(experiment.agent):
        raise ValueError(
            f"Experiment: policy and policy_factory must be left out for {name}, which follows a "
            "rule or acts at random."
        )


def _check_writing_back(experiment: Experiment, name: str) -> None:
    """Checks that a replay takes the new values that an agent gives its steps."""
    replay, learner = experiment.replay, experiment.learner
    served = experiment.layout.has_replay_node and replay.chosen_service == "reverb"
    for field, bad, rule in (
        ("replay.service", served, "table"),
        ("replay.sampler", replay.sampler == "fifo", "uniform or prioritized"),
        ("learner.devices", len(learner.devices) > 1, "one device"),
        ("learner.processes", learner.processes > 1, "1"),
        ("data", bool(experiment.data), "empty"),
    ):
        if bad:
            raise ValueError(
                f"Experiment: {field} must be {rule} for {name}, which writes back to the steps "
                f"in replay. Change --{field}."
            )


def _policy_of_training(experiment: Experiment) -> Callable[[], exploration.Policy]:
    if experiment.policy_factory:
        return _Factory("policy_factory", experiment.policy_factory)
    if experiment.policy.kind != "agent":
        return functools.partial(exploration.make_policy, experiment.policy, experiment.total_envs)
    policy = AGENTS[type(experiment.agent)].policy
    return functools.partial(policy, experiment.agent, experiment.total_envs)


def _check_epsilon(experiment: Experiment, spec: EnvSpec, is_evaluated: bool) -> None:
    """Checks ``evaluator.epsilon`` for an agent; those that play a fixed part are not evaluated."""
    epsilon = experiment.evaluator.epsilon
    if epsilon and is_evaluated and is_fixed(experiment.agent):
        raise ValueError(
            "Experiment: evaluator.epsilon must be 0 for an agent that follows a rule or acts at "
            f"random, in evaluations too; got {epsilon}."
        )
    leaves = jax.tree.leaves(spec.action, is_leaf=lambda node: hasattr(node, "dtype"))
    if epsilon and not all(np.issubdtype(leaf.dtype, np.integer) for leaf in leaves):
        raise ValueError(
            "Experiment: evaluator.epsilon must be 0 for continuous actions, which have no "
            f"uniformly random choice; got {epsilon}."
        )


def check_factories(experiment: Experiment) -> None:
    """Checks the functions of the user's own that make the network and the policy; calls neither.

    Raises:
      ValueError: a function cannot be imported.
      WrongKindError: it is no function, or does not take its arguments.
    """
    for field, wanted in _FACTORIES.items():
        if hook := getattr(experiment, field):
            rule = f"Experiment: {field} {name_of(hook)} must be a function {wanted}"
            arguments = (None, None) if field == "network_factory" else ()
            check_callable(rule, load_hook(f"Experiment: {field}", hook), *arguments)


def _after(
    policy: Callable[[], exploration.Policy], run_counts: exploration.RunCounts
) -> exploration.Policy:
    made = policy()
    return exploration.After(made, run_counts) if exploration.explores(made) else made


def _counts(agent: Agent) -> bool:
    """Whether the agent's state has the counts of steps and episodes that schedules depend on."""
    state = jax.eval_shape(lambda: agent.initial_state(1))
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, exploration.Counts))
    return any(isinstance(node, exploration.Counts) for node in leaves)


@dataclasses.dataclass(frozen=True)
class _Factory:
    """A user's factory, with checks of what it is and what it returns; it can be pickled."""

    field: str  # name of the experiment's config field
    reference: Hook

    def __call__(self, *arguments: object) -> Any:
        wanted = _FACTORIES[self.field]
        rule = f"Experiment: {self.field} {name_of(self.reference)} must be a function {wanted}"
        made = call_factory(f"Experiment: {self.field}", self.reference, wanted, *arguments)
        # Networks are NamedTuples of functions, policies are functions.
        fits = hasattr(made, "_fields") if arguments else callable(made)
        if not fits:
            raise WrongKindError(f"{rule}; it returned {type(made).__name__} {made!r:.80}.")
        return made


_FACTORIES = {
    "network_factory": "(obs_spec, action_spec) -> Network or PolicyAndCritic of rlstack.networks",
    "policy_factory": "() -> Policy of rlstack.exploration",
}
