"""config.json's values are checked against the tensors before a GGUF file is written."""

from __future__ import annotations

import json
import resource

import checkpoint_zoo as zoo
import msgspec
import pytest

from annie_quant import checkpoint
from annie_quant.checkpoint.gguf import layout as settings
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.errors import CheckpointError

pytest.importorskip("gguf", reason="the serve extra is not installed")

SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
CHECKED = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "layer_types",
]  # fmt: skip
REQUIRED = [*settings.GgufSettings.__struct_fields__[:12], "intermediate_size"]
WRONG = [10**9, 0, -1, 2**64, 10**40, 1.5, "64", [64], {"a": 1}, True, "\x1b[31m"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return zoo.bf16(tmp_path_factory.mktemp("gguf") / "plain", **SMALL)


def changed(folder, tmp_path, **fields):
    """A copy of the checkpoint, with links to its files, whose config.json has other values (None: no such field)."""
    target = tmp_path / "model"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).hardlink_to(file)
    config = json.loads((folder / "config.json").read_text()) | fields
    (target / "config.json").unlink()
    (target / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if v is not None})
    )
    return target


@pytest.mark.parametrize("value", WRONG, ids=str)
@pytest.mark.parametrize("field", CHECKED)
def test_a_wrong_value_is_one_line_that_names_config_json(folder, tmp_path, field, value):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"config\.json") as caught:
        checkpoint.convert(changed(folder, tmp_path, **{field: value}), "gguf", tmp_path / "x.gguf")
    assert caught.value.message.isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000, "kilobytes"
    assert not list(tmp_path.glob("*.gguf*")) and not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(folder, tmp_path, field):
    with pytest.raises(CheckpointError, match=rf"config\.json.*{field}"):
        checkpoint.convert(changed(folder, tmp_path, **{field: None}), "gguf", tmp_path / "x.gguf")


@pytest.mark.parametrize(
    "fields",
    [{"rms_norm_eps": "x"}, {"rms_norm_eps": -1}, {"rope_parameters": 5}, {"rope_parameters": {"rope_theta": "x"}},
     {"rope_parameters": {"mrope_section": ["a"]}}, {"rope_parameters": {"partial_rotary_factor": 2.0}},
     {"max_position_embeddings": 1e400}, {"full_attention_interval": []}, {"mtp_num_hidden_layers": -3}],
    ids=str,
)  # fmt: skip
def test_other_fields_are_typed(folder, tmp_path, fields):
    with pytest.raises(CheckpointError):
        checkpoint.convert(changed(folder, tmp_path, **fields), "gguf", tmp_path / "x.gguf")


def test_a_right_checkpoint_is_written(folder, tmp_path):
    read = settings.read_settings(ModelFolder(folder))
    assert (read.vocab_size, read.attention_head_dim) == (1536, 32)
    assert checkpoint.convert(folder, "gguf", tmp_path / "x.gguf").tensors > 20


def test_a_byte_level_tokenizer_with_byte_fallback_is_not_a_sentencepiece_model():
    """As transformers reads SmolLM2 from GGUF: tokens spell bytes, and llama.cpp looks for <0x..> in a SentencePiece model."""
    from annie_quant.checkpoint.gguf import vocabulary

    steps = [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "use_regex": True},
    ]
    content = {
        "model": {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "byte_fallback": True},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
    }
    tokenizer = msgspec.convert(content, vocabulary.Tokenizer)
    assert vocabulary.sentencepiece_scores(tokenizer, ["a", "b", "ab"]) is None
    assert vocabulary.pre_tokenizer_name(tokenizer) == "smollm"
    tokenizer.pre_tokenizer = None
    assert vocabulary.sentencepiece_scores(tokenizer, ["a", "b", "ab"]) == [-1.0, -2.0, 0.0]
