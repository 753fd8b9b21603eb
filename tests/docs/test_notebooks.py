"""Every notebook equals its source, and shows on a new run what its stored outputs show: the same kinds, tables and pictures."""

from __future__ import annotations

import base64
import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NEEDS = {
    "2": ("torch", "transformers"),
    "4": ("xllamacpp",),
    "5": ("xllamacpp",),
    "7": ("torch", "transformers", "modelopt"),
}
RICH = {"2": 1, "4": 1, "5": 1, "7": 1, "8": 2}  # tables
PICTURES = {"1": 1, "2": 2, "3": 1, "5": 1, "6": 2, "8": 1}
MAX_BYTES = 300_000
# By the notebook's number: numbers of prompts that a reader has time for, and fewer that compute the same.
FEWER = {
    "2": {'"tool_web"]), 4': '"tool_web"]), 1', '["tool_web"]), 3': '["tool_web"]), 1'},
    "7": {"\nn = 6\n": "\nn = 1\n", "calib_samples=8": "calib_samples=2"},
}
needs_jupyter = pytest.mark.skipif(
    any(
        importlib.util.find_spec(m) is None
        for m in ("nbclient", "nbformat", "ipykernel", "matplotlib", "pandas")
    ),
    reason="nbclient, nbformat, ipykernel, matplotlib or pandas is not installed (the notebooks extra), so no notebook can run",
)


def test_there_are_eight():
    assert [n.name[0] for n in NOTEBOOKS] == list("12345678")


def test_they_are_built_from_their_sources():
    spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks/build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    sources = {s.stem: s for s in (ROOT / "notebooks/src").glob("*.py")}
    assert set(sources) == {n.stem for n in NOTEBOOKS}
    for notebook in NOTEBOOKS:
        text = sources[notebook.stem].read_text(encoding="utf-8")
        assert build.faults(notebook, text) == "", f"{notebook.name}: python notebooks/build.py"
        compile(text, notebook.stem, "exec")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_stored_outputs_are_small_and_name_no_place_of_a_machine(path):
    text = path.read_text(encoding="utf-8")
    assert path.stat().st_size <= MAX_BYTES
    assert "Traceback" not in text and "/home/" not in text and "site-packages" not in text
    assert str(ROOT) not in text


def shape_of(outputs):
    """Return what a cell shows, whatever the numbers: kinds of output, and the header and columns of tables."""
    shape = []
    for output in outputs:
        if output["output_type"] == "stream":
            kind = output["name"]
        else:
            kind = tuple(sorted(output.get("data", ())))
        html = "".join(output.get("data", {}).get("text/html", ""))
        header = re.findall(r"<th>(.*?)</th>", html.partition("</thead>")[0])
        if kind != "stderr" and (not shape or shape[-1] != (kind, header)):
            shape.append((kind, header))
    return shape


@pytest.fixture(scope="module")
def kernel():
    """One kernel for all notebooks, whose processes would import torch, pandas and matplotlib seven times."""
    from jupyter_client import AsyncKernelManager
    from jupyter_client.utils import run_sync

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        patch.setenv("PYTHONPATH", str(ROOT))
        manager = AsyncKernelManager()
        yield manager
        if manager.has_kernel:
            run_sync(manager.shutdown_kernel)(now=True)


@needs_jupyter
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs(path, kernel):
    import nbclient
    import nbformat

    missing = [m for m in NEEDS.get(path.name[0], ()) if importlib.util.find_spec(m) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is not installed, and this notebook shows what it does")
    notebook = nbformat.read(path, as_version=4)
    stored = [shape_of(cell.get("outputs", ())) for cell in notebook.cells]
    nbformat.validate(notebook)
    for usual, few in FEWER.get(path.name[0], {}).items():
        (cell,) = (cell for cell in notebook.cells if usual in cell.source)
        cell.source = cell.source.replace(usual, few)
    # without the names of the notebook before
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, km=kernel, timeout=120, resources=resources)
    client.execute()
    client.kc.stop_channels()
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    assert [shape_of(cell.get("outputs", ())) for cell in notebook.cells[1:]] == stored
    assert not [o for o in outputs if o["output_type"] == "error"]
    output = "".join(o["text"] for o in outputs if o.get("name") == "stderr")
    output = output.replace(
        sys.prefix, ""
    )  # warnings of other packages contain the path of .venv, in a clone called annie_quant
    assert "Traceback" not in output and "annie_quant" not in output, output
    shown = [o["data"] for o in outputs if "data" in o]
    rich = [d["text/html"] for d in shown if "text/html" in d]
    assert len(rich) >= RICH.get(path.name[0], 0)
    for html in rich:
        assert "<script" not in html and "http://" not in html.replace("http://127.0.0.1", "")
    pictures = [base64.b64decode(d["image/png"]) for d in shown if "image/png" in d]
    assert len(pictures) >= PICTURES.get(path.name[0], 0) and all(
        p.startswith(b"\x89PNG") for p in pictures
    )
    if keep := os.environ.get("KEEP_NOTEBOOKS"):  # to look at them
        del notebook.cells[0]
        nbformat.write(notebook, Path(keep) / path.name)
