"""Arrays as the C codec (_nvfp4) takes them: contiguous, checked, from NumPy or from any library with DLPack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from annie_quant import _nvfp4

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, BFLOAT16: 2}  # _nvfp4's numbers
# DLPack's type code and bits (dlpack.h, DLDataTypeCode).
DLPACK_TYPES = {
    np.dtype(np.float32): (2, 32),
    np.dtype(np.float16): (2, 16),
    BFLOAT16: (4, 16),
    E4M3: (10, 8),
    np.dtype(np.uint8): (1, 8),
}


class DLPackArray:
    """A NumPy array as a DLPack producer, without a copy: NumPy's own DLPack has no bfloat16 and no float8.

    torch.from_dlpack(DLPackArray(unpack(t))) is a bfloat16 tensor over the same memory.
    ValueError: a dtype other than float32, float16, bfloat16, float8_e4m3fn or uint8; an array that is not contiguous
    and writeable.
    """

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        if array.dtype not in DLPACK_TYPES or not array.flags.c_contiguous or not array.flags.writeable:
            raise ValueError(
                f"{array.dtype} {array.shape}, expected one of {', '.join(map(str, DLPACK_TYPES))}, contiguous and writeable"
            )
        self.array = array

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return _nvfp4.to_dlpack(as_bytes(self.array), *DLPACK_TYPES[self.array.dtype], self.array.shape)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@dataclass(slots=True)
class _ForeignMemory:
    """Memory of another library for np.asarray; valid as long as `owner` lives."""

    owner: Any
    __array_interface__: dict[str, Any]


def float_array(w: Any, name: str) -> tuple[np.ndarray, int]:
    """Return (w as a contiguous, aligned float array, its kind in FLOAT_KINDS). A copy is made only where w is neither.

    ValueError: not an array, another dtype, or not on the CPU. `name` is used in its message.
    """
    if not isinstance(w, np.ndarray):
        w = from_dlpack(w, name)
    if w.dtype not in FLOAT_KINDS:
        raise ValueError(f"{name}: dtype {w.dtype}, expected float32, float16 or ml_dtypes.bfloat16")
    return np.require(w, requirements=("C", "A")), FLOAT_KINDS[w.dtype]


def from_dlpack(w: Any, name: str) -> np.ndarray:
    """Return the array behind `w.__dlpack__()`, read-only and without a copy."""
    if not hasattr(w, "__dlpack__"):
        raise ValueError(f"{name}: {type(w).__name__}, expected a NumPy array or one with __dlpack__")
    w = w.detach() if hasattr(w, "detach") else w  # torch exports no tensor that records gradients
    kind, number = w.__dlpack_device__()
    if int(kind) != 1:
        raise ValueError(f"{name}: on device {int(kind)}:{number} (DLPack's numbers), expected a tensor on the CPU")
    owner, address, code, bits, shape, strides = _nvfp4.from_dlpack(w.__dlpack__())
    dtype = next((d for d, pair in DLPACK_TYPES.items() if pair == (code, bits)), None)
    if dtype not in FLOAT_KINDS:
        raise ValueError(f"{name}: DLPack type {code} of {bits} bits, expected float32, float16 or bfloat16")
    interface = {
        "version": 3, "shape": shape, "typestr": f"<u{bits // 8}", "data": (address, True),
        "strides": None if strides is None else tuple(n * bits // 8 for n in strides),
    }  # fmt: skip
    return np.asarray(_ForeignMemory(owner, interface)).view(dtype)


def byte_array(a: np.ndarray, name: str) -> np.ndarray:
    """Return an array of one-byte elements (codes, E4M3 scales) as contiguous uint8."""
    if a.dtype.itemsize != 1:
        raise ValueError(f"{name}: dtype {a.dtype}, expected one byte per element")
    return np.ascontiguousarray(a).view(np.uint8)


def as_bytes(a: np.ndarray) -> np.ndarray:
    """Return the memory of a contiguous array as flat uint8, which the buffer protocol takes for every dtype."""
    return a.reshape(-1).view(np.uint8)


def output_array(out: np.ndarray | None, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return `out` after a check of its shape, dtype and flags, or a new array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        raise ValueError(
            f"out: {out.dtype} {out.shape}, expected {np.dtype(dtype)} {shape}, contiguous, aligned and writeable"
        )
    return out


def importance_weights(importance: Any, columns: int) -> np.ndarray | None:
    """Return the weights of a squared error as float32 [columns], or None. ValueError: negative, NaN or infinite."""
    if importance is None:
        return None
    weights = np.require(importance, np.float32, ("C", "A"))
    if weights.shape != (columns,):
        raise ValueError(f"importance: shape {weights.shape}, expected ({columns},)")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("importance: holds a negative number, NaN or inf")
    return weights


def finite_amax(x: np.ndarray, kind: int) -> float:
    """Return the largest magnitude of an array from `float_array`. ValueError: it holds NaN or inf."""
    value = _nvfp4.amax(as_bytes(x), kind)
    if not np.isfinite(value):
        raise ValueError(nonfinite_message(x))
    return value


def nonfinite_message(x: np.ndarray) -> str:
    bad = ~np.isfinite(x.astype(np.float32))
    first = [int(i) for i in np.argwhere(bad)[0]]
    return f"{int(bad.sum())} values are NaN or inf, the first at {first}, expected finite weights"
