"""The command line: reads options, calls the rooms that do the work, and prints errors.

May import: programs, programs.policies, programs.presets, programs.run, programs.sets,
programs.status, programs.tracking, rlstack, rlstack.acting.
"""
