"""Many runs of one experiment: a study, which is trials x an executor x a scheduler.

A `study.Study` comes in: an experiment, seeds, values of its options, and the scheduler that
chooses the values of each trial (all combinations, `optuna` or `pbt`). A directory with a run for
each trial, and a report, go out. Open `train.py` first, which runs and resumes a study. Its
`executors` train the trials: in one compiled program (`vmapped`), one after the other, in
`processes`, or on other `hosts`.

May import: rlstack, rlstack.acting, rlstack.fused, rlstack.jax_envs, rlstack.learning,
rlstack.math, rlstack.programs.build, rlstack.programs.config, rlstack.programs.program,
rlstack.programs.run, rlstack.programs.session, rlstack.programs.tools, rlstack.random,
rlstack.storage.
"""
