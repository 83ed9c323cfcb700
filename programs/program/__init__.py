"""A run in several processes: which nodes it has, what each does, and who starts them.

The setup of an experiment comes in. `topologies.py` makes a `graph.Graph` of it: open it first. The
other files are the nodes; `multi_policy` and `data_parallel` have those of several policies and of
several learner processes. `launch` starts them as threads, as processes, with Launchpad or on Ray.

May import: rlstack, rlstack.acting, rlstack.configs, rlstack.devices, rlstack.envs,
rlstack.exploration, rlstack.learning, rlstack.programs.build, rlstack.programs.config,
rlstack.programs.pictures, rlstack.programs.session, rlstack.replay, rlstack.rpc, rlstack.specs,
rlstack.storage.
"""
