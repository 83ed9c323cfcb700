"""Presets of behaviour cloning: they learn from a dataset, given by --data."""

from __future__ import annotations

from rlstack.agents.bc import BCConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import RaggedTransformerConfig, RelativePositionsConfig
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.configs.replay import ReplayConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import preset


def single_steps(batch_size: int) -> ReplayConfig:
    """Returns batches of single transitions, each once an epoch."""
    return ReplayConfig(
        sampler="uniform",
        batch_size=batch_size,
        unroll_length=1,
        starts="not_last",
        max_size=10**9,  # has no effect: a dataset has a fixed size
    )


@preset
def bc(name: str) -> Experiment:
    """Behaviour cloning of any dataset, in the environment it was recorded in: --data DIR."""
    return Experiment(
        preset=name,
        agent=BCConfig(),
        env=EnvConfig(""),  # the environment of the dataset
        replay=single_steps(256),
        frames=1_000_000,
        log_period=20_000,
        checkpoint_period=500_000,
    )


@preset
def cartpole_bc(name: str) -> Experiment:
    """CartPole-v1 from recorded play: 50 epochs of 20,000 frames: --data DIR."""
    frames, batch_size = 1_000_000, 256
    return Experiment(
        preset=name,
        agent=BCConfig(
            optimizer=OptimizerConfig(learning_rate=1e-3, anneal_steps=frames // batch_size)
        ),
        env=EnvConfig("CartPole-v1"),
        replay=single_steps(batch_size),
        frames=frames,
        log_period=20_000,
        checkpoint_period=500_000,
    )


@preset
def entity_floor_is_lava_bc(name: str) -> Experiment:
    """FloorIsLava from recorded play, with relative positions: 10 epochs of 4,000: --data DIR."""
    frames, batch_size = 40_000, 128
    relative = RelativePositionsConfig(kind="grid", extent=(1, 1), per_type_values=True)
    return Experiment(
        preset=name,
        agent=BCConfig(
            optimizer=OptimizerConfig(learning_rate=1e-2, anneal_steps=frames // batch_size)
        ),
        env=EnvConfig("rlstack.entity.games:FloorIsLava"),
        network=NetworkConfig(
            entities=RaggedTransformerConfig(d_model=16, relative_positions=relative)
        ),
        normalisation=NormalisationConfig(observations=True, observation_clip=5.0),
        replay=single_steps(batch_size),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=frames,
        log_period=4_000,
    )
