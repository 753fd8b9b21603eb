"""Model families: one value each, chosen by model type; names in both forms; no other module knows a tensor's name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from paths import ROOT

from annie_quant import models
from annie_quant.core.errors import CheckpointError

QWEN = models.family_of({"model_type": "qwen3_5_text"})
# Names that belong to the families' files.
LITERALS = re.compile(r"language_model|gate_proj|in_proj_qkv|self_attn\.")
NEW_FAMILY = '''
"""A family that needs no other change."""
from dataclasses import replace

from annie_quant.models import dense
from annie_quant.models.family import Form

FAMILY = replace(dense.LLAMA, name="New", text=Form("NewForCausalLM", "new"))
'''


def test_no_other_module_knows_a_tensor_s_name() -> None:
    package = ROOT / "annie_quant"
    files = [f for f in package.rglob("*.py") if f.parent.name != "models"]
    uses = [
        f"{f.relative_to(package)}:{number}: {line.strip()}"
        for f in files
        for number, line in enumerate(f.read_text().splitlines(), 1)
        if LITERALS.search(line)
    ]
    assert uses == []


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("qwen3_5_text", "Qwen3.5"), ("qwen3_5", "Qwen3.5"), ("qwen3", "Qwen3"), ("llama", "Llama")],
)
def test_a_family_is_named_by_the_model_type(model_type: str, name: str) -> None:
    assert models.family_of({"model_type": model_type}).name == name


def test_an_unknown_model_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointError, match="model_type 'gpt2' is not a known family") as refused:
        models.family_of({"model_type": "gpt2"})
    assert "qwen3_5_text" in refused.value.hint and "llama" in refused.value.hint
    default = models.family_or_default({"model_type": "gpt2"})
    assert default.gguf is None and default.fused_groups(
        ["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"]
    )


def test_a_new_family_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "new.py").write_text(NEW_FAMILY)
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    models.families.cache_clear()
    try:
        assert models.family_of({"model_type": "new"}).name == "New"
    finally:
        models.families.cache_clear()


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("model.language_model.layers.3.mlp.up_proj.weight", "layers.3.mlp.up_proj.weight"),
        ("language_model.model.norm.weight", "norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("mtp.fc.weight", "mtp.fc.weight"),
    ],
)
def test_the_prefix_of_a_form_is_removed(name: str, short: str) -> None:
    assert models.short_name(name) == short


def test_names_in_both_forms() -> None:
    text, multimodal = "model.layers.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj"
    assert (
        QWEN.in_form(text, multimodal=True) == multimodal
        and QWEN.in_form(multimodal, multimodal=False) == text
    )
    assert models.aliases(text)[0] == text and multimodal in models.aliases(text)
    for unchanged in ("lm_head.weight", "model.visual.patch_embed.proj.weight", "mtp.fc.weight"):
        assert QWEN.in_form(unchanged, multimodal=True) == unchanged
    assert (
        models.layer_of(multimodal) == "model.language_model.layers.0"
        and models.in_layer(multimodal) == "mlp.up_proj"
    )
    assert models.layer_of("lm_head") == "" == models.in_layer("lm_head")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.down_proj.weight", "mlp"),
        ("model.layers.3.self_attn.q_proj.weight", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", "rest"),
        ("model.layers.0.linear_attn.out_proj", "deltanet"),
        ("model.layers.0.linear_attn.in_proj_a.weight", "rest"),
        ("mtp.layers.0.mlp.down_proj.weight", "rest"),
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
    ],
)
def test_the_kind_of_a_part(name: str, kind: str) -> None:
    assert QWEN.kind_of(name) == kind


def test_fused_linears_of_one_layer_are_grouped() -> None:
    layer = "model.layers.3."
    names = [
        f"{layer}{n}"
        for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
    ]
    assert QWEN.fused_groups(names) == [sorted(names[:2])]
    assert QWEN.largest_of_group(dict(zip(names, (1.0, 3.0, 2.0, 4.0), strict=True))) == dict(
        zip(names, (3.0, 3.0, 2.0, 4.0), strict=True)
    )


def test_which_norms_add_one() -> None:
    adds = (
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "mtp.pre_fc_norm_hidden.weight",
    )
    assert all(QWEN.adds_one(n) for n in adds) and QWEN.adds_one(
        "model.layers.3.self_attn.q_norm.weight"
    )
    assert not QWEN.adds_one("model.layers.0.linear_attn.norm.weight")
    assert not QWEN.adds_one("model.layers.0.mlp.up_proj.weight")
    assert not models.family_of({"model_type": "llama"}).adds_one("model.norm.weight")


def test_every_family_describes_its_inputs_once() -> None:
    for family in models.families():
        linears = [name for site in family.inputs for name in site.linears]
        assert len(linears) == len(set(linears)), family.name
        for group in family.fused.values():
            assert any(set(group) <= set(site.linears) for site in family.inputs), (
                family.name,
                group,
            )


# -- mixtures of experts

MOE = models.family_of({"model_type": "qwen3_5_moe"})


@pytest.mark.parametrize("version", ["3.5", "3.6", "3.8"])
def test_later_versions_keep_the_family_of_their_architecture(version: str) -> None:
    """Qwen3.6 and 3.8 have no class or model type of their own; their names are in the checkpoint's name alone."""
    for kind, name in (
        ("qwen3_5", "Qwen3.5"),
        ("qwen3_5_moe", "Qwen3.5 MoE"),
        ("qwen3_5_moe_text", "Qwen3.5 MoE"),
    ):
        assert (
            models.family_of({"_name_or_path": f"Qwen/Qwen{version}", "model_type": kind}).name
            == name
        )
    assert [f.class_name for f in MOE.forms] == [
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    ]


def test_names_of_experts_both_ways() -> None:
    assert MOE.experts is not None and QWEN.experts is None
    layer = "model.language_model.layers.3"
    assert MOE.experts.split(f"{layer}.mlp.experts.7.up_proj.weight_scale") == (layer, 7, "up_proj")
    for end in ("", ".weight"):
        assert MOE.experts.merged_part(f"{layer}.mlp.experts.gate_up_proj{end}") == (
            layer,
            "gate_up_proj",
        )
    for other in (
        "mlp.experts.x.up_proj",
        "mlp.shared_expert.up_proj",
        "mlp.gate",
        "mlp.experts.7.other",
        "mlp.experts",
    ):
        assert MOE.experts.split(f"{layer}.{other}.weight") is None, other
        assert MOE.experts.merged_part(f"{layer}.{other}.weight") is None, other


def test_an_expert_s_linears_are_fused_with_each_other_only() -> None:
    names = [
        f"model.layers.0.mlp.{m}.{k}_proj"
        for m in ("experts.0", "experts.1", "shared_expert")
        for k in ("gate", "up")
    ]
    assert sorted(MOE.fused_groups([*names, "model.layers.0.mlp.experts.0.down_proj"])) == [
        names[:2],
        names[2:4],
        names[4:],
    ]


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "qwen3_moe"])
def test_routers_stay_unquantized_and_experts_do_not(kind: str) -> None:
    from annie_quant.checkpoint.linears import covering_pattern

    family = models.family_of({"model_type": kind})
    for name in ("mlp.gate", "mlp.shared_expert_gate"):
        assert covering_pattern(f"model.layers.0.{name}", family.unquantized)
    for name in (
        "mlp.experts.0.gate_proj",
        "mlp.shared_expert.gate_proj",
        "mlp.experts.gate_up_proj",
    ):
        assert not covering_pattern(f"model.layers.0.{name}", family.unquantized)


@pytest.mark.parametrize(
    ("kind", "architecture"), [("qwen3_5_moe", "QWEN35MOE"), ("qwen3_moe", "QWEN3MOE")]
)
def test_gguf_names_of_experts_are_those_of_llama_cpp(kind: str, architecture: str) -> None:
    constants = pytest.importorskip("gguf.constants", reason="the gguf extra is not installed")
    from gguf.tensor_mapping import get_tensor_name_map

    theirs = get_tensor_name_map(constants.MODEL_ARCH[architecture], 4)
    experts = models.family_of({"model_type": kind}).experts
    assert experts is not None and len(experts.gguf) >= 4
    for inside in experts.gguf:
        name = f"model.layers.2.{inside}.weight"
        assert f"blk.2.{experts.gguf[inside]}.weight" == theirs.get_name(name, (".weight",))


@pytest.mark.parametrize(
    "family", [f for f in models.families() if f.gguf], ids=lambda family: family.name
)
def test_gguf_names_are_those_of_llama_cpp(family: models.Family) -> None:
    """Those of the tensors that the architecture has in llama.cpp; a family may list names of its relatives too."""
    constants = pytest.importorskip("gguf.constants", reason="the gguf extra is not installed")
    from gguf.tensor_mapping import get_tensor_name_map

    assert family.gguf is not None
    architectures = {name: number for number, name in constants.MODEL_ARCH_NAMES.items()}
    theirs = get_tensor_name_map(architectures[family.gguf.architecture], 4)
    compared = 0
    for inside, name in [
        *family.gguf.top.items(),
        *((f"layers.2.{n}", f"blk.2.{s}") for n, s in family.gguf.layer.items()),
    ]:
        expected = theirs.get_name(f"model.{inside}", (".weight", ".bias")) or theirs.get_name(
            inside, (".weight", ".bias")
        )
        if expected:
            compared += 1
            assert name == expected, inside
    assert compared >= 10


@pytest.mark.parametrize("kind", ["qwen3_5_moe_text", "qwen3_moe"])
def test_the_families_name_every_linear_of_transformers_own_model(kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the quantize extra is not installed")
    import torch

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "vocab_size": 64,
        "num_experts": 4,
        "moe_intermediate_size": 16,
    }
    config = transformers.AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        state = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    experts = models.family_of({"model_type": kind}).experts
    assert experts is not None
    assert state[f"model.layers.0.{experts.router}.weight"].shape[0] == getattr(
        config, experts.count
    )
    for merged, linears in experts.merged.items():
        shape = state[f"model.layers.0.{experts.module}.{merged}"].shape
        assert shape[0] == 4 and 16 in (shape[1] // len(linears), shape[2])


@pytest.mark.parametrize("kind", ["qwen4_exp", "gemma4_text", "gemma4_unified"])
def test_a_published_model_without_a_family_is_recognised_and_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"{kind}.*is recognised, and its layers are not"):
        models.family_of({"model_type": kind})
    assert not models.is_known({"model_type": kind})
