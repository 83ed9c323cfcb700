"""`rlstack cluster`: files that run a training job on a cluster."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path

import tyro

from rlstack.programs.cli import train
from rlstack.programs.cli.options import UsageError, parse
from rlstack.programs.session.run_dir import RunDir
from rlstack.programs.tools.cluster.job import job_of
from rlstack.programs.tools.cluster.kubernetes import RUNS
from rlstack.programs.tools.cluster.options import KINDS, JobOptions
from rlstack.references import nearest

_OF_SEVERAL = ("--vary", "--seeds", "--population", "--resume", "--dry-run", "--profile")
_USAGE = """\
usage: rlstack cluster kuberay PRESET [options]    a RayJob for the KubeRay operator
       rlstack cluster jobset PRESET [options]     a JobSet for Kubernetes, without Ray
       rlstack cluster slurm PRESET [options]      a script for sbatch
       rlstack cluster skypilot PRESET [options]   a task for SkyPilot

Prints a file that trains a preset, or the experiment of a config file, on several hosts. Options
are those of `rlstack train`, and become those of the command in the file, and the ones that
`rlstack cluster KIND --help` explains.
"""


def main(args: list[str], modules: tuple[str, ...] = ()) -> int:
    """Runs the command; returns the exit code.

    Args:
      args: the arguments of the command.
      modules: the user's modules that the experiment needs.

    Raises:
      UsageError: an argument is wrong.
      ValueError: an option does not take its value.
    """
    if not args or args[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return 0
    kind, *rest = args
    if kind not in KINDS:
        raise UsageError(f"there is no kind {kind!r}{nearest(kind, KINDS)}")
    prog, options = f"rlstack cluster {kind}", KINDS[kind]
    if any(word in ("-h", "--help") for word in rest):
        parse(options, f"{prog} PRESET", ["--help"], config=(tyro.conf.FlagConversionOff,))
    if not rest or rest[0].startswith("-"):
        raise UsageError(f"a preset must come first, such as {kind} cartpole-ppo ({prog} --help)")
    name, *rest = rest
    own, words = _divided(rest, options)
    chosen = parse(options, prog, own, config=(tyro.conf.FlagConversionOff,))
    print(_text(kind, chosen, name, words, modules), end="")
    return 0


def _text(
    kind: str, options: JobOptions, name: str, given: Sequence[str], modules: Sequence[str]
) -> str:
    module = importlib.import_module(f"rlstack.programs.tools.cluster.{kind}")
    names = {train.full_name(word) for word in given if word.startswith("--")}
    for option in _OF_SEVERAL:
        if option in names:
            raise UsageError(f"{option} is not for a file that trains one run: leave it out")
    implied = module.IMPLIED
    if kind != "kuberay" and _value(given, "--topology") not in ("", "distributed"):
        implied = {}  # one host is enough
    rest = [word for pair in implied.items() if pair[0] not in names for word in pair]
    run_dir = _value(given, "--run-dir")
    if not run_dir:
        run_dir = _run_dir(options, name)
        rest += ["--run-dir", run_dir]
    elif implied.get("--program.launch") == "hosts" and RunDir.at(run_dir).is_stored:
        raise UsageError(
            f"--run-dir must name a directory that all hosts see; got {run_dir}. kuberay needs none"
        )
    if "--auto-resume" not in names:
        rest += ["--auto-resume", "True"]
    found = train.read(f"cluster {kind}", name, [*given, *rest], tuple(modules))
    assert found is not None
    launch = found.experiment.program.launch
    if implied and launch != implied["--program.launch"]:
        raise UsageError(f"--launch must be left out: {kind} decides it; got {launch}")
    own = [word for one in modules for word in ("--module", one)]
    command = ["rlstack", "train", *own, name, *given, *rest]
    return str(module.text(job_of(found.experiment, command, run_dir, options), options))


def _run_dir(options: JobOptions, name: str) -> str:
    """Returns the run directory on the volume."""
    if getattr(options, "volume", ""):
        return f"{RUNS}/{options.name or Path(name).stem}"
    also = ", or --volume a volume for it" if hasattr(options, "volume") else ""
    raise UsageError(f"--run-dir must name a directory that all hosts see{also}")


def _value(words: Sequence[str], option: str) -> str:
    """Returns the last value of an option; "" if it is not given."""
    found = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        name, equals, value = word.partition("=")
        if train.full_name(name) == option:
            found = value if equals else following
    return found


def _divided(args: Sequence[str], options: type[JobOptions]) -> tuple[list[str], list[str]]:
    """Returns the words of the file's own options, which take one value each, and all others."""
    fields = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(options)}
    own: list[str] = []
    others: list[str] = []
    takes_value = False
    for word, following in zip(args, [*args[1:], "--"], strict=False):
        name, equals, _ = word.partition("=")
        is_own = name.replace("_", "-") in fields
        (own if is_own or takes_value else others).append(word)
        takes_value = is_own and not equals and not following.startswith("--")
        if is_own and not equals and not takes_value and _is_flag(options, name):
            own.append("True")
    return own, others


def _is_flag(options: type[JobOptions], option: str) -> bool:
    """Returns whether an option alone means True."""
    field = option.removeprefix("--").replace("-", "_")
    return getattr(options, field, None) is False
