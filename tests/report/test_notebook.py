"""Notebook displays: figures of the objects, hostile text inert, every table well-formed."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import report_page

import annie_quant as aq
from annie_quant import notebook
from annie_quant.schema import Audit, AuditSummary, Finding

HOSTILE = "<script>alert(1)</script>\u202e\x1b[31m"


def read(html: str) -> report_page.Read:
    """The page's text and tags; raises where tags do not close."""
    ElementTree.fromstring(html.replace("&nbsp;", "\u00a0"))
    return report_page.Read(html)


def test_a_tensor_shows_its_first_codes():
    w = np.zeros((3, 32), np.float32)
    w[0, :4] = [6, -3, 0.5, 1.5]
    t = aq.nvfp4.pack(w, tensor_scale=1.0)
    page = read(notebook.tensor(t))
    text = "".join(page.text)
    assert "3 × 32" in text and "blocks of 16" in text
    assert "6-30.51.5" in text, "the first block's values in the order of its columns"


def test_gates_are_shown_with_their_interval():
    gates = aq.judge.gate_names()
    rows = {
        "tool_call": {"passes": 3, "n": 4, "low": 0.3, "high": 0.95, "threshold": 0.6, "verdict": "undecided"},
        HOSTILE: {"passes": 4, "n": 4, "low": 0.5, "high": 1.0, "threshold": 0.6, "verdict": "pass"},
    }
    assert "tool_call" in gates
    page = read(notebook.Gates({HOSTILE: rows, "other": {}})._repr_html_())
    text = "".join(page.text)
    assert "3/4 ?" in text and "4/4 ✓" in text and "—" in text and "30" in text and "95 %" in text
    assert not {"script", "iframe"} & set(page.tags) and "\u202e" not in text and "\x1b" not in text


def test_an_audit_names_its_faults():
    summary = AuditSummary(dialect="modelopt", loads=["vLLM: no"])
    result = Audit("model", [Finding("nan_scale", "layers.0", HOSTILE)], summary)
    page = read(notebook.audit(result))
    assert "1 faults" in "".join(page.text) and "nan_scale" in "".join(page.text) and "script" not in page.tags


def test_timings_show_requests():
    records = [
        {"tag": HOSTILE, "first_content_ms": 12.5, "itl_ms": [2.0, 3.0], "tpot_ms": 2.5, "e2e_ms": 18.0,
         "completion_tokens": 3, "finish_reason": "stop", "error": ""},
        {"tag": "b", "first_content_ms": None, "itl_ms": [], "error": "refused"},
    ]  # fmt: skip

    class Timings:
        def records(self):
            return records

        def __len__(self):
            return 2

    html = notebook.timings(Timings())
    page = read(html)
    text = "".join(page.text)
    assert "12.5" in text and "refused" in text and "script" not in page.tags


def test_register_adds_displays_to_ipython():
    interactive = pytest.importorskip(
        "IPython.core.interactiveshell", reason="IPython shows rich displays; not installed"
    )
    shell = interactive.InteractiveShell.instance()
    notebook.register(shell)
    t = aq.nvfp4.pack(np.ones((1, 16), np.float32))
    data, _ = shell.display_formatter.format(t)
    assert "E2M1 values" in data["text/html"] and data["text/plain"].startswith("nvfp4.Tensor")
    interactive.InteractiveShell.clear_instance()


def test_outside_ipython_nothing_happens():
    notebook.register()
