"""Modules are imported when something of them is used, and nothing else changes."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from rlstack.imports.deferred import deferred


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A package `drawing` with a module `shapes`, and `user`, which imports both."""
    (tmp_path / "drawing").mkdir()
    (tmp_path / "drawing" / "__init__.py").write_text("COLOR = 'red'\n")
    (tmp_path / "drawing" / "shapes.py").write_text("def area(x, y=2):\n    return x * y\n")
    (tmp_path / "user.py").write_text(
        "import drawing\nimport drawing.shapes as shapes\nfrom drawing import shapes as same\n"
        "from drawing.shapes import area\nEARLY = area(1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield "drawing", "drawing.shapes"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def _imported(names):
    return [name for name in names if name in sys.modules]


def test_a_module_is_imported_when_an_attribute_is_used(packages):
    with deferred(*packages):
        user = importlib.import_module("user")
    assert not _imported(packages)
    assert user.drawing.COLOR == "red"
    assert _imported(packages) == ["drawing"]
    assert user.shapes.area(3) == user.same.area(3) == 6
    assert _imported(packages) == list(packages)


def test_a_function_that_was_taken_imports_its_module_when_called(packages):
    with deferred(*packages):
        user = importlib.import_module("user")
    assert user.EARLY is None and not _imported(packages)
    assert user.area(3, y=3) == 9 and _imported(packages) == list(packages)


def test_modules_that_are_there_already_are_given_as_they_are(packages):
    shapes = importlib.import_module("drawing.shapes")
    with deferred(*packages):
        user = importlib.import_module("user")
    assert user.shapes is shapes and user.area is shapes.area and user.EARLY == 2


def test_nothing_stands_for_a_module_after_an_error(packages):
    with pytest.raises(ZeroDivisionError), deferred(*packages):
        raise ZeroDivisionError
    assert not _imported(packages)
    assert importlib.import_module("drawing.shapes").area(2) == 4


def test_an_attribute_that_a_module_lacks_is_an_error(packages):
    with deferred(*packages):
        user = importlib.import_module("user")
    with pytest.raises(AttributeError, match="no attribute 'COLOUR'"):
        _ = user.drawing.COLOUR


def _run(program):
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="needs Flax")
def test_commands_do_not_import_flax_which_haiku_imports_where_it_is_installed():
    _run("""if True:
        import sys
        import programs.cli.commands
        assert "haiku" in sys.modules and "flax" not in sys.modules
        import haiku as hk
        assert issubclass(hk.experimental.flax.Module, sys.modules["flax"].linen.Module)
    """)


def test_commands_do_not_import_tools_for_tests():
    _run("""if True:
        import sys
        import programs.cli.commands
        assert "haiku" in sys.modules and "absl.testing" not in sys.modules
        import haiku as hk
        assert hk.testing.transform_and_run(lambda x: 2 * x)(3) == 6
    """)
