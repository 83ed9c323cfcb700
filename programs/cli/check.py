"""`rlstack check agent` and `rlstack check env`."""

from __future__ import annotations

import dataclasses
from typing import Literal

import tyro

from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.config.env_config import EnvConfig, Option
from rlstack.programs.config.experiment import Experiment
from rlstack.programs.config.presets import preset
from rlstack.references import load_object


@dataclasses.dataclass(frozen=True)
class _AgentOptions:
    """Check that an agent keeps the contract: pure functions, independent rows, memory that ends
    with an episode, no learning across episodes, terminations, time limits, resuming, and more.

    The agent sees the environment of the preset. Exit code 1 means that a rule fails.
    """

    name: tyro.conf.Positional[str]
    """A preset, or "module:Config" of the config of a registered agent, made without arguments."""
    env: str = ""
    """The environment, as in --env.name. By default that of the preset, or CartPole-v1."""
    type: Literal["auto", "cpp", "for_loop", "thread", "process", "jax"] = "auto"
    """How --env is stepped, as in --env.type."""
    topologies: bool = True
    """Whether to compare the learning of a single process and of a program in lock-step, too."""


@dataclasses.dataclass(frozen=True)
class _EnvOptions:
    """Check that an environment does what agents rely on: spaces, boundaries, seeds, masks, arrays
    that stay, and the same steps in all pools. It prints the speed of each pool.

    Exit code 1 means that a rule fails.
    """

    name: tyro.conf.Positional[str]
    """The name of an environment, as in --env.name. A preset stands for its environment."""
    type: Literal["auto", "cpp", "for_loop", "thread", "process", "jax"] = "auto"
    """How it is stepped, as in --env.type."""
    options: dict[str, Option] = dataclasses.field(default_factory=dict)
    """Arguments for its constructor, as names and values."""
    steps: int = 500
    """Steps of each of three environments. Whole episodes should fit."""


def main(args: list[str]) -> int:
    """Runs the command; returns the exit code."""
    what, *rest = args or [""]
    settings = {"config": (tyro.conf.FlagConversionOff,)}
    if what == "agent":
        chosen = parse(_AgentOptions, "rlstack check agent", rest, **settings)
        agent, env = _agent(chosen)
        from rlstack.programs.run.check.agent import check_agent

        report = check_agent(agent, env, topologies=chosen.topologies)
    elif what == "env":
        of_env = parse(_EnvOptions, "rlstack check env", rest, **settings)
        from rlstack.programs.run.check.env import check_env

        report = check_env(_env(of_env), steps=of_env.steps)
    else:
        raise UsageError(
            "check must be followed by agent or env: `rlstack check agent PRESET`, `rlstack check "
            f"env NAME`; got {what!r}."
        )
    print(report)
    return 1 if report.failures else 0


def _agent(chosen: _AgentOptions) -> tuple[object, EnvConfig]:
    env = EnvConfig(chosen.env or "CartPole-v1", type=chosen.type)
    if ":" not in chosen.name:
        experiment: Experiment = preset(chosen.name)
        if chosen.env:
            own = dataclasses.replace(env, num_envs=experiment.env.num_envs)
            experiment = dataclasses.replace(experiment, env=own)
        return experiment, experiment.env
    config = load_object(chosen.name)
    return (config() if isinstance(config, type) else config), env


def _env(chosen: _EnvOptions) -> EnvConfig:
    try:
        found = preset(chosen.name).env
    except ValueError:
        return EnvConfig(chosen.name, type=chosen.type, options=chosen.options)
    return dataclasses.replace(found, options={**found.options, **chosen.options})
