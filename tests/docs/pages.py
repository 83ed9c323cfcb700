"""The documentation pages, their code blocks, and a function that runs these like a reader."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SECONDS = 120  # for one block; the slowest takes about 50 s on two idle cores
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# A block below such a comment does not run; the comment gives the reason.
NOT_RUN = re.compile(r"<!-- not run: [^\n]+ -->\s*\Z")


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str  # path from the root of the checkout
    line: int
    language: str
    text: str
    excused: bool  # whether a comment above it says why it is not run

    @property
    def is_make(self):
        return all(command.startswith("make ") for command in commands(self.text))

    @property
    def is_source(self):
        """Whether it shows a file of the checkout; its first line is the path."""
        return self.language == "python" and re.match(r"# \w+/\S+\.py\n", self.text) is not None

    @property
    def runs(self):
        shown = self.excused or self.is_make or self.is_source
        return self.language in ("sh", "python") and not shown

    @property
    def is_output(self):
        """Whether it shows the output of the block before it."""
        return self.language == "text" and not self.excused

    def __str__(self):
        return f"{self.page}:{self.line}"


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page):
    text = text_of(page)
    return [
        Block(
            page,
            text[: found.start()].count("\n") + 1,
            found[2],
            textwrap.dedent(found[3]),
            bool(NOT_RUN.search(text[: found.start()])),
        )
        for found in FENCE.finditer(text)
    ]


def commands(text):
    lines = text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def section(page, title):
    """The text of a page under a heading, up to the next heading."""
    return text_of(page).split(f"# {title}\n", 1)[1].split("\n#", 1)[0]


def code_spans(page):
    prose = FENCE.sub("", text_of(page))
    return re.findall(r"`([^`]+)`", prose)


PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
BLOCKS = [block for page in PAGES for block in blocks(page)]


def run(block, folder):
    """Runs a block as a reader would; returns its exit code and its output.

    The exit code of a block that takes too long is None.
    """
    if block.language == "python":
        named = re.match(r"# (\w+\.py)\n", block.text)
        assert named, f"{block}: the first line must name the file"
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
        start_new_session=True,  # so that all its processes can be ended
    )
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return (None, *_killed(process))
    finally:
        if process.poll() is None:
            _killed(process)
    return process.returncode, stdout, stderr


def _killed(process):
    """Kills a process and its children, and returns the output and the errors so far."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()
