"""--exclude-layers: whole parts, not substrings; a pattern that matches nothing is refused with a suggestion."""

import pytest

from annie_quant.core.errors import UsageError
from annie_quant.quantize.formats import excluded, names_module

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
    assert modules == {m for m in MODULES if ".linear_attn." in m or ".layers.0." in m or ".layers.11." in m}


def test_fnmatch_is_over_the_full_name() -> None:
    assert names_module("*mlp*", "model.layers.3.mlp.gate_proj")
    assert not names_module("layers.3*", "model.layers.3.mlp.gate_proj")
    assert excluded(["lm_head"], MODULES) == {"lm_head"}


@pytest.mark.parametrize(
    ("pattern", "meant"), [("layer.0", "layers.0"), ("linear_atn", "linear_attn"), ("layers.12", "layers.1")]
)
def test_a_pattern_that_matches_nothing_is_refused_with_a_suggestion(pattern: str, meant: str) -> None:
    with pytest.raises(UsageError) as refused:
        excluded([pattern], MODULES)
    assert repr(pattern) in refused.value.message
    assert meant in refused.value.hint
    assert refused.value.exit_code == 2
