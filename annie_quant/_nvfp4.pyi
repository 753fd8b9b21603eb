"""The C module's own calls: flat contiguous buffers. kind: 0 float32, 1 float16, 2 bfloat16."""

from typing import Any, TypeAlias

import numpy as np

# NumPy's stubs know the buffer protocol from Python 3.12 on alone.
Buffer: TypeAlias = np.ndarray[Any, Any] | bytes | bytearray | memoryview

def amax(x: Buffer, kind: int, /) -> float: ...
def pack(
    x: Buffer,
    kind: int,
    group: int,
    choice: int,
    encoding: int,
    tensor_scale: float,
    largest_code: float,
    tensor_amax: float,
    importance: Buffer | None,
    codes: Buffer,
    scales: Buffer,
    /,
) -> bool: ...
def unpack(
    codes: Buffer, scales: Buffer, kind: int, group: int, divides: bool, tensor_scale: float, out: Buffer, /
) -> bool: ...
def fake_quant(x: Buffer, kind: int, group: int, tensor_scale: float, out: Buffer, /) -> None: ...
def gptq(
    w: Buffer,
    columns: int,
    factor: Buffer,
    group: int,
    choice: int,
    tensor_scale: float,
    largest_code: float,
    importance: Buffer | None,
    codes: Buffer,
    scales: Buffer,
    /,
) -> bool: ...
def gemv(
    x: Buffer,
    kind: int,
    columns: int,
    codes: Buffer,
    scales: Buffer,
    group: int,
    divides: bool,
    tensor_scale: float,
    y: Buffer,
    /,
) -> None: ...
def from_dlpack(capsule: Any, /) -> tuple[Any, int, int, int, tuple[int, ...], tuple[int, ...] | None]: ...
def to_dlpack(owner: Buffer, code: int, bits: int, shape: tuple[int, ...], /) -> Any: ...
def to_ggml(codes: Buffer, scales: Buffer, out: Buffer, /) -> None: ...
def from_ggml(blocks: Buffer, codes: Buffer, scales: Buffer, /) -> None: ...
def swizzle(scales: Buffer, rows: int, columns: int, out: Buffer, /) -> None: ...
def unswizzle(tiles: Buffer, rows: int, columns: int, out: Buffer, /) -> None: ...
def kquantize(x: Buffer, kind: int, type: str, columns: int, importance: Buffer | None, out: Buffer, /) -> None: ...
def kdequantize(raw: Buffer, type: str, out: Buffer, /) -> None: ...
def variants() -> tuple[str, ...]: ...
def variant() -> str: ...
def set_variant(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(count: int, /) -> None: ...
