"""What the allocator keeps of the memory of threads."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives threads arenas of their own"
)

# Twelve threads hold memory at the same time. An arena is a mapping that begins at a multiple of
# 64 MB; the first one is not among them.
ARENAS = """
import re, sys, threading
{first}
held, ready, done = [], threading.Barrier(13), threading.Event()

def hold():
    held.append([bytearray(2_000) for _ in range(100)])
    ready.wait()
    done.wait()

threads = [threading.Thread(target=hold) for _ in range(12)]
for thread in threads:
    thread.start()
ready.wait()
anonymous = r"^([0-9a-f]+)-[0-9a-f]+ rw-p 00000000 00:00 0 *$"
mapped = re.findall(anonymous, open("/proc/self/maps").read(), re.M)
print(sum(int(begin, 16) % (64 << 20) == 0 for begin in mapped))
done.set()
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_share_few_arenas():
    few = "from rlstack.storage.allocator import use_few_arenas; use_few_arenas()"
    arenas = [
        int(subprocess.check_output([sys.executable, "-c", ARENAS.format(first=first)], timeout=30))
        for first in ("", few)
    ]
    assert arenas[0] > 4
    assert arenas[1] <= 2
