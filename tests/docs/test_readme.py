"""README keeps its word: every block runs as written, and what is named exists."""

import inspect
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from programs.__main__ import USAGE
from programs.presets import PRESETS
from rlstack.agent import EpochAgent

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
SECONDS = 120  # for one block; the slowest takes about 15 alone on two cores
ALL_SECONDS = 900
TABLE_CELL = r"^\| (`[^|]+) \|"


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks():
    fence = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(README[: match.start()].count("\n") + 1, match[1], match[2])
        for match in fence.finditer(README)
    ]


def commands(text):
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def is_make(block):
    return all(command.startswith("make ") for command in commands(block.text))


BLOCKS = blocks()
RUNNABLE = [b for b in BLOCKS if b.language in ("sh", "python") and not is_make(b)]


def section(title):
    """The text under a heading, up to the next heading."""
    return README.split(f"# {title}\n", 1)[1].split("\n#", 1)[0]


def run(block, folder):
    """Runs a block as a reader would; returns its exit code and what it printed."""
    if block.language == "python":
        named = re.match(r"# (\w+\.py)\n", block.text)
        assert named, f"README.md:{block.line}: the first line must name the file"
        (folder / named[1]).write_text(block.text)
        command = ["python", named[1]]
    else:
        command = ["bash", "-e", "-o", "pipefail", "-c", block.text]
    env = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": ""}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that all of it can be ended
    )
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, stdout, stderr


def runs_blocks(test):
    """Marks a test that runs a page's blocks, of which some need the services."""
    mark = pytest.mark
    for decorate in (mark.slow, mark.chosen, mark.reference, mark.timeout(ALL_SECONDS)):
        test = decorate(test)
    return test


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    """A folder in which all blocks have run in order, and their outputs by line."""
    folder = tmp_path_factory.mktemp("reader")
    return folder, {block.line: run(block, folder) for block in RUNNABLE}


@runs_blocks
@pytest.mark.parametrize("block", RUNNABLE, ids=lambda block: f"line{block.line}")
def test_the_block_runs_as_written(reader, block):
    code, stdout, stderr = reader[1][block.line]
    assert code == 0, f"README.md:{block.line}:\n{stdout}\n{stderr[-3000:]}"


@runs_blocks
@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "text"], ids=lambda block: f"line{block.line}"
)
def test_the_shown_output_is_what_comes_but_for_the_numbers(reader, block):
    number = r"\d[\d,]*(?:\.\d+)?"
    pattern = number.join(re.escape(part) for part in re.split(number, block.text.strip()))
    before = max(line for line in reader[1] if line < block.line)
    assert re.search(pattern, reader[1][before][1]), f"no {pattern!r} in:\n{reader[1][before][1]}"


@runs_blocks
def test_a_run_leaves_what_the_table_says(reader):
    folder = reader[0]
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*) \|$", section("A run and what it leaves"), re.M))
    assert len(rows) >= 6
    for name in rows:
        where = "nan/dump-1" if name == "dump-N/" else f"first/{name}"
        assert (folder / "runs" / where).exists(), name
    result = (folder / "runs" / "first" / "result.json").read_text()
    stated = re.findall(r"`(\w+)`", rows["result.json"])
    assert stated
    assert all(f'"{field}"' in result for field in stated)
    assert not (folder / "runs" / "nan" / "result.json").exists()


@runs_blocks
def test_the_examples_do_what_the_text_says(reader):
    folder, outputs = reader

    def stdout_of(part):
        return next(outputs[block.line][1] for block in RUNNABLE if part in block.text)

    assert '"eval_episodes": 10' in stdout_of("rlstack eval")
    assert "exit code 1" in stdout_of("reward-scale inf")
    assert re.search(r"^loss +(nan|-?inf)$", stdout_of("reward-scale inf"), re.M)
    assert float(stdout_of("class ActorCritic")) > 150, "the agent learns nothing"
    learned = re.search(r"greedy return (\S+)", stdout_of("my_env:Corridor"))
    assert float(learned[1]) == 1.0
    assert '"network_factory": "my_net:make"' in (folder / "runs/net/config.json").read_text()


def test_the_first_two_commands_are_train_and_test():
    first = [command for block in BLOCKS for command in commands(block.text)][:2]
    assert first == ["make train", "make test"]


def test_every_make_target_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    in_blocks = [c for b in BLOCKS if is_make(b) for c in commands(b.text)]
    named = set(re.findall(r"\bmake ([a-z-]+)", "\n".join([*in_blocks, *code_spans()])))
    assert {"train", "test"} <= named <= targets


def code_spans():
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", prose)


def test_every_command_and_preset_exists():
    known = set(re.findall(r"^  (\w+) ", USAGE, re.M))
    words = "\n".join([*code_spans(), *(b.text for b in BLOCKS if b.language == "sh")])
    named = set(re.findall(r"\brlstack ([a-z]+)\b", words))
    assert named == known
    trained = set(re.findall(r"\brlstack train ([a-z][\w-]+)", words))
    assert trained <= set(PRESETS)


def test_every_place_of_the_house_exists():
    cells = re.findall(TABLE_CELL, section("Where things are"), re.M)
    paths = [path for cell in cells for path in re.findall(r"`([^`]+)`", cell)]
    assert len(paths) > 15
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_contract_has_the_signatures_of_the_code():
    stated = dict(re.findall(r"`(\w+)\(([^`)]*)\)`", section("The Agent contract")))
    del stated["LearnerOutput"]
    assert len(stated) >= 12
    for name, arguments in stated.items():
        parameters = [*inspect.signature(getattr(EpochAgent, name)).parameters][1:]
        assert arguments.split(", ") == parameters, name


def test_no_figure_is_left_open():
    # In two parts, so that a search for what is open does not find this line.
    for name in ("README.md", "BUILD_NOTES.md"):
        text = (ROOT / name).read_text()
        assert [line for line in text.splitlines() if "TODO" + "-" in line] == [], name
