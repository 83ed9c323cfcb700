"""Which tests run, and in which worker of pytest-xdist; a plugin of pytest."""

import zlib

import pytest
from xdist.scheduler import LoadFileScheduling


class ByFile(LoadFileScheduling):
    """A worker takes one file at a time, since the tests of a file share fixtures and compilations.

    One worker gets all files that start Ray: two clusters at once would have port conflicts. One
    gets all tests of pages, so that the blocks of a page run once. Each case of the table of faults
    starts a program of its own and mostly waits, so any worker may take it.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file.endswith("/test_node_faults.py"):
            return nodeid
        together = {"/test_ray": "ray", "tests/docs/": "docs"}
        return next((scope for part, scope in together.items() if part in file), file)

    def remove_node(self, node):
        """Gives the files of a worker that crashed to other workers, without the finished ones.

        xdist gives them the finished files too. A worker with a finished file runs no test and
        reports nothing. It then gets no other file, and the suite waits for ever.
        """
        units = self.assigned_work[node]
        self.assigned_work[node] = {k: unit for k, unit in units.items() if not all(unit.values())}
        crashed = super().remove_node(node)
        if crashed is not None:  # it has failed; it might end the next worker as well
            scope = self._split_scope(crashed)
            for queue in (self.workqueue, *self.assigned_work.values()):
                queue.get(scope, {crashed: True})[crashed] = True
        return crashed

    def schedule(self) -> None:
        """Gives work to all workers; a new one gets a second file if its first has one test."""
        super().schedule()
        for node in self.nodes:
            self._reschedule(node)


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        type=_part,
        default=(1, 1),
        metavar="K/N",
        help="only the K-th of N parts of the files",
    )
    parser.addoption(
        "--always",
        action="append",
        default=[],
        metavar="PATH",
        help="with --part: also this file, or all files of this folder",
    )


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"--part must be K/N with 1 <= K <= N; got {text!r}.")
    return int(part), int(parts)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Leaves out the files of the other parts; a file stays in its part when others are added."""
    part, parts = config.option.part
    always = tuple(path.rstrip("/") + end for path in config.option.always for end in ("/", "::"))
    kept, left_out = [], []
    for item in items:
        in_part = zlib.crc32(item.nodeid.split("::")[0].encode()) % parts == part - 1
        (kept if in_part or item.nodeid.startswith(always) else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
