"""One run: train, resume, plan, check, evaluate, record, compare.

An experiment comes in; its directory and its result go out. Open `train.py` first, then the engine
that it drives: `host.py`, `fused.py`, `offline.py`, or for several processes `launch.py`.

May import: rlstack, rlstack.acting, rlstack.agents, rlstack.configs, rlstack.envs,
rlstack.families, rlstack.fused, rlstack.imports, rlstack.jax_envs, rlstack.learning,
rlstack.networks, rlstack.programs.build, rlstack.programs.config, rlstack.programs.pictures,
rlstack.programs.program, rlstack.programs.session, rlstack.random, rlstack.rpc, rlstack.specs,
rlstack.storage.
"""
