"""Runs the blocks of each page once, for all tests."""

import shutil

import pytest

from tests.docs.pages import ROOT, blocks, run, text_of


@pytest.fixture(scope="session")
def ran(tmp_path_factory):
    """Returns a function from a page to (its folder, the results of its blocks by line).

    The blocks of a page run once, in order, in one folder; each page has its own folder. It holds
    a copy of the examples if the page says that its commands run there.
    """
    results = {}

    def of(page):
        if page not in results:
            folder = tmp_path_factory.mktemp("reader")
            if "run in the folder `examples`" in " ".join(text_of(page).split()):
                shutil.copytree(ROOT / "examples", folder, dirs_exist_ok=True)
            outputs = {block.line: run(block, folder) for block in blocks(page) if block.runs}
            results[page] = folder, outputs
        return results[page]

    return of
