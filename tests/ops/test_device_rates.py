"""doctor --measure: a device file that predictions and --device read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from annie_quant.checkpoint import decode_speed
from annie_quant.cli import cli


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode_speed, "SHAPE", (64, 256))
    monkeypatch.setattr(decode_speed, "SECONDS", 0.01)
    monkeypatch.setattr(decode_speed.host, "gpus", list)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_measured_file_is_what_predictions_use() -> None:
    assert decode_speed.default_device() is decode_speed.DEVICES["gb10"]
    result = CliRunner().invoke(cli, ["doctor", "--measure", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    device = decode_speed.default_device()
    assert device.name == document["name"] == decode_speed.machine_name()
    assert device.read_bytes_s == document["read_bytes_s"] > 0 and device.layer_s > 0
    assert "product" in device.source and "copy" in device.source


def test_the_rates_are_bytes_per_fastest_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With a clock that gives every call two milliseconds."""
    monkeypatch.setattr(decode_speed, "fastest", lambda work: (work(), 0.002)[1])
    device = decode_speed.measure_device(tmp_path / "folder" / "device.json")
    assert decode_speed.find_device(str(tmp_path / "folder" / "device.json")) == device
    product, copied = 64 * 256 * 9 / 16 / 0.002, 2 * 64 * 128 / 0.002
    assert device.read_bytes_s == max(product, copied)
    assert device.layer_s == 0.002 * decode_speed.LAUNCHES
