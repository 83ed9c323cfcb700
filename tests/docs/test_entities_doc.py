"""docs/entities.md is correct: its blocks run as written, and its tables match the code."""

import json
import re

from rlstack.entity.games import GAMES
from rlstack.networks import RaggedTransformerConfig
from rlstack.programs.config.presets import PRESETS
from tests.docs.pages import blocks, text_of
from tests.docs.test_pages import runs_blocks

NAME = "docs/entities.md"
PAGE = text_of(NAME)


@runs_blocks
def test_returns_are_what_the_text_says(ran):
    printed = [stdout for _, stdout, _ in ran(NAME)[1].values()]
    assert len(printed) >= 6
    (shown,) = [i for i, block in enumerate(blocks(NAME)) if block.is_output]
    before = blocks(NAME)[shown - 1]
    assert ran(NAME)[1][before.line][1] == blocks(NAME)[shown].text
    returns = [
        float(x) for text in printed for x in re.findall(r"^evaluation return (\S+)", text, re.M)
    ]
    fire, count, rule, clone, first, second = returns
    assert fire > 0.3 and count > 0.9 and rule == 1.0 and clone > 0.9
    assert abs(first) < 1e-6 and second > 0.5  # against itself, one side's win is the other's loss
    (by_opponent,) = [json.loads(text) for text in printed if "eval_return_by_opponent" in text]
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
