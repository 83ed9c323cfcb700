"""Heavy environments: each actor acts for itself; replay is memory shared with the learner."""

from __future__ import annotations

from programs.launchers.wiring import Wiring
from programs.nodes.line import Setup
from programs.nodes.replay import SharedMemory


def heavy_env(setup: Setup) -> Wiring:
    """Returns the program."""
    program = Wiring("heavy_env", setup)
    replay = SharedMemory(setup)
    learner = program.learner(replay)
    for rank in program.ranks:
        program.actor(rank, replay, learner, inferencer=None)
    program.evaluator(learner)
    return program
