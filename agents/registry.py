"""The registry of agents: the agent of each config, and what programs need to know about it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from rlstack.configs.exploration import PolicyConfig
from rlstack.configs.network import NetworkConfig
from rlstack.references import Sources

if TYPE_CHECKING:  # JAX is imported with the first agent
    from rlstack.agent import Agent
    from rlstack.exploration import Policy
    from rlstack.networks import AnyNetwork

Recorded = Literal["", "any", "demonstrations"]
AgentClass = TypeVar("AgentClass", bound="type[Agent]")


class Entry(NamedTuple):
    """An agent and the properties that programs need; `register` explains the fields."""

    agent: type[Agent]
    network: Callable[..., AnyNetwork]
    policy: Callable[[Any, int], Policy]
    offline: bool
    recorded: Recorded
    older_runtime: bool
    compares_with_acting: bool

    def check(self, policy: PolicyConfig, network: NetworkConfig) -> None:
        """Checks for options that the agent's loss excludes.

        Raises:
          ValueError: actions have other probabilities in acting than in learning, or there is no
              acting.
        """
        if self.offline and policy != PolicyConfig():
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


class Registry(MutableMapping[type, Entry]):
    """The agents by the class of their config.

    Who has a config has imported the module of its agent, so that a lookup imports nothing. `find`
    imports the module of one agent, and iteration those of all.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._entries: dict[type, Entry] = {}

    def __getitem__(self, config: type) -> Entry:
        return self._entries[config]

    def __setitem__(self, config: type, entry: Entry) -> None:
        self._entries[config] = entry

    def __delitem__(self, config: type) -> None:
        del self._entries[config]

    def __iter__(self) -> Iterator[type]:
        self._sources.import_all()
        return iter(list(self._entries))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def by_name(self) -> dict[str, type]:
        """Returns the config classes of all agents by their names."""
        return {kind.__name__: kind for kind in self}

    def find(self, name: str) -> type | None:
        """Returns the config class of this name, of a registered agent; None if there is none."""
        if (kind := self._imported(name)) is None:
            self._sources.import_with(rf"class {re.escape(name)}\b")
            kind = self._imported(name)
        return kind

    def _imported(self, name: str) -> type | None:
        return next((kind for kind in self._entries if kind.__name__ == name), None)


AGENTS = Registry(Sources("rlstack.agents"))


def sample(cfg: object, num_envs: int) -> Policy:
    """Returns the policy that draws actions from the agent's own distribution."""
    del cfg, num_envs
    from rlstack.exploration import Sample

    return Sample()


def register(
    config: type,
    *,
    network: Callable[..., AnyNetwork],
    policy: Callable[[Any, int], Policy] = sample,
    offline: bool = False,
    recorded: Recorded = "",
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
      recorded: which recorded steps an experiment must give it besides: replay.demonstrations, or
          "any", which may also be data.
      older_runtime: whether XLA's older CPU runtime can compile the agent's update. The one in
          jaxlib 0.5 aborts on large matrix products of random numbers.
      compares_with_acting: whether the loss has the ratio of an action's probabilities in learning
          and in acting, see `Entry.check`.
    """

    def add(agent: AgentClass) -> AgentClass:
        AGENTS[config] = Entry(
            agent, network, policy, offline, recorded, older_runtime, compares_with_acting
        )
        return agent

    return add
