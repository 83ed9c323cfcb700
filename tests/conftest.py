"""Settings and hooks for all tests."""

import atexit
import contextlib
import gc
import itertools
import os
import re
import shutil
import signal
import sys
import tempfile

# Tests, and the programs that they start, compile the same small functions many times, so all
# processes of a run of the suite share one compilation cache. JAX reads these when it is imported.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the parent's cache
    _compiled = tempfile.mkdtemp(prefix="rlstack-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Tests compare outputs for few rows and for many rows bit for bit. XLA's older runtime rounds
# all shapes equally only with this flag; programs that the tests start inherit it.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=true".strip()
)

import jax
import pytest

from rlstack.programs.build import xla

pytest_plugins = ["tests.scheduling"]

_tests = itertools.count(1)  # that have run in this process

# The same as in `rlstack train`, because the suite acts and learns with small networks.
xla.configure(convolutions=False)

# A suite in the background, or in a worker, may ignore Ctrl-C, and its children would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config):
    # Quick tests spend most of their time in XLA's compiler, so they optimise least. Slow tests
    # compile as users do. XLA reads this at the first compilation.
    if config.option.markexpr.startswith("not slow"):
        os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"


def pytest_collection_finish():
    _pass_over_what_stays()


def _pass_over_what_stays():
    # Many tests collect garbage before they look for what is left. All that earlier files and
    # imports keep is passed over then, which would take up to 0.8 s each time.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    # Launchpad, Courier and Reverb are for CPython 3.10 only.
    needs_reference = {"launchpad", "courier", "reverb"}
    for item in items:
        values = getattr(getattr(item, "callspec", None), "params", {}).values()
        if needs_reference.intersection(value for value in values if type(value) is str):
            item.add_marker(pytest.mark.launchpad)


@pytest.fixture
def compilations(caplog):
    """Returns a context manager that lists the functions that XLA compiles in its body.

    The list is filled when the body ends. It has names such as ``jit(act)``.
    """

    @contextlib.contextmanager
    def compilations():
        names, before = [], len(caplog.messages)
        jax.config.update("jax_log_compiles", True)
        try:
            yield names
        finally:
            jax.config.update("jax_log_compiles", False)
        found = (re.search(r"XLA compilation of (\S+)", m) for m in caplog.messages[before:])
        names += [match[1] for match in found if match]

    return compilations


@pytest.fixture(scope="module")
def _s3_of_file():
    from tests.storage import s3_server

    with s3_server.started() as server:
        yield server


@pytest.fixture
def s3(_s3_of_file, monkeypatch):
    """A server of S3, which this process and its children use; one for each file of tests."""
    for name, value in _s3_of_file.variables.items():
        monkeypatch.setenv(name, value)
    yield _s3_of_file
    _s3_of_file.fault = lambda method, path, query: None


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled():
    """Drops compiled functions after each file: the next file cannot use them; they take GBs."""
    yield
    jax.clear_caches()
    _pass_over_what_stays()


@pytest.fixture(autouse=True)
def _few_mappings():
    """Drops compiled functions also within a file, before the process has too many mappings.

    Each compiled function maps memory. Linux allows a process 65,530 mappings (vm.max_map_count),
    and XLA's compiler crashes when it gets no more.
    """
    yield
    if next(_tests) % 10 == 0 and os.path.exists("/proc/self/maps"):
        with open("/proc/self/maps", "rb") as mappings:
            if sum(1 for _ in mappings) > 30_000:
                jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _forget_registered():
    """Forgets agents and presets of files that tests have written: other files list them all."""
    yield
    registry = sys.modules.get("rlstack.agents.registry")
    for config in list(registry.AGENTS._entries) if registry else ():
        if _is_written(config.__module__):
            del registry.AGENTS[config]
    presets = sys.modules.get("rlstack.programs.config.presets.registry")
    for name, make in list(presets.PRESETS._registered.items()) if presets else ():
        if _is_written(make.__closure__[0].cell_contents.__module__):
            del presets.PRESETS._registered[name], presets.PRESETS._described[name]


def _is_written(module):
    """Whether a test has written the file of a module."""
    return module.partition(".")[0] not in ("rlstack", "tests", "benchmarks", "examples")
