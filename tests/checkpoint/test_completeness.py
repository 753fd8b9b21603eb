"""A decoder that lost tensors is not sound."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import checkpoint_zoo as zoo
import expert_zoo
import numpy as np
import pytest

import annie_quant as aq
from annie_quant.checkpoint import convert, repair_command, writer

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    return zoo.source_and_nvfp4(tmp_path_factory.mktemp("checkpoints"))


def without(*parts: str):
    """Return a change that removes the tensors whose names have one of `parts`."""

    def change(tensors: dict, config: dict) -> None:
        for name in [n for n in tensors if any(part in n for part in parts)]:
            del tensors[name]

    return change


def findings(folder: Path, source: Path | None = None) -> list[tuple[str, str]]:
    return [(f.code, f.tensor) for f in aq.checkpoint.audit(folder, source).findings]


LOST = {
    "a layer": (("layers.1.",), "model.layers.1"),
    "the last layer": (("layers.3.",), "model.layers.3"),
    "a norm of one layer": (("layers.2.post_attention_layernorm",), "model.layers.2"),
    "a quantized linear of one layer": (("layers.2.mlp.down_proj",), "model.layers.2"),
    "a layer's mixer": (("layers.2.linear_attn",), "model.layers.2"),
    "a parameter without .weight": (("layers.0.linear_attn.dt_bias",), "model.layers.0"),
    "the embedding": (("embed_tokens",), "embed_tokens"),
    "the last norm": (("model.norm.",), "norm"),
    "the head": (("lm_head",), "lm_head"),
}


@pytest.mark.parametrize("lost", LOST)
@pytest.mark.parametrize("which", [0, 1], ids=["bf16", "nvfp4"])
def test_a_lost_tensor_is_found_without_the_source(checkpoints, tmp_path, lost, which):
    parts, place = LOST[lost]
    bad = zoo.spoil(checkpoints[which], tmp_path / "bad", without(*parts))
    audit = aq.checkpoint.audit(bad)
    assert [(f.code, f.tensor) for f in audit.findings] == [("decoder_incomplete", place)]
    assert audit.summary.loads[0] == "vLLM: no, decoder_incomplete"
    assert repair_command(audit) is None, "no repair gives the tensor back"


def test_an_unknown_family_may_call_its_last_norm_otherwise(checkpoints, tmp_path):
    def phi(t: dict, c: dict) -> None:
        c.update(model_type="phi")
        t["model.final_layernorm.weight"] = t.pop("model.norm.weight")

    assert findings(zoo.spoil(checkpoints[0], tmp_path / "phi", phi)) == []


def test_what_every_layer_lost_is_found_with_the_source(checkpoints, tmp_path):
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", without("input_layernorm"))
    assert findings(bad) == []
    assert findings(bad, checkpoints[0]) == [
        ("decoder_incomplete", "model.layers.0.input_layernorm.weight")
    ]


def test_a_layer_beyond_the_configuration(checkpoints, tmp_path):
    bad = zoo.spoil(checkpoints[1], tmp_path / "bad", lambda t, c: c.update(num_hidden_layers=3))
    assert findings(bad) == [("decoder_incomplete", "model.layers.3")]


@pytest.mark.parametrize("count", ["4", 0, True, 4.0, [4]])
def test_a_number_of_layers_of_another_type(checkpoints, tmp_path, count):
    bad = zoo.spoil(
        checkpoints[1], tmp_path / "bad", lambda t, c: c.update(num_hidden_layers=count)
    )
    assert findings(bad) == [("config_unreadable", "config.json")]


def test_a_tied_head_and_a_converted_copy_are_complete(checkpoints, tmp_path):
    tied = zoo.spoil(
        checkpoints[1],
        tmp_path / "tied",
        lambda t, c: (without("lm_head")(t, c), c.update(tie_word_embeddings=True)),
    )
    assert findings(tied, checkpoints[0]) == []
    copy = tmp_path / "ct"
    convert(checkpoints[1], "compressed-tensors", copy)
    assert findings(copy, checkpoints[0]) == []


def test_a_mixture_is_complete_until_a_layer_loses_its_shared_part(tmp_path):
    merged, single = (
        expert_zoo.merged(tmp_path / "merged"),
        expert_zoo.per_expert(tmp_path / "single"),
    )
    quantized = expert_zoo.nvfp4(tmp_path / "quantized", single)
    assert (
        findings(merged)
        == findings(single)
        == findings(quantized, single)
        == findings(quantized, merged)
        == []
    )
    for which, folder in enumerate((merged, single, quantized)):
        bad = zoo.spoil(
            folder, tmp_path / f"bad-{which}", without("layers.1.mlp.shared_expert.down_proj")
        )
        assert findings(bad) == [("decoder_incomplete", "model.layers.1")]


def test_tensors_that_the_index_does_not_list(tmp_path):
    """Loaders that read whole files use them, loaders that follow the index do not."""
    folder = zoo.bf16(tmp_path / "m", shard_bytes=1_000_000)
    assert findings(folder) == []
    index = json.loads((folder / INDEX).read_text())
    name = "model.layers.1.mlp.up_proj.weight"
    unlisted = shutil.copytree(folder, tmp_path / "unlisted")
    del (changed := json.loads(json.dumps(index)))["weight_map"][name]
    (unlisted / INDEX).write_text(json.dumps(changed))
    assert ("index_mismatch", name) in findings(unlisted)

    twice = shutil.copytree(folder, tmp_path / "twice")
    extra = "model-extra.safetensors"
    planned = [writer.planned(n, np.zeros(4, np.float32)) for n in (name, "model.other.weight")]
    writer.write(tmp_path / "part", planned)
    shutil.copyfile(tmp_path / "part" / "model.safetensors", twice / extra)
    index["weight_map"]["model.other.weight"] = extra
    (twice / INDEX).write_text(json.dumps(index))
    unknown = ("tensor_unknown", "model.other.weight")
    assert findings(twice) == [unknown, ("duplicate_tensor", name)]
