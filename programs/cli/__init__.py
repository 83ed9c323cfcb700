"""The command line: reads options, calls `programs.run` and `programs.sets`, and prints errors.

May import: programs, programs.presets, programs.run, programs.sets, programs.tracking, rlstack,
rlstack.acting.
"""
