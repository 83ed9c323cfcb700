"""``--agent.COMPONENT-optimizer.*``: options of the optimizer of one component of the agent.

In a preset most components have no optimizer of their own (None), and the parser makes no options
of None. This module separates these options from the others, and gives the components that they
name a copy of the agent's ``optimizer``, from which the options then change it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rlstack.optimizers import component_fields, require_component
from rlstack.programs.cli.options import UsageError
from rlstack.programs.config import options
from rlstack.programs.config.experiment import Experiment

_OPTION = re.compile(r"--agent\.([\w-]+)[-_]optimizer\.([\w-]+)")


def split(args: Sequence[str], experiment: Experiment) -> tuple[list[str], list[str]]:
    """Returns the other arguments, and the options of components with their values.

    Raises:
      UsageError: the agent has no such component.
    """
    others: list[str] = []
    of_components: list[str] = []
    chosen = others
    for arg in args:
        if arg.startswith("--"):
            named = _named(arg)
            if named:
                _require(experiment, named[0])
            chosen = of_components if named else others
        chosen.append(arg)
    return others, of_components


def fill(experiment: Experiment, args: Iterable[str]) -> Experiment:
    """Returns the experiment with an optimizer for each component that the options name."""
    named = [found for found in map(_named, args) if found]
    of_all = options.value_of(experiment, "agent.optimizer")
    for component in dict.fromkeys(component for component, _ in named):
        name = f"agent.{component}_optimizer"
        optimizer = options.value_of(experiment, name) or of_all
        if (component, "name") in named:
            # The arguments of one optimizer seldom exist in another.
            optimizer = dataclasses.replace(optimizer, arguments={})
        experiment = options.replaced(experiment, name, optimizer, "")
    return experiment


def fill_all(experiment: Experiment) -> Experiment:
    """Returns the experiment with an optimizer for every component, for the help."""
    agent: Any = experiment.agent
    fields = [f"{component}_optimizer" for component in component_fields(type(agent))]
    missing = {field: agent.optimizer for field in fields if getattr(agent, field) is None}
    return dataclasses.replace(experiment, agent=dataclasses.replace(agent, **missing))


def _require(experiment: Experiment, component: str) -> None:
    try:
        require_component(type(experiment.agent), component)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _named(arg: str) -> tuple[str, str] | None:
    """Returns the component and the field that an option names; None for another argument."""
    found = _OPTION.fullmatch(arg.partition("=")[0])
    return (found[1].replace("-", "_"), found[2].replace("-", "_")) if found else None
