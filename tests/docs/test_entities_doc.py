"""docs/entities.md keeps its word: its blocks run as written, and its tables name what there is."""

import json
import re
from pathlib import Path

import pytest

from programs.presets import PRESETS
from rlstack.entity.games import GAMES
from rlstack.networks import RaggedTransformerConfig
from tests.docs.test_readme import Block, run, runs_blocks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "entities.md").read_text()
BLOCKS = [
    Block(PAGE[: match.start()].count("\n") + 1, match[1], match[2])
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the blocks print that run, in order in one folder; of text blocks what they show."""
    folder = tmp_path_factory.mktemp("reader")
    found = []
    for block in BLOCKS:
        if block.language == "text":
            found.append(block.text)
            continue
        code, stdout, stderr = run(block, folder)
        assert code == 0, f"docs/entities.md:{block.line}:\n{stdout}\n{stderr[-3000:]}"
        found.append(stdout)
    return found


@runs_blocks
def test_every_block_runs_as_written(said):
    assert len(said) == len(BLOCKS) >= 6
    (shown,) = [i for i, block in enumerate(BLOCKS) if block.language == "text"]
    assert said[shown] == said[shown - 1]
    returns = [float(x) for text in said for x in re.findall(r"^greedy return (\S+)", text, re.M)]
    fire, count, rule, clone, first, second = returns
    assert fire > 0.3 and count > 0.9 and rule == 1.0 and clone > 0.9
    assert abs(first) < 1e-6 and second > 0.5  # among its own a win is another's loss
    (by_opponent,) = [json.loads(text) for text in said if "eval_return_by_opponent" in text]
    assert len(by_opponent["eval_return_by_opponent"]) == 2


def test_tables_name_what_there_is():
    games = re.findall(r"^\| ([A-Z]\w+) \|", PAGE, re.MULTILINE)
    assert games == list(GAMES)
    for name in re.findall(r"`(entity-[\w-]+)`", PAGE):
        assert name in PRESETS
    (table,) = re.findall(r"^\| option .*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    options = set(re.findall(r"`([a-z-]+)`", "".join(re.findall(r"^\|[^|]*\|", table, re.M))))
    fields = {field.replace("_", "-") for field in RaggedTransformerConfig.__dataclass_fields__}
    assert options == fields
