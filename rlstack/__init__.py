"""rlstack: stateless agents, and the drivers that run them in any topology.

The modules in this folder are the ground floor: the records that travel, the Agent contract,
optimizers, and the checks of configs. Pure.

The names in ``__all__`` are the public API. They are imported on first use, so that ``import
rlstack`` stays free of JAX. `load` is from `programs`, as the first thing that users look for here.

May import: nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstack.acting.actor import Actor
    from rlstack.acting.evaluator import Evaluator
    from rlstack.acting.inference_service import InferenceService
    from rlstack.acting.inferencer import Inferencer
    from rlstack.agent import Agent, EpochAgent
    from rlstack.configs.acting import EvaluatorConfig, InferencerConfig, ServiceConfig
    from rlstack.configs.learner import LearnerConfig
    from rlstack.configs.replay import ReplayConfig
    from rlstack.envs import AsyncEnv, SyncEnv
    from rlstack.learning.learner import Learner
    from rlstack.networks import Network
    from rlstack.programs.build.policies.policy import load
    from rlstack.replay import InProcessReplay, ReplayBuffer, SharedMemReplayBuffer
    from rlstack.replay.reverb import ReverbReplayBuffer, ReverbServer
    from rlstack.types import (
        Batch,
        EnvSpec,
        LearnerOutput,
        StepType,
        TimeStep,
        Trajectory,
        Transition,
    )

__version__: str  # version of the installed distribution, as in pyproject.toml

_MODULES = {
    "Actor": "rlstack.acting.actor",
    "Agent": "rlstack.agent",
    "AsyncEnv": "rlstack.envs",
    "Batch": "rlstack.types",
    "EnvSpec": "rlstack.types",
    "EpochAgent": "rlstack.agent",
    "Evaluator": "rlstack.acting.evaluator",
    "EvaluatorConfig": "rlstack.configs.acting",
    "InProcessReplay": "rlstack.replay",
    "InferenceService": "rlstack.acting.inference_service",
    "Inferencer": "rlstack.acting.inferencer",
    "InferencerConfig": "rlstack.configs.acting",
    "Learner": "rlstack.learning.learner",
    "LearnerConfig": "rlstack.configs.learner",
    "LearnerOutput": "rlstack.types",
    "Network": "rlstack.networks",
    "ReplayBuffer": "rlstack.replay",
    "ReplayConfig": "rlstack.configs.replay",
    "ReverbReplayBuffer": "rlstack.replay.reverb",
    "ReverbServer": "rlstack.replay.reverb",
    "ServiceConfig": "rlstack.configs.acting",
    "SharedMemReplayBuffer": "rlstack.replay",
    "StepType": "rlstack.types",
    "SyncEnv": "rlstack.envs",
    "TimeStep": "rlstack.types",
    "Trajectory": "rlstack.types",
    "Transition": "rlstack.types",
    "load": "rlstack.programs.build.policies.policy",
}

__all__ = [
    "Actor", "Agent", "AsyncEnv", "Batch", "EnvSpec", "EpochAgent", "Evaluator",
    "EvaluatorConfig", "InProcessReplay", "InferenceService", "Inferencer", "InferencerConfig",
    "Learner", "LearnerConfig", "LearnerOutput", "Network", "ReplayBuffer", "ReplayConfig",
    "ReverbReplayBuffer", "ReverbServer", "ServiceConfig", "SharedMemReplayBuffer", "StepType",
    "SyncEnv", "TimeStep", "Trajectory", "Transition", "__version__", "load",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = found
    return found


def _version() -> str:
    from importlib import metadata  # slow to import, and seldom needed

    try:
        return metadata.version("rlstack")
    except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
