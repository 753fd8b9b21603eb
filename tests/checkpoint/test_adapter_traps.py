"""Adapters that must not be merged in silence: each is one line, and nothing is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import adapter_models
import pytest
from adapter_models import Form, rewrite
from paths import TINY_ANNIE
from safetensors.torch import load_file, save_file

from annie_quant.checkpoint import ModelFolder, adapters, convert
from annie_quant.core.errors import AnnieError, CheckpointError, UsageError

PREFIX = "base_model.model.model.layers.0."
Q_PROJ = f"{PREFIX}self_attn.q_proj"
FORM = Form("llama", {"target_modules": ["q_proj", "up_proj"]})


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    base = adapter_models.save_base(folder / "base", "llama")
    adapter_models.save_adapter(adapter_models.trained(base, FORM), folder / "adapter")
    return folder


@pytest.fixture
def adapter(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "adapter", tmp_path / "adapter"))


def merge(home: Path, adapter: Path, **options: object):
    return adapters.merge(home / "base", adapter, adapter.with_name("out"), **options)


def refused(home: Path, adapter: Path) -> AnnieError:
    """Return the error of a merge, which has written nothing."""
    before = sorted(adapter.parent.iterdir())
    with pytest.raises(AnnieError) as caught:
        merge(home, adapter)
    assert sorted(adapter.parent.iterdir()) == before
    assert caught.value.hint and "\n" not in caught.value.message
    return caught.value


SETTINGS = {
    "IA3": ({"peft_type": "IA3"}, "peft_type IA3: only LORA"),
    "OFT": ({"peft_type": "OFT"}, "peft_type OFT: only LORA"),
    "prefix tuning": ({"peft_type": "PREFIX_TUNING"}, "PREFIX_TUNING: only LORA"),
    "AdaLoRA": ({"peft_type": "ADALORA"}, "ADALORA: only LORA"),
    "no type": ({"peft_type": None}, "peft_type None"),
    "PiSSA": ({"init_lora_weights": "pissa"}, "PiSSA changed the base"),
    "fast PiSSA": ({"init_lora_weights": "pissa_niter_16"}, "PiSSA changed the base"),
    "OLoRA": ({"init_lora_weights": "olora"}, "OLoRA changed the base"),
    "CorDA": ({"init_lora_weights": "corda"}, "CorDA changed the base"),
    "LoRA-GA": ({"init_lora_weights": "lora_ga"}, "LoRA-GA changed the base"),
    "LoftQ": ({"init_lora_weights": "loftq"}, "LoftQ changed the base"),
    "an unknown start": ({"init_lora_weights": "svd_of_tomorrow"}, "is not known"),
    "aLoRA": ({"alora_invocation_tokens": [1, 2]}, "aLoRA"),
    "QA-LoRA": ({"use_qalora": True}, "QA-LoRA"),
    "BD-LoRA": ({"use_bdlora": {"nblocks": 2}}, "BD-LoRA"),
    "Arrow": ({"arrow_config": {"top_k": 3}}, "Arrow"),
    "KaSA": ({"kasa_config": {"beta": 1}}, "KaSA"),
    "MonteCLoRA": ({"monteclora_config": {"num_samples": 8}}, "MonteCLoRA"),
    "VeLoRA": ({"velora_config": {"num_groups": 8}}, "VeLoRA"),
    "repeated layers": ({"layer_replication": [[0, 2], [1, 2]]}, "repeats layers"),
    "Megatron": ({"megatron_config": {"x": 1}}, "Megatron"),
    "an unknown field": ({"scale_by_moon_phase": 3}, "scale_by_moon_phase is set"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, "stored transposed"),
    "another rank": ({"r": 8}, "has rank 4, and r or rank_pattern"),
    "another rank of a module": ({"rank_pattern": {"up_proj": 16}}, "gives 16"),
    "rank 0": ({"r": 0}, "a rank outside of 1"),
    "a rank as text": ({"r": "four"}, "Expected `int`"),
    "an endless pattern": ({"alpha_pattern": {"(a+)+x": 3}}, "repeated group"),
    "an invalid pattern": ({"alpha_pattern": {"q_proj[": 3}}, "unterminated"),
    "an unknown order of experts": ({"lora_B_layout": "by_colour"}, "expected rank_major"),
    "DoRA without magnitudes": ({"use_dora": True}, "no magnitude vector"),
    "no bias of lora_B": ({"lora_bias": True}, "lora_bias is True"),
}


@pytest.mark.parametrize(("settings", "message"), SETTINGS.values(), ids=SETTINGS)
def test_settings_that_are_refused(settings: dict, message: str, home: Path, adapter: Path) -> None:
    rewrite(adapter, **settings)
    assert message in refused(home, adapter).message


def test_starts_that_leave_the_base_as_it_is_are_merged(home: Path, adapter: Path) -> None:
    for start in (True, False, "gaussian", "eva", "orthogonal", "mica"):
        rewrite(adapter, init_lora_weights=start)
        merge(home, adapter, force=True)


def test_a_converted_pissa_adapter_is_merged(home: Path, tmp_path: Path) -> None:
    """peft's conversion makes a plain LoRA of twice the rank for the original base."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = adapter_models.load_float32(home / "base")
    start = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="pissa")
    adapted = get_peft_model(model, start)
    adapted.peft_config["default"].init_lora_weights = True
    adapted.save_pretrained(tmp_path / "start")
    adapted.peft_config["default"].init_lora_weights = "pissa"
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(tmp_path / "pissa")
    assert "PiSSA changed the base" in refused(home, tmp_path / "pissa").message
    adapted.save_pretrained(
        tmp_path / "plain", path_initial_model_for_weight_conversion=str(tmp_path / "start")
    )
    expected = adapter_models.merged_by_peft(adapted)
    adapters.merge(home / "base", tmp_path / "plain", tmp_path / "merged")
    name = "model.layers.1.self_attn.q_proj.weight"
    merged = load_file(tmp_path / "merged/model.safetensors")[name].float()
    # The conversion goes through the residual, so single values are rounded to the next bf16.
    assert (merged - expected[name].float()).abs().max() < 2**-9


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def put(name: str, *shape: int):
    def change(tensors: dict) -> None:
        import torch

        tensors[name] = torch.ones(shape)

    return change


def convolve(tensors: dict) -> None:
    for part in ("A", "B"):
        name = f"{Q_PROJ}.lora_{part}.weight"
        tensors[name] = tensors[name][..., None]


def fill(value: float, part: str):
    def change(tensors: dict) -> None:
        for name, tensor in tensors.items():
            if part in name:
                tensor.fill_(value)

    return change


TENSORS = {
    "a module that the base lacks": (
        lambda t: t.update(
            {n.replace("q_proj", "qkv_proj"): t.pop(n) for n in list(t) if "q_proj" in n}
        ),
        "4 of 8 tensors match nothing in base, such as base_model.model.model.layers.",
    ),
    "a layer that the base lacks": (
        lambda t: t.update({n.replace("layers.1", "layers.7"): t.pop(n) for n in list(t)}),
        "4 of 8 tensors match nothing",
    ),
    "a prefix that no writer has": (
        lambda t: t.update(
            {n.replace("model.layers", "encoder.layers"): t.pop(n) for n in list(t)}
        ),
        "8 of 8 tensors match nothing",
    ),
    "a whole tensor that the base lacks": (put("base_model.model.score.weight", 2, 64), "score"),
    "a kind of matrix that is not known": (
        put(f"{Q_PROJ}.lora_C.weight", 4, 4),
        "lora_C.weight: no kind that is merged here",
    ),
    "a diagonal": (put(f"{Q_PROJ}.lora_diag", 4), "lora_diag: no kind"),
    "lora_A alone": (drop(f"{Q_PROJ}.lora_B.weight"), "has no lora_B next to it"),
    "lora_B alone": (drop(f"{Q_PROJ}.lora_A.weight"), "has no lora_A next to it"),
    "another width": (put(f"{Q_PROJ}.lora_A.weight", 4, 128), "an adapter of another base"),
    "a head for more tokens": (
        lambda t: (
            put("base_model.model.lm_head.lora_A.weight", 4, 64)(t),
            put("base_model.model.lm_head.lora_B.weight", 99, 4)(t),
        ),
        "is for 99 tokens and lm_head.weight has 96 rows: an added token has no row",
    ),
    "another height": (put(f"{Q_PROJ}.lora_B.weight", 32, 4), "an adapter of another base"),
    "a tensor of another shape": (
        put("base_model.model.model.norm.weight", 65),
        "does not fit model.norm.weight [64]",
    ),
    "fewer tokens": (put("base_model.model.lm_head.weight", 95, 64), "does not fit lm_head"),
    "more tokens in the head alone": (
        put("base_model.model.lm_head.weight", 97, 64),
        "96 rows in the embedding and 97 in lm_head.weight: an added token has no row",
    ),
    "more tokens in the embedding alone": (
        put("base_model.model.model.embed_tokens.weight", 97, 64),
        "97 rows in the embedding and 96",
    ),
    "a convolution": (convolve, "a LoRA of a convolution is not merged"),
    "an empty part of ZeRO": (put(f"{Q_PROJ}.lora_A.weight", 0), "not empty"),
    "not finite": (fill(float("nan"), "up_proj.lora_A"), "not finite"),
    "not trained": (fill(0, "lora_B"), "all 4 products are zero"),
    "one tensor twice": (
        put(f"{Q_PROJ}.lora_A.default.weight", 4, 64),
        "one module, two tensors",
    ),
    "two values of one tensor": (
        lambda t: (
            put("base_model.model.lm_head.weight", 96, 64)(t),
            put("base_model.model.lm_head.modules_to_save.weight", 96, 64)(t),
            t["base_model.model.lm_head.weight"].fill_(3),
        ),
        "one tensor with different values",
    ),
    "only a copy of the base": (
        put("base_model.model.lm_head.original_module.weight", 96, 64),
        "match nothing",
    ),
    "a magnitude without DoRA": (
        put(f"{Q_PROJ}.lora_magnitude_vector", 64),
        "a magnitude vector, and use_dora is False",
    ),
    "a bias of a linear without": (
        put("base_model.model.model.layers.0.mlp.up_proj.base_layer.bias", 128),
        "up_proj.base_layer.bias",
    ),
    "token rows without their numbers": (
        put("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", 2, 64),
        "trainable_token_indices has 0 tokens",
    ),
    "rows of an embedding for more tokens": (
        lambda t: (
            put("base_model.model.model.embed_tokens.lora_embedding_A", 4, 99)(t),
            put("base_model.model.model.embed_tokens.lora_embedding_B", 64, 4)(t),
        ),
        "is for 99 tokens and model.embed_tokens.weight has 96 rows: an added token has no row",
    ),
    "values beyond bf16": (fill(1e30, "q_proj.lora"), "not finite, or too large for BF16"),
}


@pytest.mark.parametrize(("change", "message"), TENSORS.values(), ids=TENSORS)
def test_tensors_that_are_refused(change, message: str, home: Path, adapter: Path) -> None:
    rewrite(adapter, change=change)
    assert message in refused(home, adapter).message


def test_a_token_beyond_the_embedding_is_named(home: Path, adapter: Path) -> None:
    name = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
    rewrite(adapter, change=put(name, 2, 64), trainable_token_indices=[3, 96])
    message = refused(home, adapter).message
    assert "token 96 has no row in model.embed_tokens.weight, which has 96" in message


def test_dora_of_an_embedding_is_refused(home: Path, tmp_path: Path) -> None:
    form = Form("llama", {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True})
    adapted = adapter_models.trained(home / "base", form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    assert "DoRA on an embedding" in refused(home, adapter).message


def test_a_pickled_adapter_is_never_read(home: Path, adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is pickled" in refused(home, adapter).message


def test_folders_that_are_no_adapter(home: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no adapter_config.json" in refused(home, tmp_path / "empty").message
    assert "is not a folder" in refused(home, tmp_path / "missing").message
    shutil.copytree(home / "adapter", tmp_path / "run/checkpoint-500")
    assert str(tmp_path / "run/checkpoint-500") in refused(home, tmp_path / "run").hint
    assert "no adapter_config.json" in refused(home, TINY_ANNIE).message


def test_a_quantized_base_is_refused(home: Path, adapter: Path) -> None:
    base = shutil.copytree(home / "base", adapter.with_name("base"))
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (base / "config.json").write_text(json.dumps(config))
    message = refused(base.parent, adapter).message
    assert "the base is quantized (bitsandbytes)" in message


def test_experts_without_a_parameter_are_refused(tmp_path: Path) -> None:
    base = adapter_models.save_base(tmp_path / "base", "qwen3-moe")
    form = Form("qwen3-moe", {"target_modules": [], "target_parameters": ["experts.down_proj"]})
    adapted = adapter_models.trained(base, form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    rewrite(adapter, target_parameters=None)
    assert "1 products, and target_parameters" in refused(tmp_path, adapter).message
    rewrite(adapter, target_parameters=["experts.gate_up_proj"])
    assert "does not fit experts of [64, 64]" in refused(tmp_path, adapter).message
    rewrite(adapter, target_parameters=["experts.down_proj"], use_dora=True)
    magnitude = "base_model.model.model.layers.0.mlp.experts.lora_magnitude_vector"
    rewrite(adapter, change=put(magnitude, 64))
    assert "only plain products of experts" in refused(tmp_path, adapter).message


def test_the_same_adapter_twice_is_refused_and_another_is_added(
    home: Path, adapter: Path, tmp_path: Path
) -> None:
    merge(home, adapter)
    once = tmp_path / "once"
    once.mkdir()
    (tmp_path / "out").rename(once / "base")
    assert "merged into it already" in refused(once, adapter).message
    rewrite(adapter, change=fill(0.5, "up_proj.lora_B"))
    merge(once, adapter)
    record = json.loads((tmp_path / "out/annie_quant.json").read_text())
    first, second = record["adapters"]
    assert first["weights_sha256"] != second["weights_sha256"]
    assert first["base_sha256"] != second["base_sha256"]


# ---- notes


def notes(home: Path, adapter: Path) -> str:
    return "\n".join(merge(home, adapter).notes)


def test_the_bases_name_is_compared(home: Path, adapter: Path) -> None:
    names = {
        str(home / "base"): False,
        "someone/BASE": False,
        "/hub/models--someone--base/snapshots/0123abcd": False,
        "Qwen/Qwen3.5-9B": True,
        "/hub/models--Qwen--Qwen3.5-9B/snapshots/0123abcd": True,
    }
    for name, is_other in names.items():
        rewrite(adapter, base_model_name_or_path=name)
        record = merge(home, adapter, force=True)
        assert any("does not prove that they are the same" in n for n in record.notes) == is_other
        assert "/hub" not in (record.trained_on or "") and str(home) not in record.trained_on


@pytest.mark.parametrize("name", ["unsloth/base-unsloth-bnb-4bit", "someone/base-bnb-4bit", ""])
def test_qlora_is_named(name: str, home: Path, adapter: Path) -> None:
    rewrite(adapter, base_model_name_or_path=name)
    if not name:
        (adapter / "README.md").write_text("adapter: qlora\nload_in_4bit: true\n")
    text = notes(home, adapter)
    assert "QLoRA" in text and "merged into the 16-bit weights of base" in text
    assert "does not prove" not in text


def test_a_quantized_folder_as_the_trained_base_is_named(home: Path, adapter: Path) -> None:
    folder = adapter.with_name("four-bit")
    folder.mkdir()
    (folder / "config.json").write_text('{"quantization_config": {"load_in_4bit": true}}')
    rewrite(adapter, base_model_name_or_path=str(folder))
    assert "QLoRA" in notes(home, adapter)


def test_products_that_are_zero_are_counted(home: Path, adapter: Path) -> None:
    rewrite(adapter, change=fill(0, "layers.1.mlp.up_proj.lora_B"))
    assert "1 of 4 products are zero, such as that of model.layers.1.mlp" in notes(home, adapter)


def test_a_change_larger_than_the_weight_is_named_with_its_scale(home: Path, adapter: Path) -> None:
    rewrite(adapter, lora_alpha=4000)
    text = notes(home, adapter)
    assert "change by more than their own norm" in text and "(scale 1000)" in text


def test_the_change_of_each_kind_is_that_of_the_matrices(home: Path, adapter: Path) -> None:
    record = merge(home, adapter)
    before = load_file(home / "base/model.safetensors")
    after = load_file(adapter.with_name("out") / "model.safetensors")
    for kind, part in (("attention", "q_proj"), ("mlp", "up_proj")):
        names = [n for n in before if part in n]
        change = sum((after[n].float() - before[n].float()).square().sum() for n in names)
        norm = sum(before[n].float().square().sum() for n in names)
        assert record.relative_change[kind] == pytest.approx(
            float((change / norm) ** 0.5), rel=0.01
        )
    assert record.tensors == 8 and record.changed == 4


# ---- the tied output layer


def logits(model) -> object:
    import torch

    with torch.no_grad():
        return model(torch.arange(24)[None]).logits


TIED = {
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "both saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "both adapted": {"target_modules": ["lm_head", "embed_tokens"]},
    "both adapted, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "saved, tied": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
        "ensure_weight_tying": True,
    },
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 5]},
    "added tokens, tied": {"target_modules": "all-linear"},
    "added tokens trained alone, tied": {
        "target_modules": ["q_proj"],
        "trainable_token_indices": [5, 98],
    },
    "added tokens, saved embedding": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens"],
    },
    "added tokens, adapted embedding": {"target_modules": ["q_proj", "embed_tokens"]},
}


@pytest.mark.parametrize(("name", "settings"), TIED.items(), ids=TIED)
def test_a_merged_tied_model_answers_as_the_adapted_one(
    name: str, settings: dict, tmp_path: Path
) -> None:
    """peft's own merge is not the measure here: it adds to the weight that both modules share."""
    import torch

    base = adapter_models.save_base(tmp_path / "base", "llama-tied")
    form = Form("llama-tied", settings, tokens=100 if name.startswith("added tokens") else 0)
    adapted = adapter_models.trained(base, form).eval()
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    adapters.merge(base, adapter, tmp_path / "merged")
    merged = adapter_models.load_float32(tmp_path / "merged").eval()
    assert torch.allclose(logits(merged), logits(adapted), atol=0.02, rtol=0.02)
    base_logits = logits(adapter_models.load_float32(base).eval())
    assert not torch.allclose(logits(merged)[..., :96], base_logits, atol=0.02, rtol=0.02)
    stays_tied = name.endswith(", tied") or name == "tokens"
    assert ("lm_head.weight" in ModelFolder(tmp_path / "merged")) != stays_tied
    config = json.loads((tmp_path / "merged/config.json").read_text())
    assert config["tie_word_embeddings"] is stays_tied


# ---- tokenizer, chat template, generation settings


def tokenizer(*added: str, moved: bool = False) -> str:
    words = [f"w{i}" for i in range(90)]
    if moved:
        words[3], words[4] = words[4], words[3]
    tokens = [{"content": token, "id": 90 + i} for i, token in enumerate(added)]
    vocab = {word: i for i, word in enumerate(words)}
    return json.dumps({"model": {"type": "BPE", "vocab": vocab}, "added_tokens": tokens})


@pytest.fixture
def own_base(home: Path, tmp_path: Path) -> Path:
    """Return the parent of a base with a tokenizer and a template."""
    base = shutil.copytree(home / "base", tmp_path / "own/base")
    (base / "tokenizer.json").write_text(tokenizer())
    (base / "tokenizer_config.json").write_text('{"eos_token": "w1"}')
    (base / "merges.txt").write_text("of the base")
    (base / "chat_template.jinja").write_text("base: {{ messages }}")
    return base.parent


def test_without_own_files_the_bases_are_taken(own_base: Path, adapter: Path) -> None:
    record = merge(own_base, adapter)
    assert record.prompt_files == "tokenizer, chat template, generation_config.json from the base"
    out = adapter.with_name("out")
    for name in ("tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert (out / name).read_bytes() == (own_base / "base" / name).read_bytes()


def test_the_adapters_tokenizer_and_template_are_taken_together(
    own_base: Path, adapter: Path
) -> None:
    """A template of the base's in a file of its own would win over the one in the adapter's tokenizer_config.json."""
    (adapter / "tokenizer.json").write_text(tokenizer())
    settings = {"eos_token": "w2", "chat_template": "adapter: {{ messages }}"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(settings))
    (adapter / "generation_config.json").write_text('{"eos_token_id": 2}')
    record = merge(own_base, adapter)
    assert "tokenizer, chat template, generation_config.json from the adapter" in (
        record.prompt_files
    )
    assert any("chat template is not the base's" in note for note in record.notes)
    out = adapter.with_name("out")
    assert not (out / "chat_template.jinja").exists()
    assert not (out / "merges.txt").exists()
    assert json.loads((out / "tokenizer_config.json").read_text()) == settings
    assert json.loads((out / "generation_config.json").read_text()) == {"eos_token_id": 2}


def test_a_template_alone_is_written_next_to_the_bases_tokenizer(
    own_base: Path, adapter: Path
) -> None:
    (adapter / "tokenizer_config.json").write_text('{"chat_template": "adapter"}')
    merge(own_base, adapter)
    out = adapter.with_name("out")
    assert (out / "chat_template.jinja").read_text() == "adapter"
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "w1"}


def test_added_tokens_of_the_adapters_tokenizer(own_base: Path, adapter: Path) -> None:
    """The base's embedding has six rows more than its tokenizer has tokens."""
    (adapter / "tokenizer.json").write_text(tokenizer("<call>", "</call>"))
    text = notes(own_base, adapter)
    assert "2 added tokens have rows that the adapter does not train, such as '<call>'" in text
    (adapter / "tokenizer.json").write_text(tokenizer(*(f"<{i}>" for i in range(7))))
    shutil.rmtree(adapter.with_name("out"))
    message = refused(own_base, adapter).message
    assert "token '<6>' has id 96, and the merged embedding has 96 rows" in message
    (adapter / "tokenizer.json").write_text(tokenizer(moved=True))
    message = refused(own_base, adapter).message
    assert "has id" in message and "an adapter of another base" in message


def test_added_tokens_with_rows_have_their_vocabulary_size(own_base: Path, tmp_path: Path) -> None:
    form = Form("llama", {"target_modules": ["q_proj"]}, tokens=100)
    adapted = adapter_models.trained(own_base / "base", form)
    adapter = adapter_models.save_adapter(adapted, tmp_path / "adapter")
    (adapter / "tokenizer.json").write_text(tokenizer(*(f"<{i}>" for i in range(10))))
    record = merge(own_base, adapter)
    assert not any("does not train" in note for note in record.notes)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["vocab_size"] == 100
    assert adapter_models.load_float32(tmp_path / "out").lm_head.weight.shape == (100, 64)


# ---- the commands' rules


def test_convert_takes_an_adapter_only_to_bf16(home: Path, adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="merged into a bf16 folder"):
        convert(home / "base", to="gguf", adapter=adapter)
    result = convert(home / "base", to="bf16", adapter=adapter, output=tmp_path / "out")
    assert result.tensors == 21 and result.size_bytes > 0
    assert any("8 of 8 tensors used" in note for note in result.notes)
    with pytest.raises(UsageError, match="exists and is not empty"):
        convert(home / "base", to="bf16", adapter=adapter, output=tmp_path / "out")
    for place in (home / "base", adapter):
        with pytest.raises(UsageError, match="is the checkpoint itself"):
            convert(home / "base", to="bf16", adapter=adapter, output=place, force=True)


def test_a_base_in_float16_that_overflows_is_refused(home: Path, adapter: Path) -> None:
    base = shutil.copytree(home / "base", adapter.with_name("half") / "base")
    file = base / "model.safetensors"
    tensors = {n: t.half() for n, t in load_file(file).items()}
    save_file(tensors, file)
    merge(base.parent, adapter)
    merged = load_file(adapter.with_name("out") / "model.safetensors")
    assert {str(t.dtype) for t in merged.values()} == {"torch.float16"}
    shutil.rmtree(adapter.with_name("out"))
    rewrite(adapter, lora_alpha=4e8)
    with pytest.raises(CheckpointError, match="too large for F16"):
        merge(base.parent, adapter)
