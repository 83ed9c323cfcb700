"""Ways to run a program's nodes: one seam, `launch`, and a file for each way behind it.

May import: programs, programs.nodes, programs.tracking, rlstack.replay, rlstack.rpc,
rlstack.storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from programs.nodes.line import Setup
    from programs.tracking.display import ProgressDisplay


def launch(setup: Setup, how: str, display: ProgressDisplay) -> int:
    """Runs the nodes of the setup's topology until all have ended.

    Whoever fails is written down in the run directory's ``failures.jsonl``; the program has
    succeeded if there is a ``result.json``.

    Args:
      setup: of the program.
      how: ``threads`` of this process, ``processes`` on this machine, or ``ray``, on a cluster.
      display: told how the program goes.

    Returns:
      SIGINT or SIGTERM if one came meanwhile, else 0.

    Raises:
      ValueError: this way needs a package, or a machine, that is not there.
    """
    return _launcher(how)(setup, display)


def _launcher(how: str) -> Callable[[Setup, Any], int]:
    if how == "threads":
        from programs.launchers.threads import run_threads

        return run_threads
    if how == "ray":
        from programs.launchers.ray_program import run_ray

        return run_ray
    from programs.launchers.processes import run_processes

    return run_processes
