"""The NVFP4 codec for torch tensors: views into annie_quant.nvfp4 on a CPU, the same arithmetic in torch ops on a GPU.

No arithmetic of its own where the C codec can run; the torch form exists for tensors that live on a GPU and is
held to the codec bit for bit by tests/test_runtime_linear.py. Definition of the format: shared spec, nvfp4.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from annie_quant import nvfp4

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes of E2M1
SMALLEST_SCALE = 2.0**-9  # the least positive E4M3 number
LARGEST_SCALE = 448.0


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """A contiguous CPU tensor as an array over the same memory; bf16 and fp8 come out as ml_dtypes."""
    import ml_dtypes
    import torch

    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    if t.dtype == torch.float8_e4m3fn:
        return t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return t.numpy()


def to_torch(a: np.ndarray) -> torch.Tensor:
    """The reverse of to_numpy, over the same memory."""
    import torch

    name = a.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
    if name == "float8_e4m3fn":
        return torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(a)


def dequantize(
    codes: torch.Tensor, block_scale: torch.Tensor, tensor_scale: float, group: int, dtype: Any
) -> torch.Tensor:
    """Weights [N, K] in `dtype` from codes uint8 [N, K/2], block_scale float8_e4m3fn [N, K/group]: val * f32(scale *
    tensor_scale)."""
    import torch

    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    if codes.device.type == "cpu":
        packed = nvfp4.Tensor(to_numpy(codes), to_numpy(block_scale), np.float32(tensor_scale), shape, group)
        return to_torch(nvfp4.unpack(packed, dtype=str(dtype).removeprefix("torch.")))
    table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
    values = torch.stack((table[(codes & 15).long()], table[(codes >> 4).long()]), -1).view(shape)
    scale = block_scale.float() * torch.tensor(tensor_scale, dtype=torch.float32, device=codes.device)
    return (values.view(*scale.shape, group) * scale.unsqueeze(-1)).view(shape).to(dtype)


def fake_quant(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """x [..., K] rounded to NVFP4 and back, same dtype: one scale a block of `group` found from x, under a given
    tensor scale.

    The gradient passes straight through (as ModelOpt's dynamic block quantizer does by default).
    """
    import torch

    with torch.no_grad():
        if x.device.type == "cpu":
            rounded = to_torch(nvfp4.fake_quant(to_numpy(x), tensor_scale=np.float32(tensor_scale), group=group)).view(
                x.shape
            )
        else:
            rounded = fake_quant_torch(x, tensor_scale, group)
    return x + (rounded - x).detach() if x.requires_grad else rounded


def fake_quant_torch(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """fake_quant in torch ops, for tensors on a GPU. Divides are true divides: a reciprocal differs on near-ties."""
    import torch

    blocks = x.float().reshape(*x.shape[:-1], -1, group)
    scale_of_all = torch.tensor(tensor_scale, dtype=torch.float32, device=x.device)
    wanted = blocks.abs().amax(-1, keepdim=True) / (6 * scale_of_all)
    wanted = torch.where(wanted == 0, torch.ones_like(wanted), wanted).clamp(SMALLEST_SCALE, LARGEST_SCALE)
    scale = wanted.to(torch.float8_e4m3fn).float() * scale_of_all
    magnitude = (blocks / scale).abs()
    # Ties go to the even code: at midpoints 0, 2, 4, 6 a tie stays below, at 1, 3, 5 it goes up.
    index = sum((magnitude > m) if i % 2 == 0 else (magnitude >= m) for i, m in enumerate(MIDPOINTS))
    values = torch.tensor(E2M1[:8], dtype=torch.float32, device=x.device)[index]
    return (torch.where(blocks < 0, -values, values) * scale).reshape(x.shape).to(x.dtype)
