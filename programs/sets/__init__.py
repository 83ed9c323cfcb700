"""Sets of runs: an experiment with several seeds and values of its options.

`members` says which runs a set has, and what its directory holds. `train` runs them: in one
compiled program (`together`), one after the other, or in processes (`processes`).

May import: rlstack, rlstack.acting, rlstack.fused, rlstack.jax_envs, rlstack.learning,
rlstack.programs, rlstack.programs.components, rlstack.programs.nodes, rlstack.programs.reports,
rlstack.programs.run, rlstack.programs.tracking, rlstack.random, rlstack.storage.
"""
