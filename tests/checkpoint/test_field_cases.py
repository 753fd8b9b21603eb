"""Checkpoints as the field writes them: public reports, each made again here with own bytes.

The expected values are those of the reports: what vLLM, SGLang and transformers do with such a folder.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import checkpoint_zoo as zoo
import expert_zoo
import ml_dtypes
import numpy as np
import pytest
from paths import ROOT

import annie_quant as aq
from annie_quant.checkpoint import ModelFolder, planned, repair_command, write
from annie_quant.checkpoint.checks.contents import read_input
from annie_quant.checkpoint.gguf.reader import check_served_by_llama_cpp, open_reader
from annie_quant.checkpoint.shards import INDEX
from annie_quant.core.errors import CheckpointError
from annie_quant.quantize import run

TINY = ROOT / "annie_quant/assets/tiny-annie"
Change = Callable[[dict, dict], object]
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d" * 32 + b"\nsize 5466352\n"
HEAD_SHAPES = {
    "fc": (256, 512),
    "norm": (256,),
    "pre_fc_norm_embedding": (256,),
    "pre_fc_norm_hidden": (256,),
    "layers.0.mlp.gate_proj": (768, 256),
    "layers.0.mlp.up_proj": (768, 256),
    "layers.0.mlp.down_proj": (256, 768),
    "layers.0.self_attn.q_proj": (512, 256),
    "layers.0.self_attn.k_proj": (128, 256),
    "layers.0.self_attn.v_proj": (128, 256),
    "layers.0.self_attn.o_proj": (256, 256),
    "layers.0.input_layernorm": (256,),
    "layers.0.post_attention_layernorm": (256,),
    "layers.0.self_attn.q_norm": (64,),
    "layers.0.self_attn.k_norm": (64,),
}


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory) -> Path:
    """tiny-annie in NVFP4 with input scales, ModelOpt's layout."""
    return zoo.nvfp4(tmp_path_factory.mktemp("field") / "nvfp4", TINY)


@pytest.fixture(scope="module")
def compressed(nvfp4, tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("compressed")
    return Path(aq.checkpoint.convert(nvfp4, "compressed-tensors", home / "ct").path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("mixture")
    return expert_zoo.nvfp4(home / "nvfp4", expert_zoo.per_expert(home / "single"))


def codes(folder: Path) -> set[str]:
    return {finding.code for finding in aq.checkpoint.audit(folder).findings}


def refused(folder: Path, *words: str) -> None:
    """Assert that a conversion and a reading for quantize and eval stop with one line that has these words."""
    for command in (
        lambda: aq.checkpoint.convert(folder, "bf16", folder.with_name("out")),
        lambda: read_input(ModelFolder(folder)),
    ):
        with pytest.raises(CheckpointError) as caught:
            command()
        assert all(word in caught.value.message for word in words), caught.value.message
        assert caught.value.hint
    assert not folder.with_name("out").exists()


# ---- settings in another form or place


def nested(c: dict) -> None:
    quant = c["quantization_config"]
    inner = {
        "quant_algo": quant["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": 16,
        "exclude_modules": quant["ignore"],
    }
    producer = {"name": "modelopt", "version": "0.33.0"}
    c["quantization_config"] = {
        "quant_method": "modelopt",
        "producer": producer,
        "quantization": inner,
    }


def nested_without_method(c: dict) -> None:
    nested(c)
    c["quantization_config"].pop("quant_method")


def in_text_config(c: dict) -> None:
    c["text_config"] = {"quantization_config": c.pop("quantization_config")}


def as_compression(c: dict) -> None:
    c["compression_config"] = c.pop("quantization_config")


FORMS = [nested, nested_without_method, in_text_config, as_compression]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("second", [True, False])
def test_settings_in_another_form_are_read(nvfp4, tmp_path, form, second):
    """vLLM and SGLang read hf_quant_config.json's object inside config.json, and settings in text_config."""
    folder = zoo.spoil(nvfp4, tmp_path / "x", lambda t, c: form(c))
    if not second:
        (folder / "hf_quant_config.json").unlink(missing_ok=True)
    assert codes(folder) == set()
    plain = aq.checkpoint.convert(folder, "bf16", tmp_path / "plain").path
    config = json.loads((Path(plain) / "config.json").read_text())
    assert "quant" not in json.dumps(config) and codes(Path(plain)) == set()
    expected = aq.checkpoint.convert(nvfp4, "bf16", tmp_path / "expected").path
    same = (Path(p) / "model.safetensors" for p in (plain, expected))
    first, other = (p.read_bytes() for p in same)
    assert first == other


def test_mixed_precision_by_config_groups(nvfp4, tmp_path):
    """ModelOpt's config.json of a mixed checkpoint lists modules as targets of groups."""

    def change(t: dict, c: dict) -> None:
        module = "model.layers.0.mlp.down_proj"
        for end in ("weight_scale", "weight_scale_2", "input_scale"):
            t.pop(f"{module}.{end}", None)
        rows, columns = t[f"{module}.weight"].shape
        t[f"{module}.weight"] = np.ones((rows, 2 * columns), ml_dtypes.float8_e4m3fn)
        t[f"{module}.weight_scale"] = np.array(0.01, np.float32)
        t[f"{module}.input_scale"] = np.array(0.01, np.float32)
        modules = sorted(n.removesuffix(".weight_scale") for n in t if n.endswith(".weight_scale"))
        four, eight = ({"num_bits": bits, "type": "float", "dynamic": False} for bits in (4, 8))
        c["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "ignore": c["quantization_config"]["ignore"],
            "config_groups": {
                "group_0": {
                    "weights": four | {"group_size": 16},
                    "input_activations": four | {"group_size": 16},
                    "targets": [m for m in modules if m != module],
                },
                "group_1": {"weights": eight, "input_activations": eight, "targets": [module]},
            },
        }

    folder = zoo.spoil(nvfp4, tmp_path / "x", change)
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    assert codes(folder) == set()

    def swap(t: dict, c: dict) -> None:
        groups = c["quantization_config"]["config_groups"]
        targets = [groups[name].pop("targets") for name in ("group_0", "group_1")]
        groups["group_0"]["targets"] = targets[1]
        groups["group_1"]["targets"] = targets[0]

    assert "format_disagrees" in codes(zoo.spoil(folder, tmp_path / "swapped", swap))


# ---- scales


@pytest.mark.parametrize("value", [np.inf, np.nan, -1.0, 0.0])
def test_a_bad_divisor_is_named_and_the_last_line_repairs_it(compressed, tmp_path, value):
    name = "model.layers.5.mlp.down_proj.input_global_scale"

    def change(t: dict, c: dict) -> None:
        t[name] = np.array([value], np.float32)

    folder = zoo.spoil(compressed, tmp_path / "x", change)
    audit = aq.checkpoint.audit(folder)
    (finding,) = [f for f in audit.findings if f.code == "input_scale_bad"]
    assert finding.tensor == name and f": {value}, " in finding.message
    command = repair_command(audit)
    first, _, second = (command or "").partition(" && ")
    words = first.split()
    assert words[:2] == ["annie-quant", "convert"] and words[3:5] == ["--to", "modelopt"]
    output = Path(words[6])
    aq.checkpoint.convert(folder, "modelopt", output)
    assert second.split() == ["annie-quant", "audit", str(output), "--repair"]
    assert aq.checkpoint.repair(output).remaining == []


@pytest.mark.parametrize("to", ["bf16", "gguf"])
@pytest.mark.parametrize("value", [np.inf, np.nan, 0.0])
def test_weights_under_a_bad_divisor_become_no_numbers(compressed, tmp_path, value, to):
    """Under an infinite divisor every weight would become 0."""
    name = "model.layers.0.mlp.up_proj.weight_global_scale"

    def change(t: dict, c: dict) -> None:
        t[name] = np.array([value], np.float32)

    folder = zoo.spoil(compressed, tmp_path / "x", change)
    with pytest.raises(CheckpointError, match=name):
        aq.checkpoint.convert(folder, to, tmp_path / "out")


def test_experts_without_input_scale(mixture, tmp_path):
    lost = [(1, 2), (3, 1)]
    modules = [f"model.layers.{layer}.mlp.experts.{expert}" for layer, expert in lost]

    def change(t: dict, c: dict) -> None:
        for name in list(t):
            if name.startswith(tuple(f"{m}." for m in modules)) and name.endswith(".input_scale"):
                t.pop(name)

    findings = aq.checkpoint.audit(zoo.spoil(mixture, tmp_path / "x", change)).findings
    missing = {f.tensor for f in findings if f.code == "input_scale_missing"}
    linears = ("gate_proj", "up_proj", "down_proj")
    assert missing == {f"{module}.{linear}" for module in modules for linear in linears}


# ---- scales of the KV cache


def per_head(t: dict, c: dict) -> None:
    scheme = {"dynamic": False, "num_bits": 8, "type": "float", "strategy": "attn_head"}
    c["quantization_config"]["kv_cache_scheme"] = scheme | {"symmetric": True}
    for layer in (3, 7):
        attention = f"model.layers.{layer}.self_attn"
        t[f"{attention}.k_scale"] = np.array([0.02, 0.03], np.float32).reshape(2, 1, 1)
        t[f"{attention}.v_scale"] = np.array([0.01, 0.015], np.float32).reshape(2, 1, 1)


def test_kv_scales_per_head(compressed, tmp_path):
    """vLLM loads them (#30141). ModelOpt's layout has one per layer: the conversion says so and names no FP8 cache."""
    folder = zoo.spoil(compressed, tmp_path / "heads", per_head)
    assert codes(folder) == set()
    result = aq.checkpoint.convert(folder, "modelopt", tmp_path / "modelopt")
    assert any("4 KV scales per head" in line for line in result.loss)
    assert sum(name.endswith(("k_scale", "v_scale")) for name in result.left_out) == 4
    settings = [
        json.loads((tmp_path / "modelopt" / f).read_text())
        for f in ("config.json", "hf_quant_config.json")
    ]
    assert (
        "FP8" not in json.dumps(settings)
        and "kv_cache_scheme" not in settings[0]["quantization_config"]
    )
    assert codes(tmp_path / "modelopt") == set()
    aq.checkpoint.convert(folder, "compressed-tensors", tmp_path / "again")
    assert codes(tmp_path / "again") == set()
    again = zoo.read(tmp_path / "again")
    assert again["model.layers.3.self_attn.k_scale"].reshape(-1).tolist() == [
        np.float32(0.02),
        np.float32(0.03),
    ]


@pytest.mark.parametrize(
    ("values", "code"), [([0.02, np.nan], "kv_scale_bad"), ([0.02] * 3, "scale_shape")]
)
def test_bad_kv_scales_per_head(compressed, tmp_path, values, code):
    def change(t: dict, c: dict) -> None:
        per_head(t, c)
        t["model.layers.3.self_attn.k_scale"] = np.array(values, np.float32)

    folder = zoo.spoil(compressed, tmp_path / "x", change)
    assert code in codes(folder)
    if code == "scale_shape":
        with pytest.raises(CheckpointError, match="expected one number"):
            aq.checkpoint.convert(folder, "modelopt", tmp_path / "out")


@pytest.mark.parametrize("end", ["k", "v"])
def test_one_kind_of_kv_scale_alone(nvfp4, tmp_path, end):
    def change(t: dict, c: dict) -> None:
        c["quantization_config"]["kv_cache_scheme"] = {
            "dynamic": False,
            "num_bits": 8,
            "type": "float",
        }
        for layer in (3, 7):
            name = f"model.layers.{layer}.self_attn.{end}_proj.{end}_scale"
            t[name] = np.array(0.011, np.float32)

    assert "kv_scale_missing" in codes(zoo.spoil(nvfp4, tmp_path / "x", change))


# ---- files next to the model


def with_head(folder: Path, target: Path, index: bool | None) -> Path:
    """Copy a folder with the MTP head in mtp.safetensors. index: True: it lists the file; False: it does not; None: no index."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    head = {
        f"mtp.{n}.weight": np.full(s, 0.015, ml_dtypes.bfloat16) for n, s in HEAD_SHAPES.items()
    }
    write(target.with_name("head"), [planned(n, t) for n, t in head.items()])
    shutil.move(target.with_name("head") / "model.safetensors", target / "mtp.safetensors")
    if index is not None:
        weight_map = dict.fromkeys(ModelFolder(folder), "model.safetensors")
        weight_map |= dict.fromkeys(head, "mtp.safetensors") if index else {}
        (target / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return target


@pytest.mark.parametrize("index", [True, None])
def test_the_head_in_a_file_of_its_own(nvfp4, tmp_path, index):
    """Without an index vLLM loads every file (filter_duplicate_safetensors_files)."""
    folder = with_head(nvfp4, tmp_path / "x", index)
    assert codes(folder) == set()
    aq.checkpoint.convert(folder, "compressed-tensors", tmp_path / "ct")
    assert {n for n in ModelFolder(tmp_path / "ct") if n.startswith("mtp.")} == {
        f"mtp.{n}.weight" for n in HEAD_SHAPES
    }


def test_a_file_that_the_index_does_not_list_is_named(nvfp4, tmp_path):
    folder = with_head(nvfp4, tmp_path / "x", False)
    assert codes(folder) == {"file_unread", "mtp_missing"}
    result = aq.checkpoint.convert(folder, "compressed-tensors", tmp_path / "ct")
    assert len(result.left_out) == 1 and result.left_out[0].startswith(
        "mtp.safetensors (15 tensors"
    )


def test_further_files_that_are_not_read_are_named(nvfp4, tmp_path):
    folder = shutil.copytree(nvfp4, tmp_path / "x")
    shutil.copyfile(folder / "model.safetensors", folder / "model.fp8.safetensors")
    (folder / "extra.safetensors").write_bytes(LFS)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    shutil.copyfile(folder / "model.safetensors", folder / "consolidated.safetensors")
    findings = aq.checkpoint.audit(folder).findings
    assert [(f.code, f.tensor) for f in findings] == [
        ("file_unread", "extra.safetensors"),
        ("file_unread", "model.fp8.safetensors"),
    ]
    left_out = aq.checkpoint.convert(folder, "bf16", tmp_path / "out").left_out
    assert {name.partition(" (")[0] for name in left_out} >= {
        "extra.safetensors",
        "model.fp8.safetensors",
        "pytorch_model.bin",
        "consolidated.safetensors",
    }


# ---- files in place of weights


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "hf_quant_config.json"]
)
def test_git_lfs_pointers(nvfp4, tmp_path, file):
    folder = shutil.copytree(nvfp4, tmp_path / "x")
    (folder / file).write_bytes(LFS)
    findings = aq.checkpoint.audit(folder).findings
    assert any(f.code == "lfs_pointer" and "git lfs pull" in f.message for f in findings), findings


GIVEN = {
    "consolidated-00001-of-00001.safetensors": "Mistral",
    "adapter_model.safetensors": "LoRA adapter",
    "pytorch_model-00001-of-00002.bin": "pickled PyTorch weights",
    "model.onnx": "ONNX",
    "model.gguf": "GGUF",
    "flax_model.msgpack": "Flax",
    "tf_model.h5": "TensorFlow",
    "openvino_model.xml": "OpenVINO",
}


@pytest.mark.parametrize("file", GIVEN)
def test_folders_without_weights_that_are_read(nvfp4, tmp_path, file):
    folder = shutil.copytree(nvfp4, tmp_path / "x")
    (folder / "model.safetensors").rename(folder / file)
    (finding,) = aq.checkpoint.audit(folder).findings
    assert finding.code == "no_weights" and file in finding.message
    assert GIVEN[file] in finding.message
    with pytest.raises(CheckpointError) as caught:
        ModelFolder(folder)
    assert caught.value.hint


def test_an_adapter_is_named_by_quantize(nvfp4, tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    shutil.copyfile(nvfp4 / "model.safetensors", tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="a LoRA adapter, not a model") as caught:
        run("direct", tmp_path, tmp_path.with_name("out"))
    assert "convert BASE --adapter" in caught.value.hint


TOOLS: dict[str, tuple[Change, str]] = {
    "MLX": (lambda t, c: c.update(quantization={"group_size": 64, "bits": 4}), "MLX"),
    "GPTQ": (
        lambda t, c: t.update({"model.layers.0.mlp.up_proj.qweight": np.ones((8, 8), np.int32)}),
        "GPTQ",
    ),
    "EXL2": (
        lambda t, c: t.update({"model.layers.0.mlp.up_proj.q_weight": np.ones((8, 8), np.int32)}),
        "EXL2",
    ),
    "bitsandbytes": (
        lambda t, c: t.update({"model.layers.0.mlp.up_proj.weight.absmax": np.ones(8, np.float32)}),
        "bitsandbytes",
    ),
    "awq": (lambda t, c: c.update(quantization_config={"quant_method": "awq", "bits": 4}), "'awq'"),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_folders_of_another_tool(tmp_path, tool):
    change, words = TOOLS[tool]
    folder = zoo.spoil(TINY, tmp_path / "x", change)
    (finding,) = aq.checkpoint.audit(folder).findings
    assert finding.code == "method_unknown" and words in finding.message
    refused(folder, words)


# ---- tensors that are not understood


def merged_codes(first: str, second: str, end: str) -> Change:
    def change(t: dict, c: dict) -> None:
        expert_zoo.pack_merged(t, c)
        for name in [n for n in t if f"{expert_zoo.MODULE}." in n]:
            new = name.replace("gate_up_proj", first).replace("down_proj", second)
            new = new if "_weight" in new else new + end
            t[new] = t.pop(name)

    return change


@pytest.mark.parametrize(
    ("first", "second", "end"), [("gate_up_proj", "down_proj", ""), ("w13", "w2", "_weight")]
)
@pytest.mark.parametrize("to", ["bf16", "compressed-tensors", "gguf"])
def test_merged_codes_of_experts_are_refused(mixture, tmp_path, first, second, end, to):
    folder = zoo.spoil(mixture, tmp_path / "x", merged_codes(first, second, end))
    findings = aq.checkpoint.audit(folder).findings
    about = {f.tensor for f in findings if f.code == "tensor_unknown"}
    assert {f"{expert_zoo.MODULE}.{first}{end}", f"{expert_zoo.MODULE}.{second}{end}"} <= about
    assert not any(s.loads == "yes" for s in aq.checkpoint.audit(folder).summary.servers)
    with pytest.raises(CheckpointError, match=r"mlp\.experts\."):
        aq.checkpoint.convert(folder, to, tmp_path / "out")


UP = "model.layers.0.mlp.up_proj"
UNKNOWN: dict[str, tuple[Change, str]] = {
    "integer codes": (
        lambda t, c: t.update({f"{UP}.codes": np.ones((8, 8), np.int8)}),
        "tensor_unknown",
    ),
    "an unmerged overlay": (
        lambda t, c: t.update({f"{UP}.lora_A.weight": np.ones((8, 256), ml_dtypes.bfloat16)}),
        "tensor_unknown",
    ),
    "a scale of queries": (
        lambda t, c: t.update({"model.layers.3.self_attn.q_scale": np.ones(1, np.float32)}),
        "tensor_unknown",
    ),
    "a scale of the KV cache outside of the layers": (
        lambda t, c: t.update({"model.k_scale": np.array(0.02, np.float32)}),
        "tensor_unknown",
    ),
    "a wrapper's prefix": (
        lambda t, c: t.update({f"_orig_mod.{UP}.weight": t.pop(f"{UP}.weight")}),
        "tensor_unknown",
    ),
    "a classifier": (
        lambda t, c: t.update({"score.weight": np.ones((2, 256), np.float32)}),
        "tensor_unknown",
    ),
    "codes without scales": (
        lambda t, c: t.update({f"{UP}.weight": np.ones((768, 128), np.uint8)}),
        "block_scale_missing",
    ),
    "scales without codes": (
        lambda t, c: t.update(
            {"model.layers.0.mlp.other.weight_scale": np.ones((8, 8), np.float32)}
        ),
        "orphan_scale",
    ),
    "a weight under both prefixes": (
        lambda t, c: t.update({f"model.language_{UP}.weight": t[f"{UP}.weight"]}),
        "tensor_repeated",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_tensor_that_is_not_understood_is_refused(tmp_path, name):
    change, code = UNKNOWN[name]
    folder = zoo.spoil(TINY, tmp_path / "x", change)
    assert code in codes(folder)
    with pytest.raises(CheckpointError):
        read_input(ModelFolder(folder))


def test_codes_and_numbers_of_one_linear(nvfp4, compressed, tmp_path):
    def change(t: dict, c: dict) -> None:
        t[f"{UP}.weight"] = np.ones((768, 256), ml_dtypes.bfloat16)

    folder = zoo.spoil(compressed, tmp_path / "x", change)
    assert "tensor_repeated" in codes(folder)
    refused(folder, f"{UP}.weight", "stored twice")


# ---- what is lost


def test_layers_lost_with_the_head(nvfp4, tmp_path):
    def change(t: dict, c: dict) -> None:
        lost = ("model.layers.6.", "model.layers.7.", "lm_head.")
        for name in [n for n in t if n.startswith(lost)]:
            t.pop(name)

    findings = aq.checkpoint.audit(zoo.spoil(nvfp4, tmp_path / "x", change)).findings
    assert [f.code for f in findings] == ["decoder_incomplete"] * 2


# ---- token ids


def edit(folder: Path, file: str, change: Callable[[dict], object]) -> None:
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))


def add_token(content: dict) -> None:
    rows = [content["added_tokens"][0] | {"id": 1536 + i, "content": f"<|new{i}|>"} for i in (0, 1)]
    content["added_tokens"] += rows


TOKENS: dict[str, tuple[str, Callable[[dict], object], str]] = {
    "the tokenizer's added tokens": ("tokenizer.json", add_token, "token id 1537"),
    "the tokenizer's vocabulary": (
        "tokenizer.json",
        lambda d: d["model"]["vocab"].update({"new": 4000}),
        "token id 4000",
    ),
    "the end of an answer": (
        "generation_config.json",
        lambda d: d.update(eos_token_id=[2, 1600]),
        "token id 1600",
    ),
    "padding": ("config.json", lambda d: d.update(pad_token_id=1536), "token id 1536"),
    "the size that config.json has": ("config.json", lambda d: d.update(vocab_size=1540), "1540"),
}


@pytest.mark.parametrize("name", TOKENS)
def test_a_token_beyond_the_embedding(tmp_path, name):
    """Otherwise quantize and eval end in torch's embedding: index 1536 is out of bounds."""
    file, change, words = TOKENS[name]
    folder = shutil.copytree(TINY, tmp_path / "x")
    edit(folder, file, change)
    findings = aq.checkpoint.audit(folder).findings
    assert [(f.code, f.tensor) for f in findings] == [("vocab_size", file)]
    with pytest.raises(CheckpointError, match="1536 rows") as caught:
        read_input(ModelFolder(folder))
    assert words in caught.value.message and "resize_token_embeddings" in caught.value.hint


@pytest.mark.parametrize("value", [-1, None, 0, "2", True])
def test_a_harmless_padding_id(tmp_path, value):
    folder = shutil.copytree(TINY, tmp_path / "x")
    edit(folder, "config.json", lambda d: d.update(pad_token_id=value))
    assert codes(folder) == set()


# ---- a tied head with a tensor of its own


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_a_tied_head_with_other_values(tmp_path, place):
    """vLLM and SGLang skip lm_head where the embedding is tied; transformers' tie_weights does not tie two that differ."""

    def change(t: dict, c: dict) -> None:
        c["tie_word_embeddings"] = place == "top"
        c["text_config"] = {"tie_word_embeddings": True}

    folder = zoo.spoil(TINY, tmp_path / "x", change)
    (finding,) = aq.checkpoint.audit(folder).findings
    assert finding.code == "head_ambiguous" and finding.tensor == "lm_head.weight"
    for word in ("vLLM", "SGLang", "transformers"):
        assert word in finding.message
    refused(folder, "lm_head.weight")


def test_a_tied_head_with_the_same_values(tmp_path):
    def change(t: dict, c: dict) -> None:
        c["tie_word_embeddings"] = True
        t["lm_head.weight"] = t["model.embed_tokens.weight"].copy()

    assert codes(zoo.spoil(TINY, tmp_path / "x", change)) == set()


# ---- GGUF


def test_a_gguf_file_without_a_suffix_is_named(tmp_path):
    blob = tmp_path / ("sha256-" + "ab" * 32)
    aq.checkpoint.convert(TINY, "gguf", tmp_path / "x.gguf", type="BF16")
    (tmp_path / "x.gguf").rename(blob)
    with pytest.raises(CheckpointError, match="a GGUF file") as caught:
        aq.checkpoint.audit(blob)
    assert f"annie-quant convert {blob} --to hf" in caught.value.hint
    result = aq.checkpoint.compare(TINY, {"blob": blob})
    assert len(result.rows) > 50


def split(folder: Path, parts: int) -> list[Path]:
    """Write the files of a split model, as llama-gguf-split does: each with its number and the count."""
    gguf = pytest.importorskip("gguf", reason="the serve extra is not installed")
    paths = []
    for number in range(parts):
        path = folder / f"m-{number + 1:05d}-of-{parts:05d}.gguf"
        writer = gguf.GGUFWriter(path, "qwen35")
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_tensor(f"blk.{number}.attn_norm.weight", np.ones(32, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    return paths


def test_parts_of_a_split_gguf_file(tmp_path):
    """llama.cpp loads a split model from its first file, and finds the others by their names."""
    first, second, third = split(tmp_path, 3)
    check_served_by_llama_cpp(first)
    with pytest.raises(CheckpointError, match="part 2 of 3 of a split GGUF file") as caught:
        check_served_by_llama_cpp(second)
    assert str(first) in caught.value.hint
    with pytest.raises(CheckpointError, match="part 1 of 3 of a split GGUF file") as caught:
        open_reader(first)
    assert f"llama-gguf-split --merge {first}" in caught.value.hint
    third.unlink()
    with pytest.raises(CheckpointError, match=f"{third.name} is missing"):
        check_served_by_llama_cpp(first)


def test_a_gguf_file_that_is_a_pointer(tmp_path):
    (tmp_path / "x.gguf").write_bytes(LFS)
    with pytest.raises(CheckpointError, match="git lfs pull"):
        open_reader(tmp_path / "x.gguf")


# ---- settings by which the codes are other weights


def with_settings(folder: Path, out: Path, **settings: object) -> Path:
    """A copy whose quantization_config has these fields; those of its groups' weights are in `weights`, targets in `targets`."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    quant = config["quantization_config"]
    for group in quant["config_groups"].values():
        group["weights"] |= settings.get("weights", {})
        group["targets"] = settings.get("targets", group["targets"])
    quant |= {name: v for name, v in settings.items() if name not in ("weights", "targets")}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "rotates weights"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({"weights": {"symmetric": False}}, "zero points"),
    ],
)
def test_settings_that_are_not_read_are_refused(compressed, tmp_path, settings, reason):
    folder = with_settings(compressed, tmp_path / "m", **settings)
    audit = aq.checkpoint.audit(folder)
    (finding,) = audit.findings
    assert finding.code == "settings_unread" and reason in finding.message
    assert repair_command(audit) is None, "no command reads it"
    for target in ("modelopt", "bf16"):
        with pytest.raises(CheckpointError, match=reason):
            aq.checkpoint.convert(folder, target, tmp_path / target)
        assert not (tmp_path / target).exists()
    dense = with_settings(compressed, tmp_path / "d", sparsity_config={"format": "dense"})
    assert aq.checkpoint.audit(dense).ok


def test_a_linear_outside_of_the_groups_targets_is_a_fault(compressed, tmp_path):
    folder = with_settings(compressed, tmp_path / "m", targets=["re:.*mlp.*"])
    findings = aq.checkpoint.audit(folder).findings
    assert {f.code for f in findings} == {"not_listed"}
    assert not any("mlp" in f.tensor for f in findings)


def test_block_scales_of_another_type_are_not_copied(nvfp4, tmp_path):
    name = "model.layers.0.mlp.down_proj.weight_scale"
    folder = ModelFolder(nvfp4)
    plan = []
    for tensor in folder:
        values = folder.tensor(tensor)
        plan.append(planned(tensor, values.view(np.uint8) if tensor == name else values))
    shutil.copytree(nvfp4, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors", INDEX))
    write(tmp_path / "m", plan)
    with pytest.raises(CheckpointError, match=f"{name}: U8, expected F8_E4M3"):
        aq.checkpoint.convert(tmp_path / "m", "compressed-tensors", tmp_path / "ct")
    assert not (tmp_path / "ct").exists()


def test_a_kv_cache_format_that_is_not_written_is_named(compressed, tmp_path):
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "dynamic": True}
    folder = with_settings(compressed, tmp_path / "m", kv_cache_scheme=scheme)
    made = aq.checkpoint.convert(folder, "modelopt", tmp_path / "mo")
    assert "the KV cache's format: only FP8 is written" in made.loss


def test_the_servers_name_of_modelopts_layout(nvfp4, tmp_path):
    folder = with_settings(nvfp4, tmp_path / "m", quant_method="modelopt_fp4")
    audit = aq.checkpoint.audit(folder)
    assert audit.ok and audit.summary.dialect == "modelopt"
