"""rlstack: stateless agents, and the drivers that run them in any topology.

The modules in this folder are the ground floor: the records that travel, the Agent contract,
optimizers, and the checks of configs. Pure.

The names in ``__all__`` are the public API. They are imported on first use, so that ``import
rlstack`` stays free of JAX.

May import: nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlstack.acting.actor import Actor
    from rlstack.acting.evaluator import Evaluator, EvaluatorConfig
    from rlstack.acting.inference import InferencerConfig
    from rlstack.acting.inference_service import InferenceService, ServiceConfig
    from rlstack.acting.inferencer import Inferencer
    from rlstack.agent import Agent, EpochAgent
    from rlstack.envs import AsyncEnv, SyncEnv
    from rlstack.learning.learner import Learner, LearnerConfig
    from rlstack.networks import Network
    from rlstack.replay import InProcessReplay, ReplayBuffer, ReplayConfig, SharedMemReplayBuffer
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

__version__: str  # of the installed distribution, as in pyproject.toml

_MODULES = {
    "Actor": "acting.actor",
    "Agent": "agent",
    "AsyncEnv": "envs",
    "Batch": "types",
    "EnvSpec": "types",
    "EpochAgent": "agent",
    "Evaluator": "acting.evaluator",
    "EvaluatorConfig": "acting.evaluator",
    "InProcessReplay": "replay",
    "InferenceService": "acting.inference_service",
    "Inferencer": "acting.inferencer",
    "InferencerConfig": "acting.inference",
    "Learner": "learning.learner",
    "LearnerConfig": "learning.learner",
    "LearnerOutput": "types",
    "Network": "networks",
    "ReplayBuffer": "replay",
    "ReplayConfig": "replay",
    "ReverbReplayBuffer": "replay.reverb",
    "ReverbServer": "replay.reverb",
    "ServiceConfig": "acting.inference_service",
    "SharedMemReplayBuffer": "replay",
    "StepType": "types",
    "SyncEnv": "envs",
    "TimeStep": "types",
    "Trajectory": "types",
    "Transition": "types",
}

__all__ = [
    "Actor",
    "Agent",
    "AsyncEnv",
    "Batch",
    "EnvSpec",
    "EpochAgent",
    "Evaluator",
    "EvaluatorConfig",
    "InProcessReplay",
    "InferenceService",
    "Inferencer",
    "InferencerConfig",
    "Learner",
    "LearnerConfig",
    "LearnerOutput",
    "Network",
    "ReplayBuffer",
    "ReplayConfig",
    "ReverbReplayBuffer",
    "ReverbServer",
    "ServiceConfig",
    "SharedMemReplayBuffer",
    "StepType",
    "SyncEnv",
    "TimeStep",
    "Trajectory",
    "Transition",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"rlstack.{_MODULES[name]}"), name)
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
