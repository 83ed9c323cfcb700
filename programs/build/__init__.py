"""Makes the parts of an experiment from its config, or from a finished run.

A config or the directory of a run comes in; environments, an agent, a replay, evaluators and seeds
go out. Open `agent.py` and `environments.py` first. `policies` has what several policies share.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.configs, rlstack.devices,
rlstack.distributions, rlstack.envs, rlstack.exploration, rlstack.families, rlstack.fused,
rlstack.jax_envs, rlstack.learning, rlstack.networks, rlstack.programs.config,
rlstack.programs.session, rlstack.random, rlstack.replay, rlstack.storage.
"""
