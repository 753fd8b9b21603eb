"""NVFP4 on the CPU, exact to the bit: pack, unpack, scale search, activation fake-quant, layouts.

The format: E2M1 elements, two to a byte with the even column in the low nibble; one E4M3 scale a block of `group`
columns; one float32 scale a tensor. Definition: OCP Microscaling Formats v1.0 for E2M1 and E4M3; ModelOpt's
qtensor/nvfp4_tensor.py for the rest. A weight is `value * float32(block_scale * tensor_scale)`.

    t = pack(w)                      # codes uint8 [..., K/2], block_scale float8_e4m3fn [..., K/16], tensor_scale
    w = unpack(t, dtype="bfloat16")

Arrays in are NumPy float32, float16 or ml_dtypes.bfloat16, or anything with `__dlpack__` (torch tensors, no copy); all
leading dimensions are free; `Lent` hands arrays out the same way. The work is done by _nvfp4 in several threads with the
GIL released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np

from annie_quant import _nvfp4

Scale = Literal["amax", "four_over_six", "sweep"]
Encoding = Literal["modelopt", "modelopt-cuda", "modelopt-static", "compressed-tensors"]

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)

# The two number formats, as tables: index by the code.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(E4M3).astype(np.float32)

_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, BFLOAT16: 2}
# DLPack's type code and bits (dlpack.h, DLDataTypeCode).
_DLPACK = {
    np.dtype(np.float32): (2, 32),
    np.dtype(np.float16): (2, 16),
    BFLOAT16: (4, 16),
    E4M3: (10, 8),
    np.dtype(np.uint8): (1, 8),
}
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
    """A packed tensor; the arrays are plain NumPy views that nobody copies.

    codes         uint8 [..., K/2], even column in the low nibble
    block_scale   ml_dtypes.float8_e4m3fn [..., K/group], row-major (not swizzled)
    tensor_scale  float32, a multiplier
    shape         of the weight, [..., K]
    group         columns of one block scale
    divisor       float32 where the scale of the tensor is kept as a divisor (compressed-tensors), else None
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
    w: Any,
    tensor_scale: float | None = None,
    scale: Scale = "amax",
    group: int = 16,
    encoding: Encoding = "modelopt",
    importance: Any = None,
    out: Tensor | None = None,
    tensor_amax: float | None = None,
    divisor: float | None = None,
) -> Tensor:
    """w [..., K] → Tensor.

    tensor_scale  multiplier shared by the whole tensor; None: found from the tensor's amax. Linears that are served as
                  one matrix (q/k/v, gate/up) must share it.
    scale         how a block's scale is chosen: "amax" (ModelOpt's dynamic rule), "four_over_six" (amax or 1.5 amax, the
                  lower squared error), "sweep" (least squared error of all 126 codes)
    importance    float32 [K], weights of the squared error, e.g. mean x_k^2 of the inputs
    encoding      "modelopt" (its CPU arithmetic), "modelopt-cuda" (differs in tensor_scale's last bit),
                  "modelopt-static" (block scales relative to tensor_amax), "compressed-tensors" (its observers'
                  arithmetic; the tensor's scale is a divisor)
    out           a Tensor whose arrays are written in place
    tensor_amax   for "modelopt-static" with a given tensor_scale
    divisor       for "compressed-tensors", in place of tensor_scale

    ValueError: K not a multiple of the group, unknown dtype, NaN or inf in w, a scale that is not positive and finite.
    """
    x, kind = _floats(w, "w")
    _check_choice(scale, encoding)
    shape = _blocks_shape(x, group, "w")
    if encoding == "compressed-tensors" and tensor_scale is not None:
        raise ValueError("compressed-tensors keeps the tensor's scale as a divisor: give divisor, not tensor_scale")
    if encoding != "compressed-tensors" and divisor is not None:
        raise ValueError(f"divisor belongs to encoding compressed-tensors, seen {encoding}")
    largest = 256.0 if scale == "four_over_six" else 448.0
    kept: np.float32 | None = None
    if encoding == "compressed-tensors":
        factor = kept = _positive(
            global_scale(_finite_amax(x, kind), x.dtype) if divisor is None else divisor, "divisor"
        )
        multiplier = np.float32(1) / kept
    else:
        if tensor_scale is None:
            tensor_amax = _finite_amax(x, kind) if tensor_amax is None else tensor_amax
            tensor_scale = float(_scale_of(tensor_amax, encoding, scale))
        factor = multiplier = _positive(tensor_scale, "tensor_scale")
    if encoding == "modelopt-static":
        tensor_amax = float(_positive(tensor_amax or factor * np.float32(6 * largest), "tensor_amax"))
    if out is None:
        out = Tensor(np.empty(shape[0], np.uint8), np.empty(shape[1], E4M3), multiplier, x.shape, group, kept)
    else:
        _check_out(out, shape, group)
        out.tensor_scale, out.divisor, out.shape = multiplier, kept, x.shape
    finite = _nvfp4.pack(
        _bytes(x),
        kind,
        group,
        _SCALES.index(scale),
        _ENCODINGS[encoding],
        float(factor),
        largest,
        float(tensor_amax or 0),
        _importance(importance, x.shape[-1]),
        _bytes(out.codes),
        _bytes(out.block_scale),
    )
    if not finite:
        raise ValueError(_nonfinite(x))
    return out


def unpack(t: Tensor, dtype: Any = "bfloat16", out: np.ndarray | None = None, nan: str = "raise") -> np.ndarray:
    """Tensor → weights [..., K] in bfloat16, float16 or float32: `value * float32(block_scale * tensor_scale)`, rounded once.

    nan="raise" names the first block whose scale is NaN (old exporters wrote such); nan="keep" decodes it to NaN.
    """
    kind_of = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
    wanted = kind_of.get(dtype) if isinstance(dtype, str) else np.dtype(dtype)
    if wanted not in _KINDS:
        raise ValueError(f"dtype {dtype}, expected bfloat16, float16 or float32")
    codes, scales, shape = _parts(t)
    if out is None:
        out = np.empty(shape, wanted)
    elif out.shape != shape or out.dtype != wanted or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: {out.dtype} {out.shape}, expected {wanted} {shape}, contiguous and writeable")
    factor = t.tensor_scale if t.divisor is None else t.divisor
    bad = _nvfp4.unpack(
        _bytes(codes), _bytes(scales), _KINDS[wanted], t.group, t.divisor is not None, float(factor), _bytes(out)
    )
    if bad and nan == "raise":
        raise ValueError(_nan_scales(scales))
    return out


class Lent:
    """An array for `torch.from_dlpack` and the like, without a copy: NumPy's own DLPack knows no bfloat16 and no float8.

    torch.from_dlpack(Lent(unpack(t))) is a bfloat16 tensor over the same memory. Codes are uint8, which NumPy lends itself.
    ValueError: a dtype other than float32, float16, bfloat16, float8_e4m3fn or uint8; an array not contiguous and writeable.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        if array.dtype not in _DLPACK or not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(
                f"{array.dtype} {array.shape}, expected one of {', '.join(map(str, _DLPACK))}, contiguous and writeable"
            )
        self.array = array

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return _nvfp4.to_dlpack(_bytes(self.array), *_DLPACK[self.array.dtype], self.array.shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


def amax(w: Any) -> np.float32:
    """Largest |w|; NaN where w holds one; 0 for an empty array."""
    x, kind = _floats(w, "w")
    return np.float32(_nvfp4.amax(_bytes(x), kind))


def tensor_scale(amax: float, encoding: Encoding = "modelopt", scale: Scale = "amax") -> np.float32:
    """The multiplier of a tensor with this amax: amax / (6 * 448), or 6 * 256 where 1.5 * amax must stay encodable.

    "modelopt-cuda" multiplies by float32(1 / 2688) instead, as torch does on a GPU. An all-zero tensor gets 1, so that
    no server divides by zero.
    """
    _check_choice(scale, encoding)
    value = np.float32(amax)
    if not np.isfinite(value) or value < 0:
        raise ValueError(f"amax {amax}, expected a finite number >= 0")
    if value == 0:
        return np.float32(1)
    span = np.float32(6 * (256 if scale == "four_over_six" else 448))
    if encoding == "compressed-tensors":
        return np.float32(1) / global_scale(value)
    result = value * (np.float32(1) / span) if encoding == "modelopt-cuda" else value / span
    return max(np.float32(result), _SMALLEST)


_scale_of = tensor_scale  # for the functions whose parameter has the same name


def global_scale(amax: float, dtype: Any = np.float32) -> np.float32:
    """compressed-tensors' divisor, 2688 / amax in the arithmetic of its observers, which run in the weight's dtype."""
    kind = np.dtype(dtype)
    if not np.isfinite(np.float32(amax)) or amax < 0:
        raise ValueError(f"amax {amax}, expected a finite number >= 0")
    if amax == 0:
        return np.float32(1)
    with np.errstate(over="ignore"):
        inverse = (np.float32(1) / np.float32(amax)).astype(kind)
        value = (inverse.astype(np.float32) * np.float32(2688)).astype(kind).astype(np.float32)
    return np.float32(min(value, np.finfo(np.float32).max))


def fake_quant(x: Any, tensor_scale: float | None = None, group: int = 16, out: np.ndarray | None = None) -> np.ndarray:
    """x [..., K] rounded to NVFP4 and back in its own dtype, one dynamic scale a block: ModelOpt's GPU op for activations.

    It differs from unpack(pack(x)): the scale byte has no lower clamp, a step under 1e-5 becomes 1, and no -0.0 comes out.
    Against an H200: the same bits, but for elements and block scales within a few last bits of a tie, where the GPU's
    approximate reciprocal may fall to the other side, as it alone explains (tests/perf/codec.md, tests/nvfp4/test_peers.py).
    tensor_scale None: amax * float32(1 / 2688), as torch computes it on a GPU. `out` may be x itself.
    """
    a, kind = _floats(x, "x")
    _blocks_shape(a, group, "x")
    if tensor_scale is None:
        tensor_scale = float(_scale_of(_finite_amax(a, kind), "modelopt-cuda"))
    if out is None:
        out = np.empty_like(a)
    elif out.shape != a.shape or out.dtype != a.dtype or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out: {out.dtype} {out.shape}, expected {a.dtype} {a.shape}, contiguous and writeable")
    _nvfp4.fake_quant(_bytes(a), kind, group, float(max(np.float32(tensor_scale), np.float32(0)) or 1e-12), _bytes(out))
    return out


def gptq(
    w: np.ndarray,
    factor: np.ndarray,
    tensor_scale: float,
    scale: Scale = "amax",
    group: int = 16,
    importance: Any = None,
) -> Tensor:
    """Quantize a weight column by column; each column's error is corrected in the columns that follow (GPTQ).

    w             float32 [N, K], contiguous; overwritten with the dequantized result
    factor        float32 [K, K], upper Cholesky factor of the inverse of the Hessian (Frantar et al. 2022)
    importance    float32 [K], weights of the squared error in the search for a block's scale; unused for "amax"

    ValueError: shapes that do not fit, or weights that are not finite after the correction.
    """
    _check_choice(scale, "modelopt")
    shape = _blocks_shape(w, group, "w")
    columns = w.shape[-1]
    out = Tensor(np.empty(shape[0], np.uint8), np.empty(shape[1], E4M3), np.float32(tensor_scale), w.shape, group)
    finite = _nvfp4.gptq(
        w.reshape(-1),
        columns,
        np.ascontiguousarray(factor, np.float32).reshape(-1),
        group,
        _SCALES.index(scale),
        float(tensor_scale),
        256.0 if scale == "four_over_six" else 448.0,
        None if scale == "amax" else _importance(importance, columns),
        _bytes(out.codes),
        _bytes(out.block_scale),
    )
    if not finite:
        raise ValueError("the error correction made weights that are not finite")
    return out


def to_ggml(t: Tensor) -> np.ndarray:
    """uint8 [..., K/64 * 36]: rows of ggml's NVFP4 blocks (type 40). tensor_scale travels apart, as the tensor `.scale`."""
    codes, scales, shape = _parts(t)
    if t.group != 16 or shape[-1] % 64:
        raise ValueError(f"shape {shape}, group {t.group}: ggml's NVFP4 needs rows of a multiple of 64 and group 16")
    out = np.empty((*shape[:-1], shape[-1] // 64 * 36), np.uint8)
    _nvfp4.to_ggml(_bytes(codes), _bytes(scales), _bytes(out))
    return out


def from_ggml(raw: np.ndarray, tensor_scale: float = 1.0) -> Tensor:
    """Rows of ggml's NVFP4 blocks, uint8 [..., n * 36] → Tensor [..., n * 64]."""
    rows = np.ascontiguousarray(raw, np.uint8)
    if rows.ndim == 0 or rows.shape[-1] % 36:
        raise ValueError(f"raw: shape {rows.shape}, expected rows of a multiple of 36 bytes")
    shape = (*rows.shape[:-1], rows.shape[-1] // 36 * 64)
    codes = np.empty((*shape[:-1], shape[-1] // 2), np.uint8)
    scales = np.empty((*shape[:-1], shape[-1] // 16), np.uint8)
    _nvfp4.from_ggml(_bytes(rows), _bytes(codes), _bytes(scales))
    return Tensor(codes, scales.view(E4M3), _positive(tensor_scale, "tensor_scale"), shape, 16)


def swizzle(block_scale: np.ndarray) -> np.ndarray:
    """Scales [M, B] of one byte each → the 128x4 tiles GPU kernels read: a flat array, zero-padded to whole tiles."""
    scales = _byte_array(block_scale, "block_scale")
    if scales.ndim != 2:
        raise ValueError(f"block_scale: shape {scales.shape}, expected [rows, blocks]")
    rows, columns = scales.shape
    out = np.empty(-(-rows // 128) * -(-columns // 4) * 512, np.uint8)
    _nvfp4.swizzle(_bytes(scales), rows, columns, _bytes(out))
    return out.view(block_scale.dtype)


def unswizzle(tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The inverse of swizzle for a matrix of rows x columns scales."""
    flat = _byte_array(tiles, "tiles").reshape(-1)
    out = np.empty((rows, columns), np.uint8)
    _nvfp4.unswizzle(_bytes(flat), rows, columns, _bytes(out))
    return out.view(tiles.dtype)


def error(w: Any, t: Tensor) -> dict[str, float]:
    """How far a packed tensor is from its source: {"rel_l2", "max_abs", "clipped"}.

    rel_l2 = |w - unpacked| / |w|, max_abs the largest difference, clipped the share of elements beyond 6 steps.
    """
    x, _ = _floats(w, "w")
    source, back = x.astype(np.float32), unpack(t, "float32")
    if source.shape != back.shape:
        raise ValueError(f"w: shape {source.shape}, expected {back.shape}")
    difference = source - back
    norm = float(np.linalg.norm(source.reshape(-1).astype(np.float64)))
    scales = t.block_scale.view(E4M3).astype(np.float32)
    step = scales * t.tensor_scale if t.divisor is None else scales / t.divisor
    beyond = np.abs(source).reshape(*step.shape, t.group) > 6 * step[..., None]
    return {
        "rel_l2": float(np.linalg.norm(difference.reshape(-1).astype(np.float64))) / norm if norm else 0.0,
        "max_abs": float(np.abs(difference).max(initial=0.0)),
        "clipped": float(beyond.mean()) if beyond.size else 0.0,
    }


# ---- what comes in


def _floats(w: Any, name: str) -> tuple[np.ndarray, int]:
    """A contiguous array and its kind."""
    if not isinstance(w, np.ndarray):
        w = _from_dlpack(w, name)
    if w.dtype not in _KINDS:
        raise ValueError(f"{name}: dtype {w.dtype}, expected float32, float16 or ml_dtypes.bfloat16")
    return w if w.flags.c_contiguous else np.ascontiguousarray(w), _KINDS[w.dtype]


@dataclass(slots=True)
class _Memory:
    """Another library's memory, as NumPy takes it; it lives as long as `owner`."""

    owner: Any
    __array_interface__: dict[str, Any]


def _from_dlpack(w: Any, name: str) -> np.ndarray:
    """The array behind `w.__dlpack__()`, read-only and without a copy."""
    if not hasattr(w, "__dlpack__"):
        raise ValueError(f"{name}: {type(w).__name__}, expected a NumPy array or one with __dlpack__")
    w = w.detach() if hasattr(w, "detach") else w  # torch lends nothing that records gradients
    kind, number = w.__dlpack_device__()
    if int(kind) != 1:
        raise ValueError(f"{name}: on device {int(kind)}:{number} (DLPack's numbers), expected a tensor on the CPU")
    owner, address, code, bits, shape, strides = _nvfp4.from_dlpack(w.__dlpack__())
    dtype = next((d for d, pair in _DLPACK.items() if pair == (code, bits)), None)
    if dtype not in _KINDS:
        raise ValueError(f"{name}: DLPack type {code} of {bits} bits, expected float32, float16 or bfloat16")
    interface = {
        "version": 3, "shape": shape, "typestr": f"<u{bits // 8}", "data": (address, True),
        "strides": None if strides is None else tuple(n * bits // 8 for n in strides),
    }  # fmt: skip
    return np.asarray(_Memory(owner, interface)).view(dtype)


def _blocks_shape(x: np.ndarray, group: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the codes and of the block scales."""
    if group not in _GROUPS:
        raise ValueError(f"group {group}, expected one of {', '.join(map(str, _GROUPS))}")
    if x.ndim == 0 or x.shape[-1] % group:
        raise ValueError(f"{name}: shape {x.shape}, expected a last dimension that is a multiple of {group}")
    return (*x.shape[:-1], x.shape[-1] // 2), (*x.shape[:-1], x.shape[-1] // group)


def _parts(t: Tensor) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Codes and scales as contiguous bytes of checked shapes."""
    codes, scales = _byte_array(t.codes, "codes"), _byte_array(t.block_scale, "block_scale")
    shape = tuple(int(n) for n in t.shape)
    if t.group not in _GROUPS:
        raise ValueError(f"group {t.group}, expected one of {', '.join(map(str, _GROUPS))}")
    if not shape or shape[-1] % t.group:
        raise ValueError(f"shape {shape}: the last dimension is not a multiple of {t.group}")
    wanted = (*shape[:-1], shape[-1] // 2), (*shape[:-1], shape[-1] // t.group)
    if (codes.shape, scales.shape) != wanted:
        raise ValueError(
            f"codes {codes.shape} and block_scale {scales.shape}, expected {wanted[0]} and {wanted[1]} for {shape}"
        )
    return codes, scales, shape


def _byte_array(a: np.ndarray, name: str) -> np.ndarray:
    if a.dtype.itemsize != 1:
        raise ValueError(f"{name}: dtype {a.dtype}, expected one byte an entry")
    return np.ascontiguousarray(a).view(np.uint8)


def _bytes(a: np.ndarray) -> np.ndarray:
    """The memory of a contiguous array, in a type that the buffer protocol knows."""
    return a.reshape(-1).view(np.uint8)


def _importance(importance: Any, columns: int) -> np.ndarray | None:
    if importance is None:
        return None
    weights = np.ascontiguousarray(importance, np.float32)
    if weights.shape != (columns,):
        raise ValueError(f"importance: shape {weights.shape}, expected ({columns},)")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("importance: holds a negative number, NaN or inf")
    return weights


def _positive(value: Any, name: str) -> np.float32:
    number = np.float32(value)
    if not np.isfinite(number) or number <= 0:
        raise ValueError(f"{name} {value}, expected a positive finite number")
    return number


def _finite_amax(x: np.ndarray, kind: int) -> float:
    value = _nvfp4.amax(_bytes(x), kind)
    if not np.isfinite(value):
        raise ValueError(_nonfinite(x))
    return value


def _nonfinite(x: np.ndarray) -> str:
    bad = ~np.isfinite(x.astype(np.float32))
    place = [int(i) for i in np.argwhere(bad)[0]]
    return f"{int(bad.sum())} values are NaN or inf, the first at {place}, expected finite weights"


def _nan_scales(scales: np.ndarray) -> str:
    bad = (scales & 0x7F) == 0x7F
    place = [int(i) for i in np.argwhere(bad)[0]]
    return f"block_scale: {int(bad.sum())} blocks have the scale NaN (0x7F), the first at {place}; quantize again"


def _check_choice(scale: str, encoding: str) -> None:
    if scale not in _SCALES:
        raise ValueError(f"scale {scale!r}, expected one of {', '.join(_SCALES)}")
    if encoding not in _ENCODINGS:
        raise ValueError(f"encoding {encoding!r}, expected one of {', '.join(_ENCODINGS)}")


def _check_out(out: Tensor, shape: tuple[tuple[int, ...], tuple[int, ...]], group: int) -> None:
    for name, array, wanted in (("codes", out.codes, shape[0]), ("block_scale", out.block_scale, shape[1])):
        if array.shape != wanted or array.dtype.itemsize != 1 or not array.flags.c_contiguous:
            raise ValueError(
                f"out.{name}: {array.dtype} {array.shape}, expected {wanted}, one byte an entry, contiguous"
            )
    if out.group != group:
        raise ValueError(f"out.group {out.group}, expected {group}")
