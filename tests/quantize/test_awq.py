"""awq_lite: a fold does not change what the model computes, in the stored tensors either; ModelOpt's own export does."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant import models
from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations
from annie_quant.models.formats import LARGEST_NVFP4
from annie_quant.quantize.formats import choose

torch = pytest.importorskip("torch", reason="folds run in torch: pip install annie-quant[quantize]")
from calibration_texts import make_batches  # noqa: E402

from annie_quant.offline import codec  # noqa: E402
from annie_quant.quantize import calibration_samples, calibration_text, folding  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402

BOUND = 1e-3
FAMILY = models.family_of({"model_type": "qwen3_5_text"})
SITES = [site for site in FAMILY.inputs if site.searched]


@pytest.fixture(scope="module")
def model() -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_ANNIE, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folds() -> list[dict[str, np.ndarray]]:
    """The folded tensors of each layer, calibrated on two conversations."""
    folder = ModelFolder(TINY_ANNIE)
    text = calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION)[::12])[:2]
    chosen = set(choose(folder, ()))
    layers = DecoderLayers(folder, make_batches(text))
    counts = torch.eye(calibration_samples.KINDS)
    return [folding.fold_layer(layer, chosen, counts).tensors for layer in layers]


def logits(
    model: object, weights: dict[str, object], samples: list[calibration_samples.Sample]
) -> np.ndarray:
    """Return the logits of the model with some of its tensors replaced."""
    original = {n: model.state_dict()[n].clone() for n in weights}  # type: ignore[attr-defined]
    model.load_state_dict(weights, strict=False)  # type: ignore[attr-defined]
    with torch.inference_mode():
        rows = [model(torch.tensor([s.ids])).logits[0].numpy() for s in samples]  # type: ignore[operator]
    model.load_state_dict(original, strict=False)  # type: ignore[attr-defined]
    return np.concatenate(rows)


def test_our_folds_keep_the_logits_and_modelopts_do_not(
    model: object, folds: list[dict[str, np.ndarray]], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("modelopt", reason="the comparison is with ModelOpt's own export")
    folder = ModelFolder(TINY_ANNIE)
    samples = calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))[::20][
        :1
    ]
    source = logits(model, {}, samples)

    ours = {name: weight for layer in folds for name, weight in layer.items()}
    assert {models.in_layer(n) for n in ours} >= {f"{site.producer}.weight" for site in SITES}
    changed = [
        n for n in ours if np.abs(ours[n] - folder.tensor(n).astype(np.float32)).max() > 0.01
    ]
    assert len(changed) > 20  # folds that change nothing would prove nothing
    folded = logits(model, {n: torch.from_numpy(w) for n, w in ours.items()}, samples)

    theirs = logits(model, modelopts_folds(model, samples, tmp_path), samples)
    good, bad = float(np.abs(folded - source).max()), float(np.abs(theirs - source).max())
    with capsys.disabled():
        print(
            f"\nmax |Δlogit| in float32 before quantization: our folds {good:.2g}, ModelOpt's {bad:.3g}"
        )
    assert good <= BOUND
    assert bad > 100 * BOUND


def modelopts_folds(
    model: object, samples: list[calibration_samples.Sample], tmp_path: Path
) -> dict[str, object]:
    """Return the source's tensors with the scales of ModelOpt's AWQ export: its norms as it wrote them, columns times s."""
    import copy

    import modelopt.torch.quantization as mtq
    import modelopt_backend
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors.torch import load_file

    modelopt_backend.register()
    other = copy.deepcopy(model).to(torch.bfloat16)  # type: ignore[call-overload]
    config = modelopt_backend.with_backend(mtq.NVFP4_AWQ_LITE_CFG)
    mtq.quantize(other, config, lambda m: [m(torch.tensor([s.ids])) for s in samples])
    scales = {
        n: m.input_quantizer.pre_quant_scale.float()
        for n, m in other.named_modules()
        if getattr(getattr(m, "input_quantizer", None), "pre_quant_scale", None) is not None
    }
    modelopt_backend.release(other)
    export_hf_checkpoint(other, export_dir=str(tmp_path / "theirs"))
    written = load_file(tmp_path / "theirs/model.safetensors")
    source = model.state_dict()  # type: ignore[attr-defined]
    norms = {n: t.float() for n, t in written.items() if n.endswith("layernorm.weight")}
    changed = {n: t for n, t in norms.items() if (t - source[n]).abs().max() > 1e-3}
    assert changed, "ModelOpt folded no norm"
    tensors: dict[str, object] = dict(changed)
    for norm in changed:
        for site in (s for s in SITES if models.in_layer(norm) == f"{s.producer}.weight"):
            for reader in (f"{models.layer_of(norm)}.{r}" for r in site.linears):
                if (
                    reader in scales
                ):  # pre_quant_scale multiplies the input, its reciprocal the weight
                    tensors[f"{reader}.weight"] = source[f"{reader}.weight"] / scales[reader]
    return tensors


def test_folds_do_not_harm_tokens_of_prompts_or_responses(
    folds: list[dict[str, np.ndarray]],
) -> None:
    """Outputs of every linear under W4A4 on other text, with folds and without. tiny-annie has inputs that only prompts have."""
    rows = read_conversations(CALIBRATION)
    folder, chosen = ModelFolder(TINY_ANNIE), set(choose(ModelFolder(TINY_ANNIE), ()))
    held_out = calibration_text.samples_of_rows(TINY_ANNIE, rows[1::12])[:2]
    errors: dict[bool, np.ndarray] = {}
    for folded in (False, True):
        inputs = DecoderLayers(folder, make_batches(held_out))
        sums = np.zeros(2)
        for weights, other in zip(folds, inputs, strict=True):
            if folded:
                changed = {models.in_layer(n): torch.from_numpy(w) for n, w in weights.items()}
                other.module.load_state_dict(other.module.state_dict() | changed, assign=True)

            def observe(x: torch.Tensor, kinds: torch.Tensor, linear: torch.nn.Linear) -> None:
                rounded = codec.round_weight(
                    linear.weight.data, float(linear.weight.abs().max()) / LARGEST_NVFP4
                )
                expected = x @ linear.weight.data.T
                error = (
                    (
                        codec.fake_quant(x, float(x.abs().max()) / LARGEST_NVFP4) @ rounded.T
                        - expected
                    )
                    .square()
                    .sum(-1)
                )
                for part, used in enumerate((kinds == 0, kinds > 0)):
                    sums[part] += float(error[used].sum() / expected[used].square().sum())  # noqa: B023

            names = [n for n in other.linears if f"{other.name}.{n}" in chosen]
            other.advance({n: functools.partial(observe, linear=other.linears[n]) for n in names})
        errors[folded] = sums
    assert (errors[True] < errors[False]).all(), errors


def test_a_fold_into_a_rounded_norm_is_exact_in_what_is_stored() -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    weights = {"post_attention_layernorm.weight": draw(64).bfloat16().float() * 0.3}
    weights |= {f"mlp.{n}_proj.weight": draw(32, 64) for n in ("gate", "up")}
    before = dict(weights)
    site = next(s for s in SITES if s.producer.startswith("post_attention"))
    folded = folding.fold_scale(weights, FAMILY, site, torch.exp(draw(64) * 0.5), torch.bfloat16)
    norm = weights[f"{site.producer}.weight"]
    assert torch.equal(norm, norm.bfloat16().float())
    x = draw(100, 64)
    for name in ("gate", "up"):
        was = (x * (1 + before[f"{site.producer}.weight"])) @ before[f"mlp.{name}_proj.weight"].T
        now = (x * (1 + norm)) @ weights[f"mlp.{name}_proj.weight"].T
        assert (now - was).abs().max() < 1e-4
    assert not torch.equal(folded, torch.ones(64))


def test_a_gain_near_zero_takes_no_scale() -> None:
    weights = {"input_layernorm.weight": torch.tensor([-1.0, 0.5]).repeat(8)}
    weights |= {f"self_attn.{n}_proj.weight": torch.ones(4, 16) for n in "qkv"}
    folded = folding.fold_scale(weights, FAMILY, SITES[0], torch.full((16,), 3.0), torch.bfloat16)
    assert torch.equal(folded[::2], torch.ones(8)) and (folded[1::2] - 3).abs().max() < 0.1
    assert all(torch.isfinite(w).all() for w in weights.values())
