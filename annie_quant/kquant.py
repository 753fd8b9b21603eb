"""ggml's K-quants on the CPU: the same bytes as llama.cpp's quantizer, and which type Q4_K_M gives to which tensor.

    raw = quantize(w, "Q4_K")              # uint8 [..., K/256 * 144], rows of ggml blocks
    w = dequantize(raw, "Q4_K")            # float32 [..., K]

The layouts and rules are those of ggml-quants.c and llama-quant.cpp in llama.cpp; the encoders sum in the same order and
without fused multiply-adds, so that every byte agrees.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from annie_quant import _nvfp4
from annie_quant.nvfp4 import _bytes, _finite_amax, _floats, _importance

Type = Literal["Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q4_0", "Q8_0"]


class Block(NamedTuple):
    """A type's block: elements, bytes, and its number in a GGUF file."""

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

# llama-quant.cpp: what a 256-element type becomes where the rows are no multiple of 256.
_FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}


def quantize(w: Any, type: Type, importance: Any = None) -> np.ndarray:
    """w [..., K] float32, float16 or bfloat16 → uint8 [..., K / elements * size_bytes].

    importance: float32 [K] as in an importance matrix (mean square of each input), or None; Q8_0 takes no notice of it.
    ValueError: K no multiple of the block, unknown type, NaN or inf in w.
    """
    block = _block(type)
    x, kind = _floats(w, "w")
    if x.ndim == 0 or x.shape[-1] == 0 or x.shape[-1] % block.elements:
        raise ValueError(
            f"w: shape {x.shape}, expected a last dimension that is a multiple of {block.elements} for {type}"
        )
    _finite_amax(x, kind)
    out = np.empty((*x.shape[:-1], x.shape[-1] // block.elements * block.size_bytes), np.uint8)
    _nvfp4.kquantize(_bytes(x), kind, type, x.shape[-1], _importance(importance, x.shape[-1]), _bytes(out))
    return out


def dequantize(raw: np.ndarray, type: Type, out: np.ndarray | None = None) -> np.ndarray:
    """uint8 rows of blocks [..., n * size_bytes] → float32 [..., n * elements], in `out` if given. Any bytes decode."""
    block = _block(type)
    rows = np.ascontiguousarray(raw)
    if rows.dtype != np.uint8:
        raise ValueError(f"raw: dtype {rows.dtype}, expected uint8")
    if rows.ndim == 0 or rows.shape[-1] % block.size_bytes:
        raise ValueError(f"raw: shape {rows.shape}, expected rows of a multiple of {block.size_bytes} bytes for {type}")
    shape = (*rows.shape[:-1], rows.shape[-1] // block.size_bytes * block.elements)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.shape != shape or out.dtype != np.float32 or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: {out.dtype} {out.shape}, expected float32 {shape}, contiguous and writeable")
    _nvfp4.kdequantize(_bytes(rows), type, _bytes(out))
    return out


def q4_k_m_type(name: str, layer: int | None, n_layers: int, shape: tuple[int, ...], tied: bool = False) -> str:
    """The type that llama-quantize's Q4_K_M gives to a tensor, by its GGUF name.

    layer     of `blk.N.`, None outside the layers
    n_layers  all of them, those for multi-token prediction among them
    shape     [rows, columns]
    tied      the model has no `output.weight`: then the token embedding is stored as the output would be

    Holds for dense models with one attn_v or attn_qkv a layer (all of Qwen3.5's): llama.cpp counts those.
    """
    columns = shape[-1]
    if len(shape) < 2 or not name.endswith("weight") or "_norm.weight" in name or "ssm_conv1d" in name:
        return "F32"
    if "ffn_gate_inp.weight" in name:
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
    """The first and last eighth, and every third layer between (llama-quant.cpp, use_more_bits)."""
    return layer < n_layers // 8 or layer >= 7 * n_layers // 8 or (layer - n_layers // 8) % 3 == 2


def _block(type: str) -> Block:
    if type not in BLOCKS:
        raise ValueError(f"type {type!r}, expected one of {', '.join(BLOCKS)}")
    return BLOCKS[type]
