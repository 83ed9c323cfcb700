"""The command `rlstack`.

Only what a command needs is imported, when it runs: `rlstack --help` must not wait for JAX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

USAGE = """\
usage: rlstack COMMAND ...

  train PRESET [options]   train a preset; `rlstack train PRESET --help` lists the options
  train --resume RUN_DIR   go on with a run from its newest checkpoint
  eval RUN_DIR             judge the newest params of a run with the greedy policy
  report RUN_DIR ...       a table and learning curves of finished runs
  record RUN_DIR           play the newest params of a run and write a dataset, for train --data
  play ENV                 play an entity environment by hand, beside a run's agent or without
  list                     the presets
  doctor                   what is usable on this machine and, for the rest, the way out
  rerun DUMP_DIR           make an update that gave NaN again
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    # As `python script.py` has it: "module:callable" finds modules of the user's folder.
    sys.path.insert(0, os.getcwd())
    command, *rest = args
    if command == "doctor":
        from programs.cli import doctor

        return doctor.main()
    from programs.cli import commands as cli

    return cli.main(command, rest)


if __name__ == "__main__":
    sys.exit(main())
