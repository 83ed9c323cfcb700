"""The command line: reads options, calls the rooms that do the work, and prints errors.

May import: rlstack, rlstack.acting, rlstack.imports, rlstack.programs.build,
rlstack.programs.config, rlstack.programs.pictures, rlstack.programs.program, rlstack.programs.run,
rlstack.programs.session, rlstack.programs.study, rlstack.programs.tools.
"""
