"""The command line: reads options, calls the rooms that do the work, and prints errors.

May import: rlstack, rlstack.acting, rlstack.imports, rlstack.programs, rlstack.programs.launchers,
rlstack.programs.policies, rlstack.programs.policy_sets, rlstack.programs.populations,
rlstack.programs.presets, rlstack.programs.reports, rlstack.programs.run, rlstack.programs.serving,
rlstack.programs.sets, rlstack.programs.status, rlstack.programs.sweeps, rlstack.programs.tracking.
"""
