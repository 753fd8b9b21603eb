"""Bits per weight: one definition for the audit, the comparison, the search and the demo's report."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import checkpoint_zoo as zoo
import expert_zoo
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.size import bytes_per_token, folder_size, gguf_size


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


def header(file: Path) -> dict:
    """Return a safetensors header, read without annie_quant."""
    content = file.read_bytes()
    return json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


def test_the_figure_is_the_tensors_bytes_over_the_sources_weights(checkpoints):
    source, quantized = ([v for f in folder.glob("*.safetensors") for k, v in header(f).items() if k != "__metadata__"]
                         for folder in checkpoints)  # fmt: skip
    weights = sum(int(np.prod(t["shape"])) for t in source)
    size = sum(t["data_offsets"][1] - t["data_offsets"][0] for t in quantized)
    assert folder_size(ModelFolder(checkpoints[1])).bits_per_weight == round(8 * size / weights, 3)
    assert folder_size(ModelFolder(checkpoints[0])).bits_per_weight == 16


@pytest.mark.parametrize("layout", ["merged", "per_expert", "nvfp4"])
def test_a_token_reads_its_experts_alone(tmp_path, layout):
    """Two of four experts, no row of the untied embedding, no MTP head and no vision tower, counted in the headers."""
    source = expert_zoo.per_expert(tmp_path / "single")
    folder = {
        "merged": lambda: expert_zoo.merged(tmp_path / "merged"),
        "per_expert": lambda: source,
        "nvfp4": lambda: expert_zoo.nvfp4(tmp_path / "nvfp4", source),
    }[layout]()
    extra = {
        n: np.ones((64, 64), zoo.BF16)
        for n in ("mtp.fc.weight", "model.visual.blocks.0.attn.proj.weight")
    }
    folder = zoo.spoil(
        folder,
        tmp_path / "whole",
        lambda t, c: (t.update(extra), c.update(tie_word_embeddings=False)),
    )
    sizes = {n: a.nbytes for n, a in zoo.read(folder).items()}
    experts = sum(size for n, size in sizes.items() if ".mlp.experts." in n)
    unread = sum(sizes[n] for n in extra) + sizes["model.embed_tokens.weight"]
    assert experts > 1000
    assert bytes_per_token(ModelFolder(folder)) == sum(sizes.values()) - unread - experts // 2


def test_every_command_has_the_same_figure(checkpoints, tmp_path):
    pytest.importorskip("torch", reason="the pipeline needs torch")
    from annie_quant.cli.pipeline.demo import SIDES, Demo
    from annie_quant.cli.pipeline.search import Search
    from annie_quant.documents import StrategyRow

    source, quantized = checkpoints
    expected = aq.checkpoint.audit(quantized).summary.bits_per_weight
    assert aq.checkpoint.compare(source, {"x": quantized}).summary["x"].bits_per_weight == expected
    row = StrategyRow("direct", False, "", [], [], {})
    search = SimpleNamespace(
        stages=SimpleNamespace(checkpoint=lambda name: quantized),
        settings=SimpleNamespace(prompt_tokens=None, cached_tokens=0),
    )
    Search.measure_size(search, row)
    assert row.bits_per_weight == expected
    demo = SimpleNamespace(dir=tmp_path, source=lambda side: quantized)
    name = next(name for name, side in SIDES.items() if side.gguf_type != "Q4_K_M")
    assert Demo.model_row(demo, name).bits_per_weight == expected


def test_a_gguf_file_of_the_same_codes_has_nearly_the_same_figure(checkpoints, tmp_path):
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    aq.checkpoint.convert(checkpoints[1], to="gguf", output=tmp_path / "x.gguf")
    expected = folder_size(ModelFolder(checkpoints[1])).bits_per_weight
    assert gguf_size(tmp_path / "x.gguf").bits_per_weight == pytest.approx(expected, abs=0.1)
