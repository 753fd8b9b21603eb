"""A layer in stages: the inputs are those of a whole pass through the partly rounded layer; each token is multiplied once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import runtime_models
from paths import CALIBRATION, TINY_ANNIE

from annie_quant.checkpoint.shards import ModelFolder
from annie_quant.data.rows import read_conversations

torch = pytest.importorskip(
    "torch", reason="the layers run in torch: pip install annie-quant[quantize]"
)
from calibration_texts import conversations, make_batches  # noqa: E402

from annie_quant.quantize import calibration_text, layer_stages, shared_text  # noqa: E402
from annie_quant.quantize.calibration_samples import PADDING, CalibrationSample, TokenBatch  # noqa: E402
from annie_quant.quantize.layerwise import DecoderLayer, DecoderLayers  # noqa: E402

LAYERS = 4  # of tiny-annie: three of DeltaNet and one of attention


@pytest.fixture(scope="module")
def samples() -> list[CalibrationSample]:
    return calibration_text.samples_of_rows(TINY_ANNIE, read_conversations(CALIBRATION))[::6][:5]


def batches(samples: Sequence[CalibrationSample], kind: str) -> list[TokenBatch]:
    if kind == "shared":
        return shared_text.arrange(conversations()).batches
    return make_batches(samples, tokens=600)


class Inputs:
    """Stores what observers get."""

    def __init__(self, names: Sequence[str]) -> None:
        self.rows: dict[str, list[torch.Tensor]] = {n: [] for n in names}
        self.kinds: dict[str, list[torch.Tensor]] = {n: [] for n in names}

    def observers(self) -> dict:
        def store(name: str, x: torch.Tensor, kinds: torch.Tensor) -> None:
            self.rows[name].append(x.clone())
            self.kinds[name].append(kinds)

        return {n: (lambda x, kinds, n=n: store(n, x, kinds)) for n in self.rows}

    def of(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.rows[name]:
            return torch.empty(0, 1), torch.empty(0)
        return torch.cat(self.rows[name]), torch.cat(self.kinds[name])


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Return another weight: coarse multiples of a step per row."""
    step = weight.abs().amax(1, keepdim=True) / 6
    return (weight / step).round() * step


def round_in_stages(layer: DecoderLayer, check: bool) -> list[list[str]]:
    """Round the layer as gptq does. check: against whole passes through the partly rounded layer. Returns the stages' linears."""
    names = []
    for stage in layer_stages.stages(layer):
        names.append(list(stage.linears))
        ours, whole = Inputs(stage.linears), Inputs(stage.linears)
        stage.observe(ours.observers())
        if check:
            layer.observe(whole.observers())
        for name in stage.linears if check else ():
            (x, kinds), (expected, expected_kinds) = ours.of(name), whole.of(name)
            assert torch.equal(kinds, expected_kinds)
            assert x.shape == expected.shape
            assert not len(x) or (x - expected).abs().max() <= 1e-5 * expected.abs().max()
        for name in stage.linears:
            layer.linears[name].weight.data = rounded(layer.linears[name].weight.data)
    return names


def real_rows(layers: DecoderLayers) -> torch.Tensor:
    real = [torch.from_numpy(b.kinds != PADDING) for b in layers.batches]
    return torch.cat([state[r] for state, r in zip(layers.states, real, strict=True)])


@pytest.mark.parametrize("kind", ["whole", "shared"])
def test_inputs_are_those_of_a_whole_pass(samples: list[CalibrationSample], kind: str) -> None:
    text = batches(samples, kind)
    padded = {i for i, b in enumerate(text) if len(set(b.lengths)) > 1}
    assert padded and (kind == "whole" or padded & {b.start for b in text}), (
        "rows of unequal length are continued, too"
    )
    staged, plain = (DecoderLayers(ModelFolder(TINY_ANNIE), text) for _ in range(2))
    for layer, other in zip(staged, plain, strict=True):
        order = round_in_stages(layer, check=True)
        mixer = "self_attn" if layer.index % 4 == 3 else "linear_attn"
        assert [names[0].partition(".")[0] for names in order] == [mixer, mixer, "mlp", "mlp"]
        assert sorted(n for names in order for n in names) == sorted(layer.linears)
        for name, linear in layer.linears.items():
            other.linears[name].weight.data = linear.weight.data
        other.advance()
        ours, expected = real_rows(staged), real_rows(plain)
        assert (ours - expected).abs().max() <= 1e-5 * expected.abs().max()
        if layer.index + 1 == LAYERS:
            break


def test_each_token_is_multiplied_once(samples: list[CalibrationSample]) -> None:
    layers = DecoderLayers(ModelFolder(TINY_ANNIE), batches(samples, "whole"))
    positions = sum(b.ids.size for b in layers.batches)
    tokens = sum(int(b.lengths.sum()) for b in layers.batches)
    rows: Counter[str] = Counter()
    for layer in layers:
        for name, linear in layer.linears.items():
            count = lambda module, args, out, name=name: rows.update({name: out[..., 0].numel()})  # noqa: E731
            linear.register_forward_hook(count)
        round_in_stages(layer, check=False)
        break
    probe = 2 * layer_stages.PROBE
    for name, n in rows.items():
        assert tokens <= n <= positions + probe, name


def test_nothing_is_stored_where_memory_is_scarce(
    samples: list[CalibrationSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = []
    for most in (layer_stages.KEPT_INPUTS, 0):
        monkeypatch.setattr(layer_stages, "KEPT_INPUTS", most)
        layers = DecoderLayers(ModelFolder(TINY_ANNIE), batches(samples, "shared"))
        for layer in layers:
            round_in_stages(layer, check=False)
            if layer.index + 1 == LAYERS:
                break
        states.append(real_rows(layers))
    assert torch.equal(*states)


def test_a_layer_of_another_shape_runs_whole(
    samples: list[CalibrationSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = DecoderLayers(ModelFolder(TINY_ANNIE), batches(samples, "whole"))
    forward = layers.forward
    monkeypatch.setattr(layers, "forward", lambda *args, **options: 1.1 * forward(*args, **options))
    for layer in layers:
        before = [s.clone() for s in layers.states]
        assert round_in_stages(layer, check=True) == [list(layer.linears)]
        with torch.inference_mode():
            expected = layers.forward(layer.module, before[0])
        assert torch.equal(layers.states[0], expected)
        break


def test_experts_see_what_a_whole_pass_gives_them(tmp_path: Path) -> None:
    runtime_models.save_mixture(tmp_path, experts=8, unused=5)
    samples = calibration_text.samples_of_rows(tmp_path, read_conversations(CALIBRATION)[:3])[:3]
    text = make_batches(samples)
    staged, plain = (DecoderLayers(ModelFolder(tmp_path), text) for _ in range(2))
    for layer, other in zip(staged, plain, strict=True):
        order = round_in_stages(layer, check=True)
        assert len(order) == 3 and any(".experts." in n for n in order[-1])
        for name, linear in layer.linears.items():
            other.linears[name].weight.data = linear.weight.data
        other.advance()
        ours, expected = real_rows(staged), real_rows(plain)
        assert (ours - expected).abs().max() <= 1e-4 * expected.abs().max()
