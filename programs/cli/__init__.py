"""The command line: reads options, calls what `programs.run` offers, and prints errors.

May import: programs, programs.presets, programs.run, programs.tracking, rlstack, rlstack.acting.
"""
