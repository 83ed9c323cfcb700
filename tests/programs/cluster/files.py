"""Makes the files of `rlstack cluster`, and reads them."""

import re
import shlex

import yaml

from rlstack.programs.cli import commands


def made(capsys, kind, *words):
    """The file of a kind for cartpole-ppo, as text."""
    capsys.readouterr()
    assert commands.main("cluster", [kind, "cartpole-ppo", *map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """What is printed for a command that is refused."""
    capsys.readouterr()
    assert commands.main("cluster", list(map(str, words))) in (1, 2)
    found = capsys.readouterr()
    assert found.out == "" and found.err.count("\n") == 1
    return found.err


def documents(text):
    """The documents of a file of YAML, by their kind."""
    return {one.get("kind", ""): one for one in yaml.safe_load_all(text)}


def command_of_script(text):
    """The words of a script's last line, which replaces the shell."""
    last = text.splitlines()[-1]
    assert last.startswith("exec ")
    return shlex.split(last)[1:]


def directives(text):
    """The options of each part of a Slurm job."""
    parts = [[]]
    for option in re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE):
        if option == "hetjob":
            parts.append([])
        else:
            name, _, value = option.removeprefix("--").partition("=")
            parts[-1].append((name, value))
    return [dict(part) for part in parts]
