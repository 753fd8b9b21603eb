"""Times of the kernels in vLLM: which are timed, which is the fastest. Without a GPU; no time is measured."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import checkpoint_zoo as zoo
import pytest
import stack_times
import torch
from paths import TINY_ANNIE

from annie_quant.core.errors import CheckpointError
from annie_quant.gemm import oracle


def test_the_fastest_kernel_of_each_cell_is_named(monkeypatch):
    us = {"ours": 4.0, "marlin": 9.0, "other": 3.0}
    monkeypatch.setattr(
        stack_times, "graph_us", lambda calls, repeats: calls[0]() / len(calls[0].args[0])
    )
    weights = [
        stack_times.Prepared(
            32, 64, [0] * 16, {name: [lambda x, v=v: v * len(x)] for name, v in us.items()}
        ),
        stack_times.Prepared(64, 64, [0] * 16, {"ours": [lambda x: 5.0 * len(x)]}),
    ]
    rows = list(stack_times.measure(weights, [1, 16], seconds=60))
    assert [(r.n, r.m, r.fastest) for r in rows] == [
        (32, 1, "other"),
        (64, 1, "ours"),
        (32, 16, "other"),
        (64, 16, "ours"),
    ]
    assert rows[0].us == us and rows[1].us == {"ours": 5.0}
    assert list(stack_times.measure(weights, [1], seconds=-1)) == [], "the time is over"


def test_a_graph_has_enough_launches_of_rotating_copies(monkeypatch):
    lengths = []
    monkeypatch.setattr(
        stack_times,
        "graph_us",
        lambda calls, repeats: lengths.append(len({id(c.func) for c in calls})) or len(calls),
    )
    weight = stack_times.Prepared(32, 64, [0], {"ours": [lambda x: x, lambda x: x, lambda x: x]})
    (row,) = stack_times.measure([weight], [1], seconds=60)
    assert row.us["ours"] == 21 and lengths == [3]


def test_shapes_are_those_that_servers_merge(tmp_path):
    """q, k and v are one matrix in a server, as gate and up are; each is named once."""
    _, folder = zoo.source_and_nvfp4(tmp_path)
    c = json.loads((folder / "config.json").read_text())
    c = c.get("text_config", c)
    shapes = stack_times.served_shapes(folder)
    hidden, width = c["hidden_size"], c["intermediate_size"]
    assert (
        (2 * width, hidden) in shapes
        and (width, hidden) not in shapes
        and (hidden, width) in shapes
    )
    assert len(set(shapes)) == len(shapes)


def test_a_checkpoint_without_nvfp4_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match="no NVFP4 linears"):
        stack_times.served_shapes(TINY_ANNIE)


def product_of_slices(x, w, slices):
    """x @ w.T whose K is split into slices, with partial sums and their sum rounded to bfloat16."""
    total = torch.zeros(len(x), len(w), dtype=torch.bfloat16)
    for i in range(slices):
        total = total + (x[:, i::slices] @ w[:, i::slices].t()).to(torch.bfloat16)
    return total.float()


def test_partial_sums_in_bfloat16_are_accepted_and_a_wrong_scale_is_not():
    """humming 0.1.10 on an H200 differed by .0034 and was left out: its split of K adds in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(16, 1024, generator=generator).to(torch.bfloat16).float()
    values = torch.randn(256, 64, 16, generator=generator)
    scales = torch.rand(256, 64, 1, generator=generator) * 0.5 + 0.75
    ours = product_of_slices(x, (values * scales).reshape(256, 1024), 1)
    for slices in (1, 4, 16):
        stack_times.check_result(
            product_of_slices(x, (values * scales).reshape(256, 1024), slices), ours, "256x1024"
        )
    neighbours = product_of_slices(x, (values * scales.roll(1, 1)).reshape(256, 1024), 1)
    for wrong in (neighbours, ours * 1.02, ours * float("nan")):
        with pytest.raises(ValueError, match="256x1024 differs from the exact one by"):
            stack_times.check_result(wrong, ours, "256x1024")


def test_the_exact_product_is_that_of_the_whole_weight(monkeypatch):
    monkeypatch.setattr(oracle, "SPAN", 3 * 64)  # three rows of eight at a time
    codes, scales = oracle.random_weight(8, 64)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    exact = stack_times.exact_product(x, torch.from_numpy(codes), torch.from_numpy(scales))
    expected = x.double().numpy() @ oracle.dequantize(codes, scales, stack_times.SCALE).T
    torch.testing.assert_close(exact, torch.from_numpy(expected), rtol=1e-6, atol=1e-9)


def test_hummings_layer_gets_the_weight_and_a_choice_of_tiles_for_each_number_of_tokens(
    monkeypatch,
):
    class Layer:
        def __init__(self, *form, torch_dtype):
            self.form, self.humming_config = (*form, torch_dtype), None

        def load_from_tensors(self, tensors):
            self.tensors = tensors

        def transform(self):
            self.humming_config = "config"

        def __call__(self, x, tuning_config):
            return x, tuning_config

    tune = SimpleNamespace(get_heuristics_config=lambda config, m: {"config": config, "m": m})
    for name, module in {
        "humming": object(),
        "humming.layer": SimpleNamespace(HummingLayer=Layer),
        "humming.tune": tune,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    codes, scales = (torch.from_numpy(a) for a in oracle.random_weight(32, 64))
    layer = stack_times.vllm_layer(codes, scales, 0.5)
    kernel = stack_times.HummingKernel([64, 1, 16])
    kernel.process_weights_after_loading(layer)
    own = layer.humming
    assert own.form == (32, 64, {"quant_method": "modelopt", "quant_algo": "nvfp4"}, torch.bfloat16)
    assert own.tensors["weight"].equal(codes) and own.tensors["weight_scale"].equal(scales)
    assert own.tensors["weight_scale_2"].tolist() == [0.5]
    _, tiles = kernel.apply_weights(layer, torch.zeros(16, 64))
    assert [(low, high, t["m"]) for low, high, t in tiles] == [(0, 1, 1), (1, 16, 16), (16, 64, 64)]
    assert {t["config"] for *_, t in tiles} == {"config"}, "chosen after the weight was repacked"
