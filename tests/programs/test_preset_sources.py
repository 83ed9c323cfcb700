"""The constants of presets whose text names a source: the source's numbers, written by hand."""

import dataclasses
import functools
import re
from pathlib import Path

import pytest

from rlstack.agents.ppo import PPOConfig
from rlstack.agents.pqn import PQNConfig
from rlstack.programs.config.presets import PRESETS, preset
from tests.programs.more_sources import MORE, PRIVILEGED

GITHUB = "https://github.com/"


@dataclasses.dataclass(frozen=True)
class Source:
    """A source, the presets that follow it, and its constants by their paths in an experiment."""

    addresses: tuple[str, ...]
    presets: tuple[str, ...]
    constants: dict
    differs: dict = dataclasses.field(default_factory=dict)  # path: (the preset's number, reason)


MINATAR = ("breakout", "asterix", "freeway", "space-invaders", "seaquest")
ENTITY = tuple(name for name in PRESETS if name.startswith("entity-") and name.endswith("-ppo"))
TUNED = "tuned for this game"


# Each value is the source's. A path with a space is one of QUANTITIES.
SOURCES = [
    Source(
        (f"{GITHUB}DLR-RM/stable-baselines3/blob/master/stable_baselines3/a2c/a2c.py",),
        ("cartpole-a2c",),
        {
            "agent.optimizer.name": "rmsprop",
            "agent.optimizer.learning_rate": 7e-4,
            "agent.optimizer.decay": 0.99,
            "optimizer eps": 1e-5,
            "agent.optimizer.anneal_steps": 0,
            "agent.discount": 0.99,
            "agent.gae_lambda": 1.0,
            "agent.entropy_cost": 0.0,
            "weight of squared value errors": 0.5,
            "agent.max_grad_norm": 0.5,
            "agent.normalise_advantages": False,
            "replay.unroll_length": 5,
            "normalisation.reward_scale": 1.0,
        },
        {
            "agent.optimizer.anneal_steps": (500_000 // (16 * 5), "as in the other presets"),
            "normalisation.reward_scale": (0.1, "values near 100 would fill the gradient norm"),
        },
    ),
    Source(
        (f"{GITHUB}DLR-RM/rl-baselines3-zoo/blob/master/hyperparams/ppo.yml",),
        ("cartpole-ppo",),
        {
            "env.num_envs": 8,
            "replay.unroll_length": 32,
            "rows of a minibatch": 256,
            "agent.gae_lambda": 0.8,
            "agent.discount": 0.98,
            "agent.num_epochs": 20,
            "agent.entropy_cost": 0.0,
            "agent.optimizer.learning_rate": 1e-3,
            "learning rate ends at frame": 100_000,
            "agent.clip_ratio": 0.2,
            "weight of squared value errors": 0.5,
            "frames": 100_000,
        },
        {
            "weight of squared value errors": (0.25, "matters little without common layers"),
            "learning rate ends at frame": (150_000, "the end of the run"),
            "frames": (150_000, "500 on each seed"),
        },
    ),
    Source(
        (
            "https://iclr-blog-track.github.io/2022/03/25/ppo-implementation-details/",
            f"{GITHUB}vwxyzjn/cleanrl/blob/master/cleanrl/ppo_atari.py",
        ),
        ("pong-ppo", "breakout-ppo"),
        {
            "env.num_envs": 8,
            "replay.unroll_length": 128,
            "agent.num_epochs": 4,
            "agent.num_minibatches": 4,
            "agent.optimizer.learning_rate": 2.5e-4,
            "optimizer eps": 1e-5,
            "learning rate ends at frame": 10_000_000,
            "agent.discount": 0.99,
            "agent.gae_lambda": 0.95,
            "agent.clip_ratio": 0.1,
            "agent.value_clip": 0.1,
            "agent.normalise_advantages": True,
            "agent.advantage_epsilon": 1e-8,
            "agent.entropy_cost": 0.01,
            "weight of squared value errors": 0.25,
            "agent.max_grad_norm": 0.5,
            "network.torso": "nature",
            "network.hidden_sizes": (512,),
            "network.shared": True,
            "frames": 10_000_000,
        },
    ),
    Source(
        (f"{GITHUB}thu-ml/tianshou/blob/v1.0.0/examples/mujoco/mujoco_ppo.py",),
        ("halfcheetah-ppo", "hopper-ppo"),
        {
            "env.num_envs": 8,
            "frames an update": 2048,
            "rows of a minibatch": 64,
            "agent.num_epochs": 10,
            "agent.optimizer.learning_rate": 3e-4,
            "optimizer eps": 1e-8,
            "agent.discount": 0.99,
            "agent.gae_lambda": 0.95,
            "agent.clip_ratio": 0.2,
            "agent.value_clip": 0.0,
            "agent.entropy_cost": 0.0,
            "weight of squared value errors": 0.25,
            "agent.max_grad_norm": 0.5,
            "agent.normalise_advantages": False,
            "network.hidden_sizes": (64, 64),
            "network.activation": "tanh",
            "network.shared": False,
            "network.policy_log_std": -0.5,
            "normalisation.observations": True,
            "frames": 3_000_000,
        },
        {
            "optimizer eps": (1e-5, "as in the other presets"),
            "frames": (1_000_000, "for two cores"),
            "hopper-ppo agent.normalise_advantages": (True, "docs/presets.md: 3,300, not 1,300"),
        },
    ),
    Source(
        (f"{GITHUB}MichaelTMatthews/Craftax_Baselines/blob/main/ppo.py",),
        ("craftax-classic-ppo", "craftax-ppo"),
        {
            "env.num_envs": 1024,
            "replay.unroll_length": 64,
            "agent.num_epochs": 4,
            "agent.num_minibatches": 8,
            "agent.optimizer.learning_rate": 2e-4,
            "optimizer eps": 1e-5,
            "agent.discount": 0.99,
            "agent.gae_lambda": 0.8,
            "agent.clip_ratio": 0.2,
            "agent.value_clip": 0.2,
            "agent.normalise_advantages": True,
            "agent.entropy_cost": 0.01,
            "weight of squared value errors": 0.25,
            "agent.max_grad_norm": 1.0,
            "network.hidden_sizes": (512, 512, 512),
            "network.activation": "tanh",
            "frames": 1_000_000_000,
        },
        {"env.num_envs": (64, "a short run"), "frames": (1_000_000, "a short run")},
    ),
    Source(
        (f"{GITHUB}luchris429/purejaxrl/blob/main/examples/brax_minatar.ipynb",),
        tuple(f"minatar-{game}-ppo" for game in MINATAR),
        {
            "env.num_envs": 64,
            "replay.unroll_length": 128,
            "agent.num_epochs": 4,
            "agent.num_minibatches": 8,
            "agent.optimizer.learning_rate": 5e-3,
            "optimizer eps": 1e-5,
            "agent.discount": 0.99,
            "agent.gae_lambda": 0.95,
            "agent.clip_ratio": 0.2,
            "agent.value_clip": 0.2,
            "agent.normalise_advantages": True,
            "agent.entropy_cost": 0.01,
            "weight of squared value errors": 0.25,
            "agent.max_grad_norm": 0.5,
            "frames": 10_000_000,
        },
        {
            "agent.optimizer.learning_rate": (1e-3, "for the convolutions of this torso"),
            "agent.value_clip": (0.0, "docs/fused.md: returns above the published ones"),
            "minatar-breakout-ppo agent.entropy_cost": (0.05, "docs/fused.md: 58, not 17"),
        },
    ),
    Source(
        (f"{GITHUB}mttga/purejaxql/blob/main/purejaxql/config/alg/pqn_minatar.yaml",),
        tuple(f"minatar-{game}-pqn" for game in MINATAR),
        {
            "env.num_envs": 128,
            "replay.unroll_length": 32,
            "agent.num_epochs": 2,
            "agent.num_minibatches": 32,
            "agent.optimizer.name": "radam",
            "agent.optimizer.learning_rate": 5e-4,
            "agent.discount": 0.99,
            "agent.return_lambda": 0.65,
            "agent.max_grad_norm": 10.0,
            "agent.epsilon_start": 1.0,
            "agent.epsilon_end": 0.05,
            "agent.epsilon_frames": 1_000_000,
            "network.norm": "layer",
            "frames": 10_000_000,
        },
    ),
    Source(
        (f"{GITHUB}mttga/purejaxql/blob/main/purejaxql/config/alg/pqn_cartpole.yaml",),
        ("cartpole-pqn", "gymnax-cartpole-pqn"),
        {
            "env.num_envs": 32,
            "replay.unroll_length": 64,
            "agent.num_epochs": 4,
            "agent.num_minibatches": 16,
            "agent.optimizer.name": "radam",
            "agent.optimizer.learning_rate": 1e-4,
            "agent.discount": 0.99,
            "agent.return_lambda": 0.95,
            "agent.max_grad_norm": 10.0,
            "agent.epsilon_start": 1.0,
            "agent.epsilon_end": 0.2,
            "agent.epsilon_frames": 100_000,
            "network.norm": "layer",
            "network.hidden_sizes": (256, 256),
            "normalisation.reward_scale": 0.1,
            "frames": 500_000,
        },
    ),
    Source(
        (f"{GITHUB}kenjyoung/MinAtar/blob/master/examples/dqn.py",),
        tuple(f"minatar-{game}-dqn" for game in MINATAR),
        {
            "replay.batch_size": 32,
            "replay.max_size": 100_000,
            "replay.min_size": 5_000,
            "replay.unroll_length": 1,
            "agent.optimizer.learning_rate": 2.5e-4,
            "agent.discount": 0.99,
            "agent.huber_delta": 1.0,
            "network.torso": "minatar",
            "network.hidden_sizes": (128,),
            "frames between copies of the target": 1_000,
            "env.num_envs": 1,
            "updates a frame": 1.0,
            "agent.double": False,
            "agent.optimizer.name": "rmsprop",
            "agent.epsilon_end": 0.1,
            "agent.epsilon_frames": 100_000,
            "frames": 5_000_000,
        },
        {
            "env.num_envs": (64, "one program"),
            "updates a frame": (0.25, "a quarter of the time"),
            "agent.double": (True, "docs/fused.md: its returns"),
            "agent.optimizer.name": ("adam", "docs/fused.md: its returns"),
            "agent.epsilon_end": (0.05, "docs/fused.md: its returns"),
            "agent.epsilon_frames": (250_000, "docs/fused.md: its returns"),
            "frames": (10_000_000, "fewer updates a frame"),
        },
    ),
    Source(
        (
            "https://arxiv.org/abs/1710.02298",
            f"{GITHUB}google/dopamine/blob/master/dopamine/agents/rainbow/configs/rainbow_aaai.gin",
        ),
        ("breakout-rainbow", "breakout-dqn"),
        {
            "agent.discount": 0.99,
            "agent.double": True,
            "agent.optimizer.name": "adam",
            "agent.optimizer.learning_rate": 6.25e-5,
            "agent.optimizer.eps": 1.5e-4,
            "agent.max_grad_norm": 0.0,
            "network.torso": "nature",
            "network.hidden_sizes": (512,),
            "network.duelling": True,
            "replay.unroll_length": 3,
            "replay.batch_size": 32,
            "replay.min_size": 20_000,
            "replay.max_size": 1_000_000,
            "replay.priority_exponent": 0.5,
            "replay.importance_exponent": 0.4,
            "replay.importance_exponent_final": 1.0,
            "importance weights are full at frame": 50_000_000,
            "updates a frame": 1 / 4,
            "frames of the game between copies of the target": 32_000,
            "frames": 50_000_000,
            "breakout-rainbow agent.min_value": -10.0,
            "breakout-rainbow agent.max_value": 10.0,
            "breakout-rainbow network.num_atoms": 51,
            "breakout-rainbow network.noisy_sigma": 0.5,
            "breakout-rainbow agent.epsilon_start": 0.0,
            "breakout-rainbow agent.epsilon_end": 0.0,
            "breakout-dqn agent.epsilon_start": 1.0,
            "breakout-dqn agent.epsilon_end": 0.01,
            "breakout-dqn agent.epsilon_frames": 250_000,
        },
        {
            "agent.max_grad_norm": (10.0, "Wang et al. 2016, for duelling networks"),
            "breakout-dqn replay.max_size": (100_000, "0.7 GB"),
            "breakout-dqn frames": (10_000_000, "a fifth of the time"),
            "breakout-dqn importance weights are full at frame": (10_000_000, "the run's end"),
        },
    ),
    Source(
        (
            "https://arxiv.org/abs/1802.01561",
            f"{GITHUB}google-deepmind/scalable_agent/blob/master/experiment.py",
        ),
        ("pong-impala",),
        {
            "replay.batch_size": 32,
            "replay.unroll_length": 20,
            "agent.discount": 0.99,
            "agent.entropy_cost": 0.01,
            "weight of squared value errors": 0.25,
            "largest norm of summed gradients": 40.0,
            "agent.optimizer.name": "rmsprop",
            "agent.optimizer.learning_rate": 6e-4,
            "agent.optimizer.decay": 0.99,
            "rmsprop eps of summed gradients": 0.01,
            "network.torso": "impala",
            "network.hidden_sizes": (256,),
            "learning rate ends at frame": 50_000_000,
            "frames": 50_000_000,
        },
        {
            "learning rate ends at frame": (10_000_000, "a fifth of the time"),
            "frames": (10_000_000, "a fifth of the time"),
        },
    ),
    Source(
        (
            "https://openreview.net/forum?id=r1lyTjAqYX",
            f"{GITHUB}google-deepmind/acme/blob/master/acme/agents/jax/r2d2/config.py",
            f"{GITHUB}google-research/seed_rl/blob/master/agents/r2d2/learner.py",
            f"{GITHUB}google-research/seed_rl/blob/master/atari/r2d2_main.py",
        ),
        ("pong-r2d2",),
        {
            "agent.discount": 0.997,
            "agent.burn_in": 40,
            "agent.n_step": 5,
            "agent.rescale_values": True,
            "agent.rescaling_eps": 1e-3,
            "agent.priority_max_share": 0.9,
            "agent.max_grad_norm": 40.0,
            "agent.optimizer.name": "adam",
            "agent.optimizer.learning_rate": 4.8e-4,  # SEED RL; the paper's 1e-4
            "agent.optimizer.eps": 1e-3,
            "agent.epsilon_base": 0.4,
            "agent.epsilon_alpha": 7.0,
            "agent.target_period": 400,  # SEED RL; the paper's and Acme's 2,500
            "network.torso": "nature",
            "network.hidden_sizes": (512,),
            "network.core": "lstm",
            "network.core_size": 512,
            "network.duelling": True,
            "replay.batch_size": 64,
            "replay.unroll_length": 40 + 80,
            "replay.period": 40,
            "replay.priority_exponent": 0.9,
            "replay.importance_exponent": 0.6,  # Acme and SEED RL
            "replay.samples_per_insert": 4.0,  # Acme
            "replay.min_size": 50_000,  # Acme
            "replay.max_size": 100_000,
            "env.num_envs": 256,
        },
        {
            "replay.min_size": (500, "20,000 steps of 10 million"),
            "replay.max_size": (5_000, "2 GB"),
            "env.num_envs": (32, "one machine"),
        },
    ),
    Source(
        (
            "https://arxiv.org/abs/2103.01955",
            f"{GITHUB}marlbenchmark/on-policy/blob/main/onpolicy/config.py",
            f"{GITHUB}marlbenchmark/on-policy/blob/main/onpolicy/scripts/train_mpe_scripts/"
            "train_mpe_spread.sh",
        ),
        ("mpe-spread-ippo", "mpe-spread-mappo", "jaxmarl-spread-ippo", "jaxmarl-spread-mappo"),
        {
            "replay.unroll_length": 25,
            "env.num_envs": 3 * 128,
            "agent.num_epochs": 10,
            "agent.num_minibatches": 1,
            "agent.optimizer.learning_rate": 7e-4,
            "optimizer eps": 1e-5,
            "agent.optimizer.anneal_steps": 0,
            "agent.discount": 0.99,
            "agent.gae_lambda": 0.95,
            "agent.clip_ratio": 0.2,
            "agent.value_clip": 0.2,
            "agent.entropy_cost": 0.01,
            "agent.value_cost": 1.0,
            "agent.max_grad_norm": 10.0,
            "network.hidden_sizes": (64, 64),
            "network.activation": "relu",
            "network.shared": False,
        },
        {
            "env.num_envs": (3 * 32, "two cores"),
            "agent.num_minibatches": (2, "two cores"),
            "agent.value_clip": (0.0, "docs/policies.md: its returns"),
            "agent.value_cost": (0.5, "matters little without common layers"),
            "mpe-spread-ippo agent.optimizer.anneal_steps": (25_000, "1,250 batches of 20 steps"),
            "mpe-spread-mappo agent.optimizer.anneal_steps": (25_000, "1,250 batches of 20 steps"),
            "jaxmarl-spread-ippo agent.optimizer.anneal_steps": (500_000, "20 times the frames"),
            "jaxmarl-spread-mappo agent.optimizer.anneal_steps": (500_000, "20 times the frames"),
        },
    ),
    Source(
        ("https://arxiv.org/abs/1812.05905", f"{GITHUB}sfujim/TD3/blob/master/main.py"),
        ("halfcheetah-sac", "halfcheetah-td3", "brax-halfcheetah-sac"),
        {
            "updates a frame": 1.0,
            "replay.batch_size": 256,
            "replay.max_size": 1_000_000,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.target_rate": 0.005,
            "agent.discount": 0.99,
            "network.hidden_sizes": (256, 256),
            "network.activation": "relu",
            "halfcheetah-td3 agent.random_frames": 25_000,
            "halfcheetah-td3 agent.noise_scale": 0.1,
            "halfcheetah-td3 agent.target_noise": 0.2,
            "halfcheetah-td3 agent.target_noise_clip": 0.5,
            "halfcheetah-td3 agent.policy_period": 2,
        },
        {
            "halfcheetah-sac updates a frame": (0.5, "a few cores"),
            "halfcheetah-td3 updates a frame": (0.5, "a few cores"),
            "replay.batch_size": (128, "a few cores"),
            "replay.max_size": (300_000, "all frames"),
            "agent.optimizer.learning_rate": (1e-3, "smaller batches, fewer updates"),
            "agent.target_rate": (0.01, "smaller batches, fewer updates"),
            "halfcheetah-td3 agent.random_frames": (5_000, "fewer frames"),
        },
    ),
    Source(
        ("https://arxiv.org/abs/1902.05605",),
        ("hopper-crossq", "halfcheetah-crossq"),
        {
            "updates a frame": 1.0,
            "replay.batch_size": 256,
            "replay.max_size": 1_000_000,
            "env.num_envs": 1,
            "agent.optimizer.learning_rate": 1e-3,
            "agent.optimizer.arguments": {"b1": 0.5},
            "agent.policy_period": 3,
            "agent.num_critics": 2,
            "agent.discount": 0.99,
            "network.hidden_sizes": (256, 256),
            "network.critic.hidden_sizes": (2048, 2048),
            "network.batch_norm_decay": 0.99,
            "network.renorm_after": 100_000,
        },
        {
            "replay.max_size": (500_000, "all frames"),
            "env.num_envs": (4, "more frames a second"),
        },
    ),
    Source(
        ("https://arxiv.org/abs/2502.15280",),
        ("hopper-simba", "halfcheetah-simba"),
        {
            "updates a frame": 2.0,
            "replay.batch_size": 256,
            "replay.max_size": 1_000_000,
            "env.num_envs": 1,
            "agent.optimizer.learning_rate": 1e-4,
            "agent.optimizer.final_learning_rate": 5e-5,
            "agent.target_rate": 0.005,
            "agent.temperature": 0.01,
            "agent.discount": 0.995,  # 1 - 5 / 1,000 steps of an episode
            "agent.num_critics": 2,  # in tasks whose episodes end early
            "agent.min_value": -5.0,
            "agent.max_value": 5.0,
            "agent.target_entropy_scale": 0.5,
            "network.num_atoms": 101,
            "network.hidden_sizes": (128,),
            "network.critic.hidden_sizes": (512, 512),
            "normalisation.observations": True,
            "normalisation.rewards": "return",
        },
        {
            "updates a frame": (1.0, "half of the time"),
            "replay.max_size": (500_000, "all frames"),
            "env.num_envs": (4, "more frames a second"),
        },
    ),
    Source(
        ("https://arxiv.org/abs/1812.05905",),
        ("brax-inverted-double-pendulum-sac",),
        {
            "updates a frame": 1.0,
            "replay.batch_size": 256,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.target_rate": 0.005,
            "agent.discount": 0.99,
        },
        {"agent.target_rate": (0.01, TUNED)},
    ),
    Source(
        (f"{GITHUB}entity-neural-network/enn-trainer/blob/main/enn_trainer/config.py",),
        ENTITY,
        {
            "agent.num_epochs": 3,
            "agent.clip_ratio": 0.2,
            "agent.value_clip": 0.2,
            "agent.gae_lambda": 0.95,
            "agent.normalise_advantages": True,
            "agent.max_grad_norm": 2.0,
            "agent.ratio": "per_actor",
            "agent.discount": 0.99,
            "agent.entropy_cost": 0.1,
            "weight of squared value errors": 0.25,
            "normalisation.observations": True,
            "normalisation.observation_clip": 5.0,
        },
        {
            "entity-multi-armed-bandit-ppo agent.discount": (0.5, TUNED),
            "entity-multi-armed-bandit-ppo agent.entropy_cost": (0.0, TUNED),
            "entity-not-hotdog-ppo agent.discount": (0.5, TUNED),
            "entity-not-hotdog-ppo agent.entropy_cost": (0.0, TUNED),
            "entity-floor-is-lava-ppo agent.entropy_cost": (1.0, TUNED),
            "entity-rock-paper-scissors-ppo agent.num_epochs": (4, TUNED),
            "entity-xor-ppo agent.entropy_cost": (0.3, TUNED),
            "entity-cherry-pick-ppo agent.entropy_cost": (0.01, TUNED),
            "entity-cherry-pick-ppo weight of squared value errors": (0.125, TUNED),
            "entity-pick-matching-balls-ppo agent.entropy_cost": (0.5, TUNED),
            "entity-minefield-ppo agent.entropy_cost": (0.01, "docs/presets.md"),
            "entity-minefield-ppo agent.discount": (0.998, "docs/presets.md"),
            "entity-minefield-ppo weight of squared value errors": (2.0, "docs/presets.md"),
            "entity-multi-snake-ppo agent.entropy_cost": (0.02, TUNED),
            "entity-multi-snake-ppo agent.discount": (0.97, TUNED),
            "entity-treasure-hunt-ppo agent.discount": (0.95, "docs/presets.md"),
            "entity-minesweeper-ppo agent.entropy_cost": (0.02, TUNED),
        },
    ),
    Source(
        ("https://doi.org/10.1038/nature14236",),
        (
            *("breakout-dqn", "breakout-rainbow", "pong-impala", "pong-ppo", "breakout-ppo"),
            *("pong-small-ppo", "pong-gpu-ppo", "breakout-gpu-ppo"),
        ),
        {
            "env.options.episodic_life": True,
            "env.options.reward_clip": True,
            "env.eval_options.episodic_life": False,
            "env.eval_options.reward_clip": False,
        },
    ),
    *(Source(*row) for row in MORE + PRIVILEGED),
]

# Their text names no program or paper with constants of its own; another preset's, or none.
WITHOUT_SOURCE = {
    *("acrobot-dqn", "acrobot-ppo", "bc", "cartpole-bc", "cartpole-c51", "cartpole-dqn"),
    "cartpole-balance-ppo",
    *("cartpole-impala", "cartpole-iqn", "cartpole-munchausen", "cartpole-qrdqn"),
    *("cartpole-rainbow", "cartpole-random", "cartpole-reinforce", "cartpole-sac"),
    *("cartpole-scripted", "connect-four-selfplay", "entity-floor-is-lava-bc"),
    *("entity-floor-is-lava-scripted", "gymnax-cartpole-dqn", "gymnax-cartpole-ppo"),
    *("jax-entity-count-ppo", "jax-entity-multi-snake-ppo", "memory-cartpole-dqn"),
    *("memory-cartpole-impala", "memory-cartpole-r2d2", "memorycue-r2d2", "memorychain-ppo"),
    *("pendulum-ddpg",),
    *("pendulum-ppo", "pendulum-sac", "pendulum-td3", "rock-paper-scissors-selfplay"),
    *("supply-chain-policies", "brax-inverted-double-pendulum-ppo", "brax-halfcheetah-ppo"),
    *("brax-ant-ppo", "pendulum-crossq", "pendulum-tqc", "pendulum-simba", "pendulum-redq"),
    *("pendulum-droq", "pendulum-d4pg", "pendulum-mpo", "cartpole-mpo", "cartpole-vmpo"),
    *("halfcheetah-mpo", "pendulum-vmpo", "halfcheetah-vmpo", "cartpole-ppg", "deepsea-rnd"),
    "deepsea-rnd-dqn",
    *("pendulum-fasttd3", "mountain-car-continuous-scripted", "mountain-car-continuous-rlpd"),
    "pendulum-iql",
    *("cartpole-cql", "pendulum-gail", "pendulum-sqil", "toll-ppo-lagrangian"),
    *("bitflip-her", "reach-her", "maze-ppo"),
    *("cartpole-muzero", "catch-muzero", "minatar-breakout-muzero", "pendulum-muzero"),
    *("tictactoe-alphazero", "connect-four-alphazero", "pendulum-tdmpc2", "cheetah-run-tdmpc2"),
    *("spread-qmix", "cover-maddpg", "spread-maddpg"),
    *("cartpole-dreamer", "catch-dreamer"),
}

SKIP = 4  # frames of an Atari game in one step


def steps_of_an_update(experiment):
    return experiment.replay.batch_size * experiment.replay.unroll_length


def updates_a_frame(experiment):
    """Of a replay into which each step inserts one item."""
    assert not experiment.replay.period or experiment.replay.period == 1
    return experiment.replay.samples_per_insert / experiment.replay.batch_size


def frames_between_copies(experiment):
    return experiment.agent.target_period / updates_a_frame(experiment)


def learning_rate_ends(experiment):
    """The frame, up to a batch, at which the learning rate is 0."""
    agent = experiment.agent
    steps = 1
    if isinstance(agent, PPOConfig | PQNConfig):
        steps = agent.num_epochs * agent.num_minibatches
    batches = agent.optimizer.anneal_steps / steps
    end = batches * steps_of_an_update(experiment)
    return (
        experiment.frames if abs(end - experiment.frames) < steps_of_an_update(experiment) else end
    )


QUANTITIES = {
    # Without a value it is 1e-5 for Adam and RMSProp.
    "optimizer eps": lambda e: 1e-5 if e.agent.optimizer.eps is None else e.agent.optimizer.eps,
    "weight of squared value errors": lambda e: 0.5 * e.agent.value_cost,
    "frames an update": steps_of_an_update,
    "rows of a minibatch": lambda e: steps_of_an_update(e) // e.agent.num_minibatches,
    "learning rate ends at frame": learning_rate_ends,
    "updates a frame": updates_a_frame,
    "updates from data": lambda e: e.frames // steps_of_an_update(e),
    "frames between copies of the target": frames_between_copies,
    "frames of the game between copies of the target": lambda e: SKIP * frames_between_copies(e),
    "importance weights are full at frame": lambda e: (
        e.replay.importance_anneal_samples / e.replay.samples_per_insert
    ),
    "largest norm of summed gradients": lambda e: e.agent.max_grad_norm * steps_of_an_update(e),
    "rmsprop eps of summed gradients": lambda e: e.agent.optimizer.eps * steps_of_an_update(e) ** 2,
}


def number_of(experiment, path):
    if path in QUANTITIES:
        return QUANTITIES[path](experiment)

    def part(whole, name):
        return whole[name] if isinstance(whole, dict) else getattr(whole, name)

    return functools.reduce(part, path.split("."), experiment)


def own(name, table):
    """The entries of a preset by their paths: those of all presets of a source, then its own."""
    common = {key: value for key, value in table.items() if key.split(" ")[0] not in PRESETS}
    return common | {
        key.removeprefix(f"{name} "): value
        for key, value in table.items()
        if key.startswith(f"{name} ")
    }


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.addresses[-1][8:])
def test_constants_are_those_of_the_source_or_differ_for_a_reason(source):
    for name in source.presets:
        experiment = preset(name)
        constants, differs = own(name, source.constants), own(name, source.differs)
        for path, constant in constants.items():
            expected, reason = differs.pop(path, (constant, "-"))
            if isinstance(expected, float):
                expected = pytest.approx(expected, rel=1e-6)
            assert number_of(experiment, path) == expected, (name, path)
            assert reason == "-" or (expected != constant and reason), (name, path)
        assert not differs, (name, "the source's number is missing")


def test_every_preset_has_a_source_or_says_that_it_has_none():
    with_source = {name for source in SOURCES for name in source.presets}
    assert not with_source & WITHOUT_SOURCE
    assert with_source | WITHOUT_SOURCE == set(PRESETS)


def test_each_address_in_the_text_of_presets_is_in_the_table():
    folder = Path(__file__).parents[2] / "programs/config/presets"
    found = set()
    for file in folder.glob("*.py"):
        found |= {x.rstrip(".,);:") for x in re.findall(r"https://[^\s\"]+", file.read_text())}
    known = {address for source in SOURCES for address in source.addresses}
    assert found == known
