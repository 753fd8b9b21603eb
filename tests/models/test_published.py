"""Published Qwen3 MoE, 3.5, 3.6 and 3.8 checkpoints: their tables, and every command on a small copy of each."""

from __future__ import annotations

import json
import math
from pathlib import Path

import checkpoint_zoo as zoo
import numpy as np
import published_models as published
import pytest

import annie_quant as aq
from annie_quant import models
from annie_quant.checkpoint import ModelFolder, dialects, repair
from annie_quant.core.errors import CheckpointError

BYTES = {"BF16": 2, "F32": 4, "U8": 1, "F8_E4M3": 1}
PLAIN = [n for n, r in published.RELEASES.items() if not r.dialect]
QUANTIZED = [
    n for n, r in published.RELEASES.items() if r.dialect in ("modelopt", "compressed-tensors")
]
NVIDIA, UNSLOTH, QWEN3 = (
    "nvidia/Qwen3.6-35B-A3B-NVFP4",
    "unsloth/Qwen3.8-27B-NVFP4",
    "nvidia/Qwen3-235B-A22B-NVFP4",
)

# Figures that others counted on the published files: 0xBakeer/inference-atlas #151 (tensors, MTP), jundot/omlx #2659 (linears),
# model.safetensors.index.json of Qwen3.6-27B (55.56 GB) and Qwen3-8B (16.38 GB), unsloth's Qwen3.8-27B in memory (23.42 GB).
COUNTED = {
    NVIDIA: {"tensors": 124_468, "mtp": 19, "listed": 291},
    "Qwen/Qwen3.6-35B-A3B-FP8": {"mtp": 1560},
    "nvidia/Qwen3.6-27B-NVFP4": {"listed": 401},
    "Qwen/Qwen3.6-27B": {"bytes": 55.56e9},
    "Qwen/Qwen3-8B": {"bytes": 16.38e9},
    UNSLOTH: {"nvfp4": 168, "fp8_channel": 233, "bytes": 23.42e9},
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_tables_have_the_published_counts(name: str) -> None:
    table, formats = published.table(name), dict(published.formats(name))
    listed = published.config(name).get("quantization_config", {}).get("quantized_layers", {})
    ours = {
        "tensors": len(table),
        "mtp": sum(n.startswith("mtp.") for n in table),
        "listed": len(listed),
        "bytes": sum(BYTES[d] * math.prod(s) for d, s in table.values()),
        **{f: sum(v == f for v in formats.values()) for f in ("nvfp4", "fp8_channel")},
    }
    for key, expected in COUNTED[name].items():
        assert ours[key] == (pytest.approx(expected, rel=2e-4) if key == "bytes" else expected), key


@pytest.mark.parametrize("name", published.RELEASES)
def test_the_family_knows_every_tensor_of_a_release(name: str) -> None:
    """At the published size: each linear has a kind, and each name its short form; fused groups are whole."""
    config = published.config(name)
    family, release = models.family_of(config), published.RELEASES[name]
    assert (family.experts is not None) == release.experts
    names = list(published.table(name))
    for tensor in names:
        short = models.short_name(tensor)
        assert not short.startswith(("model.", "language_model.")) or family.vision in tensor
        assert tensor in models.aliases(tensor)
    modules = {n for n, _ in published.formats(name) if not n.startswith("mtp.")}
    for module in modules:
        expert = family.experts.split(module) if family.experts else None
        assert expert or family.kind_of(module) in ("mlp", "attention", "deltanet", "head"), module
    sizes = {len(g) for g in family.fused_groups(modules)}
    assert sizes <= {2, 3}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("published")
    folders = {n: published.write(n, home / n.replace("/", "--")) for n in published.RELEASES}
    for name in ("Qwen/Qwen3.6-27B", "Qwen/Qwen3.6-35B-A3B"):
        folders[f"{name}, text"] = published.text_only(
            folders[name], home / f"{name.replace('/', '--')}-text"
        )
    return folders


@pytest.mark.parametrize(
    "name", [*published.RELEASES, "Qwen/Qwen3.6-27B, text", "Qwen/Qwen3.6-35B-A3B, text"]
)
def test_an_audit_has_no_finding(small, name: str) -> None:
    """Negative control: nothing is wrong with what NVIDIA, Qwen and unsloth publish."""
    audit = aq.checkpoint.audit(small[name])
    assert audit.findings == []
    assert (audit.summary.mtp is None) == ("Qwen3-" in name)


@pytest.mark.parametrize("name", [*PLAIN, "Qwen/Qwen3.6-27B, text", "Qwen/Qwen3.6-35B-A3B, text"])
def test_direct_quantizes_each(small, tmp_path: Path, name: str) -> None:
    aq.quantize.run("direct", small[name], tmp_path / "nvfp4")
    audit = aq.checkpoint.audit(tmp_path / "nvfp4", source=small[name])
    assert audit.findings == []
    before, after = zoo.read(small[name]), ModelFolder(tmp_path / "nvfp4")
    auxiliary = [n for n in before if n.startswith("mtp.") or "visual" in n]
    assert all(after.tensor(n).tobytes() == before[n].tobytes() for n in auxiliary)


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_a_conversion_keeps_weights_and_kv_scales(
    small, tmp_path: Path, name: str, to: str
) -> None:
    folder = ModelFolder(small[name])
    other = ModelFolder(aq.checkpoint.convert(folder.path, to, tmp_path / "x").path)
    assert aq.checkpoint.audit(other.path).findings == []
    before, after = dialects.linears(folder), dialects.linears(other)
    assert set(before) == set(after)
    for module, x in before.items():
        rtol = 0 if x.format == "fp8" else 2**-22  # the global scale is a reciprocal
        np.testing.assert_allclose(
            x.dequantize(folder), after[module].dequantize(other), rtol=rtol, err_msg=module
        )
    # compressed-tensors' scheme promises calibrated scales, so a cast without any is not written in it
    kv = published.RELEASES[name].kv
    assert dialects.DIALECTS[to].config(other).kv_cache == (
        "FP8" if kv or to == "modelopt" else None
    )
    scales = [
        {models.layer_of(n): float(f.scalar(n)) for n in f if n.endswith("k_scale")}
        for f in (folder, other)
    ]
    assert scales[0] == scales[1] and bool(scales[0]) == bool(kv)
    assert all(
        n.endswith("k_proj.k_scale") == (to == "modelopt") for n in other if n.endswith(".k_scale")
    )


@pytest.mark.parametrize("name", [n for n in QUANTIZED if n != UNSLOTH])
def test_a_repair_keeps_the_kv_cache(small, tmp_path: Path, name: str) -> None:
    result = repair(small[name], output=tmp_path / "x")
    assert result.remaining == []
    before, after = ModelFolder(small[name]), ModelFolder(result.path)
    assert [n for n in before if n.endswith(("k_scale", "v_scale"))] == [
        n for n in after if n.endswith(("k_scale", "v_scale"))
    ]
    exported = json.loads((tmp_path / "x/hf_quant_config.json").read_text())["quantization"]
    assert (
        exported["kv_cache_quant_algo"] == "FP8"
        and after.config["quantization_config"]["kv_cache_scheme"]
    )


@pytest.mark.parametrize("name", [UNSLOTH, "Qwen/Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B, text"])
def test_lost_heads_and_towers_come_back_in_any_layout(small, tmp_path: Path, name: str) -> None:
    """compressed-tensors, plain multimodal and plain text checkpoints that lost mtp.* and visual.*, against their source."""
    source = small[name.replace(", text", "") if name != UNSLOTH else "Qwen/Qwen3.8-27B"]

    def lose(t: dict, c: dict) -> None:
        drop("", inside="mtp.")(t, c)
        drop("", inside="visual.")(t, c)
        (c.get("text_config") or c).pop("mtp_num_hidden_layers")
        if "quantization_config" in c:
            c["quantization_config"]["ignore"] = c["quantization_config"]["ignore"][:1]

    bad = zoo.spoil(small[name], tmp_path / "bad", lose)
    expected = {"mtp_missing"} if "text" in name else {"mtp_missing", "vision_missing"}
    assert expected <= {f.code for f in aq.checkpoint.audit(bad, source=source).findings}
    result = repair(bad, source)
    assert {f.code for f in result.remaining} & {
        "mtp_missing",
        "vision_missing",
        "listed_but_plain",
    } == set()
    before, after, original = zoo.read(bad), zoo.read(Path(result.path)), zoo.read(source)
    assert all(after[n].tobytes() == t.tobytes() for n, t in before.items())
    restored = set(after) - set(before)
    assert sum(n.startswith("mtp.") for n in restored) == (19 if "35B" in name else 15)
    assert any("visual" in n for n in restored) == ("text" not in name)
    assert all(after[n].tobytes() == original[n].tobytes() for n in restored)
    assert ModelFolder(result.path).text_config["mtp_num_hidden_layers"] == 1
    with pytest.raises(CheckpointError, match="no NVFP4 in ModelOpt's layout"):
        repair(result.path, source)


def test_a_lost_head_comes_back_where_the_settings_are_lost_too(small, tmp_path: Path) -> None:
    """The tensors' names make it compressed-tensors; the audit names the settings, which a repair cannot know."""

    def lose(t: dict, c: dict) -> None:
        drop("", inside="mtp.")(t, c)
        c.pop("quantization_config")

    bad = zoo.spoil(small[UNSLOTH], tmp_path / "bad", lose)
    result = repair(bad, small["Qwen/Qwen3.8-27B"])
    assert sum(n.startswith("mtp.") for n in zoo.read(Path(result.path))) == 15
    assert "quantization_config" not in ModelFolder(result.path).config


def test_quantized_releases_as_gguf_hold_the_dequantized_values(small, tmp_path: Path) -> None:
    """FP8 with either kind of scale becomes Q8_0, NVFP4 stays: decoded by the gguf package."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    for name in (UNSLOTH, NVIDIA):
        folder = ModelFolder(small[name])
        file = aq.checkpoint.convert(
            folder.path, "gguf", tmp_path / f"{name.rpartition('/')[2]}.gguf"
        ).path
        tensors = {t.name: t for t in gguf.GGUFReader(file).tensors}
        linears = dialects.linears(folder)
        module = "model.language_model.layers.3.self_attn.o_proj"
        stored = tensors["blk.3.attn_output.weight"]
        ours = gguf.quants.dequantize(stored.data, stored.tensor_type)
        assert stored.tensor_type.name == "Q8_0" and linears[module].format == "fp8"
        expected = linears[module].dequantize(folder)
        largest = np.abs(expected.reshape(-1, 32)).max(
            1, keepdims=True
        )  # a block has 32 values in steps of 1/127 of it, as float16
        assert (np.abs(ours - expected).reshape(-1, 32) <= largest / 127 * 0.57).all()
        down = "mlp.experts.5.down_proj" if name == NVIDIA else "mlp.down_proj"
        stored = tensors[
            "blk.1.ffn_down_exps.weight" if name == NVIDIA else "blk.1.ffn_down.weight"
        ]
        scale = tensors[stored.name.replace(".weight", ".scale")].data
        index = 5 if name == NVIDIA else None
        data, factor = (
            (stored.data, scale[0]) if index is None else (stored.data[index], scale[index])
        )
        ours = gguf.quants.dequantize(data, stored.tensor_type) * factor
        expected = linears[f"model.language_model.layers.1.{down}"].dequantize(folder)
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


@pytest.mark.parametrize("step", ["modelopt", "compressed-tensors", "repair"])
def test_scales_of_a_cast_do_not_look_uncalibrated_in_a_copy(
    small, tmp_path: Path, step: str
) -> None:
    """ModelOpt until 0.42 stored 1.0 for a cast. A copy has another producer, and no such scales."""
    cast = zoo.spoil(small[QWEN3], tmp_path / "cast", all_of(("k_scale", "v_scale"), 1.0))
    assert aq.checkpoint.audit(cast).findings == []
    copy = (
        repair(cast).path
        if step == "repair"
        else aq.checkpoint.convert(cast, step, tmp_path / "x").path
    )
    assert aq.checkpoint.audit(copy).findings == []
    assert not any(n.endswith(("k_scale", "v_scale")) for n in ModelFolder(copy))
    expected = None if step == "compressed-tensors" else "FP8"
    assert dialects.of(ModelFolder(copy)).config(ModelFolder(copy)).kv_cache == expected


def layers_of(config: dict) -> dict:
    return config["quantization_config"]["quantized_layers"]


EXPERTS = "model.language_model.layers.1.mlp.experts"
V = "model.language_model.layers.3.self_attn.v_scale"


def drop(*ends: str, inside: str = ""):
    return lambda t, c: [t.pop(n) for n in list(t) if n.endswith(ends) and inside in n]


def all_of(ends: str, value: float):
    return lambda t, c: t.update(
        {n: np.full_like(a, value) for n, a in t.items() if n.endswith(ends)}
    )


def scale_of_blocks(t: dict, c: dict) -> None:
    name = f"{EXPERTS}.3.up_proj.weight_scale"
    t[name] = np.maximum(
        (t[name].astype(np.float32) / 2**13).astype(t[name].dtype).view(np.uint8), 1
    ).view(t[name].dtype)


# name → (release, change, code, tensor): each is a fault that an issue of the spec reports of published checkpoints
FAULTS = {
    "experts missing from quantized_layers": (
        NVIDIA, lambda t, c: layers_of(c).pop(EXPERTS), "not_listed", f"{EXPERTS}.0.gate_proj",
    ),
    "experts listed as FP8": (
        NVIDIA, lambda t, c: layers_of(c).update({EXPERTS: {"quant_algo": "FP8"}}), "format_disagrees",
        f"{EXPERTS}.0.gate_proj",
    ),
    "the head listed and in 16 bits": (
        NVIDIA, lambda t, c: (drop("lm_head.weight_scale", "lm_head.weight_scale_2", "lm_head.input_scale")(t, c),
                              t.update({"lm_head.weight": np.ones((1536, 256), zoo.BF16)})),
        "listed_but_plain", "lm_head",
    ),
    "scales of one layer's experts dropped": (
        NVIDIA, drop("_proj.weight_scale", inside=EXPERTS), "block_scale_missing", f"{EXPERTS}.0.gate_proj.weight",
    ),
    "tensor scales of one layer's experts dropped": (
        NVIDIA, drop("weight_scale_2", inside=EXPERTS), "tensor_scale_missing", f"{EXPERTS}.0.gate_proj",
    ),
    "an expert's scales below Marlin's range": (
        NVIDIA, scale_of_blocks, "block_scale_underflow", f"{EXPERTS}.3.up_proj.weight_scale",
    ),
    "the MTP head's experts dropped": (
        NVIDIA, drop("experts.gate_up_proj", "experts.down_proj"), "mtp_missing", "mtp.layers.0.mlp.experts",
    ),
    "the MTP head lost": (NVIDIA, drop("", inside="mtp."), "mtp_missing", "config.json"),
    "KV scales of keys without values": (QWEN3, drop("v_scale"), "kv_scale_missing", "model.layers.0.self_attn"),
    "KV scales of some layers": (QWEN3, drop("k_scale", "v_scale", inside="layers.2."), "kv_scale_missing",
                                 "model.layers.2.self_attn"),
    "KV scales of 1.0": (UNSLOTH, all_of(("k_scale", "v_scale"), 1.0), "kv_scale_default", V.replace("v_", "k_")),
    "the KV cache in FP8 and no scales": (UNSLOTH, drop("k_scale", "v_scale"), "kv_scale_missing", "config.json"),
    "a KV scale of 0": (UNSLOTH, all_of("v_scale", 0.0), "kv_scale_bad", V),
    "in_proj_a missing from ignore": (
        UNSLOTH, lambda t, c: (c["quantization_config"]["ignore"].pop(0),
                               c["quantization_config"]["config_groups"]["group_0"]["targets"].append("Linear")),
        "listed_but_plain", "model.language_model.layers.0.linear_attn.in_proj_a",
    ),
    "the last layers missing from the FP8 group": (
        UNSLOTH, lambda t, c: c["quantization_config"]["config_groups"]["group_0"]["targets"].pop(), "format_disagrees",
        "model.language_model.layers.3.mlp.down_proj",
    ),
    "routers missing from ignore": (
        QWEN3, lambda t, c: c["quantization_config"]["ignore"].remove("model.layers.2.mlp.gate"), "not_excluded",
        "model.layers.2.mlp.gate",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_published_layout_is_named(small, tmp_path: Path, fault: str) -> None:
    name, change, code, tensor = FAULTS[fault]
    bad = zoo.spoil(small[name], tmp_path / "bad", change)
    (bad / "hf_quant_config.json").unlink(missing_ok=True)
    audit = aq.checkpoint.audit(bad)
    assert code in {f.code for f in audit.findings}, audit.findings
    assert any(f.code == code and f.tensor.startswith(tensor) for f in audit.findings), (
        audit.findings
    )
    expected = {code, *CONSEQUENCES.get(fault, ())}
    assert {f.code for f in audit.findings} <= expected, audit.findings


CONSEQUENCES = {
    "scales of one layer's experts dropped": ("orphan_scale", "listed_but_plain"),
}
