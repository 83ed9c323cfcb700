"""The notebooks of the documentation run, and their outputs are of the kinds that they show."""

import pytest

from tests.docs.notebooks import NOTEBOOKS, execute


def kinds(notebook):
    """The kinds of outputs of each cell of code, without progress lines."""
    return [
        [
            sorted(output.get("data", {})) or output.output_type
            for output in cell.outputs
            if output.get("name") != "stderr"
        ]
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["compare_agents", "first_run", "own_agent"]


@pytest.mark.slow
@pytest.mark.chosen
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_what_it_has_stored(path, tmp_path):
    nbformat = pytest.importorskip("nbformat")
    stored = nbformat.read(path, as_version=4)
    assert kinds(execute(path, tmp_path)) == kinds(stored)
