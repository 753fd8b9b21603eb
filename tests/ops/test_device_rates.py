"""doctor --measure: a device file that predictions and --device read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CliRunner

from annie_quant.checkpoint import decode_speed
from annie_quant.cli import app as cli
from annie_quant.core.errors import EnvironmentFault
from annie_quant.documents import Device, write


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decode_speed.host, "gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr(decode_speed, "measure_gpu", lambda: (3e12, 4e12, 2e-6))


def test_the_measured_file_is_what_predictions_use() -> None:
    assert decode_speed.default_device() is decode_speed.DEVICES["gb10"]
    result = CliRunner().invoke(cli, ["doctor", "--measure", "--json"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    device = decode_speed.default_device()
    assert device.name == document["name"] == "a GPU"
    assert device.read_bytes_s == document["read_bytes_s"] == 4e12


def test_the_rates_of_a_gpu_are_bytes_per_fastest_call(tmp_path: Path) -> None:
    device = decode_speed.measure_device(tmp_path / "folder" / "device.json")
    assert decode_speed.find_device(str(tmp_path / "folder" / "device.json")) == device
    assert device.read_bytes_s == 4e12
    assert device.layer_s == 2e-6 * decode_speed.LAUNCHES
    assert "product" in device.source and "copy" in device.source


def test_a_processor_is_not_predicted_but_measured_by_bench(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = decode_speed.device_file()
    file.parent.mkdir(parents=True)
    write(file, Device(name="a CPU, 2 threads", read_bytes_s=4e10))
    monkeypatch.setattr(decode_speed.host, "gpus", list)
    assert decode_speed.default_device() is decode_speed.DEVICES["gb10"]
    with pytest.raises(EnvironmentFault, match="not predicted but measured") as refused:
        decode_speed.measure_device()
    assert refused.value.hint == "annie-quant bench"
