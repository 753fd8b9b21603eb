"""Calibration text run layer by layer: the numbers are the whole model's, and padding reaches no observer."""

from __future__ import annotations

import numpy as np
import pytest
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.core.progress import SILENT
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="the layers run in torch: pip install annie-quant[quantize]"
)
from calibration_texts import make_batches, padded  # noqa: E402

from annie_quant.offline import deltanet  # noqa: E402
from annie_quant.quantize import (  # noqa: E402
    calibration_samples,
    calibration_text,
    input_stats,
)
from annie_quant.quantize.calibration_samples import CalibrationSample  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayers  # noqa: E402


@pytest.fixture(scope="module")
def samples() -> list[CalibrationSample]:
    return calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))[::4][:7]


def whole_model() -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(TINY_ANNIE, dtype=torch.float32).eval()


def test_kinds_are_those_of_the_predicted_tokens(samples: list[CalibrationSample]) -> None:
    from annie_quant.offline.prompts import Template

    template = Template(TINY_ANNIE)
    for text in samples:
        assert len(text.ids) == len(text.kinds)
        assert (
            text.ids[: len(text.prompt)] == text.prompt
            and text.ids[len(text.prompt) :] == text.answer[:-1]
        )
        assert (
            text.kinds[-1] == calibration_samples.END_OF_TURN
            and text.answer[-1] in template.end_tokens
        )
        first = len(text.prompt) - 1  # the prompt's last token predicts the answer's first
        assert (
            set(text.kinds[:first]) == {calibration_samples.PROMPT}
            and calibration_samples.PROMPT not in text.kinds[first:]
        )
    calls = [t for t in samples if calibration_samples.TOOL_MARKUP in t.kinds]
    assert calls and all("<tool_call>" in template.tokenizer.decode(t.answer) for t in calls)


def test_batches_hold_every_text_once(samples: list[CalibrationSample]) -> None:
    batches = make_batches(samples, tokens=600)
    assert len(batches) > 1
    rows = [
        tuple(i[k != calibration_samples.PADDING])
        for b in batches
        for i, k in zip(b.ids, b.kinds, strict=True)
    ]
    assert sorted(rows) == sorted(t.ids for t in samples)


def test_the_last_hidden_states_are_the_whole_model_s(samples: list[CalibrationSample]) -> None:
    batch = padded(samples[:4])
    layers = DecoderLayers(ModelFolder(TINY_ANNIE), [batch])
    for layer in layers:
        layer.advance()
    model = whole_model()
    with torch.inference_mode():
        ours = model.model.norm(layers.states[0])
        for i, text in enumerate(samples[:4]):
            alone = model.model(torch.tensor([text.ids])).last_hidden_state[0]
            assert (ours[i, : len(text.ids)] - alone).abs().max() < 1e-3


def inputs_of(linear: object, model: object, samples: list[CalibrationSample]) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    handle = linear.register_forward_pre_hook(
        lambda module, args: rows.append(args[0][0].detach().numpy())
    )  # type: ignore[attr-defined]
    with torch.inference_mode():
        for text in samples:
            model.model(torch.tensor([text.ids]))  # type: ignore[attr-defined]
    handle.remove()
    return rows


def test_statistics_are_those_of_a_plain_forward_pass(samples: list[CalibrationSample]) -> None:
    names = [
        "model.layers.2.mlp.down_proj",
        "model.layers.3.self_attn.k_proj",
        "model.layers.4.linear_attn.out_proj",
    ]
    amax, _ = input_stats.largest_inputs(ModelFolder(TINY_ANNIE), names, samples, SILENT)
    model = whole_model()
    for name in names:
        rows = inputs_of(model.get_submodule(name), model, samples)
        assert amax[name] == pytest.approx(max(np.abs(x).max() for x in rows), rel=1e-4)


@pytest.mark.parametrize("steps", [1, 3, 9])
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_convolution_is_torchs(steps: int, contiguous: bool) -> None:
    rng = torch.Generator().manual_seed(steps)
    x = torch.randn(2, 6, steps, generator=rng)
    x = x if contiguous else x.transpose(1, 2).contiguous().transpose(1, 2)
    weight, bias = torch.randn(6, 4, generator=rng), torch.randn(6, generator=rng)
    extended = torch.nn.functional.pad(x.double(), (3, 0))
    expected = torch.nn.functional.conv1d(
        extended, weight[:, None].double(), bias.double(), groups=6
    )
    with torch.inference_mode():
        plain = deltanet.conv_on_cpu(x, weight, bias, None)
        active = deltanet.conv_on_cpu(x, weight, bias, "silu")
    assert (plain - expected).abs().max() < 1e-5
    assert (active - torch.nn.functional.silu(expected)).abs().max() < 1e-5
