"""Correctness, then throughput, on JAX's default device: one command for a machine with a GPU.

    python -m benchmarks.accelerator [--quick] [--out FILE] [--only PART ...] [--minutes M]

Each part runs in a process of its own, with a time limit, and FILE is written after each. The same
command goes on with the parts that FILE does not have; a part that failed runs again. Parts for
which a package is missing, or for which no time is left, say so. The last line of output is the
JSON object in FILE.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.accelerator.parts import FULL, MORE, QUICK, Part
from rlstack.programs.session.result import git_commit
from rlstack.storage import files

_CHILD = "benchmarks.accelerator.child"


def main() -> None:
    """Runs the parts that are left; exits with 1 if one failed or a number was wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accelerator")
    parser.add_argument("--quick", action="store_true", help="all parts in small form, as a test")
    parser.add_argument("--out", type=Path, help="the JSON file; default runs/accelerator.json")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PART",
        help="these parts, again if they are done; some parts run only if they are named",
    )
    parser.add_argument("--minutes", type=float, default=8.5, help="begin no part after so long")
    parser.add_argument("--list", action="store_true", help="list the parts and end")
    chosen = parser.parse_args()
    parts = QUICK if chosen.quick else FULL
    by_name = () if chosen.quick else MORE
    if chosen.list:
        print("\n".join(part.name for part in (*parts, *by_name)))
        return
    parts = (*parts, *by_name) if chosen.only else parts
    unknown = set(chosen.only or ()) - {part.name for part in parts}
    if unknown:
        names = ", ".join(part.name for part in parts)
        parser.error(f"--only must name parts; got {', '.join(unknown)}. Parts: {names}")
    out = chosen.out or Path("runs/accelerator-quick.json" if chosen.quick else _DEFAULT)
    found = _found(out, quick=chosen.quick)
    end = time.monotonic() + 60 * chosen.minutes
    for part in parts:
        done = "seconds" in found["parts"].get(part.name, {})
        if (done and not chosen.only) or (chosen.only and part.name not in chosen.only):
            continue
        left = end - time.monotonic()
        if left < min(part.seconds, 60 * chosen.minutes):
            found["parts"][part.name] = {"skipped": "no time left; run the command again"}
        else:
            found["parts"][part.name] = _run(part, chosen.quick, min(left, part.limit))
        print(f"{part.name:24} {_row(found['parts'][part.name])}", flush=True)
        _write(out, found)
    print(json.dumps(found, allow_nan=False))
    if any("error" in part or part.get("passed") is False for part in found["parts"].values()):
        raise SystemExit(1)


_LINES = 30  # of the output of a part that failed
_DEFAULT = "runs/accelerator.json"


def _found(out: Path, *, quick: bool) -> dict[str, Any]:
    """Returns what the file has, if it is of this commit and form; else an empty result."""
    new = {"name": "accelerator", "quick": quick, "commit": git_commit(), "parts": {}}
    if not out.is_file():
        return new
    old = json.loads(out.read_text())
    same = all(old.get(key) == new[key] for key in ("name", "quick", "commit"))
    return old if same else new


def _write(out: Path, found: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, json.dumps(found, indent=1, allow_nan=False) + "\n")


def _run(part: Part, quick: bool, limit: float) -> dict[str, Any]:
    """Runs a part in a child process; returns what it found, or its error."""
    command = [sys.executable, "-m", _CHILD, part.name, *(["--quick"] if quick else [])]
    flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), part.xla_flags)))
    env = os.environ | ({"XLA_FLAGS": flags} if flags else {})
    started = time.monotonic()
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not end within {limit:.0f} s"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": lines[-1], "output": lines[-_LINES:]}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"seconds": round(time.monotonic() - started, 1), **found}


def _row(found: dict[str, Any]) -> str:
    """Returns the main numbers of a part as one line."""
    if not {"seconds"} <= set(found):
        return next(f"{key}: {value}" for key, value in found.items())
    numbers = {k: v for k, v in found.items() if isinstance(v, int | float | str) and k != "device"}
    return ", ".join(f"{name} {value}" for name, value in numbers.items())


if __name__ == "__main__":
    main()
