"""Adapters on top of a quantized model: PEFT's plain LoRA, a step of Trainer, and torch.compile."""

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

from runtime_models import export_nvfp4, save_reference  # noqa: E402
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments  # noqa: E402

from annie_quant import runtime  # noqa: E402
from annie_quant.offline import codec  # noqa: E402
from annie_quant.offline.linears import NVFP4Linear, nvfp4_linears  # noqa: E402


@pytest.fixture(scope="module")
def naive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_nvfp4(
        save_reference(tmp_path_factory.mktemp("reference"), layers=2),
        tmp_path_factory.mktemp("naive"),
    )


def some_ids() -> "torch.Tensor":
    return torch.randint(0, 1000, (2, 24), generator=torch.Generator().manual_seed(3))


def adapted(naive: Path):
    peft = pytest.importorskip("peft", reason="LoRA on top needs peft: pip install peft")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(naive, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "in_proj_qkv"],
    )
    return peft.get_peft_model(model, config)


def packed(model) -> dict:
    return {n: m.codes.clone() for n, m in nvfp4_linears(model).items()}


def test_a_step_of_trainer_changes_only_the_adapters(naive: Path, tmp_path: Path) -> None:
    model = adapted(naive)
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable and all("lora_" in n for n in trainable)
    before, logits = packed(model), model(some_ids()).logits.detach()
    with torch.no_grad(), model.disable_adapter():
        assert torch.equal(model(some_ids()).logits, logits), "fresh adapters add nothing"
    rows = [{"input_ids": r, "labels": r} for r in some_ids()]
    arguments = TrainingArguments(
        tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=0.05, report_to=[], save_strategy="no",
        use_cpu=True, disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[n], c) for n, c in packed(model).items()), (
        "packed weights do not change"
    )
    model.eval()
    with torch.no_grad():
        assert not torch.equal(model(some_ids()).logits, logits)
        generated = model.generate(
            some_ids()[:1], max_new_tokens=4, do_sample=False, pad_token_id=0
        )
    assert generated.shape == (1, 28)
    model.save_pretrained(tmp_path / "adapter")
    from peft import PeftModel

    again = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(naive, dtype=torch.float32), tmp_path / "adapter"
    )
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(some_ids()).logits, model(some_ids()).logits)


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_gradients_are_those_of_the_dequantized_weights(naive: Path, numerics: str) -> None:
    model = runtime.load(naive, numerics, dtype=torch.float32)
    dense = runtime.load(naive, numerics, cache="float32", dtype=torch.float32)
    grads = []
    for m in (model, dense):
        embedded = m.get_input_embeddings()(some_ids()).detach().requires_grad_(True)
        m(inputs_embeds=embedded).logits.square().mean().backward()
        grads.append(embedded.grad)
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-6)
    assert grads[0].abs().sum() > 0


def on_a_gpus_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantizing in torch ops, as on a GPU without kernels."""
    monkeypatch.setattr(
        codec,
        "dequantize",
        lambda codes, scales, scale, group, dtype, divisor: codec.dequantize_torch(
            codes, scales, scale, divisor
        ).to(dtype),
    )


def test_torch_compile_takes_a_layer_in_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpus_path(monkeypatch)
    torch.manual_seed(0)
    layer = NVFP4Linear(64, 96, bias=True)
    scale = torch.randint(40, 90, (96, 4), dtype=torch.uint8).view(torch.float8_e4m3fn)
    layer.load_state_dict({"weight": torch.randint(0, 256, (96, 32), dtype=torch.uint8), "weight_scale": scale,
                           "weight_scale_2": torch.tensor(0.01), "input_scale": torch.tensor(0.002),
                           "bias": torch.randn(96, dtype=torch.bfloat16)})  # fmt: skip
    layer.set_numerics("w4a16")
    layer.prepare()
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        plain = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(plain, compiled)


def test_a_whole_model_compiles_in_one_graph(naive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpus_path(monkeypatch)
    model = runtime.load(naive, "w4a16").model.layers[-1].mlp
    for linear in nvfp4_linears(model).values():
        linear.prepare()
    x = torch.randn(2, 20, 64, dtype=torch.bfloat16)
    with torch.inference_mode():
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))
