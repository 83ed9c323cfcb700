"""What holds for all tests."""

import atexit
import os
import shutil
import signal
import tempfile

# Tests, and the programs that they start, compile the same small functions again and again, so all
# processes of a run of the suite share one compilation cache. JAX reads these when it is imported.
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit the cache of the process above them
    _compiled = tempfile.mkdtemp(prefix="rlstack-compiled-")
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Tests compare outputs of few rows with those of many bit for bit. XLA's older runtime rounds both
# alike in all their shapes only so; whatever programs the tests start inherits it.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=true".strip()
)

import jax
import pytest
from xdist.scheduler import LoadFileScheduling

from programs.components import xla

# As `rlstack train` does: the suite acts and learns on small networks.
xla.configure(convolutions=False)

# A suite in the background, or in a worker, may ignore Ctrl-C, and its children would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _ByFile(LoadFileScheduling):
    """A worker takes a file at a time, since fixtures and compiled functions are shared in files.

    The files that start Ray go to one worker: two clusters at once would take each other's ports.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "ray" if "/test_ray" in file else file


def pytest_xdist_make_scheduler(config, log):
    return _ByFile(config, log)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled():
    """What a file's tests have compiled is of no use to the next, and is gigabytes in the end."""
    yield
    jax.clear_caches()
