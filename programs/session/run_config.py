"""The experiment of a run, read from its directory, and what a resumed run may change in it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

from rlstack.programs.config import options
from rlstack.programs.config.encoding import from_json, to_json
from rlstack.programs.config.experiment import Experiment, ProgramConfig
from rlstack.programs.session.run_dir import RunDir, option_values

BUDGETS = ("frames", "updates", "hours")
# What a resumed run may change: none of it has an effect on what is learned.
_PERIODS = ("log_period", "checkpoint_period", "checkpoints_kept")
CHANGEABLE = (*BUDGETS, "stop", "evaluator", "loggers", *_PERIODS)
# What a scheduler may change in addition when it starts a command again, of `ProgramConfig`.
_PLACES = ("hosts", "host", "ports", "metrics", "interface")


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


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Returns the experiment of a run that is resumed with other values of some options.

    Args:
      experiment: the experiment as the run has it.
      changes: new values by the names of options, such as ``evaluator.period``. A name without a
        dot, such as ``evaluator``, takes a whole config.

    Raises:
      ValueError: there is no such option, it must stay as it is, or its value is wrong.
    """
    fields: dict[str, Any] = {}
    for name, value in changes.items():
        field, *inner = options.path(name)
        known = [entry.name for entry in options.entries(experiment)]
        if options.value_of(experiment, field) is None:
            raise ValueError(f"resume: {options.unknown(name, known)}.")
        if field not in CHANGEABLE:
            raise ValueError(f"resume: {name} must stay as it is; {how_to_change()}.")
        if inner and inner[0] not in options.hints_of_parser(getattr(experiment, field)):
            raise ValueError(f"resume: {options.unknown(name, known)}.")
        fields.setdefault(field, {})["".join(inner)] = value
    found = {
        # Together, because the values of a config may be right in pairs only.
        field: dataclasses.replace(values.pop("", getattr(experiment, field)), **values)
        if any(values)
        else values[""]
        for field, values in fields.items()
    }
    return dataclasses.replace(experiment, **found)


def moved(experiment: Experiment, program: ProgramConfig) -> Experiment:
    """Returns the experiment of a run with the hosts, ports and addresses of another command."""
    places = {name: getattr(program, name) for name in _PLACES}
    ray = dataclasses.replace(experiment.program.ray, address=program.ray.address)
    there = dataclasses.replace(experiment.program, **places, ray=ray)
    return dataclasses.replace(experiment, program=there)


def how_to_change() -> str:
    """Returns the end of a message about an option that a resumed run must keep."""
    groups = {"stop": "stop.*", "evaluator": "evaluator.*"}
    names = [f"--{groups.get(name, name).replace('_', '-')}" for name in CHANGEABLE]
    return (
        f"a resumed run may have another {', '.join(names[:-1])} and {names[-1]}, and keeps the "
        "other options. rlstack train RUN_DIR/config.json trains a new run with other ones"
    )


def record_changes(directory: RunDir, before: Experiment, now: Experiment, frames: int) -> None:
    """Writes config.json, and a line of changes.jsonl with the values before and now.

    Args:
      directory: the run's directory, claimed by this command.
      before: the experiment as the run had it.
      now: the experiment as it goes on.
      frames: the frames at which it goes on.
    """
    old, new = options_of(before), options_of(now)
    differ = {name: [old.get(name), new[name]] for name in new if old.get(name) != new[name]}
    if not differ:
        return
    directory.write_config(to_json(now))
    line = {"env_frames": frames, "wall_time": time.time(), "changed": differ}
    with open(directory.changes, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
