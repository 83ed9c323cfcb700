"""Population-based training: members that copy better ones and change their hyperparameters.

`population` says what a population is, `selection` who copies whom, `lineage` what has happened so
far. `train` trains: in one compiled program (`together`), or members in turn or as processes, by
their checkpoints (`apart`).

May import: programs, programs.reports, programs.run, programs.sets, programs.sweeps,
programs.tracking, rlstack, rlstack.storage.
"""
