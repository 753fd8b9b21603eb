"""Per-channel FP8 next to NVFP4 in compressed-tensors, as published for Qwen3.6 and 3.8: read, audited, converted.

Settings as llama.cpp #27161 and its relatives describe unsloth's: two groups with patterns that overlap, the first counts.
"""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, linears

FP8 = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "linear_attn.in_proj_qkv",
       "linear_attn.in_proj_z", "linear_attn.out_proj", "lm_head", "layers.3.mlp.gate_proj", "layers.3.mlp.up_proj",
       "layers.3.mlp.down_proj")  # fmt: skip
Q, LAST, FIRST = (
    "model.layers.3.self_attn.q_proj",
    "model.layers.3.mlp.down_proj",
    "model.layers.0.mlp.down_proj",
)
CHANNEL = {
    "num_bits": 8,
    "type": "float",
    "strategy": "channel",
    "symmetric": True,
    "dynamic": False,
}
TARGETS = [r"re:.*self_attn\.(q|k|v|o)_proj$", r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$", "re:.*lm_head",
           r"re:.*layers\.3\.mlp\.(gate|up|down)_proj$"]  # fmt: skip


def channel_fp8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return E4M3 codes and float32 scales [out, 1], by the definition."""
    w = w.astype(np.float32)
    scale = np.abs(w).max(axis=1, keepdims=True) / np.float32(448)
    return (w / scale).astype(ml_dtypes.float8_e4m3fn), scale


def two_groups(t: dict, c: dict) -> None:
    for name in [n for n in t if n.removesuffix(".weight").endswith(FP8) and n.endswith(".weight")]:
        t[name], t[f"{name}_scale"] = channel_fp8(t[name])
    nvfp4 = c["quantization_config"]["config_groups"]["group_0"] | {
        "targets": [r"re:.*mlp\.(gate|up|down)_proj$"]
    }
    token = CHANNEL | {"strategy": "token", "dynamic": True}
    fp8 = {
        "weights": CHANNEL,
        "input_activations": token,
        "format": "float-quantized",
        "targets": TARGETS,
    }
    c["quantization_config"] |= {
        "config_groups": {"group_0": fp8, "group_1": nvfp4},
        "format": "mixed-precision",
        "ignore": [r"re:.*linear_attn\.in_proj_[ab]$"],
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("channel")
    source = zoo.bf16(home / "bf16")
    only = zoo.nvfp4(home / "nvfp4", source, lambda n: ".mlp." in n and "layers.3." not in n)
    (only / "hf_quant_config.json").unlink()
    ct = Path(aq.checkpoint.convert(only, "compressed-tensors", home / "ct").path)
    return {"source": source, "mixed": zoo.spoil(ct, home / "mixed", two_groups)}


def test_it_is_read_and_has_no_finding(checkpoints):
    audit = aq.checkpoint.audit(checkpoints["mixed"], source=checkpoints["source"])
    assert audit.findings == [] and audit.summary.algorithm == "MIXED_PRECISION"
    formats = {r.name: r.format for r in audit.tensors if r.format in ("nvfp4", "fp8")}
    assert sum(f == "nvfp4" for f in formats.values()) == 9 and formats["lm_head"] == "fp8"
    assert (
        formats[LAST] == "fp8" and formats[FIRST] == "nvfp4"
    )  # the first of the overlapping groups counts
    errors = [r.rel_l2 for r in audit.tensors if r.format == "fp8"]
    assert len(errors) == 4 + 9 + 1 + 3 and all(
        0.02 < e < 0.03 for e in errors
    )  # E4M3 has 3 bits of mantissa


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors"])
def test_a_conversion_keeps_every_weight(checkpoints, tmp_path, to):
    mixed, path = ModelFolder(checkpoints["mixed"]), checkpoints["mixed"]
    for step in [to] if to == "modelopt" else ["modelopt", to]:
        path = Path(aq.checkpoint.convert(path, step, tmp_path / step).path)
        assert aq.checkpoint.audit(path, source=checkpoints["source"]).findings == []
    other = ModelFolder(path)
    before, after = linears(mixed), linears(other)
    assert set(before) == set(after)
    for name, x in before.items():
        ours, theirs = x.dequantize(mixed), after[name].dequantize(other)
        # the global scale is a reciprocal: one unit in the last place
        np.testing.assert_allclose(
            ours, theirs, rtol=0 if x.format == "fp8" else 2**-22, err_msg=name
        )
        assert after[name].per_channel(other) == (x.format == "fp8")
    shape = other.info(f"{Q}.weight_scale").shape
    assert shape == ((512,) if to == "modelopt" else (512, 1))


def put(name: str, change):
    return lambda t, c: t.update({name: change(t[name].copy())})


def first(value: float):
    def change(a: np.ndarray) -> np.ndarray:
        a[0] = value
        return a

    return change


def groups(c: dict) -> dict:
    return c["quantization_config"]["config_groups"]


FAULTS = {
    "no scale": (lambda t, c: t.pop(f"{Q}.weight_scale"), "fp8_scale_missing", Q),
    "a scale of 0": (put(f"{Q}.weight_scale", first(0)), "fp8_scale_bad", f"{Q}.weight_scale"),
    "a NaN scale": (put(f"{Q}.weight_scale", first(np.nan)), "fp8_scale_bad", f"{Q}.weight_scale"),
    "scales of half the rows": (
        put(f"{Q}.weight_scale", lambda s: s[:256]),
        "scale_shape",
        f"{Q}.weight_scale",
    ),
    "scales of 8 bits": (
        put(f"{Q}.weight_scale", lambda s: s.astype(ml_dtypes.float8_e4m3fn)),
        "scale_dtype",
        f"{Q}.weight_scale",
    ),
    "a NaN code": (put(f"{Q}.weight", first(np.nan)), "fp8_code_nan", f"{Q}.weight"),
    "the groups in the other order": (
        lambda t, c: c["quantization_config"].update(
            config_groups=dict(reversed(groups(c).items()))
        ),
        "format_disagrees",
        LAST,
    ),
    "a group that misses a linear": (
        lambda t, c: groups(c)["group_0"]["targets"].pop(2),
        "not_listed",
        "lm_head",
    ),
    "linear_attn missing from ignore": (
        lambda t, c: (
            groups(c)["group_0"]["targets"].append("Linear"),
            c["quantization_config"]["ignore"].clear(),
        ),
        "listed_but_plain",
        "model.layers.0.linear_attn.in_proj_a",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_named(checkpoints, tmp_path, fault):
    change, code, tensor = FAULTS[fault]
    audit = aq.checkpoint.audit(zoo.spoil(checkpoints["mixed"], tmp_path / "bad", change))
    assert (code, tensor) in {(f.code, f.tensor) for f in audit.findings}, audit.findings
    assert {f.code for f in audit.findings} == {code}, audit.findings
