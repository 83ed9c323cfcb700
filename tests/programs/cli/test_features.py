"""The table of features has every choice of an option and every extra, and says how to get it."""

import importlib.util
import sys
import typing
from pathlib import Path

import pytest

from rlstack.imports import versions
from rlstack.programs.cli import features
from rlstack.programs.cli.features import Choice
from rlstack.programs.config.experiment import Experiment
from rlstack.rpc import transports

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[3]
SHORT = {"--launch": "--program.launch"}  # of the command line


def choices_of(option):
    """The values that a config field of an `Experiment` may have, by its option."""
    cls = Experiment
    *groups, name = option.removeprefix("--").split(".")
    for group in groups:
        cls = typing.get_type_hints(cls)[group]
    return set(typing.get_args(typing.get_type_hints(cls)[name])) - {"auto"}


@pytest.mark.parametrize(
    "option", sorted({c.feature for c in features.CHOICES if c.feature.startswith("--")})
)
def test_every_choice_of_an_option_has_a_line(option):
    assert {c.name for c in features.CHOICES if c.feature == option} == choices_of(
        SHORT.get(option, option)
    )


def test_every_extra_has_the_modules_that_it_is_said_to_have():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for module, extra in features.EXTRAS.items():
        assert any(need.lower().startswith(module.lower()) for need in extras[extra]), extra
    named = (ROOT / "docs" / "install.md").read_text()
    for extra in extras:
        assert f"`[{extra}]`" in named


def test_a_line_lists_what_works_and_says_how_to_get_the_rest(monkeypatch):
    choices = (
        Choice("--x", "one"),
        Choice("--x", "two", ("numpy", "ray")),
        Choice("--x", "three", ("flax", "gymnax")),
        Choice("y", "four", ("optax",)),
    )
    monkeypatch.setattr(features, "in_checkout", lambda: False)
    x, y = features.lines({"numpy"}.__contains__, choices)
    assert x == (
        "--x",
        "one",
        True,
        "two: pip install 'rlstack[cluster]'. three: pip install 'rlstack[flax,jax-envs]'.",
    )
    assert y == ("y", "", False, "four: needs optax: see above.")
    all_there, _ = features.lines(lambda _: True, choices)
    assert all_there == ("--x", "one, two, three", True, "")
    monkeypatch.setattr(features, "CHOSEN", ("--x",))
    assert features.lines(lambda _: True, choices)[0].found == "one (default), two, three"


def test_the_choice_that_is_marked_is_the_one_that_runs():
    found = {line.feature: line.found for line in features.lines(_installed)}
    assert transports.default() + " (default)" in found["--program.transport"].split(", ")


def _installed(module):
    return importlib.util.find_spec(module) is not None


def test_the_way_to_get_a_module_fits_the_installation_and_the_python(monkeypatch):
    assert features.install(["report"]) == "pip install -e '.[report]'"
    assert features.how_to_get(["reverb", "ray"], (3, 12)) == (
        "needs reverb, ray, and so CPython 3.10: `make venv LANE=launchpad`."
    )
    assert features.how_to_get(["reverb", "ray"], (3, 10)) == "needs reverb, ray: see above."
    monkeypatch.setattr(features, "in_checkout", lambda: False)
    assert features.how_to_get(["jax2onnx"], (3, 10)) == (
        "needs jax2onnx, and so CPython 3.11 or newer."
    )
    assert features.how_to_get(["reverb"], (3, 12)) == (
        "needs reverb, and so CPython 3.10: pip install rlstack with CPython 3.10."
    )


def test_optional_libraries_have_their_versions_and_unknown_ones_are_marked(monkeypatch):
    choices = (
        Choice("x", "own"),
        Choice("x", "gymnax", ("gymnax",)),
        Choice("x", "MPE", ("mpe2",)),
        Choice("x", "gif", ("PIL", "haiku")),
    )
    found = {"gymnax": "1.0.1", "mpe2": "7.0", "pillow": "12.0"}
    monkeypatch.setattr(versions, "installed", lambda name: found.get(name, ""))
    versions.unknown.cache_clear()
    (line,) = features.lines(lambda _: True, choices, features.version_of)
    versions.unknown.cache_clear()
    refused = "mpe2 7.0, refused: needs at least 1.0, below 2"
    assert line.found == f"own, gymnax 1.0.1, MPE ({refused}), gif (PIL 12.0)"
