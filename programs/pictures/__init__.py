"""How a policy plays, as pictures: on a screen, in a window, as a video.

A policy and an environment come in, frames go out. Open `watch.py` first. `training_videos` are the
videos that a run makes of its evaluations.

May import: rlstack, rlstack.configs, rlstack.entity, rlstack.envs, rlstack.programs.build,
rlstack.programs.config, rlstack.programs.session, rlstack.storage.
"""
