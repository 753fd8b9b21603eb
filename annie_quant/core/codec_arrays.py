"""Arrays as the C codec (_nvfp4) takes them: contiguous, checked, from NumPy or torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from annie_quant import _nvfp4

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT_KINDS = {np.dtype(np.float32): 0, np.dtype(np.float16): 1, BFLOAT16: 2}  # _nvfp4's numbers


def float_array(w: object, name: str) -> tuple[np.ndarray, int]:
    """Return (w as a contiguous, aligned float array, its kind in FLOAT_KINDS).

    A copy is made only where w is neither.

    ValueError: not an array, another dtype, or not on the CPU. `name` is used in its message.
    """
    array = w if isinstance(w, np.ndarray) else host_array(w, name)
    if array.dtype not in FLOAT_KINDS:
        raise ValueError(
            f"{name}: dtype {array.dtype}, expected float32, float16 or ml_dtypes.bfloat16"
        )
    return np.require(array, requirements=("C", "A")), FLOAT_KINDS[array.dtype]


def host_array(w: Any, name: str) -> np.ndarray:
    """Return a torch tensor, or an array of another library that NumPy can read, as a NumPy array without a copy."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(w, torch.Tensor):
        if not hasattr(w, "__array__"):
            raise ValueError(
                f"{name}: {type(w).__name__}, expected a NumPy array or a torch tensor"
            )
        return np.asarray(w)
    if w.device.type != "cpu":
        raise ValueError(f"{name}: on device {w.device}, expected a tensor on the CPU")
    w = w.detach()
    if w.dtype == torch.bfloat16:  # which NumPy does not know
        return w.view(torch.uint16).numpy().view(BFLOAT16)
    try:
        return w.numpy()
    except TypeError:  # a dtype that NumPy does not know, such as float8
        raise ValueError(
            f"{name}: dtype {w.dtype}, expected float32, float16 or bfloat16"
        ) from None


def byte_array(a: np.ndarray, name: str) -> np.ndarray:
    """Return an array of one-byte elements (codes, E4M3 scales) as contiguous uint8."""
    if a.dtype.itemsize != 1:
        raise ValueError(f"{name}: dtype {a.dtype}, expected one byte per element")
    return np.ascontiguousarray(a).view(np.uint8)


def as_bytes(a: np.ndarray) -> np.ndarray:
    """Return the memory of a contiguous array as flat uint8, which the buffer protocol takes for every dtype."""
    return a.reshape(-1).view(np.uint8)


def output_array(
    out: np.ndarray | None, shape: tuple[int, ...], dtype: DTypeLike | None
) -> np.ndarray:
    """Return `out` after a check of its shape, dtype and flags, or a new array if it is None."""
    if out is None:
        return np.empty(shape, dtype)
    if out.shape != shape or out.dtype != dtype or not out.flags.carray:
        message = f"out: {out.dtype} {out.shape}, expected {np.dtype(dtype)} {shape}, contiguous, aligned and writeable"
        raise ValueError(message)
    return out


def importance_weights(importance: ArrayLike | None, columns: int) -> np.ndarray | None:
    """Return the weights of a squared error as float32 [columns], or None.

    ValueError: negative, NaN or infinite.
    """
    if importance is None:
        return None
    weights = np.require(importance, np.float32, ("C", "A"))
    if weights.shape != (columns,):
        raise ValueError(f"importance: shape {weights.shape}, expected ({columns},)")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError("importance: holds a negative number, NaN or inf")
    return weights


def finite_amax(x: np.ndarray, kind: int) -> float:
    """Return the largest magnitude of an array from `float_array`.

    ValueError: it holds NaN or inf.
    """
    value = _nvfp4.amax(as_bytes(x), kind)
    if not np.isfinite(value):
        raise ValueError(nonfinite_message(x))
    return value


def nonfinite_message(x: np.ndarray) -> str:
    bad = ~np.isfinite(x.astype(np.float32))
    first = [int(i) for i in np.argwhere(bad)[0]]
    return f"{int(bad.sum())} values are NaN or inf, the first at {first}, expected finite weights"
