"""Many runs of one experiment: seeds and grids, searches with Optuna, populations.

An experiment and values of its options come in; a directory with a run for each trial, and a
report, go out. `trials.py` says which runs a study has; open `study.py` first, which runs them: in
one compiled program (`together`), one after the other, or in processes (`executors`). `search.py`
and `populations.py` choose the values while the runs train.

May import: rlstack, rlstack.acting, rlstack.fused, rlstack.jax_envs, rlstack.learning,
rlstack.math, rlstack.programs.build, rlstack.programs.config, rlstack.programs.program,
rlstack.programs.run, rlstack.programs.session, rlstack.programs.tools, rlstack.random,
rlstack.storage.
"""
