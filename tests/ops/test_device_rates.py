"""doctor --measure: a device file that predictions and --device read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CliRunner

from annie_quant.checkpoint import decode_speed
from annie_quant.cli import app as cli
from annie_quant.documents import LlamaCppRates, ProductRate
from annie_quant.ops import llama_cpp_rates

RATES = LlamaCppRates(
    layer_s=2e-5,
    depth_s=0,
    products={"BF16": ProductRate(weight_s=5e-11, row_s=1e-9)},
    attention=[],
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(decode_speed.host, "gpus", list)
    monkeypatch.setattr(llama_cpp_rates, "measure", lambda progress: RATES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_measured_file_is_what_predictions_use() -> None:
    assert decode_speed.default_device() is decode_speed.DEVICES["gb10"]
    result = CliRunner().invoke(cli, ["doctor", "--measure", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    device = decode_speed.default_device()
    assert device.name == document["name"] == decode_speed.machine_name()
    assert device.read_bytes_s == document["read_bytes_s"] == pytest.approx(40e9)
    assert device.layer_s == 2e-5 and device.llama_cpp == RATES
    assert "llama.cpp, BF16 40 GB/s" in device.source


def test_the_rates_of_a_gpu_are_bytes_per_fastest_call(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(decode_speed.host, "gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr(decode_speed, "measure_gpu", lambda: (3e12, 4e12, 2e-6))
    device = decode_speed.measure_device(lambda _: RATES, tmp_path / "folder" / "device.json")
    assert decode_speed.find_device(str(tmp_path / "folder" / "device.json")) == device
    assert device.read_bytes_s == 4e12 and device.llama_cpp is None
    assert device.layer_s == 2e-6 * decode_speed.LAUNCHES
    assert "product" in device.source and "copy" in device.source
