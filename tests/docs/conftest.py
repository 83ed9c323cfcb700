"""Runs the blocks of each page once, for all tests."""

import fcntl
import pickle
import shutil

import pytest

from tests.docs.pages import ROOT, blocks, run, text_of


@pytest.fixture(scope="session")
def ran(tmp_path_factory, worker_id):
    """Returns a function from a page to (its folder, the results of its blocks by line).

    The blocks of a page run once, in order, in one folder; each page has its own folder. It holds
    a copy of the examples if the page says that its commands run there. The first worker of
    pytest-xdist that needs a page runs it; the others wait for its results.
    """
    base = tmp_path_factory.getbasetemp()
    pages = (base if worker_id == "master" else base.parent) / "pages"
    pages.mkdir(exist_ok=True)
    results = {}

    def of(page):
        if page not in results:
            name = page.replace("/", "-")
            with (pages / f"{name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                results[page] = _ran_once(page, pages / name)
        return results[page]

    return of


def _ran_once(page, folder):
    """What the blocks of the page gave, from its folder if they ran before."""
    stored = folder.with_suffix(".pickle")
    if not stored.exists():
        if "run in the folder `examples`" in " ".join(text_of(page).split()):
            shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
        folder.mkdir(exist_ok=True)
        outputs = {block.line: run(block, folder) for block in blocks(page) if block.runs}
        stored.write_bytes(pickle.dumps(outputs))
    return folder, pickle.loads(stored.read_bytes())
