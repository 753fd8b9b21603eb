"""The W4A16 operators (torch.ops.annie_quant.nvfp4_linear, nvfp4_experts) on a CPU, decoded in NumPy, for tests without a GPU.

install(monkeypatch) replaces the preparation; of a packed weight each block of 256 rows is then its codes and its scales, padded as
the real one's rows and columns are, with the planted faults of the real repack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from annie_quant.gemm import grouped, oracle, torch_op

_libraries: list[Any] = []


def padded(n: int, k: int) -> tuple[int, int]:
    return -(-n // 32) * 32, -(-k // 128) * 128


def prepare(
    codes: Any, block_scale: Any, tensor_scale: float, *, fault: str | None = None
) -> torch_op.Prepared:
    n, k = codes.shape[0], codes.shape[1] * 2
    scales = block_scale.view(torch.uint8).numpy()
    bad = np.argwhere(scales >= 0x7F)
    if bad.size:
        raise ValueError(f"block_scale is NaN or negative at row {bad[0][0]}, block {bad[0][1]}")
    bytes_of = codes.numpy()
    if fault == "nibbles":
        bytes_of = bytes_of >> 4 | bytes_of << 4
    if fault == "scales":
        scales = scales[np.arange(n) ^ 1 if n % 2 == 0 else np.roll(np.arange(n), 1)]
    rows, columns = padded(n, k)
    to_codes, to_scales = (
        np.zeros((rows, columns // 2), np.uint8),
        np.zeros((rows, columns // 16), np.uint8),
    )
    to_codes[:n, : k // 2], to_scales[:n, : k // 16] = bytes_of, scales
    blocks = [slice(i, i + grouped.BLOCK_ROWS) for i in range(0, rows, grouped.BLOCK_ROWS)]
    parts = [part[b].ravel() for b in blocks for part in (to_codes, to_scales)]
    unused = np.zeros(columns - k, np.uint8)  # so that the size tells K
    packed = torch.from_numpy(np.concatenate([*parts, unused]))
    return torch_op.Prepared(packed, torch.tensor(tensor_scale, dtype=torch.float32), n)


def product(
    x: torch.Tensor, packed: torch.Tensor, tensor_scale: torch.Tensor, n: int
) -> torch.Tensor:
    k = x.shape[-1]
    rows, columns = padded(n, k)
    size = rows * columns * 9 // 16
    assert packed.numel() == size + columns - k, "the packed weight has another shape"
    codes, scales, rest = [], [], packed.numpy()[:size]
    while rest.size:
        of_block = min(grouped.BLOCK_ROWS, rest.size // (columns * 9 // 16))
        split, end = of_block * columns // 2, of_block * columns * 9 // 16
        codes.append(rest[:split].reshape(of_block, -1))
        scales.append(rest[split:end].reshape(of_block, -1))
        rest = rest[end:]
    assert sum(map(len, codes)) == rows
    codes, scales = (np.concatenate(parts)[:n] for parts in (codes, scales))
    codes, scales = codes[:, : k // 2], scales[:, : k // 16]
    weight = torch.from_numpy(
        oracle.dequantize(codes, scales, tensor_scale.item()).astype(np.float32)
    )
    return (x.float() @ weight.t()).to(x.dtype)


def experts_write(
    out: torch.Tensor,
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    sorted_pairs: torch.Tensor,
    tile_experts: torch.Tensor,
    padded: torch.Tensor,
    top_k: int,
    tile_tokens: int,
) -> None:
    """Compute tile by tile, as the blocks of csrc/gemm/grouped.cu do: only what a tile holds counts, not where its pairs belong."""
    pairs, n = out.shape
    assert (
        pairs == x.shape[0] * top_k
        and out.is_contiguous()
        and sorted_pairs.numel() >= tile_experts.numel() * tile_tokens
    )
    for tile, expert in enumerate(tile_experts.tolist()):
        if tile * tile_tokens >= int(padded) or not 0 <= expert < packed.shape[0]:
            continue
        of_tile = sorted_pairs[tile * tile_tokens : (tile + 1) * tile_tokens].long()
        of_tile = of_tile[(of_tile >= 0) & (of_tile < pairs)]
        out[of_tile] = product(x[of_tile // top_k], packed[expert], scales[expert], n)


def install(monkeypatch: Any) -> None:
    """Define the operator for CPU tensors and let `torch_op.prepare` make weights for it."""
    torch_op.register()
    grouped.register()
    if not _libraries:
        library = torch.library.Library("annie_quant", "IMPL")
        library.impl("nvfp4_linear", product, "CPU")
        library.impl("nvfp4_experts_out", experts_write, "CPU")
        _libraries.append(library)
    monkeypatch.setattr(torch_op, "prepare", prepare)
