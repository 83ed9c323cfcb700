"""The experiment of a run, read from its directory."""

from __future__ import annotations

import json
from typing import Any

from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.session.run_dir import RunDir, option_values


def read_config(directory: RunDir, *, several: bool = False) -> Experiment:
    """Returns the experiment of a run.

    Args:
      directory: the run's directory.
      several: True to accept a run that trained several policies.

    Raises:
      ValueError: the config file is not the config of an experiment, or the run trained several
        policies and `several` is False.
    """
    experiment = from_json(directory.config.read_bytes(), directory.config)
    if experiment.policies and not several:
        raise ValueError(
            f"{directory.path} must be a run of one policy; it trained several: "
            f"{', '.join(experiment.policies)}. rlstack eval evaluates all of them, and "
            "rlstack.load(run_dir, policy=NAME) loads one."
        )
    return experiment


def options_of(experiment: Experiment) -> dict[str, Any]:
    """Returns the options of an experiment by name, such as agent.discount, as in its JSON."""
    return option_values(json.loads(to_json(experiment)))
