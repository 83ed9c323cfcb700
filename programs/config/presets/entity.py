"""Presets of PPO on the entity games, based on enn-trainer's runs where it has any.

Most were tuned here on seed 1, to reach the returns published for enn-trainer in fewer frames, with
networks that two cores train in minutes.

Unless a preset sets another value, enn-trainer's defaults apply: three epochs, values clipped, the
learning rate and the entropy bonus annealed to 0, inputs standardised and clipped to 5, ratios per
actor (https://github.com/entity-neural-network/enn-trainer/blob/main/enn_trainer/config.py). Each
preset has its own frames, environments, unrolls, minibatches, learning rate and network. A reset is
a step of an unroll here but not a frame, so games of one step have unrolls and minibatches of twice
the length.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rlstack.agents.ppo import PPOConfig
from rlstack.configs.acting import EvaluatorConfig
from rlstack.configs.entities import (
    RaggedTransformerConfig,
    RelativePositionsConfig,
    TranslationConfig,
)
from rlstack.configs.network import NetworkConfig
from rlstack.configs.normalisation import NormalisationConfig
from rlstack.optimizers import OptimizerConfig
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.programs.config.presets.registry import find, like, on_policy_replay, preset

_PPO = PPOConfig(
    entropy_cost=0.1, value_clip=0.2, num_epochs=3, max_grad_norm=2.0, ratio="per_actor"
)


@dataclasses.dataclass(frozen=True)
class _Run:
    """The size of a run, and how it learns."""

    frames: int
    num_envs: int
    unroll_length: int
    batch_size: int  # rows of a minibatch
    learning_rate: float
    one_step: bool = False  # whether every other row is a reset


def _entity(
    name: str,
    game: str,
    run: _Run,
    network: RaggedTransformerConfig,
    agent: PPOConfig = _PPO,
    options: dict[str, Any] | None = None,
) -> Experiment:
    rows = run.num_envs * run.unroll_length
    minibatches = max(rows // run.batch_size, 1)
    frames_a_batch = rows // 2 if run.one_step else rows
    steps = -(-run.frames // frames_a_batch) * agent.num_epochs * minibatches
    optimizer = OptimizerConfig(learning_rate=run.learning_rate, anneal_steps=steps)
    return Experiment(
        preset=name,
        agent=dataclasses.replace(
            agent,
            num_minibatches=minibatches,
            optimizer=optimizer,
            entropy_anneal_steps=steps if agent.entropy_cost else 0,
        ),
        env=EnvConfig(f"rlstack.entity.games:{game}", num_envs=run.num_envs, options=options or {}),
        network=NetworkConfig(entities=network),
        normalisation=NormalisationConfig(observations=True, observation_clip=5.0),
        replay=on_policy_replay(run.num_envs, run.unroll_length),
        evaluator=EvaluatorConfig(episodes=200, num_envs=20),
        frames=run.frames,
    )


def _sees_around(reach: int, **changes: Any) -> RaggedTransformerConfig:
    """Returns a network that sees positions of others, up to ``reach`` cells in each direction."""
    positions = RelativePositionsConfig(kind="grid", extent=(reach, reach), per_type_values=True)
    return RaggedTransformerConfig(relative_positions=positions, **changes)


@preset
def entity_multi_armed_bandit_ppo(name: str) -> Experiment:
    """MultiArmedBandit: no layers; a lower learning rate than in enn-trainer's test."""
    return _entity(
        name,
        "MultiArmedBandit",
        _Run(500, 4, 16, 16, 0.02),
        RaggedTransformerConfig(d_model=16, num_layers=0),
        dataclasses.replace(_PPO, discount=0.5, entropy_cost=0.0),
    )


@preset
def entity_not_hotdog_ppo(name: str) -> Experiment:
    """NotHotdog, as enn-trainer tests it."""
    return _entity(
        name,
        "NotHotdog",
        _Run(1_000, 8, 32, 32, 0.005, one_step=True),
        RaggedTransformerConfig(d_model=16, num_layers=1),
        dataclasses.replace(_PPO, discount=0.5, entropy_cost=0.0),
    )


@preset
def entity_count_ppo(name: str) -> Experiment:
    """Count of two choices."""
    return _entity(
        name,
        "Count",
        _Run(2_000, 16, 2, 32, 1e-2, one_step=True),
        RaggedTransformerConfig(d_model=16, num_layers=1),
        options={"masked_choices": 2},
    )


@preset
def entity_count10_ppo(name: str) -> Experiment:
    """Count of all ten choices."""
    return _entity(
        name,
        "Count",
        _Run(80_000, 256, 2, 256, 3e-3, one_step=True),
        RaggedTransformerConfig(num_layers=1),
    )


@preset
def entity_floor_is_lava_ppo(name: str) -> Experiment:
    """FloorIsLava, which needs relative positions."""
    return _entity(
        name,
        "FloorIsLava",
        _Run(10_000, 64, 4, 64, 3e-2, one_step=True),
        _sees_around(1, d_model=16),
        dataclasses.replace(_PPO, entropy_cost=1.0),
    )


@preset
def entity_rock_paper_scissors_ppo(name: str) -> Experiment:
    """RockPaperScissors: the value sees the opponent's choice; tuned here."""
    return _entity(
        name,
        "RockPaperScissors",
        _Run(4_000, 256, 2, 128, 4e-3, one_step=True),
        RaggedTransformerConfig(d_model=16),
        dataclasses.replace(_PPO, num_epochs=4),
    )


@preset
def entity_xor_ppo(name: str) -> Experiment:
    """Xor of two entities and a global feature, a quarter of enn-trainer's environments.

    With the entropy bonus, a policy that is right in three of four cases continues to explore.
    """
    return _entity(
        name,
        "Xor",
        _Run(200_000, 512, 2, 1024, 3e-3, one_step=True),
        RaggedTransformerConfig(d_model=16),
        dataclasses.replace(_PPO, entropy_cost=0.3, advantage_epsilon=1.0),
    )


@preset
def entity_cherry_pick_ppo(name: str) -> Experiment:
    """CherryPick of 32, with a network and an entropy bonus smaller than enn-trainer's."""
    return _entity(
        name,
        "CherryPick",
        _Run(100_000, 64, 16, 512, 5e-3),
        RaggedTransformerConfig(d_model=32, num_layers=1),
        dataclasses.replace(_PPO, entropy_cost=0.01, value_cost=0.25),
    )


@preset
def entity_pick_matching_balls_ppo(name: str) -> Experiment:
    """PickMatchingBalls of 3 to 32, colours one-hot; a smaller network than enn-trainer's."""
    return _entity(
        name,
        "PickMatchingBalls",
        _Run(500_000, 64, 16, 512, 3e-3),
        RaggedTransformerConfig(d_qk=32),
        dataclasses.replace(_PPO, entropy_cost=0.5),
        {"one_hot": True, "randomize": True},
    )


@preset
def entity_move_to_origin_ppo(name: str) -> Experiment:
    """MoveToOrigin: two actions of one actor per step; half of enn-trainer's minibatches."""
    return _entity(
        name,
        "MoveToOrigin",
        _Run(400_000, 64, 32, 1024, 3e-3),
        RaggedTransformerConfig(),
    )


@preset
def entity_minefield_ppo(name: str) -> Experiment:
    """Minefield of up to ten mines, seen from the vehicle, with fine positions within 30 of it.

    The policy must find the sequence of turns that avoids a mine before it becomes too certain. The
    value loss has as much weight as the policy loss, whose advantages are divided by a deviation of
    about a tenth. With less weight the policy only learns to drive straight at the target, for a
    return of 0.84.
    """
    positions = RelativePositionsConfig(
        kind="polar",
        sectors=16,  # one for each turn
        rings=6,
        scale=30.0,
        interpolate=True,
        per_type_values=True,
        angle_feature="heading",
    )
    translation = TranslationConfig(
        reference="Vehicle", angle_feature="heading", distance_feature=True, keep_reference=False
    )
    return _entity(
        name,
        "Minefield",
        _Run(600_000, 64, 128, 1024, 5e-3),
        RaggedTransformerConfig(
            num_layers=1, relative_positions=positions, translation=translation
        ),
        dataclasses.replace(_PPO, entropy_cost=0.01, discount=0.998, value_cost=4.0),
    )


@preset
def entity_multi_snake_ppo(name: str) -> Experiment:
    """MultiSnake of one snake, up to length 11; a tenth of enn-trainer's frames."""
    return _entity(
        name,
        "MultiSnake",
        _Run(1_000_000, 64, 64, 1024, 5e-3),
        _sees_around(10, num_layers=1),
        dataclasses.replace(_PPO, entropy_cost=0.02, discount=0.97),
        {"num_snakes": 1, "max_snake_length": 11},
    )


@preset
def jax_entity_count_ppo(name: str) -> Experiment:
    """Count of two choices in JAX, in one compiled program: the constants of entity-count-ppo."""
    return _in_jax(name, "entity-count-ppo", "Count")


@preset
def jax_entity_multi_snake_ppo(name: str) -> Experiment:
    """MultiSnake in JAX, in one compiled program: the constants of entity-multi-snake-ppo."""
    return _in_jax(name, "entity-multi-snake-ppo", "MultiSnake")


def _in_jax(name: str, like_name: str, game: str) -> Experiment:
    env = find(like_name).env
    env = dataclasses.replace(env, name=f"rlstack.entity.jax_games:{game}", type="jax")
    return like(like_name, name, env=env, topology="fused")


@preset
def entity_treasure_hunt_ppo(name: str) -> Experiment:
    """TreasureHunt, as in entity-gym's tutorial, but with a lower discount.

    With the tutorial's discount, 0.99, the greedy policy oscillates between equally near treasures.
    """
    return _entity(
        name,
        "TreasureHunt",
        _Run(100_000, 64, 32, 512, 5e-3),
        _sees_around(5),
        dataclasses.replace(_PPO, discount=0.95),
    )


@preset
def entity_minesweeper_ppo(name: str) -> Experiment:
    """MineSweeper: several robots act at once; there is no published run."""
    return _entity(
        name,
        "MineSweeper",
        _Run(150_000, 64, 32, 1024, 5e-3),
        _sees_around(5),
        dataclasses.replace(_PPO, entropy_cost=0.02),
    )
