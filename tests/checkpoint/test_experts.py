"""Mixtures of experts: merged and single names of the same bytes, and the faults of their checkpoints."""

from __future__ import annotations

from pathlib import Path

import checkpoint_zoo as zoo
import expert_zoo
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, ShardError, repair


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("experts")
    return {
        "merged": expert_zoo.merged(home / "merged"),
        "single": expert_zoo.per_expert(home / "single"),
    }


def test_single_experts_are_read_from_merged_tensors(plain):
    """Every expert's linear can be read by its own name, and has the bytes that NumPy cuts from the merged tensor."""
    folder, single = ModelFolder(plain["merged"]), ModelFolder(plain["single"])
    assert len(folder.expert_parts) == 4 * 3 * expert_zoo.EXPERTS and not single.expert_parts
    for name in single:
        assert folder.find(name) == name and folder.info(name).shape == single.info(name).shape
        assert folder.tensor(name).tobytes() == single.tensor(name).tobytes()
        assert b"".join(p.tobytes() for p in folder.pieces(name)) == single.tensor(name).tobytes()
        folder.release(name)
    multimodal = (
        f"model.language_model.layers.1.mlp.experts.{expert_zoo.EXPERTS - 1}.up_proj.weight"
    )
    assert np.array_equal(
        folder.tensor(folder.find(multimodal)), single.tensor(single.find(multimodal))
    )
    assert set(folder) == set(expert_zoo.weights()), "iteration has the files' own names"
    with pytest.raises(ShardError, match="missing"):
        folder.info(f"model.layers.1.mlp.experts.{expert_zoo.EXPERTS}.up_proj.weight")


@pytest.fixture(scope="module")
def sound(plain, tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sound")
    quantized = expert_zoo.nvfp4(home / "nvfp4", plain["single"])
    (quantized / "hf_quant_config.json").unlink()
    out = {
        "nvfp4": quantized,
    }
    out["ct"] = Path(aq.checkpoint.convert(quantized, "compressed-tensors", home / "ct").path)

    def excluded(t: dict, c: dict) -> None:
        expert_zoo.plain_merged(t, c)
        c["quantization_config"]["ignore"].append("model.layers.1.mlp.experts*")

    return out | {"excluded": zoo.spoil(quantized, home / "excluded", excluded)}


@pytest.mark.parametrize("kind", ["merged", "single", "nvfp4", "ct", "excluded"])
def test_sound_experts_have_no_finding(plain, sound, kind):
    """Negative control: merged or single, plain, listed as excluded, in both dialects."""
    assert aq.checkpoint.audit((plain | sound)[kind]).findings == []


@pytest.mark.parametrize("names", ["merged", "single"])
def test_experts_against_a_source_with_either_names(plain, sound, names):
    """The source may store the experts merged, as transformers does, and the checkpoint one by one, as ModelOpt does."""
    audit = aq.checkpoint.audit(sound["nvfp4"], source=plain[names])
    assert audit.findings == []
    errors = {r.name: r.rel_l2 for r in audit.tensors if ".experts." in r.name}
    assert len(errors) == 4 * 3 * expert_zoo.EXPERTS and all(
        0.08 < e < 0.12 for e in errors.values()
    )


def test_swapped_experts_are_found_against_a_merged_source(plain, sound, tmp_path):
    def swap(t: dict, c: dict) -> None:
        one, two = (f"model.layers.1.mlp.experts.{e}.down_proj.weight" for e in (0, 1))
        t[one], t[two] = t[two], t[one]

    audit = aq.checkpoint.audit(
        zoo.spoil(sound["nvfp4"], tmp_path / "x", swap), source=plain["merged"]
    )
    assert {(f.code, f.tensor.rpartition("experts.")[2]) for f in audit.findings} == {
        ("large_error", "0.down_proj"),
        ("large_error", "1.down_proj"),
    }


@pytest.mark.parametrize("fault", expert_zoo.FAULTS)
def test_each_fault_of_experts_is_named(sound, tmp_path, fault):
    change, code, tensor = expert_zoo.FAULTS[fault]
    audit = aq.checkpoint.audit(zoo.spoil(sound["nvfp4"], tmp_path / "bad", change))
    assert (code, tensor) in {(f.code, f.tensor) for f in audit.findings}, audit.findings
    assert {f.code for f in audit.findings} <= {code, *CONSEQUENCES.get(fault, ())}, audit.findings
    assert all("\n" not in f.message and len(f.message) < 400 for f in audit.findings)


CONSEQUENCES = {
    "one expert more than the configuration": (),
    "an expert without block scales": (
        "orphan_scale",
        "not_excluded",
        "fused_mixed",
        "experts_mixed",
    ),
}


def test_experts_are_repaired_from_a_merged_source(plain, sound, tmp_path):
    bad = zoo.spoil(
        sound["nvfp4"],
        tmp_path / "bad",
        expert_zoo.FAULTS["gate and up of an expert differ in scale"][0],
    )
    result = repair(bad, plain["merged"])
    assert result.remaining == []
    a, b = zoo.read(sound["nvfp4"]), zoo.read(Path(result.path))
    assert {n: t.tobytes() for n, t in a.items()} == {n: t.tobytes() for n, t in b.items()}


# -- KV scales


def with_kv(value: float, algo: str = "FP8"):
    def change(t: dict, c: dict) -> None:
        for kind in "kv":
            t[f"model.layers.3.self_attn.{kind}_proj.{kind}_scale"] = np.array(value, np.float32)
        c["quantization_config"]["kv_cache_quant_algo"] = algo

    return change


@pytest.mark.parametrize(
    ("value", "algo", "code"),
    [
        (0.02, "FP8", None),
        (1.0, "FP8_CAST", None),
        (1.0, "FP8", "kv_scale_default"),
        (0.0, "FP8", "kv_scale_bad"),
        (np.nan, "FP8", "kv_scale_bad"),
    ],
)
def test_scales_of_the_kv_cache(sound, tmp_path, value, algo, code):
    audit = aq.checkpoint.audit(zoo.spoil(sound["nvfp4"], tmp_path / "kv", with_kv(value, algo)))
    assert {f.code for f in audit.findings} - {"not_finite"} == ({code} if code else set())
    assert all("model.layers.3.self_attn." in f.tensor for f in audit.findings)


# -- columns per rank


@pytest.mark.parametrize(("columns", "code"), [(48, "columns_per_rank"), (64, None)])
def test_columns_that_are_not_whole_kernel_steps(sound, tmp_path, columns, code):
    def narrow(t: dict, c: dict) -> None:
        for name in [n for n in t if n.endswith("experts.2.down_proj.weight")]:
            t[name], t[f"{name}_scale"] = (
                t[name][:, : columns // 2],
                t[f"{name}_scale"][:, : columns // 16],
            )

    audit = aq.checkpoint.audit(zoo.spoil(sound["nvfp4"], tmp_path / "x", narrow))
    assert {f.code for f in audit.findings} == ({code} if code else set())
    assert audit.summary.loads[0] == (
        "vLLM: no, columns are not a multiple of 32 (#48898)" if code else "vLLM: yes"
    )


@pytest.mark.parametrize("kind", ["merged", "single", "nvfp4", "excluded"])
def test_a_summary_counts_experts_by_kind(plain, sound, kind):
    """One entry per linear of an expert, merged or single, not one per expert's number."""
    summary = aq.checkpoint.audit((plain | sound)[kind]).summary
    count, quantized = 4 * expert_zoo.EXPERTS, {"nvfp4": 4, "excluded": 3}.get(kind, 0)
    entries = [
        e
        for e in (*summary.quantized, *summary.unquantized)
        if "experts." in e and "shared" not in e
    ]
    per_layer = [quantized * expert_zoo.EXPERTS, count - quantized * expert_zoo.EXPERTS]
    expected = {f"{n} x experts.{k}_proj" for n in per_layer if n for k in ("gate", "up", "down")}
    assert set(entries) == expected


@pytest.mark.parametrize("names", ["merged", "single"])
def test_a_comparison_has_every_expert(plain, sound, tmp_path, names):
    """Folder and GGUF file, source merged or single: a row per expert's linear, with the error of the codes themselves."""
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    file = aq.checkpoint.convert(sound["nvfp4"], "gguf", tmp_path / "x.gguf").path
    result = aq.checkpoint.compare(plain[names], {"folder": sound["nvfp4"], "gguf": file})
    rows = {
        form: [r for r in result.rows if r.form == form and ".experts." in r.tensor]
        for form in ("folder", "gguf")
    }
    assert len(rows["folder"]) == len(rows["gguf"]) == 4 * 3 * expert_zoo.EXPERTS
    for a, b in zip(*(sorted(r, key=lambda row: row.tensor) for r in rows.values()), strict=True):
        assert (
            a.tensor == b.tensor
            and 0.08 < a.rel_l2 < 0.12
            and a.rel_l2 == pytest.approx(b.rel_l2, rel=1e-5)
        )
        assert 4.4 < a.bits < 4.6 and 4.4 < b.bits < 4.6


def test_gguf_has_the_same_tensors_from_either_layout(sound, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    other = aq.checkpoint.convert(sound["nvfp4"], "compressed-tensors", tmp_path / "other").path
    files = [
        aq.checkpoint.convert(f, "gguf", tmp_path / f"{i}.gguf").path
        for i, f in enumerate((sound["nvfp4"], other))
    ]
    ours, theirs = ({t.name: t for t in gguf.GGUFReader(file).tensors} for file in files)
    assert set(ours) == set(theirs) and any(
        "_exps" in name and t.tensor_type.name == "NVFP4" for name, t in ours.items()
    )
    for name, tensor in ours.items():
        same = np.allclose if name.endswith("scale") else np.array_equal  # a divisor's last place
        assert same(tensor.data, theirs[name].data), name


def test_merged_experts_in_16_bits_stay_listed(sound, tmp_path):
    """A conversion and a repair list unquantized merged experts; those of the MTP head need no entry."""

    def head(t: dict, c: dict) -> None:
        t["mtp.layers.0.mlp.experts.gate_up_proj"] = t[expert_zoo.GATE_UP].copy()

    folder = zoo.spoil(sound["excluded"], tmp_path / "head", head)
    assert aq.checkpoint.audit(folder).findings == []
    done = aq.checkpoint.convert(folder, "compressed-tensors", tmp_path / "ct")
    assert aq.checkpoint.audit(done.path).findings == []
    bad = zoo.spoil(sound["nvfp4"], tmp_path / "bad", expert_zoo.plain_merged)
    assert repair(bad).remaining == []


def test_the_number_of_experts_under_the_name_that_transformers_saves(sound, tmp_path):
    """transformers 5 saves Qwen3 MoE with num_local_experts (its Qwen3MoeConfig.attribute_map)."""

    def rename(t: dict, c: dict) -> None:
        c["num_local_experts"] = c.pop("num_experts")

    renamed = zoo.spoil(sound["nvfp4"], tmp_path / "renamed", rename)
    assert ModelFolder(renamed).text_config["num_experts"] == expert_zoo.EXPERTS
    assert aq.checkpoint.audit(renamed).findings == []
    stated = zoo.spoil(
        renamed, tmp_path / "more", lambda t, c: c.update(num_local_experts=expert_zoo.EXPERTS + 1)
    )
    assert {f.code for f in aq.checkpoint.audit(stated).findings} == {"expert_count"}
