"""The topology as a program, and what its nodes need of their environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from programs.nodes.line import Setup

# On a machine with an accelerator it is the learner's and the inference services'.
ON_CPU = ("coordinator", "actor", "evaluator", "replay")


def build(setup: Setup) -> Any:
    """Returns the setup's topology as a `programs.launchers.wiring.Wiring`."""
    from programs.launchers.distributed import distributed
    from programs.launchers.heavy_env import heavy_env
    from programs.launchers.light_env import light_env

    topologies: dict[str, Callable[[Setup], Any]] = {
        "heavy_env": heavy_env,
        "light_env": light_env,
        "distributed": distributed,
    }
    return topologies[setup.experiment.topology](setup)


def environment(group: str) -> dict[str, str]:
    """Returns the environment variables of a group's processes."""
    if group in ON_CPU:
        return {"JAX_PLATFORMS": "cpu"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if group == "inferencer" else {}
