"""The doctor command reports on this machine, and on packages that crash, hang or are missing."""

import sys

import pytest

from rlstack.programs.__main__ import _how_to_repair
from rlstack.programs.cli import doctor, features
from rlstack.programs.cli.doctor import Check


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(200)
def test_this_machine_can_run_a_single_process(capsys):
    found = []

    def look():
        found.extend(doctor.report())
        return found

    assert doctor.main(look) == 0
    checks = {check.name: check for check in found}
    assert checks["jax"].usable
    assert checks["jax"].found
    assert checks["jax devices"].found
    assert checks["Python"].found.startswith("cpython 3.")
    assert checks["topology single_process"].usable
    assert [check for check in found if not check.usable and not check.detail] == []
    if sys.version_info[:2] != (3, 10):
        assert "no wheels for Python 3." in checks["reverb"].detail
        assert "`make venv LANE=launchpad`" in checks["reverb"].detail
        assert checks["topology distributed"].usable
    default = "reverb" if checks["reverb"].usable else "table"
    assert checks["--replay.service"].found.startswith(f"{default} (default)")
    printed = capsys.readouterr().out
    for name in checks:
        assert name in printed


@pytest.mark.launchpad
@pytest.mark.timeout(100)
def test_the_services_import_in_the_reference_lane():
    pytest.importorskip("launchpad")
    found = doctor.probe({"courier": "dm-launchpad", "launchpad": "dm-launchpad"}, 60.0)
    assert [(f["version"], f["error"]) for f in found] == [("0.5.2", "")] * 2


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(60)
def test_a_package_that_crashes_or_hangs_does_not_end_the_report(tmp_path, monkeypatch):
    modules = {
        "fine": "print('noise')",
        "crashes": "import os; os.abort()",
        "exits": "raise SystemExit(0)",
        "leaves": "import os; os._exit(0)",
        "hangs": "import time; time.sleep(60)",
        "raises": "raise ImportError('libpython3.10.so.1.0: cannot open shared object file')",
        "last": "",
    }
    for name, text in modules.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.probe({name: name for name in [*modules, "missing"]}, timeout=3.0)
    errors = {record["module"]: record["error"] for record in found}
    assert errors["fine"] == errors["last"] == ""
    assert "ended the process (code -6)" in errors["crashes"]
    assert "SystemExit" in errors["exits"]
    assert "ended the process (code 0)" in errors["leaves"]
    assert "took over 3 s" in errors["hangs"]
    assert "libpython3.10" in errors["raises"]
    assert "No module named 'missing'" in errors["missing"]


@pytest.mark.parametrize(
    ("module", "error", "version", "words"),
    [
        (
            "reverb",
            "No module named 'reverb'",
            (3, 12),
            ["Python 3.12", "3.10", "`make venv LANE=launchpad`"],
        ),
        (
            "courier",
            "ImportError: libpython3.10.so.1.0: cannot open shared object file",
            (3, 10),
            ["apt install libpython3.10", "uv python install 3.10"],
        ),
        ("optax", "No module named 'optax'", (3, 12), ["not installed", "`make venv`"]),
        (
            "envpool",
            "ImportError: libEGL.so.1: cannot open shared object file",
            (3, 12),
            ["apt install libegl1"],
        ),
        ("jax", "RuntimeError: odd", (3, 12), ["make clean venv"]),
    ],
)
def test_how_to_fix_a_package(module, error, version, words):
    advice = doctor.how_to_fix(module, error, version)
    for word in words:
        assert word in advice


def test_a_missing_core_package_makes_single_process_unusable(capsys):
    checks = [Check("Python", "cpython 3.10", True)]
    checks += [Check(name, "", name != "optax") for name in [*doctor.CORE, *doctor.SERVICES]]
    topologies = doctor._topologies(checks)
    assert topologies[0] == Check("topology single_process", "", False, "needs optax: see above.")
    assert doctor.main(lambda: [*checks, *topologies]) == 1
    assert "needs optax" in capsys.readouterr().out


def test_shared_memory_that_is_missing_or_small(tmp_path, monkeypatch):
    missing = doctor._shm(str(tmp_path / "none"))
    assert not missing.usable
    assert "mount" in missing.detail
    monkeypatch.setattr(doctor, "_SMALL_SHM", 1 << 62)
    assert "--shm-size" in doctor._shm(str(tmp_path)).detail


def test_another_package_of_the_stacks_name_is_named(monkeypatch):
    assert features.owners("numpy") == {"numpy"}
    assert doctor._names().usable
    monkeypatch.setattr(features, "owners", lambda _: {"rlstack", "stack-of-others"})
    check = doctor._names()
    assert not check.usable and "pip uninstall stack-of-others" in check.detail
    assert "stack-of-others also installs a package named rlstack" in _how_to_repair()
