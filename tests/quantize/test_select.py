"""--exclude-layers: whole parts, not substrings; a pattern that matches nothing is refused with a suggestion."""

import checkpoint_zoo as zoo
import ml_dtypes
import numpy as np
import pytest

from annie_quant import checkpoint
from annie_quant.checkpoint import ModelFolder
from annie_quant.core.errors import CheckpointError, UsageError
from annie_quant.quantize.formats import choose, excluded, names_module

MODULES = [
    f"model.layers.{i}.{part}"
    for i in range(12)
    for part in ("self_attn.q_proj", "linear_attn.in_proj_qkv", "mlp.gate_proj")
] + ["lm_head"]


def test_a_layer_number_is_a_whole_part() -> None:
    modules = excluded(["layers.1"], MODULES)
    assert modules == {m for m in MODULES if m.startswith("model.layers.1.")}
    assert len(modules) == 3


def test_a_plain_pattern_names_parts_anywhere() -> None:
    modules = excluded(["linear_attn", "layers.0", "layers.11"], MODULES)
    assert modules == {
        m for m in MODULES if ".linear_attn." in m or ".layers.0." in m or ".layers.11." in m
    }


def test_fnmatch_is_over_the_full_name() -> None:
    assert names_module("*mlp*", "model.layers.3.mlp.gate_proj")
    assert not names_module("layers.3*", "model.layers.3.mlp.gate_proj")
    assert excluded(["lm_head"], MODULES) == {"lm_head"}


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [("layer.0", "layers.0"), ("linear_atn", "linear_attn"), ("layers.12", "layers.1")],
)
def test_a_pattern_that_matches_nothing_is_refused_with_a_suggestion(
    pattern: str, meant: str
) -> None:
    with pytest.raises(UsageError) as refused:
        excluded([pattern], MODULES)
    assert repr(pattern) in refused.value.message
    assert meant in refused.value.hint
    assert refused.value.exit_code == 2


def test_every_linear_with_uneven_rows_is_named_at_once(tmp_path) -> None:
    names = [
        f"model.layers.{i}.mlp.{part}_proj.weight" for i in range(2) for part in ("up", "down")
    ]
    tensors = {n: np.zeros((32, 150 if "down" in n else 32), ml_dtypes.bfloat16) for n in names}
    folder = ModelFolder(zoo.save(tmp_path / "model", tensors, {"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="rows of 150, expected a multiple of 16") as refused:
        choose(folder, ())
    assert refused.value.hint.endswith("--exclude-layers mlp.down_proj")
    assert choose(folder, ["mlp.down_proj"]) == [
        n.removesuffix(".weight") for n in names if "up" in n
    ]


def test_a_quantized_folder_is_refused_although_some_linears_are_plain(tmp_path) -> None:
    source = zoo.bf16(tmp_path / "bf16")
    mlp = zoo.nvfp4(tmp_path / "nvfp4", source, lambda name: ".mlp." in name)
    packed = checkpoint.convert(mlp, "compressed-tensors", tmp_path / "packed").path
    for folder in (mlp, packed):
        with pytest.raises(CheckpointError, match="is quantized already") as refused:
            choose(ModelFolder(folder), ())
        assert "--to bf16" in refused.value.hint
