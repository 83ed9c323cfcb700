"""The options of learning."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlstack.checks import Checked, are_distinct


@dataclasses.dataclass(frozen=True)
class LearnerConfig(Checked):
    """How the learner runs its agent's updates."""

    devices: tuple[int, ...] = ()
    """Devices that share each batch, by their index in jax.local_devices(). Their number must
    divide the batch size. By default JAX's default device."""
    processes: int = 1
    """Number of learner processes. Each learns from its share of the actors and of each batch, and
    their gradients are averaged. It must divide the batch size and the number of actors (topologies
    of several nodes, with launch processes, ray or hosts)."""
    prefetch: Literal["auto", "on", "off"] = "auto"
    """Whether the next batch is drawn, and moved to the device, while an update runs. Priorities
    then reach the replay one batch later. auto: with an accelerator, except in a single process and
    in lock-step. On a CPU it gains nothing, because updates run in the calling thread."""
    minibatches: Literal["auto", "scan", "calls"] = "auto"
    """How an agent with epochs runs its minibatches: in one compiled loop (scan), or in one call
    per minibatch (calls). auto chooses calls for convolutions on the CPU, because XLA's loops are
    many times slower there."""
    micro_batches: int = 1
    """Number of parts of a batch (with epochs: of a minibatch) that the network learns from one
    after another. The update stays the same, except for the order of sums. Raise it if a batch does
    not fit into the device's memory; each update then runs the network forward twice."""
    check_finite: bool = True
    """Whether a loss or gradient that is NaN or infinite stops the run. `rlstack rerun` repeats the
    update from its inputs, which are saved."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("devices", are_distinct(self.devices), "distinct and at least 0")
        self.require_at_least(1, "micro_batches", "processes")
