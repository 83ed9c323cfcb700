"""The script of a Slurm job array. The tasks of the array work on one sweep at the same time."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

FILE = "slurm.sh"
_SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --array=1-{tasks}{limit}
#SBATCH --output={output}
#SBATCH --signal=B:TERM@120
# Two minutes before its time limit a task saves and ends; submit the script again to continue.
cd {here}
exec {python} -m rlstack sweep --resume {root}{options}
"""


def write(root: Path, tasks: int, *, divided: bool, at_once: int = 0) -> str:
    """Writes the script to the directory of a sweep, and returns it.

    Args:
      root: the directory of the sweep, on a file system that all nodes share.
      tasks: the number of tasks.
      divided: True if each task trains a part of a set of runs; False if each task adds trials to a
        search until there are enough.
      at_once: maximum number of tasks that run at the same time; 0 for no limit.
    """
    text = _SCRIPT.format(
        name=shlex.quote(root.name),
        tasks=tasks,
        limit=f"%{at_once}" if at_once else "",
        output=shlex.quote(f"{root}/slurm-%A_%a.out"),
        here=shlex.quote(os.getcwd()),
        python=shlex.quote(sys.executable),
        root=shlex.quote(str(root)),
        options=f' --task "$SLURM_ARRAY_TASK_ID/{tasks}"' if divided else "",
    )
    (root / FILE).write_text(text)
    return text


def submit(root: Path) -> str:
    """Gives the script to Slurm; returns the answer of sbatch.

    Raises:
      ValueError: there is no sbatch, or it refuses the script.
    """
    command = ["sbatch", str(root / FILE)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except FileNotFoundError:
        raise ValueError(
            "Sweep: sbatch, which --submit needs, is not on PATH. Leave out --submit, and submit "
            f"{root / FILE} where Slurm is."
        ) from None
    if done.returncode:
        raise ValueError(f"Sweep: sbatch refused {root / FILE}: {done.stderr.strip()}")
    return done.stdout.strip()
