"""The XLA flags that a program sets; flags that the user has set stay."""

import types

import pytest

from programs.components import xla


@pytest.fixture
def environ(monkeypatch):
    """The environment variables, all removed."""
    variables = {}
    monkeypatch.setattr(xla, "os", types.SimpleNamespace(environ=variables))
    return variables


def test_convolutions_have_all_cores(environ):
    xla.configure(convolutions=True)
    assert environ == {}


def test_one_of_several_processes_has_one(environ):
    xla.configure(convolutions=True, single_thread=True)
    assert environ == {"XLA_FLAGS": xla.SINGLE_THREAD, xla.POOL_SIZE: "1"}


def test_small_networks_have_the_older_runtime_in_one_thread(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: True)
    xla.configure(convolutions=False)
    assert environ["XLA_FLAGS"].split() == [xla.LEGACY_CPU_RUNTIME, xla.SINGLE_THREAD]
    assert environ[xla.POOL_SIZE] == "1"


def test_a_runtime_that_is_not_there_is_not_asked_for(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: False)
    xla.configure(convolutions=False)
    assert environ == {}


def test_what_the_user_has_set_stays(environ, monkeypatch):
    monkeypatch.setattr(xla, "_has_legacy_runtime", lambda: True)
    mine = "--xla_cpu_use_thunk_runtime=true --xla_cpu_multi_thread_eigen=true"
    environ.update({"XLA_FLAGS": mine, xla.POOL_SIZE: "3"})
    xla.configure(convolutions=False, single_thread=True)
    assert environ == {"XLA_FLAGS": mine, xla.POOL_SIZE: "3"}
    environ.clear()
    environ["NPROC"] = "2"
    xla.configure(convolutions=False)
    assert environ[xla.POOL_SIZE] == "2"
