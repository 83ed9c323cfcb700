"""What people do with finished and running runs: play, export, serve, compare, look.

Directories of runs come in. `report` compares runs, `status` shows how they are doing, `serve`
answers other programs, `seats` lets policies and people play against one another, and `export`
writes a policy for use without rlstack.

May import: rlstack, rlstack.acting, rlstack.configs, rlstack.entity, rlstack.envs, rlstack.math,
rlstack.programs.build, rlstack.programs.config, rlstack.programs.pictures,
rlstack.programs.program, rlstack.programs.session, rlstack.specs, rlstack.storage.
"""
