"""The life of a run on disk and on the screen, whatever trains it.

Logs, evaluations and checkpoints come in; a directory with logs, checkpoints and the result goes
out. Open `periodic.py` first, which decides what is due, then `run_dir.py`. `profile.py` shows
where the time of a run goes.

May import: rlstack, rlstack.acting, rlstack.envs, rlstack.learning, rlstack.programs.config,
rlstack.rpc, rlstack.storage.
"""
