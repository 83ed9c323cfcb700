"""The table of features of other systems names tests, options and modules that exist."""

import ast
import dataclasses
import importlib
import re

from rlstack.agents import AGENTS
from rlstack.programs.config.experiment import EnvConfig, Experiment
from rlstack.replay import ReplayConfig
from tests.docs.pages import ROOT, code_spans, text_of

PAGE = "docs/origins.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
# Options that are not in the config, and those of other commands than train.
OTHER = {"--resume", "--seeds", "--vary", "--checkpoint"}


def rows():
    lines = [line for line in text_of(PAGE).splitlines() if line.startswith("| ")]
    return [line for line in lines if not re.match(r"\| (feature|---) \|", line)]


def options():
    """Every option of `rlstack train`."""
    found = set()

    def visit(kind, prefix):
        for field in dataclasses.fields(kind):
            name = f"{prefix}{field.name.replace('_', '-')}"
            found.add(f"--{name}")
            if dataclasses.is_dataclass(field.default):
                visit(type(field.default), f"{name}.")

    visit(Experiment, "")
    required = {EnvConfig: "env.", ReplayConfig: "replay."} | dict.fromkeys(AGENTS, "agent.")
    for kind, prefix in required.items():
        visit(kind, prefix)
    return found


def test_every_feature_has_a_test_that_exists():
    found = {row: TEST.findall(row.split(" | ")[-1]) for row in rows()}
    assert len(found) > 100
    assert [row for row, tests in found.items() if len(tests) != 1] == []
    functions = {}
    for (path, name), *_ in found.values():
        if path not in functions:
            tree = ast.parse((ROOT / path).read_text())
            functions[path] = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
        assert name in functions[path], f"{path}::{name}"


def test_every_option_and_module_exists():
    spans = {span.split(" ")[0] for span in code_spans(PAGE)}
    named = {span for span in spans if span.startswith("--")} - OTHER
    assert len(named) > 30
    assert named - options() == set()
    for name in {span for span in spans if re.fullmatch(r"(rlstack|programs)(\.\w+)+", span)}:
        module, _, last = name.rpartition(".")
        if last[0].isupper() or last == "run":
            assert hasattr(importlib.import_module(module), last), name
        else:
            importlib.import_module(name)


def test_every_feature_has_a_link_to_a_page():
    assert [row for row in rows() if "](" not in row] == []
    links = re.findall(r"\]\(([\w/]+\.md)(?:#[\w-]+)?\)", text_of(PAGE))
    assert len(links) > 20
    assert {link for link in links if not (ROOT / "docs" / link).exists()} == set()


def test_every_system_has_a_section():
    titles = re.findall(r"^## (.*)$", text_of(PAGE), re.M)
    names = "The API design, entity-gym, enn-trainer, rogue-net, entity-gym-rs, MARO, border"
    assert titles == names.split(", ")
