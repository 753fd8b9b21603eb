"""The C module's own calls: flat contiguous buffers. kind: 0 float32, 1 float16, 2 bfloat16."""

from typing import Any, TypeAlias

import numpy as np

# NumPy's stubs know the buffer protocol from Python 3.12 on alone.
_Buffer: TypeAlias = np.ndarray[Any, Any] | bytes | bytearray | memoryview

def amax(x: _Buffer, kind: int, /) -> float: ...
def pack(
    x: _Buffer,
    kind: int,
    group: int,
    choice: int,
    encoding: int,
    tensor_scale: float,
    largest_code: float,
    tensor_amax: float,
    importance: _Buffer | None,
    codes: _Buffer,
    scales: _Buffer,
    /,
) -> bool: ...
def unpack(
    codes: _Buffer,
    scales: _Buffer,
    kind: int,
    group: int,
    divides: bool,
    tensor_scale: float,
    out: _Buffer,
    /,
) -> bool: ...
def fake_quant(x: _Buffer, kind: int, group: int, tensor_scale: float, out: _Buffer, /) -> None: ...
def gptq(
    w: _Buffer,
    columns: int,
    factor: _Buffer,
    group: int,
    choice: int,
    tensor_scale: float,
    largest_code: float,
    importance: _Buffer | None,
    codes: _Buffer,
    scales: _Buffer,
    /,
) -> bool: ...
def gemv(
    x: _Buffer,
    kind: int,
    columns: int,
    codes: _Buffer,
    scales: _Buffer,
    group: int,
    divides: bool,
    tensor_scale: float,
    y: _Buffer,
    /,
) -> bool: ...
def to_ggml(codes: _Buffer, scales: _Buffer, out: _Buffer, /) -> bool: ...
def from_ggml(blocks: _Buffer, codes: _Buffer, scales: _Buffer, /) -> None: ...
def swizzle(scales: _Buffer, rows: int, columns: int, out: _Buffer, /) -> None: ...
def unswizzle(tiles: _Buffer, rows: int, columns: int, out: _Buffer, /) -> None: ...
def kquantize(
    x: _Buffer, kind: int, type: str, columns: int, importance: _Buffer | None, out: _Buffer, /
) -> int | None: ...
def kdequantize(raw: _Buffer, type: str, out: _Buffer, /) -> None: ...
def variants() -> tuple[str, ...]: ...
def variant() -> str: ...
def set_variant(name: str, /) -> None: ...
def threads() -> int: ...
def set_threads(count: int, /) -> None: ...
