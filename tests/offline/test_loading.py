"""ModelOpt's exports in transformers: the same logits as ModelOpt's dequantized weights, and faults that are named."""

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "modelopt", reason="ModelOpt makes the checkpoints: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

import checkpoint_zoo as zoo  # noqa: E402
from runtime_models import dequantized, export_nvfp4, save_reference  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from annie_quant import checkpoint, runtime  # noqa: E402
from annie_quant.core.errors import CheckpointError, EnvironmentFault  # noqa: E402
from annie_quant.offline.linears import nvfp4_linears  # noqa: E402

CONFIGS = {
    "NVFP4_DEFAULT_CFG": 25,
    "NVFP4_MLP_ONLY_CFG": 12,
    "NVFP4_MLP_WEIGHT_ONLY_CFG": 12,
}  # NVFP4 linears


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=list(CONFIGS))
def exported(
    request, reference: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    return request.param, export_nvfp4(
        reference, tmp_path_factory.mktemp(request.param), request.param
    )


@pytest.fixture(scope="module")
def naive(reference: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_nvfp4(reference, tmp_path_factory.mktemp("naive"))


def some_ids() -> "torch.Tensor":
    return torch.randint(0, 1000, (2, 40), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("cache", ["packed", "bf16"])
def test_logits_are_those_of_modelopts_dequantized_weights(
    exported, reference: Path, cache: str
) -> None:
    config, folder = exported
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert len(nvfp4_linears(model)) == CONFIGS[config]
    runtime.set_numerics(model, "w4a16")
    runtime.set_cache(model, cache)
    plain = AutoModelForCausalLM.from_pretrained(reference).eval()
    plain.load_state_dict(dequantized(folder))
    with torch.inference_mode():
        assert torch.equal(model(some_ids()).logits, plain(some_ids()).logits)


def test_numerics_follow_the_checkpoint(exported) -> None:
    config, folder = exported
    model = runtime.load(folder)
    weight_only = "WEIGHT_ONLY" in config
    assert runtime.numerics_of(model) == (["w4a16"] if weight_only else ["w4a4", "w4a16"])
    assert {m.numerics for m in nvfp4_linears(model).values()} == {
        "w4a16" if weight_only else "w4a4"
    }
    assert {m.group for m in nvfp4_linears(model).values()} == {32 if weight_only else 16}


def test_saving_and_loading_gives_the_same_checkpoint(exported, tmp_path: Path) -> None:
    _, folder = exported
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    before, after = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert torch.equal(
            tensor.reshape(-1).view(torch.uint8), after[name].reshape(-1).view(torch.uint8)
        ), name
    saved, original = (
        json.loads((f / "config.json").read_text())["quantization_config"]
        for f in (tmp_path, folder)
    )
    assert saved == original


def test_a_bf16_model_loads_unchanged(reference: Path) -> None:
    model = runtime.load(reference)
    assert runtime.numerics_of(model) == ["bf16"] and model.dtype == torch.bfloat16


def test_generate_and_left_padding_work(naive: Path) -> None:
    model = runtime.load(naive, cache="float32", dtype=torch.float32)
    ids = torch.randint(5, 1000, (1, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    alone = model.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0
    )
    assert alone.shape == (1, 15)


def test_only_hf_quant_config_is_enough_for_load(naive: Path, tmp_path: Path) -> None:
    folder = copy(naive, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        a = runtime.load(folder)(some_ids()).logits
        assert torch.equal(a, runtime.load(naive)(some_ids()).logits)


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target / "model")
    return target / "model"


def edited(source: Path, target: Path, change) -> Path:
    """Copy a checkpoint and apply `change` to its dict of tensors in place."""
    folder = copy(source, target)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Q = "model.layers.3.self_attn.q_proj"


def nan_scale(t: dict) -> None:
    t[f"{Q}.weight_scale"].view(torch.uint8)[0, 0] = 0x7F


def halve(t: dict) -> None:
    for name in (f"{Q}.weight", f"{Q}.weight_scale"):
        t[name] = t[name][:, : t[name].shape[1] // 2].contiguous()


def put(name: str, value):
    return lambda t: t.__setitem__(name, value)


FAULTS = {
    "block_scale_nan": nan_scale,
    "input_scale_bad": put(f"{Q}.input_scale", torch.tensor(0.0)),
    "tensor_scale_bad": put(f"{Q}.weight_scale_2", torch.tensor(float("inf"))),
    "tensor_scale_inverted": put(f"{Q}.weight_scale_2", torch.tensor(2000.0)),
    "tensor_scale_missing": lambda t: t.pop(f"{Q}.weight_scale_2"),
    "block_scale_missing": lambda t: t.pop(f"{Q}.weight_scale"),
    "scale_shape": lambda t: t.__setitem__(
        f"{Q}.weight_scale", t[f"{Q}.weight_scale"][:, :3].contiguous()
    ),
    "scale_dtype": lambda t: t.__setitem__(f"{Q}.weight_scale", t[f"{Q}.weight_scale"].float()),
    "not_finite": lambda t: t["model.norm.weight"].__setitem__(3, float("nan")),
    "orphan_scale": lambda t: t.pop(f"{Q}.weight"),
}


@pytest.mark.parametrize("code", list(FAULTS))
def test_a_fault_is_refused_with_the_audits_finding(naive: Path, tmp_path: Path, code: str) -> None:
    folder = edited(naive, tmp_path, FAULTS[code])
    findings = [f.message for f in checkpoint.audit(folder).findings if f.code == code]
    with pytest.raises(CheckpointError) as raised:
        AutoModelForCausalLM.from_pretrained(folder)
    assert any(raised.value.message.startswith(message) for message in findings)
    assert "\n" not in raised.value.message and "audit" in raised.value.hint


def test_a_negative_block_scale_is_refused(naive: Path, tmp_path: Path) -> None:
    """The codec refuses such weights, in the first forward of more than a few tokens."""

    def negate(t: dict) -> None:
        t[f"{Q}.weight_scale"].view(torch.uint8)[0, 0] |= 0x80

    folder = edited(naive, tmp_path, negate)
    assert [f.code for f in checkpoint.audit(folder).findings] == ["block_scale_negative"]
    with pytest.raises(CheckpointError, match=rf"{Q}\.weight_scale holds .* negative") as raised:
        runtime.load(folder)
    assert "audit" in raised.value.hint


def test_a_head_without_decay_is_sound(naive: Path, tmp_path: Path) -> None:
    """transformers' initialisation sometimes makes A_log log(0); its exp is 0, and every runtime computes it."""
    name = "model.layers.0.linear_attn.A_log"
    for value, sound in ((-float("inf"), True), (float("inf"), False), (float("nan"), False)):
        folder = edited(naive, tmp_path / str(value), lambda t, v=value: t[name].__setitem__(1, v))
        assert ([f.tensor for f in checkpoint.audit(folder).findings] == []) is sound
        if sound:
            with torch.inference_mode():
                assert runtime.load(folder)(some_ids()).logits.isfinite().all()
        else:
            with pytest.raises(CheckpointError, match=r"A_log"):
                runtime.load(folder)


def test_a_multimodal_checkpoint_loads_as_its_text_model_in_the_dtype_asked_for(
    naive: Path, tmp_path: Path
) -> None:
    tensors, config = zoo.read(naive), json.loads((naive / "config.json").read_text())
    zoo.multimodal(tensors, config)
    folder = zoo.save(tmp_path / "vl", tensors, config)
    for dtype in (torch.float32, torch.bfloat16):
        deep, plain = runtime.load(folder, dtype=dtype), runtime.load(naive, dtype=dtype)
        assert [p.dtype for p in deep.parameters()] == [p.dtype for p in plain.parameters()]
        with torch.inference_mode():
            assert torch.equal(deep(some_ids()).logits, plain(some_ids()).logits)


def test_quantized_experts_are_refused_by_name(naive: Path, tmp_path: Path) -> None:
    def experts(t: dict) -> None:
        for name in [n for n in t if ".mlp.up_proj." in n]:
            t[name.replace(".mlp.", ".mlp.experts.0.")] = t.pop(name)

    with pytest.raises(
        CheckpointError, match=r"mlp\.experts\.0\.up_proj: this runtime reads no quantized experts"
    ):
        runtime.load(edited(naive, tmp_path, experts))


def test_a_missing_norm_and_a_width_that_config_json_denies_are_named(
    naive: Path, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"norm: missing"):
        runtime.load(edited(naive, tmp_path / "a", lambda t: t.pop("model.norm.weight")))
    with pytest.raises(
        CheckpointError, match=rf"{Q}\.weight is U8 \[256, 16\], expected U8 \[256, 32\]"
    ):
        runtime.load(edited(naive, tmp_path / "b", halve))
    folder = configured(naive, tmp_path / "c", lambda c: c.update(intermediate_size=256))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight is U8 .* expected U8"):
        runtime.load(folder)
    folder = configured(naive, tmp_path / "d", lambda c: c.update(vocab_size=c["vocab_size"] * 2))
    with pytest.raises(CheckpointError, match=r"config\.json makes it|vocab_size 3072"):
        runtime.load(folder)
    folder = configured(naive, tmp_path / "e", lambda c: c.update(model_type="no_such_model"))
    with pytest.raises(CheckpointError, match="no_such_model") as raised:
        runtime.load(folder)
    assert "\n" not in raised.value.message
    folder = configured(naive, tmp_path / "f", lambda c: c.update(max_position_embeddings="4096"))
    with pytest.raises(CheckpointError, match=r"max_position_embeddings.*expected int, got str"):
        runtime.load(folder)


def configured(source: Path, target: Path, change) -> Path:
    """Copy a checkpoint and apply `change` to its config.json in place."""
    folder = copy(source, target)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("algo", ["W4A8_NVFP4_FP8", "INT4_AWQ", None])
def test_formats_that_are_not_read_are_named(naive: Path, tmp_path: Path, algo: str | None) -> None:
    folder = configured(naive, tmp_path, lambda c: c["quantization_config"].update(quant_algo=algo))
    with pytest.raises(CheckpointError, match=str(algo or "''")):
        AutoModelForCausalLM.from_pretrained(folder)


def test_a_truncated_shard_a_missing_shard_and_an_empty_folder(naive: Path, tmp_path: Path) -> None:
    folder = copy(naive, tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        runtime.load(folder)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="shard 2 of 2 is missing"):
        runtime.load(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        runtime.load(folder)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        runtime.load(tmp_path)


def test_too_little_memory_is_one_line(naive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    free = psutil.virtual_memory()._replace(available=300_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(
        EnvironmentFault, match=r"needs 0\.\d GB of memory this way and 0\.0 GB are free"
    ):
        runtime.load(naive)
    monkeypatch.undo()

    def short(*args, **kwargs):
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: not enough memory: you tried\n more"
        )

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", short)
    with pytest.raises(EnvironmentFault, match="does not fit into memory") as raised:
        runtime.load(naive)
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("place", ["cpu", "split", "disk"])
def test_device_map_is_honoured(naive: Path, tmp_path: Path, place: str) -> None:
    """All on one device by name, module by module, and with half of the layers on disk."""
    whole = runtime.load(naive)
    parts = {
        "model.embed_tokens": "cpu",
        "model.norm": "cpu",
        "lm_head": "cpu",
        "model.rotary_emb": "cpu",
    }
    parts |= {
        f"model.layers.{i}": "disk" if place == "disk" and i >= 2 else "cpu" for i in range(4)
    }
    more = {"device_map": {"": "cpu"} if place == "cpu" else parts}
    if place == "disk":
        more["offload_folder"] = str(tmp_path)
    model = runtime.load(naive, **more)
    device = model.model.layers[3].mlp.up_proj.codes.device.type
    assert device == ("meta" if place == "disk" else "cpu")
    with torch.inference_mode():
        assert torch.equal(model(some_ids()).logits, whole(some_ids()).logits)
