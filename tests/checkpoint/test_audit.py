"""The audit: sound checkpoints have no finding; each fault is reported with its code and its tensor."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from checkpoint_faults import DOWN, FAULTS, GATE, UP, awq, folded, scale

import annie_quant as aq
from annie_quant.checkpoint import shards

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sound")
    plain = zoo.bf16(home / "bf16", shard_bytes=2_000_000)
    out = {
        "bf16": plain,
        "nvfp4": zoo.nvfp4(home / "nvfp4", plain),
        "w4a16": zoo.nvfp4(home / "w4a16", plain, with_input=False),
        "mlp_only": zoo.nvfp4(home / "mlp_only", plain, lambda n: ".mlp." in n),
    }
    out["ct"] = Path(aq.checkpoint.convert(out["nvfp4"], "compressed-tensors", home / "ct").path)
    return out


@pytest.mark.parametrize("kind", ["bf16", "nvfp4", "w4a16", "mlp_only", "ct"])
def test_sound_checkpoints_have_no_finding(sound, kind):
    audit = aq.checkpoint.audit(sound[kind])
    assert audit.ok, audit.findings
    assert aq.checkpoint.audit(sound[kind], source=sound["bf16"]).ok
    assert json.loads(json.dumps(audit.to_dict()))["ok"] is True


def test_the_summary_counts_tensors(sound):
    s = aq.checkpoint.audit(sound["mlp_only"]).summary
    assert s.quantized == ["4 x mlp.down_proj", "4 x mlp.gate_proj", "4 x mlp.up_proj"]
    assert "lm_head" in s.unquantized and "self_attn.q_proj" in s.unquantized
    config = zoo.CONFIG
    quantized = 3 * 4 * config["hidden_size"] * config["intermediate_size"]
    total = sum(int(np.prod(v)) for v in zoo.shapes(config).values())
    # 4 bits + 8/16 of a block scale, and 8 bytes of scalars per linear
    assert s.weights == total
    assert s.bits_per_quantized_weight == round(4.5 + 12 * 64 / quantized, 3)
    assert s.size_bytes == quantized * 4.5 / 8 + 12 * 8 + 2 * (total - quantized)
    assert s.algorithm == "NVFP4" and all(line.split(": ")[1] for line in s.loads)


def test_a_plain_checkpoint_has_16_bits_per_weight(sound):
    s = aq.checkpoint.audit(sound["bf16"]).summary
    assert s.dialect == "plain" and s.bits_per_weight == 16 and s.bits_per_quantized_weight is None


@pytest.mark.parametrize("kind", ["bf16", "nvfp4"])
def test_the_settings_are_not_read_again_for_each_tensor(sound, kind, monkeypatch):
    reads = []

    def read(path: Path) -> object:
        reads.append(path.name)
        return json.loads(path.read_text()) if path.exists() else None

    monkeypatch.setattr(shards, "read_object", read)
    assert aq.checkpoint.audit(sound[kind]).ok
    assert reads.count("config.json") == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_reported(sound, tmp_path, fault):
    change, code, tensor = FAULTS[fault]
    folder = zoo.spoil(sound["nvfp4"], tmp_path / "bad", change)
    audit = aq.checkpoint.audit(folder)
    assert code in {f.code for f in audit.findings}, audit.findings
    if tensor:
        assert tensor in {f.tensor for f in audit.findings if f.code == code}, audit.findings
    assert not audit.ok and all(
        "\n" not in f.message and len(f.message) < 400 for f in audit.findings
    )
    assert {f.code for f in audit.findings} <= {code, *CONSEQUENCES.get(fault, ())}, audit.findings
    json.dumps(audit.to_dict())


# Further findings that the fault causes; there must be no others.
CONSEQUENCES = {
    "NaN tensor scale": (),
    "no block scale": ("orphan_scale", "not_excluded", "fused_mixed"),
    "scale without a weight": ("orphan_scale", "decoder_incomplete"),
    "no tensor scale": (),
    "only hf_quant_config": (),
    "one of a fused group is plain": ("config_disagrees",),
    "excluded and quantized": ("config_disagrees",),
    "plain and not excluded": ("config_disagrees",),
    "group size": ("config_disagrees",),
    "linear_attn missing from ignore": ("config_disagrees",),
}


def test_a_deadly_fault_appears_in_what_loads(sound, tmp_path):
    folder = zoo.spoil(sound["nvfp4"], tmp_path / "bad", FAULTS["NaN block scale"][0])
    summary = aq.checkpoint.audit(folder).summary
    assert all(": no, block_scale_nan" in line for line in summary.loads)
    assert {(s.loads, s.note) for s in summary.servers} == {("no", "block_scale_nan")}


def test_a_bfloat16_state_of_deltanet_appears_in_what_loads(sound, tmp_path):
    """vLLM keeps the state in the model's dtype on a GPU where config.json has lost the key. It is not a finding."""
    folder = zoo.spoil(sound["nvfp4"], tmp_path / "lost", lambda t, c: c.pop("mamba_ssm_dtype"))
    audit = aq.checkpoint.audit(folder)
    assert audit.ok and "--mamba-ssm-cache-dtype float32" in audit.summary.loads[0]
    summary = aq.checkpoint.audit(sound["nvfp4"]).summary
    assert summary.loads[0] == "vLLM: yes" and summary.loads == [str(s) for s in summary.servers]
    assert {s.server: s.loads for s in summary.servers}["transformers"] == "after"


def test_llama_cpp_on_blackwell_does_not_protect_a_checkpoint_without_input_scales(sound):
    def loads(folder):
        return {s.server: s.note for s in aq.checkpoint.audit(folder).summary.servers}["llama.cpp"]

    warning = "the inputs of W4A16 linears have 4 bits in prompts, too"
    assert warning not in loads(sound["nvfp4"]) and warning not in loads(sound["bf16"])
    assert warning in loads(sound["w4a16"])


def test_faults_of_the_files_are_findings(sound, tmp_path):
    folder = zoo.spoil(sound["nvfp4"], tmp_path / "cut", lambda t, c: None)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    audit = aq.checkpoint.audit(folder)
    assert [f.code for f in audit.findings] == ["shard_truncated"] and not audit.ok


def test_a_multiplier_instead_of_a_divisor_is_reported(sound, tmp_path):
    folder = zoo.spoil(
        sound["ct"],
        tmp_path / "bad",
        lambda t, c: scale(
            t, f"{DOWN}.weight_global_scale", 1 / float(t[f"{DOWN}.weight_global_scale"][0])
        ),
    )
    assert "tensor_scale_inverted" in {f.code for f in aq.checkpoint.audit(folder).findings}


# -- against the source


def test_a_right_fold_has_no_finding_and_a_wrong_one_names_its_norm(sound, tmp_path):
    for right in (True, False):
        change, norm = folded(sound["bf16"], right)
        folder = zoo.spoil(sound["nvfp4"], tmp_path / str(right), change)
        audit = aq.checkpoint.audit(folder, source=sound["bf16"])
        about_folds = [f for f in audit.findings if not f.code.startswith("fused_")]
        if right:
            assert about_folds == []
        else:
            assert [(f.code, f.tensor) for f in about_folds] == [("fold_plus_one", norm)]


def test_a_linear_that_was_left_out_of_a_fold_is_reported(sound, tmp_path):
    change, norm = folded(sound["bf16"], True, only=("gate",))
    audit = aq.checkpoint.audit(
        zoo.spoil(sound["nvfp4"], tmp_path / "x", change), source=sound["bf16"]
    )
    assert ("fold_mismatch", norm) in {(f.code, f.tensor) for f in audit.findings}


def row_fold(t: dict, c: dict, source: Path, producer: str, consumer: str, right: bool) -> None:
    """Fold between two linears: the producer's rows are divided by the factors of the consumer's columns."""
    plain, (a, b) = zoo.read(source), (f"model.layers.3.{k}" for k in (producer, consumer))
    width, rows = plain[f"{b}.weight"].shape[1], plain[f"{a}.weight"].shape[0]
    s = np.random.default_rng(6).uniform(0.4, 2.5, rows)
    spread = np.repeat(s.reshape(-1, 64), width // rows, axis=0).reshape(-1) if rows != width else s
    t.update(awq(plain, b, spread))
    if right:
        divided = {f"{a}.weight": plain[f"{a}.weight"].astype(np.float32) / s[:, None]}
        t.update(awq(divided, a, np.ones(plain[f"{a}.weight"].shape[1])))


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize(
    "pair", [("mlp.up_proj", "mlp.down_proj"), ("self_attn.v_proj", "self_attn.o_proj")]
)
def test_folds_between_linears_must_cancel(sound, tmp_path, pair, right):
    folder = zoo.spoil(
        sound["nvfp4"], tmp_path / "x", lambda t, c: row_fold(t, c, sound["bf16"], *pair, right)
    )
    audit = aq.checkpoint.audit(folder, source=sound["bf16"])
    about_folds = [(f.code, f.tensor) for f in audit.findings if not f.code.startswith("fused_")]
    assert about_folds == ([] if right else [("fold_mismatch", f"model.layers.3.{pair[1]}")])


@pytest.mark.parametrize("right", [True, False])
def test_the_gated_norm_is_folded_as_a_plain_one(sound, tmp_path, right):
    plain, name = zoo.read(sound["bf16"]), "model.layers.0.linear_attn."
    s = np.random.default_rng(7).uniform(0.4, 2.5, 64)

    def change(t: dict, c: dict) -> None:
        t.update(awq(plain, f"{name}out_proj", np.tile(s, 4)))
        w = plain[f"{name}norm.weight"].astype(np.float64)
        t[f"{name}norm.weight"] = (w / s if right else (1 + w) / s - 1).astype(ml_dtypes.bfloat16)

    audit = aq.checkpoint.audit(
        zoo.spoil(sound["nvfp4"], tmp_path / "x", change), source=sound["bf16"]
    )
    assert [(f.code, f.tensor) for f in audit.findings] == (
        [] if right else [("fold_mismatch", f"{name}norm.weight")]
    )


def test_a_changed_tensor_scale_is_reported_for_its_linear(sound, tmp_path):
    folder = zoo.spoil(
        sound["nvfp4"],
        tmp_path / "x",
        lambda t, c: scale(t, f"{DOWN}.weight_scale_2", 1.5 * t[f"{DOWN}.weight_scale_2"]),
    )
    audit = aq.checkpoint.audit(folder, source=sound["bf16"])
    assert {f.tensor for f in audit.findings} == {DOWN}
    both = {n: 1.5 for n in (GATE, UP)}
    folder = zoo.spoil(
        sound["nvfp4"],
        tmp_path / "y",
        lambda t, c: [
            scale(t, f"{n}.weight_scale_2", k * t[f"{n}.weight_scale_2"]) for n, k in both.items()
        ],
    )
    audit = aq.checkpoint.audit(folder, source=sound["bf16"])
    assert ("large_error", GATE) in {(f.code, f.tensor) for f in audit.findings}


def swap_nibbles(t: dict, c: dict) -> None:
    w = t[f"{DOWN}.weight"]
    t[f"{DOWN}.weight"] = (w >> 4 | w << 4).astype(np.uint8)


def swizzle(t: dict, c: dict) -> None:
    s = t[f"{DOWN}.weight_scale"]
    rows, cols = s.shape
    t[f"{DOWN}.weight_scale"] = np.ascontiguousarray(
        s.reshape(rows // 128, 4, 32, cols // 4, 4).transpose(0, 3, 2, 1, 4)
    ).reshape(rows, cols)


@pytest.mark.parametrize("change", [swap_nibbles, swizzle])
def test_faults_that_only_the_source_shows(sound, tmp_path, change):
    """Reversed nibbles and swizzled scales have valid bytes; against the source they stand out."""
    folder = zoo.spoil(sound["nvfp4"], tmp_path / "x", change)
    assert aq.checkpoint.audit(folder).ok
    audit = aq.checkpoint.audit(folder, source=sound["bf16"])
    assert [(f.code, f.tensor) for f in audit.findings] == [("large_error", DOWN)]


def test_another_model_s_weights_are_reported(sound, tmp_path):
    other = zoo.bf16(tmp_path / "other", seed=9)
    codes = {f.code for f in aq.checkpoint.audit(sound["nvfp4"], source=other).findings}
    assert {"large_error", "differs_from_source"} <= codes


def test_errors_against_the_source_are_those_of_the_format(sound):
    rows = aq.checkpoint.audit(sound["nvfp4"], source=sound["bf16"]).tensors
    errors = [r.rel_l2 for r in rows if r.rel_l2 is not None]
    assert len(errors) == 3 * 3 + 4 + 4 * 3
    assert 0.08 < np.median(errors) < 0.11  # .0951 for Gaussian weights by amax
