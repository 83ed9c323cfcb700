"""Runs a script under a process title: ``python titled.py TITLE SCRIPT ARGUMENT...``.

The title is there, and signs of life begin, before the script has imported anything. This imports
almost nothing, because it runs before the script's packages.
"""

from __future__ import annotations

import os
import runpy
import sys

from rlstack.programs.program.launch import signs
from rlstack.programs.session import signals
from rlstack.programs.session.titles import set_title


def main() -> None:
    """Runs the script of the command line as Python would."""
    set_title(sys.argv[1])
    signals.give_handlers_a_stack()
    signs.give()
    sys.argv = sys.argv[2:]
    if not getattr(sys.flags, "safe_path", False):  # otherwise it is an entry of PYTHONPATH
        sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
