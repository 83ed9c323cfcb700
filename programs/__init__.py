"""Programs: everything that runs an experiment.

An experiment's config comes in, and a directory of a run goes out. Each folder is a room, in this
order: `config`, `session` (the life of a run on disk and screen), `build` (objects from a config),
`pictures`, `program` (several processes), `run`, `tools` (finished runs), `study` (many runs),
`cli`. Read `run/single_process.py` first, the whole loop in one process; then `run/train.py`.
"""

if __name__ != "rlstack.programs":  # from a checkout, where the folder is beside rlstack/
    raise ImportError("This package is rlstack.programs: import it by that name.")
