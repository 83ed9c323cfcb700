"""The registry of agents: the agent of each config, and what programs need to know about it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from rlstack import exploration
from rlstack.agent import Agent
from rlstack.networks import Network, NetworkConfig, PolicyAndCritic

AgentClass = TypeVar("AgentClass", bound=type[Agent])


class Entry(NamedTuple):
    """What programs need to know about an agent; `register` explains the fields."""

    agent: type[Agent]
    network: Callable[..., Network | PolicyAndCritic]
    policy: Callable[[Any, int], exploration.Policy]
    offline: bool
    older_runtime: bool
    compares_with_acting: bool

    def check(self, policy: exploration.PolicyConfig, network: NetworkConfig) -> None:
        """Checks what the agent's loss excludes.

        Raises:
          ValueError: actions have other probabilities in acting than in learning, or there is no
              acting.
        """
        if self.offline and policy != exploration.PolicyConfig():
            raise ValueError(
                f"Experiment: policy must keep its defaults with {self.agent.__name__}, which "
                f"learns from recorded data and does not act in training; got {policy}."
            )
        if not self.compares_with_acting:
            return
        why = (
            f"with {self.agent.__name__}, whose loss compares the probabilities of actions in "
            "learning with those in acting"
        )
        if not policy.is_of_agent:
            raise ValueError(
                f"Experiment: policy.kind must be agent, or sample without warm_up, {why}; got "
                f"{policy.kind}. Explore with --agent.entropy-cost."
            )
        if network.norm == "batch":
            raise ValueError(
                f"Experiment: network.norm must not be batch {why}: batch norm gives different "
                "ones. Use --network.norm batch_renorm or layer."
            )


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
          and in acting, see `Entry.check`.
    """

    def add(agent: AgentClass) -> AgentClass:
        AGENTS[config] = Entry(agent, network, policy, offline, older_runtime, compares_with_acting)
        return agent

    return add
