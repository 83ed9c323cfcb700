"""The names of other libraries lead to options that exist, and hints say the same as the page."""

import re

import pytest

from rlstack.programs.config.options import entries, nearest
from rlstack.programs.config.presets import preset
from tests.docs.pages import blocks, section
from tests.docs.test_pages import runs_blocks, stdout_of

ROWS = [
    [re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split(" | ")]
    for line in section("docs/coming_from.md", "Options").splitlines()
    if line.startswith("| `--")
]
KNOWN = sorted(
    {
        f"--{entry.name}"
        for name in ("cartpole-ppo", "cartpole-dqn", "pendulum-sac")
        for entry in entries(preset(name))
    }
    | {"--run-dir"}
)


def test_the_table_has_all_libraries():
    assert len(ROWS) > 20
    assert [row[0] for row in ROWS if len(row[0]) != 1] == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
def test_each_name_is_understood(row):
    (own,), *others = row
    assert own in KNOWN
    names = [name for cell in others for name in cell]
    assert names
    assert {name: nearest(f"--{name}", KNOWN) for name in names} == dict.fromkeys(names, own)


@runs_blocks
def test_the_loop_without_a_program_learns(ran):
    page = "docs/seed_api.md"
    printed = stdout_of(ran, page, "# my_loop.py")
    assert float(re.search(r"mean return (\d+)", printed)[1]) > 100
    (program,) = (block.text for block in blocks(page) if "# my_loop.py" in block.text)
    assert len(program.splitlines()) <= 36
