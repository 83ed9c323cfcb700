"""The presets by name, and what several of them share."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlstack.configs.replay import ReplayConfig
from rlstack.programs.config import own_modules
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.references import Sources, nearest

if TYPE_CHECKING:  # JAX is imported with the first preset
    from rlstack.optimizers import OptimizerConfig

_SOURCES = Sources("rlstack.programs.config.presets")
_DEFINITION = re.compile(
    r'^@preset\ndef (\w+)\([^)]*\)[^\n]*:\n    """([^\n]*?)"{0,3}$', re.MULTILINE
)


class Presets(Mapping[str, Callable[[], Experiment]]):
    """The presets by name. Names and descriptions are read from the sources; a preset is imported
    when it is asked for.
    """

    def __init__(self) -> None:
        self._registered: dict[str, Callable[[], Experiment]] = {}
        self._described: dict[str, str] = {}

    def add(self, name: str, make: Callable[[], Experiment], description: str) -> None:
        """Adds a preset."""
        self._registered[name] = make
        self.descriptions()[name] = description

    def descriptions(self) -> dict[str, str]:
        """Returns the first line of the docstring of each preset, by its name."""
        if not self._described:
            for text in _SOURCES.texts().values():
                for function, line in _DEFINITION.findall(text):
                    self._described[function.replace("_", "-")] = line
        return self._described

    def __getitem__(self, name: str) -> Callable[[], Experiment]:
        if name not in self._registered:
            _SOURCES.import_with(rf"def {re.escape(name.replace('-', '_'))}\(")
        return self._registered[name]

    def __iter__(self) -> Iterator[str]:
        own_modules.load_entry_points(own_modules.PRESETS)
        return iter(list(self.descriptions()))

    def __len__(self) -> int:
        return len(list(iter(self)))


PRESETS = Presets()


def preset(function: Callable[[str], Experiment]) -> Callable[[str], Experiment]:
    """Registers an experiment under its function's name, with the docstring's first line."""
    name = function.__name__.replace("_", "-")
    PRESETS.add(name, lambda: function(name), (function.__doc__ or "").splitlines()[0])
    return function


def find(name: str) -> Experiment:
    """Returns a preset by name.

    Raises:
      ValueError: no preset has this name; the message suggests others.
    """
    try:
        make = PRESETS[name]
    except KeyError:
        if name not in set(PRESETS):  # iterating also loads presets of installed packages
            alike = [other for other in PRESETS if name in other.split("-")]
            hint = f"; there are {', '.join(alike)}." if alike else nearest(name, PRESETS)
            raise ValueError(
                f"preset: there is no {name!r}{hint} rlstack presets lists all; one of your own "
                "needs --module, the module that registers it."
            ) from None
        make = PRESETS[name]
    return make()


def describe(name: str) -> str:
    """Returns the one-line description of a preset that was found; "" for an unknown name."""
    return PRESETS.descriptions().get(name, "")


def like(base: str, name: str, **changes: Any) -> Experiment:
    """Returns the preset ``base`` under another name, with these fields changed."""
    return dataclasses.replace(find(base), preset=name, **changes)


def falling(learning_rate: float, steps: int) -> OptimizerConfig:
    """Returns Adam with a learning rate that falls to 0 over ``steps`` optimizer steps."""
    from rlstack.optimizers import OptimizerConfig

    return OptimizerConfig(learning_rate=learning_rate, anneal_steps=steps)


def on_policy(
    name: str, agent: Any, env: EnvConfig, unroll_length: int, frames: int, **fields: Any
) -> Experiment:
    """Returns on-policy learning with a learning rate that falls to 0 at the end of the run."""
    steps = frames // (env.num_envs * unroll_length)
    if hasattr(agent, "num_epochs"):
        steps *= agent.num_epochs * agent.num_minibatches
    optimizer = dataclasses.replace(agent.optimizer, anneal_steps=steps)
    return Experiment(
        preset=name,
        agent=dataclasses.replace(agent, optimizer=optimizer),
        env=env,
        replay=on_policy_replay(env.num_envs, unroll_length),
        frames=frames,
        **fields,
    )


def on_policy_replay(num_envs: int, unroll_length: int) -> ReplayConfig:
    """Returns a queue of whole unrolls, in which each environment's unroll is used once."""
    return ReplayConfig(
        sampler="fifo",
        batch_size=num_envs,
        unroll_length=unroll_length,
        max_size=2 * num_envs,
    )


def transitions(
    batch_size: int, max_size: int, min_size: int, updates_per_frame: float, num_steps: int = 1
) -> ReplayConfig:
    """Returns a replay of ``num_steps`` transitions, drawn uniformly once it has ``min_size``."""
    return ReplayConfig(
        sampler="uniform",
        batch_size=batch_size,
        unroll_length=num_steps,
        starts="not_last",
        max_size=max_size,
        min_size=min_size,
        samples_per_insert=batch_size * updates_per_frame,
    )


def atari(name: str, num_envs: int) -> EnvConfig:
    """Returns an Atari game with the settings of DQN's paper; evaluation plays whole games.

    The paper is Mnih et al. (2015), https://doi.org/10.1038/nature14236, methods and table 1. In
    training an episode is one life, and rewards are clipped.
    """
    return EnvConfig(
        name,
        num_envs=num_envs,
        options={"episodic_life": True, "reward_clip": True},
        eval_options={"episodic_life": False, "reward_clip": False},
    )
