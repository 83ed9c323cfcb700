"""Modules are imported when something of them is used, and nothing else changes."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlstack.imports.deferred import defer_package, deferred


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


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package `shop.goods` with modules `prices` and `taxes`, both of which it imports."""
    goods = tmp_path / "shop" / "goods"
    goods.mkdir(parents=True)
    (tmp_path / "shop" / "__init__.py").write_text(
        "import importlib\n\n\ndef __getattr__(name):\n"
        "    return importlib.import_module(f'shop.{name}')\n"
    )
    (goods / "__init__.py").write_text(
        "import shop.goods\nfrom . import taxes\nfrom .prices import price\n"
    )
    (goods / "prices.py").write_text("def price(x):\n    return 2 * x\n")
    (goods / "taxes.py").write_text("RATE = 0.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield "shop.goods"
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_modules_of_a_deferred_package_are_imported_without_it(package):
    defer_package(package)
    assert not _imported(["shop"])
    prices = importlib.import_module("shop.goods.prices")
    assert prices.price(3) == 6 and not _imported(["shop.goods.taxes"])


def test_a_deferred_package_is_imported_once_when_an_attribute_is_used(package):
    defer_package(package)
    prices = importlib.import_module("shop.goods.prices")
    goods = importlib.import_module("shop.goods")
    assert goods.prices is prices and not _imported(["shop.goods.taxes"])
    assert goods.price is prices.price and goods.taxes.RATE == 0.2
    assert importlib.import_module("shop").goods is importlib.import_module("shop.goods") is goods


def test_threads_that_use_a_deferred_package_wait_for_its_import(package, tmp_path):
    (tmp_path / "shop" / "goods" / "__init__.py").write_text(
        "import time\ntime.sleep(0.2)\nfrom .prices import price\n"
    )
    defer_package(package)
    goods = importlib.import_module("shop.goods")
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda x: goods.price(x), range(4), timeout=100))
    assert found == [0, 2, 4, 6]


def test_an_error_of_a_deferred_package_is_raised_where_it_is_used_each_time(package, tmp_path):
    (tmp_path / "shop" / "goods" / "__init__.py").write_text("1 / 0\n")
    defer_package(package)
    goods = importlib.import_module("shop.goods")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            _ = goods.price


def test_an_attribute_that_a_deferred_package_lacks_is_an_error(package):
    defer_package(package)
    goods = importlib.import_module("shop.goods")
    with pytest.raises(AttributeError, match="no attribute 'cost'"):
        _ = goods.cost


@pytest.mark.parametrize("name", ["shop.none", "none.goods"])
def test_a_package_that_is_not_installed_stays_an_import_error(package, name):
    defer_package(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def test_a_package_that_was_imported_is_not_deferred(package):
    goods = importlib.import_module(package)
    defer_package(package)
    assert importlib.import_module(package) is goods and _imported(["shop.goods.taxes"])


def test_orthogonal_initial_weights_need_two_modules_of_scipy_linalg():
    _run("""if True:
        import sys
        import numpy as np
        import rlstack.networks
        import jax
        import jax.numpy as jnp
        x = jnp.arange(12.0).reshape(4, 3) ** 2
        q, r = jnp.linalg.qr(x)
        assert "scipy.linalg._decomp_qr" not in sys.modules
        import scipy
        expected = scipy.linalg.qr(np.asarray(x), mode="economic")
        np.testing.assert_allclose(q, expected[0], atol=1e-5)
        np.testing.assert_allclose(r, expected[1], rtol=1e-5, atol=1e-4)
        import scipy.sparse.linalg
        from scipy.linalg import cython_blas, lapack
        assert scipy.linalg.cython_blas is cython_blas and scipy.linalg.lapack is lapack
    """)


def _run(program):
    subprocess.run([sys.executable, "-c", program], timeout=100, check=True)


@pytest.mark.skipif(importlib.util.find_spec("flax") is None, reason="needs Flax")
def test_commands_do_not_import_flax_which_haiku_imports_where_it_is_installed():
    _run("""if True:
        import sys
        import rlstack.programs.cli.train, rlstack.agents.ppo
        assert "haiku" in sys.modules and "flax" not in sys.modules
        import haiku as hk
        assert issubclass(hk.experimental.flax.Module, sys.modules["flax"].linen.Module)
    """)


def test_commands_do_not_import_tools_for_tests():
    _run("""if True:
        import sys
        import rlstack.programs.cli.train, rlstack.agents.ppo
        assert "haiku" in sys.modules and "absl.testing" not in sys.modules
        import haiku as hk
        assert hk.testing.transform_and_run(lambda x: 2 * x)(3) == 6
    """)
