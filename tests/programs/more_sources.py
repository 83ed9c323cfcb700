"""The constants of the sources of some presets, for `test_preset_sources`, which has the others.

They are those of presets from recorded data, and with critics that see more than policies. A row
has the addresses, the presets, the constants by path, and the presets' own numbers with the reason.
"""

GITHUB = "https://github.com/"


def of_agent(**constants):
    return {f"agent.{name}": constant for name, constant in constants.items()}


MORE = [
    (
        (f"{GITHUB}DramaCow/jaxued/blob/main/examples/maze_plr.py",),
        ("maze-plr", "maze-robust-plr"),
        {
            "levels.score_function": "MaxMC",
            "levels.buffer_size": 4000,
            "levels.replay_prob": 0.8,
            "levels.staleness_coeff": 0.3,
            "levels.temperature": 0.3,
            "levels.minimum_fill_ratio": 0.5,
            "agent.discount": 0.995,
            "agent.gae_lambda": 0.98,
        },
        {"levels.temperature": (1.0, "a short run needs more levels")},
    ),
    (
        (f"{GITHUB}nicklashansen/tdmpc2/blob/main/tdmpc2/config.yaml",),
        ("halfcheetah-tdmpc2",),
        {
            "updates a frame": 1.0,
            "replay.batch_size": 256,
            "replay.max_size": 1_000_000,
            "env.num_envs": 1,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.encoder_optimizer.learning_rate": 0.3 * 3e-4,
            "agent.policy_optimizer.learning_rate": 3e-4,
            "agent.discount": 0.995,  # 1 - 5 / 1,000 steps of an episode
            **of_agent(horizon=3, iterations=6, num_samples=512, num_elites=64, temperature=0.5),
            **of_agent(num_policy_trajectories=24, min_std=0.05, max_std=2.0, num_critics=5),
            **of_agent(consistency_cost=20.0, reward_cost=0.1, value_cost=0.1, step_decay=0.5),
            **of_agent(entropy_cost=1e-4, target_rate=0.01, max_grad_norm=20.0),
            "network.num_atoms": 101,
            "network.hidden_sizes": (512, 512),
        },
        {
            "replay.max_size": (300_000, "all frames"),
            "env.num_envs": (4, "more frames a second"),
        },
    ),
    (
        (f"{GITHUB}younggyoseo/FastTD3",),
        ("brax-halfcheetah-fasttd3",),
        {
            "env.num_envs": 1_024,
            "updates a frame": 2 / 1_024,
            "replay.batch_size": 32_768,
            "replay.unroll_length": 3,
            "replay.max_size": 1_024 * 10 * 1_024,
            "replay.min_size": 11 * 1_024,
            "agent.discount": 0.97,
            "agent.target_rate": 0.1,
            "agent.least_noise_scale": 0.1,
            "agent.noise_scale": 0.4,
            "agent.target_noise": 0.1,
            "agent.target_noise_clip": 0.5,
            "agent.policy_period": 2,
            "agent.min_value": -500.0,
            "agent.max_value": 500.0,
            "agent.clipped": True,
            "agent.optimizer.name": "adamw",
            "agent.optimizer.learning_rate": 3e-4,
            "agent.optimizer.weight_decay": 0.1,
            "network.num_atoms": 101,
            "network.hidden_sizes": (512, 256, 128),
            "network.critic.hidden_sizes": (1_024, 512, 256),
            "normalisation.observations": True,
            "normalisation.reward_scale": 1.0,
        },
        {
            "replay.max_size": (1_000_000, "memory"),
            "normalisation.reward_scale": (0.1, "rewards are ten times as large"),
        },
    ),
    (
        (f"{GITHUB}ikostrikov/implicit_q_learning/blob/master/configs/mujoco_config.py",),
        ("hopper-iql", "halfcheetah-iql"),
        {
            "agent.discount": 0.99,
            "agent.expectile": 0.7,
            "agent.inverse_temperature": 3.0,
            "agent.target_rate": 0.005,
            "agent.min_log_std": -5.0,
            "agent.max_weight": 100.0,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.policy_optimizer.learning_rate": 3e-4,
            "agent.policy_optimizer.schedule": "cosine",
            "agent.policy_optimizer.anneal_steps": 1_000_000,
            "network.hidden_sizes": (256, 256),
            "replay.batch_size": 256,
            "updates from data": 1_000_000,
        },
        {
            "agent.policy_optimizer.anneal_steps": (200_000, "as many as updates"),
            "updates from data": (200_000, "a fifth of the updates"),
        },
    ),
    (
        (f"{GITHUB}sfujim/TD3_BC/blob/main/main.py",),
        ("hopper-td3-bc", "halfcheetah-td3-bc"),
        {
            "agent.discount": 0.99,
            "agent.critic_weight": 2.5,
            "agent.target_rate": 0.005,
            "agent.target_noise": 0.2,
            "agent.target_noise_clip": 0.5,
            "agent.policy_period": 2,
            "agent.optimizer.learning_rate": 3e-4,
            "network.hidden_sizes": (256, 256),
            "normalisation.observations": True,
            "replay.batch_size": 256,
            "updates from data": 1_000_000,
        },
        {"updates from data": (200_000, "a fifth of the updates")},
    ),
    (
        (f"{GITHUB}aviralkumar2907/CQL/blob/master/d4rl/examples/cql_mujoco_new.py",),
        ("hopper-cql", "halfcheetah-cql"),
        {
            "agent.discount": 0.99,
            "agent.conservative_weight": 5.0,
            "agent.num_sampled": 10,
            "agent.soft_targets": False,
            "agent.target_rate": 0.005,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.policy_optimizer.learning_rate": 1e-4,
            "network.hidden_sizes": (256, 256, 256),
            "replay.batch_size": 256,
            "updates from data": 3_000_000,
        },
        {"updates from data": (200_000, "fewer updates")},
    ),
    (
        (f"{GITHUB}rail-berkeley/rlkit/blob/master/examples/awac/mujoco/awac1.py",),
        ("hopper-awac", "halfcheetah-awac"),
        {
            "agent.discount": 0.99,
            "agent.temperature": 2.0,
            "agent.min_log_std": -6.0,
            "agent.target_rate": 0.005,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.policy_optimizer.learning_rate": 3e-4,
            "agent.policy_optimizer.weight_decay": 1e-4,
            "network.hidden_sizes": (256, 256),
            "replay.batch_size": 1024,
        },
    ),
]

PRIVILEGED = [
    (
        (
            f"{GITHUB}google-deepmind/mujoco_playground/blob/main/mujoco_playground/config/"
            "locomotion_params.py",
        ),
        ("go1-joystick-ppo", "g1-joystick-ppo"),
        {
            "env.num_envs": 8192,
            "replay.unroll_length": 20,
            "agent.num_minibatches": 32,
            "agent.num_epochs": 4,
            "agent.discount": 0.97,
            "agent.optimizer.learning_rate": 3e-4,
            "agent.max_grad_norm": 1.0,
            "go1-joystick-ppo agent.entropy_cost": 1e-2,
            "g1-joystick-ppo agent.entropy_cost": 5e-3,
            "go1-joystick-ppo agent.clip_ratio": 0.3,
            "g1-joystick-ppo agent.clip_ratio": 0.2,
            "network.hidden_sizes": (512, 256, 128),
            "network.critic_observation": "privileged_state",
            "network.critic_input": "state",
            "normalisation.observations": True,
            "frames": 200_000_000,
        },
        {
            "env.num_envs": (256, "the robots run on CPUs"),
            "agent.num_minibatches": (8, "batches are smaller"),
            "frames": (20_000_000, "the robots run on CPUs"),
        },
    ),
]
