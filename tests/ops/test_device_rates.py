"""doctor --measure: a device file that predictions and --device read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import CliRunner

from annie_quant.checkpoint import decode_speed, first_token, prefill_rates
from annie_quant.checkpoint.first_token import NoRate, Prompt
from annie_quant.checkpoint.prompt_work import PromptWork
from annie_quant.cli import app as cli
from annie_quant.core.errors import EnvironmentFault, UsageError
from annie_quant.documents import Device, PredictedFirstToken, write

RATES = {"bf16": 600.0, "w4a16": 300.0, "fp8": 1000.0}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(decode_speed.host, "gpus", lambda: [{"name": "a GPU"}])
    monkeypatch.setattr(decode_speed, "measure_gpu", lambda: (3e12, 4e12, 2e-6))
    monkeypatch.setattr(decode_speed, "measure_prefill", lambda: (RATES, {"w4a4": "no FP4 units"}))


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


def test_the_first_token_is_predicted_by_the_measured_rates_of_prompts() -> None:
    device = decode_speed.measure_device()
    assert device.prefill_tflop_s == RATES and "w4a4 not measured: no FP4 units" in device.source
    shape = first_token.prefill().models["Qwen3.5-9B"]
    weights = float(shape.linear_weights)

    def of(kernel: str, device: Device = device) -> PredictedFirstToken:
        work = PromptWork(shape, {kernel: (weights, 0.0)}, 0.0)
        return first_token.predict(work, "vllm", device, Prompt(2048))

    products_ms = {kernel: 2 * weights * 2048 / (rate * 1e9) for kernel, rate in RATES.items()}
    assert of("w4a16").ms - of("fp8").ms == pytest.approx(products_ms["w4a16"] - products_ms["fp8"])
    assert of("bf16").ms < of("bf16", decode_speed.DEVICES["gb10"]).ms
    assert of("bf16").low_ms is None, "no server was measured there"
    text = first_token.interval_text(of("bf16"))
    assert text.startswith("at least ") and "no server was measured there" in text
    with pytest.raises(NoRate, match="no prefill rate is known for w4a4 in vLLM on a GPU"):
        of("w4a4")


def test_rates_that_are_none_are_refused() -> None:
    file = decode_speed.device_file()
    file.parent.mkdir(parents=True)
    bad = {"bf16": 0.0}
    write(file, Device(name="a GPU", read_bytes_s=4e12, prefill_tflop_s=bad))
    with pytest.raises(UsageError, match="are no rates"):
        decode_speed.find_device(str(file))


def test_a_kernel_that_fails_is_left_out_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU is not needed: what each format multiplies is replaced."""

    def missing() -> None:
        raise NotImplementedError("SM90 has no FP4 units")

    kernels = {"bf16": lambda: lambda: None, "w4a4": missing}
    torch = pytest.importorskip("torch", reason="rates are measured by torch")
    monkeypatch.setattr(prefill_rates, "KERNELS", kernels)
    monkeypatch.setattr(prefill_rates, "SECONDS", 0.01)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rates, reasons = prefill_rates.measure_prefill()
    assert rates["bf16"] > 0 and reasons == {"w4a4": "SM90 has no FP4 units"}
