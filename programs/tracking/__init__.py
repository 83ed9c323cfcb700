"""Records of a run: its directory, periodic logs and checkpoints, progress display and result.

May import: rlstack, rlstack.acting, rlstack.envs, rlstack.learning, rlstack.programs,
rlstack.storage.
"""
