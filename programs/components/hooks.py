"""Checks the functions of the user's own that an experiment names, before anything is started."""

from __future__ import annotations

from programs.components.evaluation import check_evaluator
from programs.experiment import Experiment
from programs.tracking.endings import make_rules
from programs.tracking.own_loggers import check_loggers


def check_hooks(experiment: Experiment) -> None:
    """Makes each hook of the experiment once, as its node will, and checks its signature.

    Raises:
      ValueError: a hook cannot be imported.
      rlstack.checks.WrongKindError: a hook is not the function that its option describes.
    """
    check_loggers(experiment.loggers)
    make_rules(experiment.stop)
    if experiment.evaluator.factory:
        check_evaluator(experiment.evaluator.factory)
