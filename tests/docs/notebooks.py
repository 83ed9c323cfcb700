"""The notebooks of the documentation: executes them, and stores their outputs.

python -m tests.docs.notebooks      # docs/notebooks/*.ipynb, with new outputs
"""

import os
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
_SECONDS = 120  # for one cell


def execute(path, folder):
    """Returns a notebook with the outputs of its cells, which run in `folder`.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised an exception.
    """
    import nbclient
    import nbformat
    from jupyter_client import KernelManager

    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    # EnvPool's drawing of Jumanji sets this where it is imported, and pictures would be left out.
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    with tempfile.TemporaryDirectory() as sockets:  # Unix sockets, because ports are open to others
        kernel = KernelManager(transport="ipc", ip=f"{sockets}/kernel")
        try:
            return nbclient.NotebookClient(
                notebook, km=kernel, timeout=_SECONDS, resources=resources, record_timing=False
            ).execute(env=variables)
        finally:
            kernel.shutdown_kernel(now=True)


def _store(path):
    import nbformat

    with tempfile.TemporaryDirectory() as folder:
        text = nbformat.writes(execute(path, folder)).replace(f"{folder}/", "")
    path.write_text(text + "\n")


def main():
    """Stores new outputs in all notebooks."""
    for path in NOTEBOOKS:
        _store(path)
        print(Path(path).relative_to(ROOT))


if __name__ == "__main__":
    main()
