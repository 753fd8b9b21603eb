"""NVFP4Linear and the codec's torch faces, against ModelOpt's dequantize and a search over all codes in NumPy."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip(
    "torch", reason="the runtime needs torch: pip install annie-quant[quantize]"
)
pytest.importorskip(
    "transformers", reason="the runtime needs transformers: pip install annie-quant[quantize]"
)
pytest.importorskip("annie_quant.nvfp4", reason="the runtime needs the codec")

from annie_quant.core.errors import UsageError  # noqa: E402
from annie_quant.offline import codec, linears  # noqa: E402
from annie_quant.offline.linears import NVFP4Linear, set_cache, set_numerics  # noqa: E402

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)


def e4m3_numbers() -> np.ndarray:
    """Every positive E4M3FN number from the definition of the format: 4 exponent bits of bias 7, 3 of mantissa."""
    codes = np.arange(1, 127)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


def nearest(x: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """The nearest of sorted numbers; a tie goes to the even index of the format."""
    distance = np.abs(x[..., None] - numbers)
    least = distance.min(-1, keepdims=True)
    tied = distance == least
    even = tied & (np.arange(len(numbers)) % 2 == 0)
    return numbers[np.where(even.any(-1), even.argmax(-1), tied.argmax(-1))]


def rounded(x: np.ndarray, tensor_scale: np.float32) -> np.ndarray:
    """x float32 [..., K] rounded to NVFP4 by search: one scale per block of 16 from its maximum, then the nearest element."""
    blocks = x.astype(np.float32).reshape(-1, 16)
    ideal = np.abs(blocks).max(1) / (np.float32(6) * tensor_scale)
    ideal = np.clip(np.where(ideal == 0, np.float32(1), ideal), 2.0**-9, 448)
    # The list starts at code 1, so even codes have odd indices: a zero in front keeps the parity.
    scale = (nearest(ideal.astype(np.float64), np.concatenate([[0.0], e4m3_numbers()]))).astype(
        np.float32
    ) * tensor_scale
    quotient = (blocks / scale[:, None]).astype(np.float32)
    value = nearest(np.abs(quotient).astype(np.float64), MAGNITUDES) * np.sign(blocks)
    return (value.astype(np.float32) * scale[:, None]).reshape(x.shape)


def hard_inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], np.float32)
    near = np.stack(
        [ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9)), -ties], 0
    )
    return {
        "gaussian": rng.standard_normal((64, 64)).astype(np.float32),
        "ties": np.concatenate([near.reshape(-1), np.zeros(16, np.float32)]).reshape(1, -1),
        "wide": (rng.standard_normal((32, 64)) * 10.0 ** rng.integers(-8, 3, (32, 64))).astype(
            np.float32
        ),
        "zeros": np.zeros((2, 32), np.float32),
        "sparse": np.where(rng.random((32, 64)) < 0.05, 3.0, 0.0).astype(np.float32),
    }


@pytest.mark.parametrize("kind", list(hard_inputs()))
@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-10, 0.00123])
def test_activations_are_rounded_as_by_a_search_over_all_codes(
    kind: str, tensor_scale: float
) -> None:
    x = hard_inputs()[kind]
    x = x * np.float32(tensor_scale) if kind == "ties" else x
    expected = rounded(x, np.float32(tensor_scale))
    for form in (codec.fake_quant, codec.fake_quant_torch):
        actual = form(torch.from_numpy(x), float(np.float32(tensor_scale))).numpy()
        np.testing.assert_array_equal(np.abs(actual), np.abs(expected), err_msg=form.__name__)
        assert (actual * expected >= 0).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_torch_form_is_the_codec_bit_for_bit(dtype: str) -> None:
    for kind, x in hard_inputs().items():
        t = torch.from_numpy(x).to(getattr(torch, dtype))
        a, b = codec.fake_quant(t, 0.0009765), codec.fake_quant_torch(t, 0.0009765)
        assert a.dtype == b.dtype == t.dtype
        assert torch.equal(a.float().abs(), b.float().abs()), kind


def packed_layer(
    k: int = 64, n: int = 96, group: int = 16, bias: bool = False, seed: int = 0
) -> tuple[NVFP4Linear, "torch.Tensor"]:
    """A layer with ModelOpt's packing of random weights, and ModelOpt's own dequantized weights."""
    pytest.importorskip(
        "modelopt", reason="ModelOpt is the reference: pip install annie-quant[quantize]"
    )
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    torch.manual_seed(seed)
    weights = torch.randn(n, k, dtype=torch.bfloat16)
    packed, scale, scale_2 = NVFP4QTensor.quantize(weights, group, try_tensorrt=False)
    layer = NVFP4Linear(k, n, group=group, bias=bias)
    state = {"weight": packed._quantized_data, "weight_scale": scale, "weight_scale_2": scale_2}
    state["input_scale"] = torch.tensor(4.0 / 2688)
    if bias:
        state["bias"] = torch.randn(n, dtype=torch.bfloat16)
    layer.load_state_dict(state)
    dense = packed.dequantize(
        dtype=torch.bfloat16, scale=scale, double_scale=scale_2, block_sizes={-1: group}
    )
    return layer, dense


@pytest.mark.parametrize("group", [16, 32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("cache", ["packed", "bf16"])
def test_w4a16_is_modelopts_dequantize_and_torchs_linear(
    group: int, bias: bool, cache: str
) -> None:
    layer, dense = packed_layer(group=group, bias=bias)
    layer.set_numerics("w4a16")
    layer.set_cache(cache)
    x = torch.randn(3, 5, 64, dtype=torch.bfloat16)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, dense, layer.bias))


def test_packed_weights_are_multiplied_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, dense = packed_layer(bias=True)
    layer.set_numerics("w4a16")
    monkeypatch.setattr(linears, "FEW_ROWS", 0)
    monkeypatch.setattr(linears, "BLOCK_BYTES", 64 * 2 * 7)  # seven rows at a time
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    whole = torch.nn.functional.linear(x.float(), dense.float(), layer.bias.float())
    torch.testing.assert_close(layer(x).float(), whole, atol=0.2, rtol=0.02)


def test_w4a4_rounds_the_input_first() -> None:
    layer, _ = packed_layer()
    x = torch.randn(8, 64)
    layer.set_cache("float32")
    fine = torch.from_numpy(rounded(x.numpy(), np.float32(layer.input_scale.item())))
    expected = fine.double() @ layer.dense.double().T
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-5)
    plain = x.double() @ layer.dense.double().T
    assert (expected - plain).abs().max() > 0.1, "the rounding must change the test's inputs"


def test_float32_weights_are_value_times_scale_exactly() -> None:
    layer, dense = packed_layer()
    wide = layer.rows(0, 96, torch.float32)
    assert torch.equal(wide.bfloat16(), dense)


def test_packed_tensors_keep_their_types_through_to() -> None:
    layer, _ = packed_layer(bias=True)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    moved = copy.deepcopy(layer).to(torch.float16)
    for name in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        now = getattr(moved, name)
        assert now.dtype == before[name].dtype
        assert torch.equal(
            now.view(torch.uint8) if now.dim() else now,
            before[name].view(torch.uint8) if now.dim() else before[name],
        )
    assert moved.bias.dtype == torch.float16
    assert set(before) == {"weight", "weight_scale", "weight_scale_2", "input_scale", "bias"}


@pytest.mark.parametrize("numerics", ["w4a4", "w4a16"])
def test_gradients_reach_the_input(numerics: str) -> None:
    layer, _ = packed_layer()
    layer.set_numerics(numerics)
    x = torch.randn(4, 64, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(
        x.grad, layer.rows(0, 96, torch.float32).sum(0).expand(4, -1), atol=1e-4, rtol=1e-4
    )


def test_w4a4_without_input_scale_is_refused() -> None:
    layer = NVFP4Linear(32, 8, activations=False)
    assert layer.numerics == "w4a16"
    with pytest.raises(UsageError, match="input_scale"):
        set_numerics(torch.nn.Sequential(layer), "w4a4")
    with pytest.raises(UsageError, match="unknown"):
        layer.set_numerics("w8a8")
    with pytest.raises(UsageError, match="unknown"):
        set_cache(torch.nn.Sequential(layer), "float64")
    with pytest.raises(UsageError, match="multiple of 16"):
        NVFP4Linear(24, 8)
