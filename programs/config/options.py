"""Options of a config by their dotted names, such as ``agent.optimizer.learning_rate``.

A name has the fields of the configs on its way, with ``-`` or ``_``; the last field may be an entry
of a dict, as in ``env.options.length``.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from rlstack.checks import described, fits, hints_of, is_config, kinds_of
from rlstack.programs.config.env_config import Option

T = TypeVar("T")

# Names that other libraries have for an option, for hints.
_ELSEWHERE = {
    "agent.optimizer.learning-rate": "lr step-size adam-lr actor-lr critic-lr policy-lr q-lr",
    "agent.discount": "gamma discount-factor",
    "agent.gae-lambda": "lam lambda lambda-",
    "agent.clip-ratio": "clip-range clip-param clip-coef clip-eps ppo-clipping-epsilon",
    "agent.entropy-cost": "ent-coef entropy-coef entropy-coeff entropy-loss-coeff",
    "agent.value-cost": "vf-coef value-coef vf-loss-coeff baseline-cost",
    "agent.num-epochs": "n-epochs update-epochs num-sgd-iter epochs",
    "agent.max-grad-norm": "grad-clip clip-grad-norm max-gradient-norm",
    "agent.target-rate": "tau polyak target-tau",
    "agent.target-period": "target-update-interval target-network-frequency target-update-period",
    "agent.epsilon-start": "start-e exploration-initial-eps initial-epsilon",
    "agent.epsilon-end": "end-e exploration-final-eps final-epsilon",
    "agent.epsilon-frames": "exploration-fraction epsilon-timesteps epsilon-decay",
    "agent.temperature": "alpha initial-alpha",
    "env.name": "env env-id env-name environment",
    "env.num-envs": "n-envs num-environments total-num-envs num-envs-per-env-runner",
    "frames": "total-timesteps total-steps total-env-steps num-timesteps timesteps num-frames",
    "replay.max-size": "buffer-size replay-size max-replay-size total-buffer-size capacity",
    "replay.min-size": "learning-starts min-replay-size",
    "replay.batch-size": "train-batch-size total-batch-size",
    "replay.unroll-length": "n-steps num-steps rollout-length rollout-fragment-length",
    "replay.samples-per-insert": "train-freq train-frequency gradient-steps utd-ratio",
    "program.num-actors": "num-env-runners num-rollout-workers",
    "evaluator.period": "eval-freq eval-every evaluation-interval",
    "evaluator.episodes": "n-eval-episodes num-eval-episodes evaluation-duration",
    "network.hidden-sizes": "net-arch fcnet-hiddens layer-sizes hidden-size hidden-dim",
    "checkpoint-period": "save-freq checkpoint-freq checkpoint-frequency",
    "learner.devices": "device gpu cuda",
    "loggers": "track wandb tensorboard report-to",
    "run-dir": "log-dir save-dir tensorboard-log storage-path output-dir",
}


class Entry(NamedTuple):
    """An option of a config."""

    name: str  # with "-", as the command line has it
    value: Any
    hint: Any  # its type
    config: Any  # the config that has it as a field, or a dict of which it is an entry
    field: str


def entries(config: Any, prefix: str = "") -> Iterator[Entry]:
    """Yields the options of a config that have values which are no configs, in their order.

    Args:
      config: a dataclass.
      prefix: the beginning of all names, such as ``agent.``.
    """
    for field, hint in hints_of_parser(config).items():
        yield from _entries(prefix + field.replace("_", "-"), config, field, hint)


def hints_of_parser(config: Any) -> dict[str, Any]:
    """Returns the types of fields as a parser sees them, within `experiment.agents_of`."""
    hints = typing.get_type_hints(type(config))
    return {field.name: hints[field.name] for field in dataclasses.fields(config)}


def _entries(name: str, config: Any, field: str, hint: Any) -> Iterator[Entry]:
    value = config[field] if isinstance(config, dict) else getattr(config, field)
    if is_config(value):
        yield from entries(value, f"{name}.")
    elif isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _entries(f"{name}.{key}".replace("_", "-"), value, key, type(one))
    elif value or not any(map(dataclasses.is_dataclass, typing.get_args(hint))):
        # There are no options of a config that is None, or of no configs by name.
        yield Entry(name, value, hint, config, field)


def parsed(word: str) -> Option:
    """Returns the value of a word: True or False, a number, or the text itself."""
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return word


def path(name: str) -> list[str]:
    """Returns the fields on the way to an option."""
    return name.replace("-", "_").split(".")


def value_of(config: Any, name: str) -> Any:
    """Returns the value of an option; None if there is no such option."""
    for field in path(name):
        config = config.get(field) if isinstance(config, dict) else getattr(config, field, None)
    return config


def replaced(config: T, name: str, value: Any, where: str = "--vary") -> T:
    """Returns a config with another value of an option.

    A number becomes an integer or a float if the option's type is the other one and no digit is
    lost.

    Args:
      config: the config.
      name: name of the option.
      value: the new value, as JSON or the command line has it.
      where: the argument that names the option, for errors; "" for none.

    Raises:
      ValueError: there is no such option, or it takes no such value.
    """

    def set_in(inner: Any, fields: Sequence[str]) -> Any:
        field, *rest = fields
        if isinstance(inner, dict):
            old = inner.get(field)
            if rest:
                return {**inner, field: set_in(old, rest)}
            return {**inner, field: value if old is None else _fitted(type(old), value, shown)}
        hints = hints_of(inner) if is_config(inner) else {}
        if field not in hints:
            known = [entry.name.replace("-", "_") for entry in entries(config)]
            raise ValueError(f"{shown}: {unknown(name.replace('-', '_'), known)}.")
        new = set_in(getattr(inner, field), rest) if rest else _fitted(hints[field], value, shown)
        return dataclasses.replace(inner, **{field: new})

    shown = f"{where} {name}".lstrip()
    made: T = set_in(config, path(name))
    return made


def placed(config: T, name: str, value: Any) -> T:
    """Returns a config with a value that JAX traces, which no check of a config can read."""

    def set_in(inner: Any, fields: Sequence[str]) -> Any:
        field, *rest = fields
        if isinstance(inner, dict):
            return {**inner, field: value}
        changed = copy.copy(inner)
        new = set_in(getattr(inner, field), rest) if rest else value
        object.__setattr__(changed, field, new)
        return changed

    made: T = set_in(config, path(name))
    return made


def _fitted(hint: Any, value: Any, shown: str) -> Any:
    """Returns the value in a type of the field; 1 becomes 1.0, and 8.0 becomes 8, where it must."""
    kinds = kinds_of(hint)
    if isinstance(value, float) and float not in kinds and int in kinds and value.is_integer():
        value = int(value)
    elif float in kinds and int not in kinds and fits(float, value):
        value = float(value)
    if not fits(hint, value):
        raise ValueError(f"{shown}: must be {described(hint)}; got {value!r}.")
    return value


def unknown(name: str, known: Iterable[str]) -> str:
    """Returns the message about an option that does not exist, with the one most like it."""
    near = nearest(name, list(known))
    return f"there is no option {name}" + (f"; did you mean {near}?" if near else "")


def nearest(name: str, known: Sequence[str]) -> str:
    """Returns the option that is most like a misspelt one; "" if none is like it.

    Groups may be missing: ``learning_rate`` is like ``agent.optimizer.learning_rate``. A name that
    other libraries have, such as ``gamma``, is like the option that it stands for.
    """
    last_part = name.rpartition(".")[2].strip("-").replace("_", "-").lower()
    for own, others in _ELSEWHERE.items():
        for option in known if last_part in others.split() else ():
            if f".{option.lstrip('-')}".replace("_", "-").endswith(f".{own}"):
                return option

    def likeness(other: str) -> tuple[float, float]:
        def ratio(left: str, right: str) -> float:
            return difflib.SequenceMatcher(None, left.lower(), right.lower()).ratio()

        last = ratio(name.rpartition(".")[2].lstrip("-"), other.rpartition(".")[2].lstrip("-"))
        whole = ratio(name, other)
        return max(last, whole), whole

    best = max(known, key=likeness, default="")
    return best if best and likeness(best)[0] > 0.7 else ""
