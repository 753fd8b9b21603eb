"""The compiled CUDA module; annie_quant.gemm checks every argument and is what to call."""

from typing import Any

ARCHS: str
PLAN_FIELDS: dict[str, str]
Limits = tuple[int, int, int, bool, bool]
Report = tuple[int, int] | None
GroupedShape = tuple[int, int, int, int, int]

class CudaError(RuntimeError): ...

def device_count() -> int: ...
def device_info(device: int, /) -> dict[str, Any]: ...
def pointer_device(ptr: int, /) -> int: ...
def use_device(device: int, /) -> int: ...
def packed_bytes(n: int, k: int, /) -> int: ...
def repack(
    codes: int, scales: int, packed: int, n: int, k: int, fault: int, stream: int, /
) -> Report: ...
def limits() -> Limits: ...
def plan(
    m: int, n: int, k: int, path: str, limits: Limits | None = None, /
) -> tuple[str, tuple[int, ...]]: ...
def plan_needs(
    m: int, n: int, k: int, path: str, fields: tuple[int, ...], limits: Limits | None = None, /
) -> tuple[int, int]: ...
def w4a16(
    x: int,
    ldx: int,
    packed: int,
    scale: float,
    out: int,
    workspace: int,
    workspace_bytes: int,
    m: int,
    n: int,
    k: int,
    x_type: int,
    out_type: int,
    path: str,
    fields: tuple[int, ...],
    pdl: int,
    stream: int,
    /,
) -> None: ...
def linear_workspace(m: int, n: int, k: int, /) -> int: ...
def linear(
    x: int,
    ldx: int,
    packed: int,
    packed_bytes: int,
    scale: float,
    out: int,
    workspace: int,
    workspace_bytes: int,
    m: int,
    n: int,
    k: int,
    type: int,
    stream: int,
    /,
) -> None: ...
def w4a4(
    a: int,
    a_scale: int,
    w: int,
    w_scale: int,
    alpha: float,
    out: int,
    m: int,
    n: int,
    k: int,
    out_type: int,
    mode: int,
    fault: int,
    stream: int,
    /,
) -> None: ...
def plan_grouped(
    shape: GroupedShape, tile_tokens: int, limits: Limits | None = None, /
) -> tuple[int, int, int, int]: ...
def grouped_needs(
    shape: GroupedShape, fields: tuple[int, ...], limits: Limits | None = None, /
) -> tuple[int, int]: ...
def grouped(
    x: int,
    ldx: int,
    packed: int,
    packed_bytes: int,
    scales: int,
    sorted_pairs: int,
    tile_experts: int,
    padded: int,
    tiles: int,
    out: int,
    shape: GroupedShape,
    type: int,
    fields: tuple[int, ...],
    pdl: int,
    stream: int,
    /,
) -> None: ...
def fake_quant(x: int, type: int, blocks: int, scale: float, out: int, stream: int, /) -> None: ...
def malloc(size: int, /) -> int: ...
def free(ptr: int, /) -> None: ...
def copy(to: int, source: int, size: int, stream: int, /) -> None: ...
def fill(to: int, byte: int, size: int, stream: int, /) -> None: ...
def stream_new() -> int: ...
def stream_free(stream: int, /) -> None: ...
def stream_sync(stream: int, /) -> None: ...
def stream_after(stream: int, earlier: int, /) -> None: ...
def capture_begin(stream: int, /) -> None: ...
def capture_end(stream: int, /) -> int: ...
def graph_time(graph: int, stream: int, /) -> float: ...
def graph_free(graph: int, /) -> None: ...
