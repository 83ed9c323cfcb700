"""Sets of runs: an experiment with several seeds and values of its options.

`members` says which runs a set has, and what its directory holds. `train` runs them: in one
compiled program (`together`), one after the other, or in processes (`processes`).

May import: programs, programs.components, programs.nodes, programs.reports, programs.run,
programs.tracking, rlstack, rlstack.acting, rlstack.fused, rlstack.jax_envs, rlstack.learning,
rlstack.random, rlstack.storage.
"""
