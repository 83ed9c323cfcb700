"""What holds for all tests."""

import atexit
import os
import shutil
import signal
import tempfile

# Tests, and the programs that they start, compile the same small functions again and again: what
# one process has compiled the others read. JAX looks at these when it is imported.
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

import jax  # noqa: E402
import pytest  # noqa: E402

from programs.build import xla  # noqa: E402

# As `rlstack train` does: the suite acts and learns on small networks.
xla.configure(convolutions=False)

# Who runs the suite in the background may have it ignore Ctrl-C, which its children would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled():
    """What a file's tests have compiled is of no use to the next, and is gigabytes in the end."""
    yield
    jax.clear_caches()
