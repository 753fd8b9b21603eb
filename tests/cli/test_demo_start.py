"""The start of a demo."""

from __future__ import annotations

import importlib.util

import pytest

from annie_quant.cli.pipeline import DemoSettings, demo
from annie_quant.core.errors import EnvironmentFault


def test_all_missing_packages_are_named_before_anything_is_written(tmp_path, monkeypatch):
    """A wheel without extras: before, the demo named torch, and after its installation failed where the servers start."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("torch", "xllamacpp") else find(name),
    )
    with pytest.raises(EnvironmentFault, match="not installed: torch, xllamacpp") as refused:
        demo.run(DemoSettings(output=tmp_path / "run"))
    assert refused.value.hint == 'pip install "annie-quant[quantize,serve]"'
    assert not (tmp_path / "run").exists()
