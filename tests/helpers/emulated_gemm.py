"""The W4A16 operators on a CPU: torch.ops.annie_quant.nvfp4_linear and nvfp4_experts, decoded in NumPy, for tests without a GPU.

install(monkeypatch) replaces the preparation; a packed weight is then its codes and scales one after the other, padded as the
real one's rows and columns are, with the planted faults of the real repack.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from annie_quant.gemm import grouped, oracle, torch_op

_libraries: list[Any] = []


def padded(n: int, k: int) -> tuple[int, int]:
    return -(-n // 32) * 32, -(-k // 128) * 128


def prepare(codes: Any, block_scale: Any, tensor_scale: float, *, fault: str | None = None) -> torch_op.Prepared:
    n, k = codes.shape[0], codes.shape[1] * 2
    scales = block_scale.view(torch.uint8).numpy()
    bad = np.argwhere((scales >= 0x7F) & (scales != 0x80))
    if bad.size:
        raise ValueError(f"block_scale is NaN or negative at row {bad[0][0]}, block {bad[0][1]}")
    bytes_of = codes.numpy()
    if fault == "nibbles":
        bytes_of = bytes_of >> 4 | bytes_of << 4
    if fault == "scales":
        scales = scales[np.arange(n) ^ 1 if n % 2 == 0 else np.roll(np.arange(n), 1)]
    rows, columns = padded(n, k)
    to_codes, to_scales = np.zeros((rows, columns // 2), np.uint8), np.zeros((rows, columns // 16), np.uint8)
    to_codes[:n, : k // 2], to_scales[:n, : k // 16] = bytes_of, scales
    packed = torch.from_numpy(np.concatenate([to_codes.ravel(), to_scales.ravel()]))
    return torch_op.Prepared(packed, torch.tensor(tensor_scale, dtype=torch.float32), n)


def product(x: torch.Tensor, packed: torch.Tensor, tensor_scale: torch.Tensor, n: int) -> torch.Tensor:
    k = x.shape[-1]
    rows, columns = padded(n, k)
    codes = packed[: rows * columns // 2].view(rows, -1)[:n, : k // 2].numpy()
    scales = packed[rows * columns // 2 :].view(rows, -1)[:n, : k // 16].numpy()
    weight = torch.from_numpy(oracle.dequantize(codes, scales, tensor_scale.item()).astype(np.float32))
    return (x.float() @ weight.t()).to(x.dtype)


def experts_product(
    x: torch.Tensor,
    packed: torch.Tensor,
    scales: torch.Tensor,
    n: int,
    sorted_pairs: torch.Tensor,
    tile_experts: torch.Tensor,
    padded: torch.Tensor,
    top_k: int,
    tile_tokens: int,
) -> torch.Tensor:
    """Compute tile by tile, as the blocks of csrc/gemm/grouped.cu do: only what a tile holds counts, not where its pairs belong."""
    pairs = x.shape[0] * top_k
    out = torch.zeros(pairs, n, dtype=x.dtype)
    for tile, expert in enumerate(tile_experts.tolist()):
        if tile * tile_tokens >= int(padded) or not 0 <= expert < packed.shape[0]:
            continue
        of_tile = sorted_pairs[tile * tile_tokens : (tile + 1) * tile_tokens].long()
        of_tile = of_tile[(of_tile >= 0) & (of_tile < pairs)]
        out[of_tile] = product(x[of_tile // top_k], packed[expert], scales[expert], n)
    return out


def install(monkeypatch: Any) -> None:
    """Define the operator for CPU tensors and let `torch_op.prepare` make weights for it."""
    torch_op.register()
    grouped.register()
    if not _libraries:
        library = torch.library.Library("annie_quant", "IMPL")
        library.impl("nvfp4_linear", product, "CPU")
        library.impl("nvfp4_experts", experts_product, "CPU")
        _libraries.append(library)
    monkeypatch.setattr(torch_op, "prepare", prepare)
