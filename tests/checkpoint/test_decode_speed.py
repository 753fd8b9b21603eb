"""Predicted tokens per second: what a token reads, published and measured speeds, device files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint import ModelFolder, decode_speed
from annie_quant.checkpoint.decode_speed import DEVICES, TokenBytes
from annie_quant.checkpoint.size import Caches
from annie_quant.core.errors import UsageError
from annie_quant.documents import Device, write
from annie_quant.quantize import estimates


class Published(NamedTuple):
    """A speed of one stream. read_gb: bytes of weights per token.  explained: why it is outside the limit."""

    model: str
    device: str
    read_gb: float
    layers: int
    tok_s: float
    explained: str = ""


def counted(model: str, strategy: str) -> float:
    return estimates.estimate(model, strategy).speed.read_bytes / 1e9


# Sources and the count of bytes: tests/perf/decode_speed.md.
FIGURES = [
    Published("9B NVFP4, vLLM, eager", "gb10", counted("9b", "direct"), 32, 33.0),
    Published("27B NVFP4, vLLM", "gb10", counted("27b", "direct"), 64, 13.1),
    Published("9B Q4_K_M, llama.cpp", "gb10", 5.1, 32, 35.9),
    Published("35B-A3B Q8_0, llama.cpp", "gb10", 3.1, 40, 53.0),
    Published("Qwen2.5-7B Q4_K_M, Ollama", "gb10", 4.36, 28, 44.5),
    Published(
        "Llama-3.3-70B NVFP4, vLLM 0.15",
        "gb10",
        40.61,
        80,
        4.1,
        "W4A4 kernels of prefill for one token",
    ),
    Published("9B shape bf16, vLLM 0.26", "h200", 15.87, 32, 1000 / 4.141),
    Published("9B shape NVFP4, our kernels", "h200", counted("9b", "direct"), 32, 1000 / 2.640),
]


@pytest.mark.parametrize("row", FIGURES, ids=lambda row: row.model)
def test_published_speeds_are_predicted_within_15_percent_or_explained(row: Published) -> None:
    predicted = decode_speed.tok_s(TokenBytes(row.read_gb * 1e9, row.layers), DEVICES[row.device])
    error = predicted / row.tok_s - 1
    assert abs(error) < 0.15 or (row.explained and error > 0), (
        f"{predicted:.1f} instead of {row.tok_s:.1f}"
    )


# vLLM 0.26 on an H200, 2026-11-29: GB per token, layers, those of attention, size of a head, ms after 128 and 16,384 tokens.
H200_VLLM = [
    ("9B, bf16 head", 6.04, 32, 8, 256, 2.660, 3.423),
    ("9B, NVFP4 head", 4.576, 32, 8, 256, 2.291, 3.030),
    ("Coder-0.5B bf16", 0.988, 24, 24, 64, 1.463, 2.597),
    ("Coder-0.5B naive", 0.474, 24, 24, 64, 1.436, 2.433),
    ("Coder-1.5B bf16", 3.087, 28, 28, 128, 1.689, 3.901),
    ("Coder-1.5B naive", 1.205, 28, 28, 128, 1.536, 3.357),
]


@pytest.mark.parametrize("row", H200_VLLM, ids=lambda row: row[0])
def test_vllm_on_an_h200_is_predicted_within_10_percent_also_at_depth(
    row: tuple[str, float, int, int, int, float, float],
) -> None:
    _, gigabytes, layers, full, head, *measured = row
    read = TokenBytes(gigabytes * 1e9, layers, Caches(position=1, attention=(full, head)))
    for depth, milliseconds in zip((192, 16_416), measured, strict=True):
        assert 1e3 / decode_speed.tok_s(read, DEVICES["h200"], depth) == pytest.approx(
            milliseconds, rel=0.1
        ), depth


def test_attention_has_its_own_time_and_the_host_is_the_least() -> None:
    read = TokenBytes(
        1e9, 4, Caches(position=1000, window_position=100, window=50, attention=(2, 64))
    )
    device = Device(name="d", read_bytes_s=1e9, attention_s=(1e-6, 1e-8), step_s=1.2)
    assert 1 / decode_speed.tok_s(read, device) == pytest.approx(1.2)
    expected = 1 + 50 * 100 / 1e9 + 10**6 * 2 * (1e-6 + 64 * 1e-8)
    assert 1 / decode_speed.tok_s(read, device, 10**6) == pytest.approx(expected)
    assert (
        decode_speed.largest_bytes(read, device, 1.0)
        < 0
        < decode_speed.largest_bytes(read, device, 0.8)
    )


def test_a_token_reads_the_weights_the_cache_and_the_states() -> None:
    folder = ModelFolder(TINY_ANNIE)
    config = folder.text_config
    read = decode_speed.token_bytes(folder)
    full = sum(t == "full_attention" for t in config["layer_types"])
    linear = len(config["layer_types"]) - full
    assert 0 < full < read.layers == config["num_hidden_layers"]
    heads, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    assert (
        read.at(0) - read.weights == linear * heads * width * config["linear_key_head_dim"] * 4 * 2
    )
    depth = read.at(1000) - read.at(0)
    assert depth == 1000 * full * config["num_key_value_heads"] * config["head_dim"] * 2 * 2
    device = Device(name="d", read_bytes_s=1e9, layer_s=1e-3)
    assert decode_speed.tok_s(read, device) == pytest.approx(
        1 / (read.at(0) / 1e9 + read.layers * 1e-3)
    )
    assert decode_speed.tok_s(read, device, 10**6) < decode_speed.tok_s(read, device)


def test_a_window_limits_the_keys_that_are_read() -> None:
    read = TokenBytes(10.0, 2, Caches(position=3, window_position=5, window=100))
    assert read.at(40) == 10 + 40 * 8 and read.at(1000) == 10 + 3000 + 500


def test_the_bytes_for_a_speed_are_the_inverse_of_the_prediction() -> None:
    read = TokenBytes(5e9, 32, Caches(state=50_000_000))
    for device in DEVICES.values():
        speed = decode_speed.tok_s(read, device)
        assert decode_speed.largest_bytes(read, device, speed) == pytest.approx(read.weights)
    assert decode_speed.largest_bytes(read, DEVICES["gb10"], 1000.0) < 0


def test_devices_have_a_name_a_rate_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert decode_speed.find_device("GB10") is DEVICES["gb10"]
    rate = decode_speed.find_device("100:20")
    assert (rate.read_bytes_s, rate.layer_s) == pytest.approx((100e9, 20e-6))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert decode_speed.default_device() is DEVICES["gb10"]
    monkeypatch.setattr(decode_speed.host, "gpus", lambda: [{"name": "a GPU"}])
    own = Device(name="a GPU", read_bytes_s=5e9, layer_s=1e-5, source="test")
    file = decode_speed.device_file()
    file.parent.mkdir()
    write(file, own)
    assert decode_speed.default_device() == decode_speed.find_device(str(file)) == own
    assert own.name in decode_speed.describe(decode_speed.predict(ModelFolder(TINY_ANNIE)))


def test_a_device_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    write(other, Device(name="NVIDIA B300", read_bytes_s=7e12, layer_s=2e-5))
    with pytest.raises(
        UsageError, match="measured on another machine: NVIDIA B300, this is"
    ) as refused:
        decode_speed.find_device(str(other))
    assert "--device 7000:20" in refused.value.hint, "the same rates can be given as numbers"
    other.write_text(json.dumps({"name": "x", "read_bytes_s": -1}))
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps({"name": "x", "read_bytes_s": 1e9, "attention_s": [1e-9, -1e-9]}))
    for name, problem in ((str(slow), "are no rates"),
                          ("0", "expected GB/s"), ("-5", "expected GB/s"), ("nan", "expected GB/s"), ("5:x", "no such"),
                          ("gb11", "no such device file"), (str(other), "are no rates")):  # fmt: skip
        with pytest.raises(UsageError, match=problem):
            decode_speed.find_device(name)
