"""What the allocator keeps of freed memory."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="only glibc gives threads arenas of their own"
)

VERSION = tuple(int(part) for part in platform.libc_ver()[1].split(".")[:2] if part.isdigit())
KEEP = "from rlstack.storage.allocator import keep_freed_memory; keep_freed_memory()"

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
def test_threads_share_one_arena():
    assert _number_printed(ARENAS, first="") > 4
    assert _number_printed(ARENAS, first=KEEP) == 0


# A block as large as the intermediate results of an update is allocated, written and freed twice.
PAGES = """
import ctypes, resource, threading
{first}
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def pages(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(size)))
    libc.memset(block, 1, ctypes.c_size_t(size))
    libc.free(block)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def twice():
    pages({megabytes} << 20)
    print(pages({megabytes} << 20))

thread = threading.Thread(target=twice)
thread.start()
thread.join()
"""


@pytest.mark.timeout(60)
@pytest.mark.skipif(VERSION < (2, 35), reason="glibc before 2.35 has a limit of 32 MB")
def test_a_large_block_is_used_again_without_new_pages():
    assert _number_printed(PAGES, first="", megabytes=64) > 1_000
    assert _number_printed(PAGES, first=KEEP, megabytes=64) < 100


@pytest.mark.timeout(60)
def test_free_memory_can_still_be_returned():
    returned = KEEP + "; from rlstack.storage.allocator import return_free_memory"
    code = PAGES.replace("print(", "return_free_memory(); print(")
    assert _number_printed(code, first=returned, megabytes=64) > 1_000


def _number_printed(code: str, **values: object) -> int:
    command = [sys.executable, "-c", code.format(**values)]
    return int(subprocess.check_output(command, timeout=30))
