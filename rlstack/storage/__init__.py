"""Files: checkpoints, datasets and logs.

May import: rlstack, rlstack.envs, rlstack.replay.
"""
