"""The command line: reads options, calls the rooms that do the work, and prints errors.

May import: programs, programs.launchers, programs.policies, programs.policy_sets,
programs.populations, programs.presets, programs.reports, programs.run, programs.serving,
programs.sets, programs.status, programs.sweeps, programs.tracking, rlstack, rlstack.acting,
rlstack.imports.
"""
