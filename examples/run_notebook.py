"""Run the notebook of this folder and store what its cells show. The manual has a page with them.

python examples/run_notebook.py
"""

import re
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).with_name("bf16_in_a_notebook.ipynb")


def executed() -> nbformat.NotebookNode:
    """Return the notebook with the outputs of its cells, run in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raised.
    """
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=300, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = {}  # times
            cell.outputs = [_without_ids(output) for output in cell.outputs if _is_kept(output)]
    return notebook


def _is_kept(output: Any) -> bool:
    """Return False for warnings about this machine, and for progress bars, which are empty at the end."""
    return output.get("name") != "stderr" and output.get("data", {}).get("text/html", "some") != ""


def _without_ids(output: Any) -> Any:
    """Replace what differs between two runs: addresses of objects, and the ids of tables that pandas styles."""
    for kind, text in output.get("data", {}).items():
        output["data"][kind] = re.sub(r"\bT_[0-9a-f]+_?", "T_", re.sub(r" at 0x[0-9a-f]+", "", text))
    return output


if __name__ == "__main__":
    nbformat.write(executed(), NOTEBOOK)
