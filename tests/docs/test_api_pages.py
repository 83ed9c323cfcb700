"""docs/api.md is current, and has what a reader looks for."""

import importlib.util
import re

import rlstack
from tests.docs.pages import ROOT, text_of

_SPEC = importlib.util.spec_from_file_location("api_pages", ROOT / "docs" / "api_pages.py")
api_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(api_pages)
PAGE = text_of("docs/api.md")


def test_the_page_is_current():
    assert api_pages.page() == PAGE, "run `make api`"


def test_it_has_every_public_name_and_the_meaning_of_the_fields_of_configs():
    titles = re.findall(r"^### (\S+)$", PAGE, re.M)
    assert len(titles) == len(set(titles))
    assert {f"rlstack.{name}" for name in rlstack.__all__ if name != "__version__"} <= set(titles)
    agents = {title for title in titles if title.startswith("rlstack.agents.")}
    assert {"rlstack.agents.ppo.PPOConfig", "rlstack.agents.dqn.DQNConfig"} <= agents
    replay = PAGE.split("### rlstack.ReplayConfig\n")[1].split("\n### ")[0]
    assert "- `batch_size: int`: Items in one sample.\n" in replay
    assert "- `min_size: int = 1`: Items that must be inserted before the first sample.\n" in replay
    assert "### rlstack.programs.config.experiment.Experiment\n" in PAGE
    assert "``" not in re.sub(r"```", "", PAGE)
