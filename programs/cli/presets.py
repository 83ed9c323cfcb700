"""`rlstack presets`: the ready experiments."""

from __future__ import annotations

import dataclasses

from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.layouts import LAYOUTS, Topology
from rlstack.programs.config.presets import PRESETS, describe, preset


@dataclasses.dataclass(frozen=True)
class _PresetsOptions:
    """List the presets, each with a description. Options leave out those that do not match."""

    agent: str = ""
    """A part of the agent's name, such as ppo."""
    env: str = ""
    """A part of the environment's name, such as pong."""
    topology: Topology | None = None
    """fused: presets of environments written in JAX; the other topologies train all presets, these
    included."""
    max_frames: int | None = None
    """The largest budget, in environment steps."""


def main(args: list[str]) -> int:
    """Prints the presets; returns the exit code.

    Raises:
      UsageError: an argument is wrong, or no preset matches.
    """
    chosen = parse(_PresetsOptions, "rlstack presets", args)
    every = chosen == _PresetsOptions()
    shown = [name for name in PRESETS if every or _matches(preset(name), chosen)]
    if not shown:
        raise UsageError("no preset matches. Without options all are listed")
    width = max(map(len, shown))
    for name in shown:
        print(f"  {name:{width}} {describe(name)}")
    return 0


def _matches(experiment: Experiment, chosen: _PresetsOptions) -> bool:
    agent = type(experiment.agent).__name__.removesuffix("Config")
    return (
        chosen.agent.lower() in agent.lower()
        and chosen.env.lower() in experiment.env.name.lower()
        and (
            chosen.topology is None
            or not LAYOUTS[chosen.topology].is_compiled
            or experiment.env.type == "jax"
        )
        and (chosen.max_frames is None or experiment.frames <= chosen.max_frames)
    )
