"""The command line: rlstack train | eval | list | doctor | rerun.

Only what a command needs is imported, when it runs: `rlstack --help` must not wait for JAX.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

USAGE = """\
usage: rlstack COMMAND ...

  train PRESET [options]   train a preset; `rlstack train PRESET --help` lists the options
  train --resume RUN_DIR   go on with a run from its newest checkpoint
  eval RUN_DIR             judge the newest params of a run with the greedy policy
  list                     the presets
  doctor                   what is usable on this machine and, for the rest, the way out
  rerun DUMP_DIR           run an update that gave NaN again
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    # As `python script.py` has it: "module:callable" finds modules of the user's folder.
    sys.path.insert(0, os.getcwd())
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": _train,
        "eval": _eval,
        "list": _list,
        "doctor": _doctor,
        "rerun": _rerun,
    }
    if args[0] not in commands:
        return _fail(f"rlstack: there is no command {args[0]!r}{_nearest(args[0], commands)}")
    try:
        return commands[args[0]](args[1:])
    except (ValueError, OSError, ArithmeticError) as error:
        if os.environ.get("RLSTACK_TRACEBACK"):
            raise
        return _fail(f"rlstack {args[0]}: {error}")


def _train(args: list[str]) -> int:
    from programs.session import Interrupted
    from programs.train import resume, run

    if not args or args[0] in ("-h", "--help"):
        print(USAGE)
        return _list([])
    try:
        if args[0].startswith("-"):
            result = resume(*_parse_resume(args))
        else:
            experiment, run_dir = _parse_train(args[0], args[1:])
            result = run(experiment, run_dir)
    except Interrupted as stop:
        print(f"rlstack train: {stop}; everything is saved.", file=sys.stderr)
        return stop.exit_code
    print(f"eval_return_mean {result.eval_return_mean:.1f} +- {result.eval_return_std:.1f}")
    return 0
