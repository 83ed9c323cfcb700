"""Light environments: inference services act for many actors; replay is shared memory."""

from __future__ import annotations

from programs.launchers.wiring import Wiring
from programs.nodes.line import Setup
from programs.nodes.replay import SharedMemory


def light_env(setup: Setup) -> Wiring:
    """Returns the program."""
    program = Wiring("light_env", setup)
    replay = SharedMemory(setup)
    learner = program.learner(replay)
    inferencers = program.inferencers(learner)
    for rank in program.ranks:
        program.actor(rank, replay, learner, inferencers[rank % len(inferencers)])
    program.evaluator(learner)
    return program
