"""Checks the functions of the user's own that an experiment names, before anything is started."""

from __future__ import annotations

from programs.experiment import Experiment
from rlstack.replay.custom import make_sampler


def check_hooks(experiment: Experiment) -> None:
    """Makes each hook of the experiment once, as its node will, and checks its signature.

    Raises:
      ValueError: a hook cannot be imported.
      rlstack.checks.WrongKindError: a hook is not the function that its option describes.
    """
    if experiment.replay.sampler_factory:
        make_sampler(experiment.replay)
