"""Population-based training: members that copy better ones and change their hyperparameters.

`population` says what a population is, `selection` who copies whom, `lineage` what has happened so
far. `train` trains: in one compiled program (`together`), or members in turn or as processes, by
their checkpoints (`apart`).

May import: rlstack, rlstack.programs, rlstack.programs.reports, rlstack.programs.run,
rlstack.programs.sets, rlstack.programs.sweeps, rlstack.programs.tracking, rlstack.storage.
"""
