"""The rates of llama.cpp: a fit of times with a known law, predictions from it, and probes that llama.cpp serves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from paths import TINY_ANNIE

from annie_quant.checkpoint import ModelFolder, decode_speed, llama_cpp_speed
from annie_quant.checkpoint.llama_cpp_speed import DEEP, Product, Work
from annie_quant.checkpoint.size import AttentionShape
from annie_quant.documents import AttentionRate, Device, LlamaCppRates, decode, write
from annie_quant.ops import llama_cpp, llama_cpp_rates
from annie_quant.ops.llama_cpp_rates import (
    ATTENTION,
    ATTENTION_PROBES,
    DEEP_PROBE,
    DEPTHS,
    PRODUCT_PROBES,
    TYPES,
    Probe,
)

WEIGHT = {kind: (10 + 3 * i) * 1e-12 for i, kind in enumerate(TYPES)}
ROW = {kind: (2 + i) * 1e-9 for i, kind in enumerate(TYPES)}
LAYER, START, DEEP_TOKEN = 20e-6, 50e-6, 70e-9
HEAD = {64: 9e-9, 128: 14e-9}


def keys(dim: int, kv_heads: int) -> float:
    return dim * kv_heads * 2e-10 + (3e-8 if kv_heads == 3 else 0)


def law(probe: Probe, depth: int) -> float:
    total = probe.layers * LAYER
    for p in probe.products():
        total += p.rows * ROW[p.type] + p.rows * p.columns * WEIGHT[p.type]
    if depth:
        total += probe.layers * (
            START
            + depth * (probe.heads * HEAD[probe.head_dim] + keys(probe.head_dim, probe.kv_heads))
        )
    return total


@pytest.fixture
def rates() -> LlamaCppRates:
    products = [law(probe, 0) for probe in PRODUCT_PROBES]
    attention = [[law(probe, depth) for depth in DEPTHS] for probe in ATTENTION_PROBES]
    deep = [law(DEEP_PROBE, 0), law(DEEP_PROBE, DEEP) + DEEP_PROBE.layers * DEEP * DEEP_TOKEN]
    return llama_cpp_rates.fit(products, attention, deep)


def test_the_fit_returns_the_law_of_the_times(rates: LlamaCppRates) -> None:
    assert rates.layer_s == pytest.approx(LAYER, rel=1e-3) and rates.depth_s == pytest.approx(
        START, rel=1e-3
    )
    assert rates.deep_s == pytest.approx(DEEP_TOKEN, rel=1e-3)
    for kind in TYPES:
        assert rates.products[kind].weight_s == pytest.approx(WEIGHT[kind], rel=1e-3)
        assert rates.products[kind].row_s == pytest.approx(ROW[kind], rel=1e-3)
    assert {(a.head_dim, a.kv_heads) for a in rates.attention} == {
        (dim, kv) for dim, kv, _ in ATTENTION
    }
    for a in rates.attention:
        assert a.head_s == pytest.approx(HEAD[a.head_dim], rel=1e-3)
        assert a.keys_s == pytest.approx(keys(a.head_dim, a.kv_heads), rel=1e-3)


def test_a_model_that_was_not_measured_is_predicted(rates: LlamaCppRates) -> None:
    shape = AttentionShape(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64
    )
    work = Work([Product("Q4_K", 4096, 4096), Product("NVFP4", 100, 512, 0.5)], shape)
    products = (
        4096 * ROW["Q4_K"]
        + 4096**2 * WEIGHT["Q4_K"]
        + 50 * ROW["NVFP4"]
        + 50 * 512 * WEIGHT["NVFP4"]
    )
    attention = 30 * (
        START + 3000 * (9 * HEAD[64] + keys(64, 3))
    )  # of three key heads, so without DEEP_TOKEN
    assert llama_cpp_speed.seconds(work, rates) == pytest.approx(products + 30 * LAYER, rel=1e-3)
    assert llama_cpp_speed.seconds(work, rates, 3000) == pytest.approx(
        products + 30 * LAYER + attention, rel=1e-3
    )


def test_negative_costs_are_not_fitted() -> None:
    design = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert llama_cpp_rates.nonnegative_fit(design, np.array([0.5, 1.5, 2.5]))[1] == 0


def test_a_request_that_other_processes_disturbed_moves_no_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every probe takes its cost by the law above, and one request of each several times as long."""

    def disturbed(
        probe: Probe, depths: Sequence[int], folder: Path, repeats: int = 0
    ) -> list[list[float]]:
        return [[law(probe, depth), 7 * law(probe, depth), law(probe, depth)] for depth in depths]

    monkeypatch.setattr(llama_cpp_rates, "time_probe", disturbed)
    measured = llama_cpp_rates.measure()
    for kind in TYPES:
        assert measured.products[kind].weight_s == pytest.approx(WEIGHT[kind], rel=1e-3)


def test_sizes_that_were_not_measured_cost_in_proportion_and_windows_end() -> None:
    rate = AttentionRate(head_dim=64, kv_heads=2, head_s=1e-8, keys_s=4e-8)
    rates = LlamaCppRates(layer_s=0, depth_s=0, products={}, attention=[rate])
    full = AttentionShape(
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=128
    )
    assert llama_cpp_speed.attention_seconds(full, rates, 1000) == pytest.approx(
        2 * 1000 * (8e-8 + 8e-8) * 2
    )
    types = ["full_attention", "sliding_attention", "linear_attention"]
    growing = LlamaCppRates(layer_s=0, depth_s=0, deep_s=1e-7, products={}, attention=[rate])
    odd = AttentionShape(
        num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=3, head_dim=64
    )
    for shape, few, middle in ((full, 32e-8, 37e-8), (odd, 14e-8, 14e-8)):
        for depth, each in ((DEEP // 2, middle), (DEEP, few + 1e-7), (2 * DEEP, few + 1e-7)):
            assert llama_cpp_speed.attention_seconds(shape, growing, depth) == pytest.approx(
                2 * depth * each
            )
    mixed = AttentionShape(
        layer_types=types,
        sliding_window=100,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    )
    assert llama_cpp_speed.attention_seconds(mixed, rates, 1000) == pytest.approx(
        (1000 + 100) * 1.2e-7
    )


def test_the_file_keeps_the_rates_and_predictions_use_them(
    rates: LlamaCppRates, tmp_path: Path
) -> None:
    device = Device(name="d", read_bytes_s=1e9, layer_s=1e-5, llama_cpp=rates)
    write(tmp_path / "device.json", device)
    assert decode(Device, tmp_path / "device.json") == device
    folder = ModelFolder(TINY_ANNIE)
    read = decode_speed.token_bytes(folder)
    work = llama_cpp_speed.work_of(folder, AttentionShape(num_hidden_layers=1))
    assert sum(p.rows * p.columns for p in work.products) * 2 == pytest.approx(
        read.weights, rel=0.05
    )
    whole = decode_speed.predict(folder, device).tok_s
    assert whole != pytest.approx(decode_speed.predict(folder, replace_rates(device)).tok_s)
    seconds = (
        llama_cpp_speed.seconds(work, rates)
        + (read.layers - 1) * LAYER
        + 2 * read.caches.state / 1e9
    )
    assert whole == pytest.approx(1 / seconds, rel=0.01)


def replace_rates(device: Device) -> Device:
    return Device(name=device.name, read_bytes_s=device.read_bytes_s, layer_s=device.layer_s)


@pytest.mark.parametrize("kind", ["Q4_1", "NVFP4"])
def test_a_probe_is_served_and_removed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(llama_cpp_rates, "REPEATS", 2)
    probe = Probe(kind, 2, 128, 128, 2, 1, 64, 1024)
    times = llama_cpp_rates.time_probe(probe, (0, 300), tmp_path)
    assert len(times) == 2 and all(0 < t < 1 for each in times for t in each)
    assert not list(tmp_path.glob("*.gguf"))


def test_llama_cpp_inherits_the_users_way_of_waiting_and_not_the_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTHER", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    environment = llama_cpp.environment()
    assert "OMP_WAIT_POLICY" not in environment and environment["OTHER"] == "1"
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert llama_cpp.environment()["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_package_waits_as_llama_cpp_leaves_out() -> None:
    code = "import os, annie_quant.offline; print(os.environ['OMP_WAIT_POLICY'])"
    own = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "passive"
