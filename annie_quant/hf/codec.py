"""The NVFP4 codec for torch tensors: views into annie_quant.nvfp4 on a CPU, the same arithmetic in torch ops on a GPU.

No arithmetic of its own where the C codec can run; the torch form exists for tensors that live on a GPU and is
held to the codec bit for bit by tests/hf/test_linear.py. Definition of the format: annie_quant.nvfp4.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from annie_quant import _nvfp4, nvfp4

if TYPE_CHECKING:
    import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # between neighbouring magnitudes of E2M1
LARGEST_SCALE = 448.0
SMALLEST_STEP = 1e-5  # ModelOpt's op for activations takes 1 for a smaller step
KINDS = {"float32": 0, "float16": 1, "bfloat16": 2}


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
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    tensor_scale: float,
    group: int,
    dtype: Any,
    divisor: float | None = None,
) -> torch.Tensor:
    """Weights [N, K] in `dtype` from codes uint8 [N, K/2], block_scale float8_e4m3fn [N, K/group]: val * f32(scale *
    tensor_scale), or val * f32(scale / divisor) where the checkpoint keeps the tensor's scale as a divisor."""
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    if codes.device.type == "cpu":
        kept = None if divisor is None else np.float32(divisor)
        packed = nvfp4.Tensor(to_numpy(codes), to_numpy(block_scale), np.float32(tensor_scale), shape, group, kept)
        return to_torch(nvfp4.unpack(packed, dtype=str(dtype).removeprefix("torch.")))
    return dequantize_torch(codes, block_scale, tensor_scale, group, dtype, divisor)


def dequantize_torch(
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    tensor_scale: float,
    group: int,
    dtype: Any,
    divisor: float | None = None,
) -> torch.Tensor:
    """dequantize in torch ops, for tensors on a GPU."""
    import torch

    table = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
    pairs = torch.stack(
        (table.repeat(16), table.repeat_interleave(16)), -1
    )  # by byte: the low nibble is the even column
    # A divisor as a tensor: torch multiplies by the inverse of a Python number on a GPU.
    factor = torch.full((), tensor_scale if divisor is None else divisor, dtype=torch.float32, device=codes.device)
    scale = block_scale.float() * factor if divisor is None else block_scale.float() / factor
    values = pairs[codes.int()].view(*scale.shape, group) * scale.unsqueeze(-1)
    return values.view(*codes.shape[:-1], -1).to(dtype)


def product(
    x: torch.Tensor, codes: torch.Tensor, block_scale: torch.Tensor, scale: float, group: int, divides: bool
) -> torch.Tensor:
    """x [..., K] on a CPU times the packed weights [N, K], transposed → [..., N] in x's dtype.

    Each weight is decoded in registers, so only the packed bytes are read; sums are float32. For few rows: beyond four
    or so, dequantizing once and a matrix product are faster. scale is a divisor where `divides`.
    """
    import torch

    x, n = x.contiguous(), codes.shape[0]
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
    arrays = [t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in (x, codes, block_scale, out)]
    kind = KINDS[str(x.dtype).removeprefix("torch.")]
    _nvfp4.gemv(arrays[0], kind, x.shape[-1], arrays[1], arrays[2], group, divides, scale, arrays[3])
    return out


def fake_quant(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """x [..., K] rounded to NVFP4 and back, same dtype: one scale a block of `group` found from x, under a given
    tensor scale.

    The gradient passes straight through (as ModelOpt's dynamic block quantizer does by default).
    """
    import torch

    if torch.compiler.is_compiling():
        rounded = torch.ops.annie_quant.nvfp4_fake_quant(x, tensor_scale, group)
    else:
        with torch.no_grad():
            rounded = fake_quant_now(x, tensor_scale, group)
    return x + (rounded - x).detach() if x.requires_grad else rounded


def fake_quant_now(x: torch.Tensor, tensor_scale: float, group: int) -> torch.Tensor:
    """fake_quant by the C codec, by the GPU's own kernel where it is built, else by torch ops; no gradient."""
    import torch

    if x.device.type == "cpu":
        rounded = nvfp4.fake_quant(to_numpy(x), tensor_scale=np.float32(tensor_scale), group=group)
        return to_torch(rounded).view(x.shape)
    if group == 16 and kernels():
        from annie_quant import gemm

        x = x.contiguous()
        return gemm.fake_quant(x, tensor_scale, torch.empty_like(x)) if x.numel() else x
    return fake_quant_torch(x, tensor_scale, group)


def fake_quant_torch(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """fake_quant in torch ops. Divides are true divides: a reciprocal differs on near-ties.

    As ModelOpt's op does: what rounds to zero is +0.0; a block whose step is under 1e-5 gets the step 1; NaN becomes -6
    steps and is passed over when the block's largest magnitude is sought.
    """
    import torch

    def constant(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device=x.device)

    blocks = x.float().reshape(*x.shape[:-1], -1, group)
    largest = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1, keepdim=True)
    wanted = (largest / constant(float(np.float32(6) * np.float32(tensor_scale)))).clamp_max(LARGEST_SCALE)
    step = wanted.to(torch.float8_e4m3fn).float() * tensor_scale
    step = torch.where(step >= float(np.float32(SMALLEST_STEP)), step, 1.0)
    magnitude = (blocks / step).abs()
    # Ties go to the even code: at midpoints 0, 2, 4, 6 a tie stays below, at 1, 3, 5 it goes up; NaN goes all the way.
    index = sum(~(magnitude <= m) if i % 2 == 0 else ~(magnitude < m) for i, m in enumerate(MIDPOINTS))
    values = torch.tensor(E2M1[:8], dtype=torch.float32, device=x.device)[index] * step
    return torch.where(blocks >= 0, values, 0.0 - values).reshape(x.shape).to(x.dtype)


@functools.cache
def kernels() -> bool:
    """Whether this project's CUDA kernels are built and have a GPU to run on."""
    from annie_quant import gemm
    from annie_quant.errors import EnvironmentFault

    try:
        return gemm.device_count() > 0
    except EnvironmentFault:
        return False


@functools.cache
def register() -> Any:
    """Defines torch.ops.annie_quant.nvfp4_fake_quant once: fake_quant as torch.compile wants it."""
    import torch

    schema = "(Tensor x, float tensor_scale, int group) -> Tensor"

    @torch.library.custom_op("annie_quant::nvfp4_fake_quant", mutates_args=(), schema=schema)
    def op(x: Any, tensor_scale: float, group: int) -> Any:
        rounded = fake_quant_now(x, tensor_scale, group)
        return rounded.clone() if rounded is x else rounded

    @op.register_fake
    def _(x: Any, tensor_scale: float, group: int) -> Any:
        return torch.empty_like(x)

    return op
