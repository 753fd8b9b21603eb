"""Conversions: exact both ways where the formats allow, readable by the libraries that own them, GGUF as llama.cpp's own."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest
from checkpoint_faults import fp8_too
from paths import DATA

import annie_quant as aq
from annie_quant import models
from annie_quant.checkpoint import ModelFolder
from annie_quant.checkpoint.gguf import layout as names
from annie_quant.checkpoint.gguf import vocabulary
from annie_quant.core.errors import CheckpointError, UsageError

pytest.importorskip("annie_quant.nvfp4", reason="the C codec is not built")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("checkpoints")
    out = {"bf16": zoo.bf16(home / "bf16")}
    out["nvfp4"] = zoo.nvfp4(home / "nvfp4", out["bf16"])
    out["w4a16"] = zoo.nvfp4(home / "w4a16", out["bf16"], with_input=False)
    for name in ("nvfp4", "w4a16"):
        out[f"ct_{name}"] = Path(
            aq.checkpoint.convert(out[name], "compressed-tensors", home / f"ct_{name}").path
        )
    return out


# -- compressed-tensors


@pytest.mark.parametrize("kind", ["nvfp4", "w4a16"])
def test_converting_back_restores_the_checkpoint(checkpoints, tmp_path, kind):
    """Codes, block scales and plain tensors are equal; global scales up to one unit in the last place."""
    back = aq.checkpoint.convert(checkpoints[f"ct_{kind}"], "modelopt", tmp_path / "back")
    before, after = zoo.read(checkpoints[kind]), zoo.read(tmp_path / "back")
    assert set(before) == set(after) and "reciprocal" in back.loss[0]
    for name, array in before.items():
        if name.endswith(("weight_scale_2", "input_scale")):
            assert abs(int(array.view(np.int32)) - int(after[name].view(np.int32))) <= 1
        else:
            assert array.dtype == after[name].dtype and array.tobytes() == after[name].tobytes(), (
                name
            )
    a, b = (
        json.loads((f / "config.json").read_text()) for f in (checkpoints[kind], tmp_path / "back")
    )
    assert a == b
    assert (tmp_path / "back/hf_quant_config.json").exists()
    assert {f.name for f in (tmp_path / "back").iterdir()} >= set(zoo.TOKENIZER)


def test_global_scales_become_divisors(checkpoints):
    here, there = ModelFolder(checkpoints["nvfp4"]), ModelFolder(checkpoints["ct_nvfp4"])
    module = "model.layers.0.mlp.down_proj"
    assert there.scalar(f"{module}.weight_global_scale") == np.float32(1) / here.scalar(
        f"{module}.weight_scale_2"
    )
    assert there.info(f"{module}.weight_global_scale").shape == (1,)
    ours, theirs = (dict(aq.checkpoint.linears(f))[module].dequantize(f) for f in (here, there))
    np.testing.assert_allclose(ours, theirs, rtol=3e-7)


@pytest.mark.parametrize("kind", ["nvfp4", "w4a16"])
def test_compressed_tensors_reads_ours(checkpoints, kind):
    """Its own configuration class accepts our settings, and its own decompressor gives our values (in bf16)."""
    torch = pytest.importorskip("torch", reason="the quantize extra is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    folder = ModelFolder(checkpoints[f"ct_{kind}"])
    config = QuantizationConfig.model_validate(folder.config["quantization_config"])
    scheme = config.config_groups["group_0"]
    assert config.format == "nvfp4-pack-quantized" and scheme.weights.group_size == 16
    assert (scheme.input_activations is None) == (kind == "w4a16")
    for name, linear in list(aq.checkpoint.linears(folder).items())[:4]:
        state = {
            "weight_packed": torch.from_numpy(folder.tensor(f"{name}.weight_packed").copy()),
            "weight_scale": torch.from_numpy(
                folder.tensor(f"{name}.weight_scale").view(np.uint8).copy()
            ).view(torch.float8_e4m3fn),
            "weight_global_scale": torch.from_numpy(
                folder.tensor(f"{name}.weight_global_scale").copy()
            ),
        }
        theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"].float().numpy()
        ours = linear.dequantize(folder)
        np.testing.assert_allclose(theirs, ours, rtol=2**-7)  # two roundings to bf16
        assert np.count_nonzero(theirs) == np.count_nonzero(ours)


def test_compressed_tensors_own_output_is_read_the_same(checkpoints, tmp_path):
    """Our reader and their decompressor give the same values for a linear that their compressor packed."""
    torch = pytest.importorskip("torch", reason="the quantize extra is not installed")
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((checkpoints["ct_w4a16"] / "config.json").read_text())
    scheme = QuantizationConfig.model_validate(config["quantization_config"]).config_groups[
        "group_0"
    ]
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    divisor = torch.tensor([2688.0]) / weight.abs().max()
    scale = (divisor * weight.reshape(32, 4, 16).abs().amax(-1) / 6).to(torch.float8_e4m3fn)
    state = NVFP4PackedCompressor.compress(
        {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": divisor}, scheme
    )
    module = "model.layers.0.mlp.gate_proj"
    tensors = {
        f"{module}.weight_packed": state["weight_packed"].numpy(),
        f"{module}.weight_scale": state["weight_scale"]
        .view(torch.uint8)
        .numpy()
        .view(ml_dtypes.float8_e4m3fn),
        f"{module}.weight_global_scale": divisor.numpy(),
    }
    folder = ModelFolder(zoo.save(tmp_path / "theirs", tensors, config))
    ours = aq.checkpoint.linears(folder)[module].dequantize(folder)
    theirs = NVFP4PackedCompressor.decompress(state, scheme)["weight"].float().numpy()
    np.testing.assert_allclose(theirs, ours, rtol=2**-7)
    assert np.linalg.norm(ours - weight.numpy()) / np.linalg.norm(weight.numpy()) < 0.11


def test_modelopt_dequantizes_ours_to_the_same_values(checkpoints):
    torch = pytest.importorskip("torch", reason="the quantize extra is not installed")
    qtensor = pytest.importorskip(
        "modelopt.torch.quantization.qtensor.nvfp4_tensor", reason="ModelOpt is not installed"
    )
    folder = ModelFolder(checkpoints["nvfp4"])
    for name, linear in list(aq.checkpoint.linears(folder).items())[:3]:
        packed = qtensor.NVFP4QTensor(
            torch.Size(linear.shape(folder)),
            torch.float32,
            torch.from_numpy(folder.tensor(f"{name}.weight").copy()),
        )
        theirs = packed.dequantize(
            scale=torch.from_numpy(
                folder.tensor(f"{name}.weight_scale").view(np.uint8).copy()
            ).view(torch.float8_e4m3fn),
            double_scale=torch.tensor(float(linear.tensor_scale(folder).multiplier)),
            block_sizes={-1: 16},
        )
        np.testing.assert_array_equal(theirs.numpy(), linear.dequantize(folder))


def test_mixed_precision_is_converted_both_ways(checkpoints, tmp_path):
    mixed = zoo.spoil(checkpoints["nvfp4"], tmp_path / "mixed", fp8_too)
    (mixed / "hf_quant_config.json").unlink()
    assert aq.checkpoint.audit(mixed).ok, aq.checkpoint.audit(mixed).findings
    ct = aq.checkpoint.convert(mixed, "compressed-tensors", tmp_path / "ct").path
    assert aq.checkpoint.audit(ct).ok, aq.checkpoint.audit(ct).findings
    assert (
        json.loads((Path(ct) / "config.json").read_text())["quantization_config"]["format"]
        == "mixed-precision"
    )
    aq.checkpoint.convert(ct, "modelopt", tmp_path / "back")
    before, after = zoo.read(mixed), zoo.read(tmp_path / "back")
    assert set(before) == set(after)
    assert all(
        before[n].tobytes() == after[n].tobytes()
        for n in before
        if not n.endswith(("_scale_2", "input_scale"))
    )
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    result = aq.checkpoint.convert(mixed, "gguf", tmp_path / "mixed.gguf")
    assert (
        result.dequantized == ["model.layers.3.self_attn.o_proj"]
        and "became Q8_0" in result.loss[0]
    )


def test_weight_only_next_to_quantized_activations_and_fp8(checkpoints, tmp_path):
    """Three formats and bf16 in one checkpoint, both ways, and compressed-tensors' own class reads the settings."""

    def three(t: dict, c: dict) -> None:
        fp8_too(t, c)
        layers = c["quantization_config"]["quantized_layers"]
        for name in [n for n in layers if ".mlp.down_proj" in n]:
            layers[name]["quant_algo"] = "W4A16_NVFP4"
            t.pop(f"{name}.input_scale")

    mixed = zoo.spoil(checkpoints["nvfp4"], tmp_path / "mixed", three)
    (mixed / "hf_quant_config.json").unlink()
    assert aq.checkpoint.audit(mixed).ok, aq.checkpoint.audit(mixed).findings
    aq.checkpoint.convert(mixed, "compressed-tensors", tmp_path / "ct")
    audit = aq.checkpoint.audit(tmp_path / "ct")
    assert audit.ok and audit.summary.algorithm == "MIXED_PRECISION", audit.findings
    aq.checkpoint.convert(tmp_path / "ct", "modelopt", tmp_path / "back")
    assert aq.checkpoint.audit(tmp_path / "back").ok
    a, b = (
        ModelFolder(f).config["quantization_config"]["quantized_layers"]
        for f in (mixed, tmp_path / "back")
    )
    assert a == b and {v["quant_algo"] for v in a.values()} == {"NVFP4", "W4A16_NVFP4", "FP8"}
    assert set(zoo.read(mixed)) == set(zoo.read(tmp_path / "back"))
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.quantization import QuantizationConfig

    config = QuantizationConfig.model_validate(
        ModelFolder(tmp_path / "ct").config["quantization_config"]
    )
    assert [g.format for g in config.config_groups.values()] == ["nvfp4-pack-quantized"] * 2 + [
        "float-quantized"
    ]


def test_a_tied_embedding_has_the_output_s_type(tmp_path):
    """llama-quant.cpp: without output.weight, the token embedding gets the output's type, Q6_K."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    config = zoo.CONFIG | {"tie_word_embeddings": True}
    tensors = zoo.weights(config)
    apart = zoo.save(tmp_path / "apart", tensors, zoo.CONFIG)
    tied = zoo.save(
        tmp_path / "tied", {n: t for n, t in tensors.items() if n != "lm_head.weight"}, config
    )
    for folder, expected in ((apart, "Q4_K"), (tied, "Q6_K")):
        path = aq.checkpoint.convert(
            folder, "gguf", tmp_path / f"{folder.name}.gguf", type="Q4_K_M"
        ).path
        kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(path).tensors}
        assert (
            kinds["token_embd.weight"] == expected and kinds.get("output.weight", "Q6_K") == "Q6_K"
        )


def test_larger_mixtures_follow_llama_quant(checkpoints, tmp_path):
    """llama-quant.cpp: Q5_K_M raises the tensors that Q4_K_M raises, Q6_K is Q6_K throughout; the error falls in order."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    files, kinds = {}, {}
    for mix in ("Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0"):
        files[mix] = aq.checkpoint.convert(
            checkpoints["bf16"], "gguf", tmp_path / f"{mix}.gguf", type=mix
        ).path
        kinds[mix] = {t.name: t.tensor_type.name for t in gguf.GGUFReader(files[mix]).tensors}
    for name, kind in kinds["Q4_K_M"].items():
        assert kinds["Q5_K_M"][name] == {"Q4_K": "Q5_K"}.get(kind, kind)
        assert kinds["Q6_K"][name] == {"Q4_K": "Q6_K"}.get(kind, kind)
    assert set(kinds["Q5_K_M"].values()) == {"F32", "Q5_K", "Q6_K"}
    errors = [s.rel_l2 for s in aq.checkpoint.compare(checkpoints["bf16"], files).summary.values()]
    assert errors == sorted(errors, reverse=True) and errors[0] < 0.09 and errors[-1] < 0.006
    odd = zoo.bf16(tmp_path / "odd", intermediate_size=320)
    with pytest.raises(CheckpointError, match="rows of 320, Q5_K_M needs a multiple of 256"):
        aq.checkpoint.convert(odd, "gguf", tmp_path / "odd.gguf", type="Q5_K_M")


def test_a_rerun_after_an_interrupt_keeps_complete_shards(checkpoints, tmp_path, monkeypatch):
    from annie_quant.checkpoint import writer

    target, part, whole = tmp_path / "out", tmp_path / ".out.part", writer.write_shard
    aq.checkpoint.convert(
        checkpoints["nvfp4"], "compressed-tensors", tmp_path / "undisturbed", shard_bytes=500_000
    )

    def stopping(folder, shard, *rest):
        if len(list(folder.glob("*.safetensors"))) == 2:
            raise KeyboardInterrupt
        whole(folder, shard, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(writer, "write_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            aq.checkpoint.convert(
                checkpoints["nvfp4"], "compressed-tensors", target, shard_bytes=500_000
            )
    left = {f.name: f.stat().st_mtime_ns for f in part.glob("*.safetensors")}
    assert len(left) == 2 and not target.exists()
    aq.checkpoint.convert(checkpoints["nvfp4"], "compressed-tensors", target, shard_bytes=500_000)
    assert all((target / n).stat().st_mtime_ns == t for n, t in left.items()) and not part.exists()
    for file in (tmp_path / "undisturbed").iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
    with pytest.raises(UsageError, match="exists and is not empty"):
        aq.checkpoint.convert(checkpoints["w4a16"], "compressed-tensors", target)
    aq.checkpoint.convert(checkpoints["w4a16"], "compressed-tensors", target, force=True)
    assert not list(target.glob("model-*")) and aq.checkpoint.audit(target).ok


# -- GGUF


def reference() -> dict:
    return json.loads((DATA / "gguf_reference.json").read_text())


def test_gguf_equals_that_of_llama_cpp_s_converter(tmp_path):
    """Every key and every tensor, byte for byte (A to one unit in the last place), for each kind of checkpoint."""
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    from make_gguf_reference import checkpoints, comparable, describe

    for name, folder in checkpoints(tmp_path).items():
        ours = comparable(
            name,
            describe(Path(aq.checkpoint.convert(folder, "gguf", tmp_path / f"{name}.gguf").path)),
        )
        theirs = reference()[name]
        assert ours["keys"] == json.loads(json.dumps(theirs["keys"])), name
        assert set(ours["tensors"]) == set(theirs["tensors"])
        for tensor, described in theirs["tensors"].items():
            same = (
                2 if tensor.endswith("ssm_a") else 3
            )  # exp differs by a unit in the last place between libraries
            assert ours["tensors"][tensor][:same] == described[:same], (name, tensor)


def test_decay_is_minus_exp(checkpoints, tmp_path):
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    path = aq.checkpoint.convert(checkpoints["bf16"], "gguf", tmp_path / "x.gguf").path
    (decay,) = (t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ssm_a")
    log = (
        ModelFolder(checkpoints["bf16"])
        .tensor("model.layers.1.linear_attn.A_log")
        .astype(np.float64)
    )
    np.testing.assert_allclose(decay.data, -np.exp(log[[0, 2, 1, 3]]), rtol=1e-7)


def test_nvfp4_in_gguf_dequantizes_to_the_checkpoint(checkpoints, tmp_path):
    """The gguf package's decoder times `.scale` gives ModelOpt's values, with the heads in the checkpoint's order."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    path = aq.checkpoint.convert(checkpoints["nvfp4"], "gguf", tmp_path / "x.gguf").path
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    folder = ModelFolder(checkpoints["nvfp4"])
    linears = aq.checkpoint.linears(folder)
    order = np.arange(256).reshape(2, 2, 64).transpose(1, 0, 2).reshape(-1)
    for name, place, axis in (
        ("mlp.down_proj", "ffn_down", None),
        ("linear_attn.out_proj", "ssm_out", 1),
        ("linear_attn.in_proj_z", "attn_gate", 0),
    ):
        linear = linears[f"model.layers.0.{name}"]
        want = linear.dequantize(folder)
        want = want if axis is None else np.take(want, order, axis)
        block = tensors[f"blk.0.{place}.weight"]
        got = (
            gguf.quants.dequantize(block.data, block.tensor_type)
            * tensors[f"blk.0.{place}.scale"].data[0]
        )
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert (
            tensors[f"blk.0.{place}.input_scale"].data[0] == linear.input_scale(folder).multiplier
        )


def test_a_gguf_file_is_no_model_folder_and_a_damaged_one_is_not_compared(checkpoints, tmp_path):
    pytest.importorskip("gguf", reason="the serve extra is not installed")
    file = Path(aq.checkpoint.convert(checkpoints["bf16"], "gguf", tmp_path / "x.gguf").path)
    with pytest.raises(CheckpointError, match="a GGUF file, expected a model folder") as refused:
        aq.checkpoint.convert(file, "modelopt", tmp_path / "back")
    assert f"annie-quant convert {file} --to hf" in refused.value.hint
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match="not a GGUF file that can be read"):
        aq.checkpoint.compare(checkpoints["bf16"], {"file": file})


@pytest.mark.parametrize(
    ("kind", "ask", "error"),
    [
        ("bf16", {"to": "modelopt"}, "nothing in it is quantized"),
        ("bf16", {"to": "onnx"}, "unknown dialect 'onnx'"),
        ("bf16", {"to": "gguf", "type": "NVFP4"}, "holds no NVFP4"),
        ("bf16", {"to": "gguf", "type": "Q2_K"}, "is not a type that is written here"),
        (
            "nvfp4",
            {"to": "gguf", "type": "Q4_K_M"},
            "is quantized already, Q4_K_M needs unquantized weights",
        ),
        ("nvfp4", {"to": "compressed-tensors", "type": "BF16"}, "--type is for GGUF"),
    ],
)
def test_impossible_conversions_are_refused(checkpoints, tmp_path, kind, ask, error):
    with pytest.raises((CheckpointError, UsageError), match=error):
        aq.checkpoint.convert(checkpoints[kind], output=tmp_path / "out.gguf", **ask)
    assert not list(tmp_path.iterdir())


def test_a_gguf_that_exists_is_replaced_only_when_asked(checkpoints, tmp_path):
    file = tmp_path / "x.gguf"
    file.write_text("mine")
    with pytest.raises(UsageError, match=r"x\.gguf exists") as error:
        aq.checkpoint.convert(checkpoints["bf16"], "gguf", file)
    assert file.read_text() == "mine" and "--force" in str(error.value.hint)
    assert aq.checkpoint.convert(checkpoints["bf16"], "gguf", file, force=True).size_bytes > 10_000


def test_awq_is_not_dropped_silently(checkpoints, tmp_path):
    bad = zoo.spoil(
        checkpoints["nvfp4"],
        tmp_path / "awq",
        lambda t, c: t.update(
            {"model.layers.0.mlp.down_proj.pre_quant_scale": np.ones(512, ml_dtypes.bfloat16)}
        ),
    )
    for to in ("gguf", "compressed-tensors"):
        with pytest.raises(CheckpointError, match="pre_quant_scale"):
            aq.checkpoint.convert(bad, to, tmp_path / "out.gguf")


def other_algorithm(t: dict, c: dict) -> None:
    c["quantization_config"]["quant_algo"] = "W4A8_NVFP4_FP8"


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "gguf"])
def test_activation_scales_of_an_unknown_algorithm_are_not_taken_for_nvfp4_s(
    checkpoints, tmp_path, to
):
    w4a8 = zoo.spoil(checkpoints["nvfp4"], tmp_path / "w4a8", other_algorithm)
    with pytest.raises(CheckpointError, match="W4A8_NVFP4_FP8' is not known here"):
        aq.checkpoint.convert(w4a8, to, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()
    with pytest.raises(CheckpointError, match="W4A8_NVFP4_FP8' is not known here"):
        aq.checkpoint.repair(w4a8, output=tmp_path / "repaired")
    assert aq.checkpoint.convert(w4a8, "bf16", tmp_path / "plain").tensors > 0


@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "gguf", "bf16"])
def test_fp8_scales_of_another_layout_are_refused(checkpoints, tmp_path, to):
    """As ModelOpt writes MXFP8: a scale per 32 columns."""

    def spread(t: dict, c: dict) -> None:
        fp8_too(t, c)
        t["model.layers.3.self_attn.o_proj.weight_scale"] = np.ones((256, 8), np.float32)

    mixed = zoo.spoil(checkpoints["nvfp4"], tmp_path / "mixed", spread)
    with pytest.raises(
        CheckpointError, match=r"shape \[256, 8\], expected one number or \[256, 1\]"
    ):
        aq.checkpoint.convert(mixed, to, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_only_a_tensor_s_pages_are_released(checkpoints, tmp_path, monkeypatch):
    """The numbers of a quantized linear have 8 times the bytes of its codes: the end of the file was passed."""
    ranges = []
    release = ModelFolder.release

    def checked(self: ModelFolder, name: str, begin: int = 0, end: int | None = None) -> None:
        ranges.append((begin, end or 0, self.info(name).size_bytes))
        release(self, name, begin, end)

    monkeypatch.setattr(ModelFolder, "release", checked)
    aq.checkpoint.convert(checkpoints["nvfp4"], "gguf", tmp_path / "x.gguf", type="BF16")
    assert ranges and all(begin <= size and end <= size for begin, end, size in ranges)


def test_a_failed_gguf_leaves_no_file(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(names.Layout, "transform", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        aq.checkpoint.convert(checkpoints["bf16"], "gguf", tmp_path / "x.gguf")
    assert not list(tmp_path.iterdir())


def test_an_unknown_tensor_and_tokenizer_are_refused(checkpoints, tmp_path):
    odd = zoo.spoil(
        checkpoints["bf16"],
        tmp_path / "odd",
        lambda t, c: t.update({"model.layers.0.moe.gate.weight": np.ones(4, np.float32)}),
    )
    with pytest.raises(
        CheckpointError,
        match=r"model.layers.0.moe.gate.weight: .* and Qwen3.5 has no such tensor",
    ):
        aq.checkpoint.convert(odd, "gguf", tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match="no name for"):
        vocabulary.pre_tokenizer_name(
            vocabulary.Tokenizer(pre_tokenizer=vocabulary.PreTokenizer("Split", {"Regex": "a+"}))
        )
    with pytest.raises(CheckpointError, match=r"token id 9 and config.json a vocabulary of 5"):
        vocabulary.tokens_and_types(vocabulary.Tokenizer(vocabulary.Bpe({"a": 9})), 5)


def test_multimodal_names_map_and_vision_is_left_out(checkpoints, tmp_path):
    def rename(t: dict, c: dict) -> None:
        for name in list(t):
            if name.startswith("model."):
                t[name.replace("model.", "model.language_model.", 1)] = t.pop(name)
        t["model.visual.patch_embed.proj.weight"] = np.ones((4, 4), ml_dtypes.bfloat16)
        text = {k: c.pop(k) for k in list(c) if k not in ("architectures", "model_type")}
        c |= {
            "text_config": text,
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
        }

    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    multi = zoo.spoil(checkpoints["bf16"], tmp_path / "multi", rename)
    result = aq.checkpoint.convert(multi, "gguf", tmp_path / "multi.gguf")
    assert (
        result.left_out == ["model.visual.patch_embed.proj.weight"] and "vision" in result.loss[0]
    )
    plain = aq.checkpoint.convert(checkpoints["bf16"], "gguf", tmp_path / "plain.gguf").path
    a, b = (
        {t.name: t.data.tobytes() for t in gguf.GGUFReader(p).tensors} for p in (result.path, plain)
    )
    assert a == b


def test_the_order_of_the_heads():
    heads = names.Heads(keys=2, values=6, key_dim=4, value_dim=4)
    assert heads.order(1).tolist() == [0, 3, 1, 4, 2, 5]
    family = models.family_of({"model_type": "qwen3_5_text"})
    layout = names.Layout(family, family.gguf, family.deltanet, 1, names.Heads(4, 4, 4, 4))
    assert layout.rows("model.layers.0.linear_attn.in_proj_z.weight", 16) is None
