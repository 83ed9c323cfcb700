"""The text that a profiled run prints: the shares of each node, and what limits the speed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlstack.programs.session.profiling.profile import (
    ACTING,
    COMPILED,
    DRAWING,
    ENVIRONMENTS,
    EVALUATING,
    LEARNING,
    OTHER,
    SAVING,
    SERVING,
    WRITING,
)
from rlstack.programs.session.run_dir import RunDir


def summary(directory: RunDir) -> str:
    """Returns a table of what all nodes of a run measured, and what limits the speed."""
    found = [json.loads(path.read_text()) for path in sorted(directory.profile.glob("*.json"))]
    if not found:
        return "there is no profile: the run ended before the first of the updates."
    lines = [f"profile of the updates {found[0]['updates']}:"]
    for node in found:
        shares = sorted(node["parts"].items(), key=lambda part: -part[1])
        text = ", ".join(f"{name} {share / node['seconds']:.0%}" for name, share in shares)
        lines.append(f"  {node['node']}: {node['seconds']:.2f} s; {text}")
    lines.append(bottleneck({node["node"]: _shares(node) for node in found}))
    if any(path.is_dir() for path in directory.profile.iterdir()):
        lines.append(f"Traces for Perfetto or TensorBoard are in {directory.profile}.")
    return "\n".join(lines)


def _shares(node: Mapping[str, Any]) -> dict[str, float]:
    return {name: seconds / node["seconds"] for name, seconds in node["parts"].items()}


_ADVICE = {
    ENVIRONMENTS: "Use more --env.num-envs, EnvPool (--env.type cpp), or several actors "
    "(--topology heavy_env --program.num-actors).",
    ACTING: "Use more --env.num-envs, so that one call computes more actions, or several actors.",
    LEARNING: "Use a smaller network, fewer epochs, or an accelerator (docs/devices.md).",
    DRAWING: "The learner waits for data: use more actors or environments.",
    WRITING: "Actors wait for space in the replay: the learner is slower than they are. Use a "
    "smaller network, fewer epochs, or an accelerator (docs/devices.md).",
    SERVING: "The service waits: actors or the learner limit the speed.",
    COMPILED: "Acting, environments and updates are one function; the trace shows its operations.",
    EVALUATING: "Profile other updates, or evaluate less often (--evaluator.period).",
    SAVING: "Profile other updates, or save less often (--checkpoint-period, --evaluator.period).",
    OTHER: "The trace shows it.",
}


def bottleneck(nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Returns one sentence on what takes most of the time, and one on what to change.

    Args:
      nodes: the share of each part in the time of a node, by the names of nodes.
    """
    # A learner makes the updates that are counted; a single process is its own learner.
    learners = sorted(node for node in nodes if node.split("/")[0] == "learner")
    chosen = learners[0] if learners else min(nodes)
    parts = nodes[chosen]
    name = max(parts, key=lambda part: parts[part])
    advice = _ADVICE[name]
    if learners and name == DRAWING:
        actors = [shares for node, shares in nodes.items() if node.startswith("actor/")]
        if actors:
            total = {part: sum(shares.get(part, 0.0) for shares in actors) for part in _ADVICE}
            slowest = max(total, key=lambda part: total[part])
            return (
                f"Acting limits the speed: the learner waits {parts[name]:.0%} of its time, and "
                f"actors spend most of theirs on {slowest}. {_ADVICE[slowest]}"
            )
    return f"Most of the time of {chosen} is {name}, {parts[name]:.0%}. {advice}"
