"""Ways to run a program's nodes: one function, `launch`, and one module for each way.

May import: programs, programs.nodes, programs.tracking, programs.topologies, rlstack.replay,
rlstack.rpc, rlstack.storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from programs.nodes.base import Setup
    from programs.tracking.display import ProgressDisplay

_CPU_GROUPS = ("coordinator", "actor", "evaluator", "replay")


def launch(setup: Setup, how: str, display: ProgressDisplay) -> int:
    """Runs the nodes of the setup's topology until all have ended.

    Failures of nodes are written to the run directory's ``failures.jsonl``. The program has
    succeeded if there is a ``result.json``.

    Args:
      setup: of the program.
      how: ``threads`` of this process, ``processes`` on this machine, or ``ray``, on a cluster.
      display: shows the program's progress.

    Returns:
      SIGINT or SIGTERM if one came, else 0.

    Raises:
      ValueError: this way needs a package, or a machine, that is missing.
    """
    if how == "threads":
        from programs.launchers.threads import run_threads

        return run_threads(setup, display)
    if how == "ray":
        from programs.launchers.ray_program import run_ray

        return run_ray(setup, display)
    from programs.launchers.processes import run_processes

    return run_processes(setup, display)


def environment(group: str) -> dict[str, str]:
    """Returns the environment variables of a group's processes.

    On a machine with an accelerator, the learner and the inference services use it.
    """
    if group in _CPU_GROUPS:
        return {"JAX_PLATFORMS": "cpu"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if group == "inferencer" else {}
