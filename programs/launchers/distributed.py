"""Distributed: replay is a service too, and nodes know of each other only by addresses."""

from __future__ import annotations

from programs.launchers.wiring import Wiring
from programs.nodes.line import Setup


def distributed(setup: Setup) -> Wiring:
    """Returns the program."""
    program = Wiring("distributed", setup)
    replay = program.reverb()
    learner = program.learner(replay)
    inferencers = program.inferencers(learner)
    for rank in program.ranks:
        program.actor(rank, replay, learner, inferencers[rank % len(inferencers)])
    program.evaluator(learner)
    return program
