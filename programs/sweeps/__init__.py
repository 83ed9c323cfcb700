"""Sweeps: a search of the values of an experiment's options, one trial after the other.

`space` says which values an option may take, and `sweep` what a sweep's directory holds. `study`
suggests values, and is the only module that imports Optuna. `search` trains the trials in
processes, which `ray_hosts` starts on a Ray cluster. `report` shows trials, and `slurm` writes the
script of a Slurm job array.

May import: rlstack, rlstack.math, rlstack.programs, rlstack.programs.launchers,
rlstack.programs.reports, rlstack.programs.sets, rlstack.programs.tracking, rlstack.storage.
"""
