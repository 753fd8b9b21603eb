"""NVFP4 on the CPU, exact to the bit.

Pack, unpack, scale search, activation fake-quant, GPTQ, GEMV, layouts.

The format: E2M1 elements, two per byte with the even column in the low nibble; one E4M3 scale per
block of `group` columns; one float32 scale per tensor. A weight is `value * float32(block_scale *
tensor_scale)`. Sources: OCP Microscaling Formats v1.0 for E2M1 and E4M3, ModelOpt's
qtensor/nvfp4_tensor.py for the rest.

    t = pack(w)                      # codes uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16], tensor_scale
    w = unpack(t, dtype="bfloat16")

Inputs are NumPy arrays of float32, float16 or ml_dtypes.bfloat16, or torch tensors on the CPU (no
copy). All leading dimensions are free. The work is done by the C module _nvfp4 in several threads
with the GIL released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from annie_quant import _nvfp4
from annie_quant.core.codec_arrays import (
    BFLOAT16,
    E4M3,
    FLOAT_KINDS,
    as_bytes,
    byte_array,
    finite_amax,
    float_array,
    importance_weights,
    nonfinite_message,
    output_array,
)

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

__all__ = [
    "BFLOAT16",
    "E2M1_VALUES",
    "E4M3",
    "E4M3_VALUES",
    "Encoding",
    "Scale",
    "Tensor",
    "amax",
    "check",
    "error",
    "fake_quant",
    "from_ggml",
    "gemv",
    "global_scale",
    "gptq",
    "invalid_scales",
    "is_factor",
    "pack",
    "set_threads",
    "set_variant",
    "swizzle",
    "tensor_scale",
    "threads",
    "to_ggml",
    "unpack",
    "unswizzle",
    "variant",
    "variants",
]

Scale = Literal["amax", "four_over_six", "sweep"]
Encoding = Literal["modelopt", "modelopt-cuda", "modelopt-static", "compressed-tensors"]

# Values of all codes, indexed by the code.
E2M1_VALUES = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)
E4M3_MAGNITUDE = 0x7F  # mask of a byte without its sign
E4M3_NAN = 0x7F  # larger bytes are negative
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)

E2M1_MAX = 6
_LARGEST_BLOCK_SCALE = {
    "amax": 448.0,
    "four_over_six": 256.0,
    "sweep": 448.0,
}  # 1.5 * 256 is still an E4M3 value
_SCALES = ("amax", "four_over_six", "sweep")
_ENCODINGS = {"modelopt": 0, "modelopt-cuda": 0, "modelopt-static": 1, "compressed-tensors": 2}
_GROUPS = (16, 32, 64)
_SMALLEST = np.float32(2.0**-149)

variants = _nvfp4.variants
variant = _nvfp4.variant
set_variant = _nvfp4.set_variant
threads = _nvfp4.threads
set_threads = _nvfp4.set_threads


@dataclass(slots=True, eq=False)
class Tensor:
    """A packed tensor. Its arrays are plain NumPy arrays and are never copied.

    codes         uint8 [..., K/2], two codes per byte, the even column in the low nibble
    block_scale   ml_dtypes.float8_e4m3fn [..., K/group], row-major (not swizzled)
    tensor_scale  float32, a multiplier
    shape         shape of the weight, [..., K]
    group         columns per block scale
    divisor       float32 where the tensor's scale is stored as a divisor (compressed-tensors), else None
    """

    codes: np.ndarray
    block_scale: np.ndarray
    tensor_scale: np.float32
    shape: tuple[int, ...]
    group: int = 16
    divisor: np.float32 | None = None

    def __repr__(self) -> str:
        return f"nvfp4.Tensor(shape={tuple(self.shape)}, group={self.group}, tensor_scale={float(self.tensor_scale):g})"

    @property
    def nbytes(self) -> int:
        """Bytes on disk: codes, block scales and the one float32."""
        return int(self.codes.nbytes + self.block_scale.nbytes + 4)


def pack(
    w: object,
    tensor_scale: float | None = None,
    scale: Scale = "amax",
    group: int = 16,
    encoding: Encoding = "modelopt",
    importance: ArrayLike | None = None,
    out: Tensor | None = None,
    tensor_amax: float | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Quantize w [..., K] to NVFP4.

    tensor_scale  multiplier of the whole tensor; None: computed from the tensor's amax. Linears that are served as one
                  matrix (q/k/v, gate/up) must share it.
    scale         how a block's scale is chosen: "amax" (ModelOpt's dynamic rule), "four_over_six" (amax or 1.5 amax,
                  whichever has the lower squared error), "sweep" (least squared error of all 126 codes)
    importance    float32 [K], weights of the squared error, for example the mean of x_k^2 of the inputs
    encoding      "modelopt" (its CPU arithmetic), "modelopt-cuda" (differs in the last bit of tensor_scale),
                  "modelopt-static" (block scales relative to tensor_amax), "compressed-tensors" (the arithmetic of its
                  observers; the tensor's scale is a divisor)
    out           a Tensor whose arrays are written in place
    tensor_amax   for "modelopt-static" with an explicit tensor_scale
    divisor       for "compressed-tensors", instead of tensor_scale

    ValueError: K is not a multiple of the group, unknown dtype, NaN or inf in w, a scale that is
        not positive and finite. `out` is then unchanged.
    """
    x, kind = float_array(w, "w")
    _check_choice(scale, encoding)
    shape = _block_shapes(x.shape, group, "w")
    if encoding == "compressed-tensors" and tensor_scale is not None:
        raise ValueError(
            "compressed-tensors stores the tensor's scale as a divisor: pass divisor, not tensor_scale"
        )
    if encoding != "compressed-tensors" and divisor is not None:
        raise ValueError(f"divisor is for the encoding compressed-tensors, got {encoding}")
    largest = _LARGEST_BLOCK_SCALE[scale]
    stored_divisor: np.float32 | None = None
    is_checked = False  # whether w is known to be finite
    if encoding == "compressed-tensors":
        if divisor is None:
            divisor = float(global_scale(finite_amax(x, kind), x.dtype))
            is_checked = True
        factor = stored_divisor = _positive(divisor, "divisor")
        multiplier = np.float32(1) / stored_divisor
    else:
        if tensor_scale is None:
            if tensor_amax is None:
                tensor_amax = finite_amax(x, kind)
                is_checked = True
            tensor_scale = float(_scale_of(tensor_amax, encoding, scale))
        factor = multiplier = _positive(tensor_scale, "tensor_scale")
    if encoding == "modelopt-static":
        tensor_amax = float(
            _positive(tensor_amax or factor * np.float32(E2M1_MAX * largest), "tensor_amax")
        )
    if out is None:
        codes = np.empty(shape[0], np.uint8)
        block_scale = np.empty(shape[1], E4M3)
    else:
        _check_out(out, shape, group)
        if not is_checked:  # an error after this line would leave parts of the result in `out`
            finite_amax(x, kind)
        codes = out.codes
        block_scale = out.block_scale
    finite = _nvfp4.pack(
        as_bytes(x),
        kind,
        group,
        _SCALES.index(scale),
        _ENCODINGS[encoding],
        float(factor),
        largest,
        float(tensor_amax or 0),
        importance_weights(importance, x.shape[-1]),
        as_bytes(codes),
        as_bytes(block_scale),
    )
    if not finite:
        raise ValueError(nonfinite_message(x))
    if out is None:
        return Tensor(codes, block_scale, multiplier, x.shape, group, stored_divisor)
    out.tensor_scale = multiplier
    out.divisor = stored_divisor
    out.shape = x.shape
    return out


def unpack(
    t: Tensor, dtype: DTypeLike = "bfloat16", out: np.ndarray | None = None, nan: str = "raise"
) -> np.ndarray:
    """Return the weights [..., K] in bfloat16, float16 or float32.

    Each is the code times the block scale times the tensor scale (compressed-tensors: divided by
    its divisor). The scales' product and the weight are float32 numbers; the weight is then rounded
    once to `dtype`.

    nan  "raise": ValueError unless the tensor is valid (`check`); old exporters wrote blocks whose scale is NaN
         "keep": decode whatever the bytes are, such a block to NaN
    """
    by_name = {
        "bfloat16": BFLOAT16,
        "float16": np.dtype(np.float16),
        "float32": np.dtype(np.float32),
    }
    out_dtype = by_name.get(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if out_dtype not in FLOAT_KINDS:
        raise ValueError(f"dtype {dtype}, expected bfloat16, float16 or float32")
    codes, scales, shape = _parts(t)
    if nan not in ("raise", "keep"):
        raise ValueError(f"nan {nan!r}, expected raise or keep")
    out = output_array(out, shape, out_dtype)
    factor, divides = _factor(t) if nan == "keep" else _valid_factor(t)
    valid = _nvfp4.unpack(
        as_bytes(codes),
        as_bytes(scales),
        FLOAT_KINDS[out_dtype],
        t.group,
        divides,
        factor,
        as_bytes(out),
    )
    if nan == "raise" and not valid:
        raise ValueError(_invalid_scales_message(scales))
    return out


def check(t: Tensor) -> None:
    """Raise ValueError unless a tensor is valid.

    Its shapes fit together, no block scale is NaN or negative, and the tensor's scale (or divisor)
    is positive and finite. `unpack`, `gemv`, `to_ggml` and `error` take no other tensor.
    """
    _, scales, _ = _parts(t)
    _valid_factor(t)
    if any(invalid_scales(scales)):
        raise ValueError(_invalid_scales_message(scales))


def invalid_scales(block_scale: np.ndarray) -> tuple[int, int]:
    """Return how many block scales are NaN, and how many are negative (-0 too). Both are 0 in a valid tensor."""
    scales = byte_array(block_scale, "block_scale")
    invalid = scales[scales >= E4M3_NAN]
    nan = int(((invalid & E4M3_MAGNITUDE) == E4M3_NAN).sum())
    return nan, invalid.size - nan


def is_factor(value: float | np.floating) -> bool:
    """Return whether a tensor's scale, or divisor, is valid: positive and finite in float32."""
    with np.errstate(over="ignore"):
        number = np.float32(value)
    return bool(np.isfinite(number) and number > 0)


def amax(w: object) -> np.float32:
    """Return the largest |w|: NaN if w holds one, 0 for an empty array."""
    x, kind = float_array(w, "w")
    return np.float32(_nvfp4.amax(as_bytes(x), kind))


def tensor_scale(amax: float, encoding: Encoding = "modelopt", scale: Scale = "amax") -> np.float32:
    """Return the multiplier of a tensor with this amax.

    Amax / (6 * 448), or amax / (6 * 256) for "four_over_six".

    "modelopt-cuda" multiplies by float32(1 / 2688) instead, as torch does on a GPU. An all-zero
    tensor gets 1, so that no server divides by zero.
    """
    _check_choice(scale, encoding)
    value = np.float32(amax)
    if not np.isfinite(value) or value < 0:
        raise ValueError(f"amax {amax}, expected a finite number >= 0")
    if value == 0:
        return np.float32(1)
    if encoding == "compressed-tensors":
        return np.float32(1) / global_scale(value)
    span = np.float32(E2M1_MAX * _LARGEST_BLOCK_SCALE[scale])
    result = value * (np.float32(1) / span) if encoding == "modelopt-cuda" else value / span
    return max(np.float32(result), _SMALLEST)


_scale_of = tensor_scale  # for the functions that have a parameter of the same name


def global_scale(amax: float, dtype: DTypeLike = np.float32) -> np.float32:
    """Return compressed-tensors' divisor, 2688 / amax.

    The arithmetic is that of its observers, in the weight's dtype. Where the quotient overflows
    that dtype (float16: amax below .041), it is 1, as there.
    """
    kind = np.dtype(dtype)
    if not np.isfinite(np.float32(amax)) or amax < 0:
        raise ValueError(f"amax {amax}, expected a finite number >= 0")
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        inverse = (np.float32(1) / np.float32(amax)).astype(kind)
        value = (inverse.astype(np.float32) * np.float32(2688)).astype(kind).astype(np.float32)
    return value if np.isfinite(value) else np.float32(1)


def fake_quant(
    x: object, tensor_scale: float | None = None, group: int = 16, out: np.ndarray | None = None
) -> np.ndarray:
    """Round x [..., K] to NVFP4 and back in its own dtype, one dynamic scale per block.

    ModelOpt's GPU op for activations.

    Differences from unpack(pack(x)): the scale byte has no lower clamp, a step under 1e-5 becomes
    1, and the result has no -0.0. Compared with an H200 the bits are equal, except for elements and
    block scales within a few last bits of a tie, where the GPU's approximate reciprocal may round
    to the other side (tests/perf/codec.md, tests/nvfp4/test_peers.py).

    tensor_scale  None: amax * float32(1 / 2688), as torch computes it on a GPU; 0, of an all-zero tensor, counts as 1e-12
    out           an array for the result; it may be x itself

    ValueError: K is not a multiple of the group, unknown dtype, a tensor_scale that is negative,
        NaN or infinite, an `out`
    that overlaps x only partly.
    """
    a, kind = float_array(x, "x")
    _block_shapes(a.shape, group, "x")
    if tensor_scale is None:
        tensor_scale = float(_scale_of(finite_amax(a, kind), "modelopt-cuda"))
    out = output_array(out, a.shape, a.dtype)
    factor = float(np.float32(tensor_scale))
    if not (np.isfinite(factor) and factor >= 0):
        raise ValueError(f"tensor_scale {tensor_scale}, expected a finite number >= 0")
    _nvfp4.fake_quant(as_bytes(a), kind, group, factor or 1e-12, as_bytes(out))
    return out


def gptq(
    w: np.ndarray,
    factor: np.ndarray,
    tensor_scale: float,
    scale: Scale = "amax",
    group: int = 16,
    importance: ArrayLike | None = None,
) -> Tensor:
    """Quantize a weight column by column.

    Each column's error is corrected in the columns that follow (GPTQ).

    w             float32 [N, K], contiguous; overwritten with the dequantized result
    factor        float32 [K, K], upper Cholesky factor of the inverse of the Hessian (Frantar et al. 2022)
    importance    float32 [K], weights of the squared error in the search for a block's scale; unused for "amax"

    ValueError: shapes that do not fit, or weights that are not finite after the correction.
    """
    _check_choice(scale, "modelopt")
    shape = _block_shapes(w.shape, group, "w")
    columns = w.shape[-1]
    if w.ndim != 2 or w.dtype != np.float32 or not w.flags.carray:
        raise ValueError(
            f"w: {w.dtype} {w.shape}, expected float32 [N, K], contiguous, aligned and writeable"
        )
    factor = np.require(factor, np.float32, ("C", "A"))
    if factor.shape != (columns, columns):
        raise ValueError(f"factor: shape {factor.shape}, expected ({columns}, {columns})")
    out = Tensor(
        np.empty(shape[0], np.uint8),
        np.empty(shape[1], E4M3),
        _positive(tensor_scale, "tensor_scale"),
        w.shape,
        group,
    )
    finite = _nvfp4.gptq(
        w.reshape(-1),
        columns,
        factor.reshape(-1),
        group,
        _SCALES.index(scale),
        float(out.tensor_scale),
        _LARGEST_BLOCK_SCALE[scale],
        None if scale == "amax" else importance_weights(importance, columns),
        as_bytes(out.codes),
        as_bytes(out.block_scale),
    )
    if not finite:
        raise ValueError("the error correction made weights that are not finite")
    return out


def gemv(x: object, t: Tensor, out: np.ndarray | None = None) -> np.ndarray:
    """Multiply x [..., K] by the transpose of a packed weight [N, K].

    Returns [..., N] in x's dtype, sums in float32.

    Each weight is decoded in registers, so only the packed bytes are read. Meant for up to about
    four rows of x; for more, `unpack` and a matrix product are faster.
    """
    a, kind = float_array(x, "x")
    codes, scales, shape = _parts(t)
    if len(shape) != 2 or a.ndim == 0 or a.shape[-1] != shape[1]:
        raise ValueError(
            f"x: shape {a.shape}, expected [..., {shape[-1]}] for a weight of shape {shape}"
        )
    out = output_array(out, (*a.shape[:-1], shape[0]), a.dtype)
    factor, divides = _valid_factor(t)
    valid = _nvfp4.gemv(
        as_bytes(a),
        kind,
        shape[1],
        as_bytes(codes),
        as_bytes(scales),
        t.group,
        divides,
        factor,
        as_bytes(out),
    )
    if not valid:
        raise ValueError(_invalid_scales_message(scales))
    return out


def to_ggml(t: Tensor) -> np.ndarray:
    """Return rows of ggml's NVFP4 blocks (type 40), uint8 [..., K/64 * 36].

    GGUF stores tensor_scale as a tensor `.scale`.
    """
    codes, scales, shape = _parts(t)
    if t.group != 16 or shape[-1] % 64:
        raise ValueError(
            f"shape {shape}, group {t.group}: ggml's NVFP4 needs rows of a multiple of 64 and group 16"
        )
    _valid_factor(t)
    out = np.empty((*shape[:-1], shape[-1] // 64 * 36), np.uint8)
    if not _nvfp4.to_ggml(as_bytes(codes), as_bytes(scales), as_bytes(out)):
        raise ValueError(_invalid_scales_message(scales))
    return out


def from_ggml(raw: np.ndarray, tensor_scale: float = 1.0) -> Tensor:
    """Return a Tensor [..., n * 64] from rows of ggml's NVFP4 blocks, uint8 [..., n * 36]."""
    rows = np.ascontiguousarray(raw, np.uint8)
    if rows.ndim == 0 or rows.shape[-1] % 36:
        raise ValueError(f"raw: shape {rows.shape}, expected rows of a multiple of 36 bytes")
    shape = (*rows.shape[:-1], rows.shape[-1] // 36 * 64)
    codes = np.empty((*shape[:-1], shape[-1] // 2), np.uint8)
    scales = np.empty((*shape[:-1], shape[-1] // 16), np.uint8)
    _nvfp4.from_ggml(as_bytes(rows), as_bytes(codes), as_bytes(scales))
    return Tensor(codes, scales.view(E4M3), _positive(tensor_scale, "tensor_scale"), shape, 16)


def swizzle(block_scale: np.ndarray) -> np.ndarray:
    """Reorder one-byte scales [M, B] into the 128x4 tiles that GPU kernels read.

    Flat, zero-padded to whole tiles.
    """
    scales = byte_array(block_scale, "block_scale")
    if scales.ndim != 2:
        raise ValueError(f"block_scale: shape {scales.shape}, expected [rows, blocks]")
    rows, columns = scales.shape
    out = np.empty(-(-rows // 128) * -(-columns // 4) * 512, np.uint8)
    _nvfp4.swizzle(as_bytes(scales), rows, columns, as_bytes(out))
    return out.view(block_scale.dtype)


def unswizzle(tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Return the scales [rows, columns] that `swizzle` reordered."""
    flat = byte_array(tiles, "tiles").reshape(-1)
    out = np.empty((rows, columns), np.uint8)
    _nvfp4.unswizzle(as_bytes(flat), rows, columns, as_bytes(out))
    return out.view(tiles.dtype)


def error(w: object, t: Tensor) -> dict[str, float]:
    """Compare a packed tensor with its source. Returns {"rel_l2", "max_abs", "clipped"}.

    rel_l2 is |w - unpacked| / |w|, max_abs the largest difference, clipped the share of elements
    beyond 6 steps.
    """
    x, _ = float_array(w, "w")
    source = x.astype(np.float32)
    unpacked = unpack(t, "float32")
    if source.shape != unpacked.shape:
        raise ValueError(f"w: shape {source.shape}, expected {unpacked.shape}")
    difference = source - unpacked
    norm = float(np.linalg.norm(source.reshape(-1).astype(np.float64)))
    scales = t.block_scale.view(E4M3).astype(np.float32)
    step = scales * t.tensor_scale if t.divisor is None else scales / t.divisor
    beyond = np.abs(source).reshape(*step.shape, t.group) > E2M1_MAX * step[..., None]
    return {
        "rel_l2": float(np.linalg.norm(difference.reshape(-1).astype(np.float64))) / norm
        if norm
        else 0.0,
        "max_abs": float(np.abs(difference).max(initial=0.0)),
        "clipped": float(beyond.mean()) if beyond.size else 0.0,
    }


def _block_shapes(
    shape: tuple[int, ...], group: int, name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the codes and of the block scales of an array."""
    if not isinstance(group, int) or group not in _GROUPS:
        raise ValueError(f"group {group!r}, expected one of {', '.join(map(str, _GROUPS))}")
    if not shape or shape[-1] % group:
        raise ValueError(
            f"{name}: shape {shape}, expected a last dimension that is a multiple of {group}"
        )
    return (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // group)


def _parts(t: Tensor) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return codes and scales as contiguous bytes, and the shape. They must fit together."""
    codes = byte_array(t.codes, "codes")
    scales = byte_array(t.block_scale, "block_scale")
    shape = tuple(int(n) for n in t.shape)
    expected = _block_shapes(shape, t.group, "tensor")
    if (codes.shape, scales.shape) != expected:
        raise ValueError(
            f"codes {codes.shape} and block_scale {scales.shape}, expected {expected[0]} and {expected[1]} for {shape}"
        )
    return codes, scales, shape


def _factor(t: Tensor) -> tuple[float, bool]:
    """Return the tensor's scale as it is stored, and whether it is a divisor."""
    return float(t.tensor_scale if t.divisor is None else t.divisor), t.divisor is not None


def _valid_factor(t: Tensor) -> tuple[float, bool]:
    """Return `_factor` of a tensor. ValueError: it is not positive and finite."""
    factor, divides = _factor(t)
    _positive(factor, "divisor" if divides else "tensor_scale")
    return factor, divides


def _positive(value: float | np.floating, name: str) -> np.float32:
    if not is_factor(value):
        raise ValueError(f"{name} {value}, expected a positive finite number")
    return np.float32(value)


def _invalid_scales_message(scales: np.ndarray) -> str:
    nan, negative = invalid_scales(scales)
    first = [int(i) for i in np.argwhere(scales >= E4M3_NAN)[0]]
    return f"block_scale: {nan} scales are NaN and {negative} negative, the first at {first}; quantize again"


def _check_choice(scale: str, encoding: str) -> None:
    if scale not in _SCALES:
        raise ValueError(f"scale {scale!r}, expected one of {', '.join(_SCALES)}")
    if encoding not in _ENCODINGS:
        raise ValueError(f"encoding {encoding!r}, expected one of {', '.join(_ENCODINGS)}")


def _check_out(out: Tensor, shape: tuple[tuple[int, ...], tuple[int, ...]], group: int) -> None:
    for name, array, expected in (
        ("codes", out.codes, shape[0]),
        ("block_scale", out.block_scale, shape[1]),
    ):
        if array.shape != expected or array.dtype.itemsize != 1 or not array.flags.carray:
            raise ValueError(
                f"out.{name}: {array.dtype} {array.shape}, expected {expected}, one byte per element, contiguous, writeable"
            )
    if out.group != group:
        raise ValueError(f"out.group {out.group}, expected {group}")
