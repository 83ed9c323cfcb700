"""The JSON form of an experiment, as the directory of a run has it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cattrs
import numpy as np
from cattrs.gen import make_dict_structure_fn, make_dict_unstructure_fn, override
from cattrs.preconf.json import make_converter

from rlstack.configs.acting import EvaluationPeriod
from rlstack.configs.learner import LearnerConfig
from rlstack.programs.config import own_modules
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.member_config import AgentConfig, MemberConfig, kind_of_agent
from rlstack.programs.config.program_config import ProgramConfig
from rlstack.references import name_of


def to_json(experiment: Experiment) -> str:
    """Returns the experiment as JSON text, which `from_json` reads.

    A function of the user's own is recorded by its name, "module:callable", and a number of numpy
    as a number.
    """
    return json.dumps(_converter().unstructure(experiment), indent=2, default=plain) + "\n"


def plain(value: Any) -> Any:
    """Returns a number of numpy as one of Python, and a function of the user's own as its name.

    Raises:
      TypeError: the value is neither.
    """
    return value.item() if isinstance(value, np.generic) else name_of(value)


def from_json(text: str | bytes, where: str | Path = "from_json") -> Experiment:
    """Returns the experiment of a JSON text, or of its bytes in UTF-8.

    Raises:
      ValueError: the text is not the config of an experiment; the message names the wrong field.
    """
    wrong = f"{where}: not the config of an experiment"
    try:
        tree = _tree(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{wrong}, an object in JSON as a run writes it: {error}") from error
    own_modules.load_all(tree.get("modules", ()))
    try:
        return _converter().structure(tree, Experiment)
    except cattrs.BaseValidationError as error:
        reasons = "; ".join(cattrs.transform_error(error, "config", _reason))
        raise ValueError(f"{wrong}: {reasons}") from error


def _tree(text: str | bytes) -> dict[str, Any]:
    """Returns the object of a JSON text, of which the modules can be imported."""
    tree: Any = json.loads(text)
    if not isinstance(tree, dict):
        raise ValueError(f"got {tree!r:.40}")
    names = tree.get("modules", [])
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"modules must be a list of names; got {names!r:.40}")
    return tree


def _reason(error: BaseException, kind: type | None) -> str:
    """Returns the text of a ValueError, which states the rule, or cattrs' text of another error."""
    return str(error) if type(error) is ValueError else cattrs.v.format_exception(error, kind)


@functools.cache  # a report reads many configs, and each converter compiles code
def _converter() -> cattrs.Converter:
    converter = make_converter(forbid_extra_keys=True)

    def structure_agent(value: Mapping[str, object] | None, _: object) -> AgentConfig | None:
        if value is None:
            return None
        fields = dict(value)
        kind = kind_of_agent(str(fields.pop("kind", "")))
        components = [name for name in fields if name.endswith("_optimizer")]
        if components:
            from rlstack.optimizers import require_component

            for name in components:
                require_component(kind, name.removesuffix("_optimizer"))
        return converter.structure(fields, kind)

    structure_fields = converter.get_structure_hook(LearnerConfig)

    def structure_learner(value: Mapping[str, Any], kind: Any) -> LearnerConfig:
        fields = dict(value)
        count = fields.pop("num_devices", 1)  # in configs older than the field `devices`
        return structure_fields({"devices": range(count) if count > 1 else (), **fields}, kind)

    converter.register_structure_hook(LearnerConfig, structure_learner)
    structure_nodes = converter.get_structure_hook(ProgramConfig)

    def structure_program(value: Mapping[str, Any], kind: Any) -> ProgramConfig:
        fields, ray = dict(value), value.get("ray")
        if isinstance(ray, Mapping) and "on_loss" in ray:  # in configs of earlier versions
            fields = {"on_loss": ray["on_loss"], **fields, "ray": {**ray}}
            del fields["ray"]["on_loss"]
        return structure_nodes(fields, kind)

    converter.register_structure_hook(ProgramConfig, structure_program)

    def unstructure_agent(value: Any) -> dict[str, Any] | None:
        if value is None:
            return None
        return {"kind": type(value).__name__, **converter.unstructure(value, type(value))}

    plain = (int | str, EvaluationPeriod)  # types kept as they are; the configs check the values
    converter.register_structure_hook_func(lambda kind: kind in plain, lambda value, _: value)
    agent = override(struct_hook=structure_agent, unstruct_hook=unstructure_agent)
    for config in (MemberConfig, Experiment):  # the second has dicts of the first
        reads = make_dict_structure_fn(
            config, converter, _cattrs_forbid_extra_keys=True, agent=agent
        )
        converter.register_structure_hook(config, reads)
        writes = make_dict_unstructure_fn(config, converter, agent=agent)
        converter.register_unstructure_hook(config, writes)
    return converter
