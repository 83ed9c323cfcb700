"""Files: checkpoints, datasets and logs.

May import: rlstack, rlstack.configs, rlstack.envs, rlstack.replay.
"""
