"""K-quants: the bytes of llama.cpp's quantizer (in xllamacpp's library), decoded as gguf-py does."""

from __future__ import annotations

import ctypes
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from nvfp4_cases import BFLOAT16, bits
from paths import DATA

from annie_quant import kquant, nvfp4

GOLDEN = DATA / "kquant_golden.json"


@pytest.fixture(autouse=True)
def fastest_variant():
    yield
    nvfp4.set_variant("auto")


def awkward(columns: int = 1024) -> np.ndarray:
    """Return rows with heavy tails, zeros, one sign, one value, wide ranges, subnormals, and a coarse grid."""
    rng = np.random.default_rng(0)
    w = (rng.standard_t(4, (48, columns)) * 0.02).astype(np.float32)
    w[0] = 0
    w[1, :300] = 0
    w[2] = np.abs(w[2])
    w[3] = 1e-9
    w[4, ::7] *= 100
    w[5] *= np.float32(1e-20)
    w[6] *= np.float32(1e-38)
    w[7] = np.round(w[7] * 50) / 50
    w[8] = -np.abs(w[8])
    w[9] = 0.5
    w[10] = -0.5
    w[11, 1:] = 0
    w[12] = np.exp(rng.uniform(-40, 10, columns))
    w[13] *= np.float32(1e4)
    return w.astype(BFLOAT16).astype(np.float32)


def importance(columns: int = 1024) -> np.ndarray:
    weights = np.random.default_rng(1).gamma(0.5, 1, columns).astype(np.float32)
    weights[:40] = 0
    return weights


def llama_cpp():
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    result = sorted(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))
    library = ctypes.CDLL(str(result[0])) if result else None
    if library is None or not hasattr(library, "ggml_quantize_chunk"):
        pytest.skip("this build of xllamacpp does not export ggml_quantize_chunk")
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    return library


def llama_cpp_bytes(w: np.ndarray, kind: str, weights: np.ndarray | None) -> np.ndarray:
    block = kquant.BLOCKS[kind]
    out = np.zeros((w.shape[0], w.shape[1] // block.elements * block.size_bytes), np.uint8)
    pointer = None if weights is None else weights.ctypes.data_as(ctypes.c_void_p)
    size = llama_cpp().ggml_quantize_chunk(
        block.ggml_type,
        w.ctypes.data_as(ctypes.c_void_p),
        out.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(0),
        ctypes.c_int64(w.shape[0]),
        ctypes.c_int64(w.shape[1]),
        pointer,
    )
    assert size == out.nbytes
    return out


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "importance"])
@pytest.mark.parametrize("kind", kquant.BLOCKS)
def test_same_bytes_as_llama_cpp(variant, weighted, kind):
    w, weights = awkward(), importance() if weighted else None
    expected = llama_cpp_bytes(w, kind, weights)
    nvfp4.set_variant(variant)
    got = kquant.quantize(w, kind, weights)
    wrong = got != expected
    assert not wrong.any(), np.argwhere(wrong)[:5]
    np.testing.assert_array_equal(kquant.quantize(w.astype(BFLOAT16), kind, weights), expected)


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("kind", kquant.BLOCKS)
def test_same_bytes_as_the_golden_digests(variant, kind):
    """Digests of llama.cpp's output for awkward(), so that the check also runs without xllamacpp.

    To write the file from the ggml inside xllamacpp: python tests/nvfp4/test_kquant_bytes.py
    """
    nvfp4.set_variant(variant)
    golden = json.loads(GOLDEN.read_text())["sha256"]
    for name, weights in (("plain", None), ("importance", importance())):
        raw = kquant.quantize(awkward(), kind, weights)
        assert hashlib.sha256(raw.tobytes()).hexdigest() == golden[f"{kind} {name}"]


@pytest.mark.parametrize("variant", nvfp4.variants())
@pytest.mark.parametrize("kind", kquant.BLOCKS)
def test_decodes_as_gguf_py(variant, kind):
    gguf = pytest.importorskip("gguf", reason="gguf is not installed")
    nvfp4.set_variant(variant)
    block = kquant.BLOCKS[kind]
    rng = np.random.default_rng(3)
    for raw in (
        kquant.quantize(awkward(), kind),
        rng.integers(0, 256, (64, 4 * block.size_bytes), np.uint8),
    ):
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, getattr(gguf.GGMLQuantizationType, kind))
        got = kquant.dequantize(raw, kind)
        number = ~np.isnan(expected)
        np.testing.assert_array_equal(bits(got)[number], bits(expected)[number])
        assert np.isnan(got[~number]).all()


def test_errors_are_those_of_the_formats():
    """Gaussian weights: a relative error of .0713 for Q4_K; more bits, less error."""
    w = np.random.default_rng(4).standard_normal((128, 1024)).astype(np.float32) * np.float32(0.02)
    error = {
        k: float(
            np.linalg.norm(w - kquant.dequantize(kquant.quantize(w, k), k)) / np.linalg.norm(w)
        )
        for k in kquant.BLOCKS
    }
    assert error["Q4_K"] == pytest.approx(0.0713, abs=5e-4)
    assert error["Q8_0"] < error["Q6_K"] < error["Q5_K"] < error["Q4_K"] < error["Q4_0"] < 0.12


@pytest.mark.parametrize(
    ("name", "layer", "n_layers", "shape", "tied", "expected"),
    [
        ("output.weight", None, 32, (1000, 4096), False, "Q6_K"),
        ("output.weight", None, 32, (1000, 4000), False, "Q8_0"),
        ("token_embd.weight", None, 32, (1000, 4096), False, "Q4_K"),
        ("token_embd.weight", None, 32, (1000, 4096), True, "Q6_K"),
        ("blk.0.ffn_down.weight", 0, 32, (4096, 12288), False, "Q6_K"),
        ("blk.4.ffn_down.weight", 4, 32, (4096, 12288), False, "Q4_K"),
        ("blk.6.ffn_down.weight", 6, 32, (4096, 12288), False, "Q6_K"),
        ("blk.28.ffn_down.weight", 28, 32, (4096, 12288), False, "Q6_K"),
        ("blk.27.ffn_down.weight", 27, 32, (4096, 12288), False, "Q6_K"),
        ("blk.26.attn_v.weight", 26, 32, (1024, 4096), False, "Q4_K"),
        ("blk.3.attn_qkv.weight", 3, 32, (8192, 4096), False, "Q6_K" if (3 - 4) % 3 == 2 else "Q4_K"),
        ("blk.3.attn_q.weight", 3, 32, (4096, 4096), False, "Q4_K"),
        ("blk.3.ffn_up.weight", 3, 32, (4096, 96), False, "Q5_0"),
        ("blk.0.ffn_down.weight", 0, 32, (4096, 96), False, "Q8_0"),
        ("blk.0.ffn_up.weight", 0, 32, (4096, 100), False, "F16"),
        ("blk.0.attn_norm.weight", 0, 32, (4096,), False, "F32"),
        ("blk.0.ssm_conv1d.weight", 0, 32, (8192, 4), False, "F32"),
    ],
)  # fmt: skip
def test_types_of_q4_k_m(name, layer, n_layers, shape, tied, expected):
    assert kquant.q4_k_m_type(name, layer, n_layers, shape, tied) == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: kquant.quantize(np.ones((2, 300), np.float32), "Q4_K"),
            r"shape \(2, 300\), .* multiple of 256 for Q4_K",
        ),
        (lambda: kquant.quantize(np.ones((2, 256), np.float32), "Q3_K"), "type 'Q3_K'"),
        (
            lambda: kquant.quantize(np.full((2, 256), np.inf, np.float32), "Q4_K"),
            r"NaN or inf, the first at \[0, 0\]",
        ),
        (
            lambda: kquant.quantize(np.ones((2, 256), np.float32), "Q4_K", np.ones(255)),
            r"importance: shape \(255,\)",
        ),
        (lambda: kquant.dequantize(np.zeros((2, 143), np.uint8), "Q4_K"), "multiple of 144 bytes"),
        (lambda: kquant.dequantize(np.zeros((2, 144), np.int8), "Q4_K"), "dtype int8"),
    ],
)
def test_bad_calls_say_what_was_seen_and_expected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


if __name__ == "__main__":
    digests = {
        f"{kind} {name}": hashlib.sha256(
            llama_cpp_bytes(awkward(), kind, weights).tobytes()
        ).hexdigest()
        for kind in kquant.BLOCKS
        for name, weights in (("plain", None), ("importance", importance()))
    }
    import xllamacpp

    GOLDEN.write_text(
        json.dumps(
            {"made_by": f"ggml in xllamacpp {xllamacpp.__version__}", "sha256": digests}, indent=1
        )
    )
