"""The registry of agents: the agent of each config, and what programs need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rlstack import exploration
from rlstack.agent import Agent
from rlstack.networks import Network, PolicyAndCritic

AgentClass = TypeVar("AgentClass", bound=type[Agent])


class Entry(NamedTuple):
    """What programs need to know about an agent; `register` explains the fields."""

    agent: type[Agent]
    network: Callable[..., Network | PolicyAndCritic]
    policy: Callable[[Any, int], exploration.Policy]
    offline: bool
    older_runtime: bool
    compares_with_acting: bool


AGENTS: dict[type, Entry] = {}  # by the class of the agent's config


def sample(cfg: object, num_envs: int) -> exploration.Policy:
    """Returns the policy that draws actions from the agent's own distribution."""
    del cfg, num_envs
    return exploration.Sample()


def register(
    config: type,
    *,
    network: Callable[..., Network | PolicyAndCritic],
    policy: Callable[[Any, int], exploration.Policy] = sample,
    offline: bool = False,
    older_runtime: bool = True,
    compares_with_acting: bool = False,
) -> Callable[[AgentClass], AgentClass]:
    """Registers the decorated agent: an experiment with this config runs this agent.

    Args:
      config: the agent's config, a frozen dataclass.
      network: ``(obs_spec, action_spec, cfg=NetworkConfig) -> network``, the network that the agent
        uses unless the experiment names another.
      policy: ``(agent config, number of environments) -> policy``, how the agent explores.
      offline: whether the agent learns from recorded data only, and never from its own acting.
      older_runtime: whether XLA's older CPU runtime can compile the agent's update. The one in
          jaxlib 0.5 aborts on large matrix products of random numbers.
      compares_with_acting: whether the loss has the ratio of an action's probabilities in learning
          and in acting. Plain batch norm gives different ones, and is refused.
    """

    def add(agent: AgentClass) -> AgentClass:
        AGENTS[config] = Entry(agent, network, policy, offline, older_runtime, compares_with_acting)
        return agent

    return add
