"""Quantize and dequantize ggml's K-quant blocks (Q4_K, Q6_K ...) on the CPU.

The same bytes as llama.cpp's quantizer, and the type that Q4_K_M gives to each tensor.

    raw = quantize(w, "Q4_K")              # uint8 [..., K/256 * 144], rows of ggml blocks
    w = dequantize(raw, "Q4_K")            # float32 [..., K]

Layouts and rules follow ggml-quants.c and llama-quant.cpp in llama.cpp. The encoders sum in the
same order and without fused multiply-adds, so that every byte is equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from annie_quant import _nvfp4
from annie_quant.core.codec_arrays import (
    as_bytes,
    finite_amax,
    float_array,
    importance_weights,
    output_array,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Type = Literal["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_0", "Q8_0"]


class Block(NamedTuple):
    """Block layout of a type. ggml_type is its number in a GGUF file."""

    elements: int
    size_bytes: int
    ggml_type: int


BLOCKS: dict[str, Block] = {
    "Q4_K": Block(256, 144, 12),
    "Q5_K": Block(256, 176, 13),
    "Q6_K": Block(256, 210, 14),
    "Q5_0": Block(32, 22, 6),
    "Q4_0": Block(32, 18, 2),
    "Q8_0": Block(32, 34, 8),
}

_BLOCK_ALIGNMENT = 2  # bytes: a block's scales are 16-bit numbers

# llama-quant.cpp: the type used instead where rows are not a multiple of 256.
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def quantize(w: object, type: Type, importance: ArrayLike | None = None) -> np.ndarray:
    """Quantize w [..., K] (float32, float16 or bfloat16) to uint8 [..., K / elements * size_bytes].

    importance  float32 [K] as in an importance matrix (mean square of each input), or None; unused for Q8_0

    ValueError: K is not a multiple of the block, unknown type, NaN or inf in w, or weights so large
        that a block's scale is no float16, which llama.cpp does not load.
    """
    block = _block(type)
    x, kind = float_array(w, "w")
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % block.elements:
        raise ValueError(
            f"w: shape {x.shape}, expected a last dimension that is a multiple of {block.elements} for {type}"
        )
    finite_amax(x, kind)
    out = np.empty((*x.shape[:-1], x.shape[-1] // block.elements * block.size_bytes), np.uint8)
    bad_row = _nvfp4.kquantize(
        as_bytes(x),
        kind,
        type,
        x.shape[-1],
        importance_weights(importance, x.shape[-1]),
        as_bytes(out),
    )
    if bad_row is not None:
        largest = float(np.abs(x.reshape(-1, x.shape[-1])[bad_row].astype(np.float32)).max())
        raise ValueError(
            f"w: row {bad_row}, whose largest magnitude is {largest:g}, has a block whose {type} scale is too large for float16"
        )
    return out


def dequantize(raw: np.ndarray, type: Type, out: np.ndarray | None = None) -> np.ndarray:
    """Return float32 [..., n * elements] from rows of blocks, uint8 [..., n * size_bytes].

    All byte values are valid.

    out  a float32 array for the result
    """
    block = _block(type)
    rows = np.ascontiguousarray(raw)
    if rows.dtype != np.uint8:
        raise ValueError(f"raw: dtype {rows.dtype}, expected uint8")
    if rows.ndim == 0 or rows.shape[-1] % block.size_bytes:
        raise ValueError(
            f"raw: shape {rows.shape}, expected rows of a multiple of {block.size_bytes} bytes for {type}"
        )
    shape = (*rows.shape[:-1], rows.shape[-1] // block.size_bytes * block.elements)
    out = output_array(out, shape, np.float32)
    if rows.ctypes.data % _BLOCK_ALIGNMENT:
        rows = rows.copy()
    _nvfp4.kdequantize(as_bytes(rows), type, as_bytes(out))
    return out


def q4_k_m_type(
    name: str, layer: int | None, n_layers: int, shape: tuple[int, ...], tied: bool = False
) -> str:
    """Return the type that llama-quantize's Q4_K_M gives to the tensor with this GGUF name.

    layer     N of `blk.N.`, None outside the layers
    n_layers  number of layers, including those for multi-token prediction
    shape     [rows, columns]
    tied      the model has no `output.weight`; the token embedding then gets the type of the output

    Valid for dense models with one attn_v or attn_qkv per layer, as all of Qwen3.5: llama.cpp
    counts those tensors.
    """
    columns = shape[-1]
    if (
        len(shape) < 2
        or not name.endswith("weight")
        or "_norm.weight" in name
        or "ssm_conv1d" in name
    ):
        return "F32"
    if "ffn_gate_inp.weight" in name or "ffn_gate_inp_shexp.weight" in name:
        return "F32"
    if name == "output.weight" or (tied and name == "token_embd.weight"):
        kind = "Q6_K" if columns % 256 == 0 else "Q8_0"
    elif any(part in name for part in ("attn_v.weight", "attn_qkv.weight", "ffn_down")):
        kind = "Q6_K" if _more_bits(layer or 0, n_layers) else "Q4_K"
    else:
        kind = "Q4_K"
    if columns % BLOCKS[kind].elements:
        kind = _FALLBACK.get(kind, kind)
    return kind if columns % BLOCKS[kind].elements == 0 else "F16"


def _more_bits(layer: int, n_layers: int) -> bool:
    """Return whether a layer is in the first or last eighth, or every third one between.

    Source: llama-quant.cpp, use_more_bits.
    """
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


def _block(type: str) -> Block:
    if type not in BLOCKS:
        raise ValueError(f"type {type!r}, expected one of {', '.join(BLOCKS)}")
    return BLOCKS[type]
