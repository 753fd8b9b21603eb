"""--exclude-layers: whole parts, not substrings; a pattern that names nothing is refused with what it may have meant."""

import pytest

from annie_quant.errors import UsageError
from annie_quant.quantize.exclude import excluded, matches

MODULES = [
    f"model.layers.{i}.{part}"
    for i in range(12)
    for part in ("self_attn.q_proj", "linear_attn.in_proj_qkv", "mlp.gate_proj")
] + ["lm_head"]


def test_a_layer_number_is_a_whole_part() -> None:
    hit = excluded(["layers.1"], MODULES)
    assert hit == {m for m in MODULES if m.startswith("model.layers.1.")}
    assert len(hit) == 3


def test_founding_flag_names_parts_anywhere() -> None:
    hit = excluded(["linear_attn", "layers.0", "layers.11"], MODULES)
    assert hit == {m for m in MODULES if ".linear_attn." in m or ".layers.0." in m or ".layers.11." in m}


def test_fnmatch_is_over_the_full_name() -> None:
    assert matches("*mlp*", "model.layers.3.mlp.gate_proj")
    assert not matches("layers.3*", "model.layers.3.mlp.gate_proj")
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
