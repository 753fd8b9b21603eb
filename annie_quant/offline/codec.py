"""Number formats for torch tensors: NVFP4, and those to which servers round activations and KV caches.

NVFP4 is defined in annie_quant.nvfp4. CPU tensors are computed by its C codec. The torch form is for GPU tensors, and equals the
C codec bit for bit (tests/offline/test_linear.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np
import torch

from annie_quant import _nvfp4, gemm, nvfp4
from annie_quant.core.errors import EnvironmentFault

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MAX_E4M3 = 448.0
MIN_STEP = 1e-5  # ModelOpt's op for activations replaces a smaller step by 1
DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 2}  # as _nvfp4 numbers them
QK8_0 = 32  # values per block of ggml's Q8_0
QK_NVFP4 = 16
SCALE_OFFSETS = (
    0,
    -1,
    1,
    -2,
    2,
)  # neighbours of amax's scale code that llama.cpp tries, in its order
MAX_CODE = 0x7E  # E4M3's largest finite value, 448
# kinds of a quantized KV cache
_FP8 = "fp8"
NVFP4 = "nvfp4"
Round = Callable[[torch.Tensor], torch.Tensor]
CacheRounding = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]
]


def to_numpy(t: torch.Tensor) -> np.ndarray:
    """Return a CPU tensor as an array over the same memory if it is contiguous. bf16 and fp8 become ml_dtypes."""
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    if t.dtype == torch.float8_e4m3fn:
        return t.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return t.numpy()


def to_torch(a: np.ndarray) -> torch.Tensor:
    """Return an array as a tensor over the same memory; the reverse of to_numpy."""
    name = a.dtype.name
    if name == "bfloat16":
        return torch.from_numpy(a.view(np.uint16)).view(torch.bfloat16)
    if name == "float8_e4m3fn":
        return torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn)
    return torch.from_numpy(a)


def byte_arrays(*tensors: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the bytes of CPU tensors, over the same memory where they are contiguous."""
    return (t.detach().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors)


def dtype_name(dtype: torch.dtype) -> str:
    """torch.bfloat16 → "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def dequantize(
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    tensor_scale: float,
    group: int,
    dtype: torch.dtype,
    divisor: float | None = None,
) -> torch.Tensor:
    """Return the weights [N, K] in `dtype`: value * f32(block scale * tensor_scale).

    codes: uint8 [N, K/2]. block_scale: float8_e4m3fn [N, K/group]. divisor: the tensor scale's reciprocal as a
    compressed-tensors checkpoint stores it; the weights are then value * f32(block scale / divisor).
    """
    if codes.device.type != "cpu":
        return dequantize_torch(codes, block_scale, tensor_scale, divisor).to(dtype)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    reciprocal = None if divisor is None else np.float32(divisor)
    packed = nvfp4.Tensor(
        to_numpy(codes), to_numpy(block_scale), np.float32(tensor_scale), shape, group, reciprocal
    )
    return to_torch(nvfp4.unpack(packed, dtype=dtype_name(dtype)))


def dequantize_torch(
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    tensor_scale: float,
    divisor: float | None = None,
) -> torch.Tensor:
    """Dequantize in torch ops, for GPU tensors, to float32."""
    values = torch.tensor(E2M1, dtype=torch.float32, device=codes.device)
    # Both values of each byte; the low nibble is the even column.
    byte_values = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1)
    # The divisor is a tensor because torch multiplies by the reciprocal of a Python number on a GPU.
    factor = torch.full(
        (), tensor_scale if divisor is None else divisor, dtype=torch.float32, device=codes.device
    )
    scale = block_scale.float() * factor if divisor is None else block_scale.float() / factor
    weights = byte_values[codes.int()].view(*scale.shape, -1) * scale.unsqueeze(-1)
    return weights.view(*codes.shape[:-1], -1)


def packed_matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    block_scale: torch.Tensor,
    scale: float,
    group: int,
    divides: bool,
) -> torch.Tensor:
    """Return x W^T [..., N] in x's dtype for CPU tensors x [..., K] and packed weights [N, K], summed in float32.

    Weights are decoded in registers, so only the packed bytes are read. This is for few rows of x: with more than about
    four, one dequantize and a matrix product are faster. scale: the tensor scale, or its divisor if `divides`.
    """
    x = x.contiguous()
    y = torch.empty((*x.shape[:-1], codes.shape[0]), dtype=x.dtype)
    x_bytes, code_bytes, scale_bytes, y_bytes = byte_arrays(x, codes, block_scale, y)
    kind = DTYPE_CODES[dtype_name(x.dtype)]
    _nvfp4.gemv(x_bytes, kind, x.shape[-1], code_bytes, scale_bytes, group, divides, scale, y_bytes)
    return y


def fake_quant(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """Return x [..., K] rounded to NVFP4 and back, in x's dtype; block scales are computed from x.

    The gradient is passed straight through, as ModelOpt's dynamic block quantizer does by default.
    """
    with torch.no_grad():
        rounded = fake_quant_eager(x, tensor_scale, group)
    return x + (rounded - x).detach() if x.requires_grad else rounded


def fake_quant_eager(x: torch.Tensor, tensor_scale: float, group: int) -> torch.Tensor:
    """fake_quant without a gradient: by the C codec, on a GPU by our kernel if it is built, else by torch ops."""
    if x.device.type == "cpu":
        if x.shape[-1] % group:
            raise ValueError(f"rows of {x.shape[-1]} values, expected a multiple of {group}")
        x = x.contiguous()
        rounded = torch.empty_like(x)
        # 1e-12 is what nvfp4.fake_quant takes for the scale 0 of an all-zero tensor.
        scale = float(np.float32(tensor_scale)) or 1e-12
        x_bytes, rounded_bytes = byte_arrays(x, rounded)
        _nvfp4.fake_quant(x_bytes, DTYPE_CODES[dtype_name(x.dtype)], group, scale, rounded_bytes)
        return rounded
    if group == 16 and has_kernels():
        x = x.contiguous()
        if x.numel():
            gemm.fake_quant(x, tensor_scale, rounded := torch.empty_like(x))
            return rounded
        return x
    return fake_quant_torch(x, tensor_scale, group)


def fake_quant_torch(x: torch.Tensor, tensor_scale: float, group: int = 16) -> torch.Tensor:
    """fake_quant in torch ops. Divisions are true divisions: a product with the reciprocal differs near ties.

    As in ModelOpt's op, values that round to zero become +0.0, a block whose step is below 1e-5 gets step 1, and NaN becomes
    -6 steps and does not count for its block's largest magnitude.
    """

    def constant(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device=x.device)

    blocks = x.float().reshape(*x.shape[:-1], -1, group)
    amax = torch.where(blocks.isnan(), 0.0, blocks.abs()).amax(-1, keepdim=True)
    block_scale = (amax / constant(float(np.float32(6) * np.float32(tensor_scale)))).clamp_max(
        MAX_E4M3
    )
    step = block_scale.to(torch.float8_e4m3fn).float() * tensor_scale
    step = torch.where(step >= float(np.float32(MIN_STEP)), step, 1.0)
    a = (blocks / step).abs()
    values = torch.where(a.isnan(), 6.0, to_e2m1(a)) * step
    return torch.where(blocks >= 0, values, 0.0 - values).reshape(x.shape).to(x.dtype)


def round_weight(weight: torch.Tensor, tensor_scale: float) -> torch.Tensor:
    """Return a weight [N, K] packed as NVFP4 and unpacked again, in its own dtype and on its device."""
    if weight.device.type == "cuda":
        return fake_quant_torch(weight, tensor_scale)
    packed = nvfp4.pack(to_numpy(weight), tensor_scale=tensor_scale)
    return to_torch(nvfp4.unpack(packed, dtype_name(weight.dtype)))


def fake_quant_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return e4m3(clamp(x / scale, ±448)) * scale, computed in float32, in x's dtype. scale: one number, or one per token."""
    scale = scale.float()
    scale = scale.reshape(()) if scale.numel() == 1 else scale
    return (
        (x.float() / scale).clamp(-MAX_E4M3, MAX_E4M3).to(torch.float8_e4m3fn).float() * scale
    ).to(x.dtype)


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to ggml's Q8_0 and back: per block of 32 a float16 scale amax / 127 and 8-bit integers.

    Source: quantize_row_q8_0 of ggml-cpu, to which llama.cpp rounds the activations of NVFP4 products on CPUs. Integers are
    computed with the float32 scale, ties to even as its SIMD forms do. K must be a multiple of 32.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK8_0)
    amax = blocks.abs().amax(-1, keepdim=True)
    integers = (blocks * torch.where(amax > 0, 127 / amax, 0.0)).round()
    return (integers * (amax / 127).half().float()).reshape(x.shape).to(x.dtype)


def nvfp4_searched(x: torch.Tensor) -> torch.Tensor:
    """Round x [..., K] to NVFP4 as llama.cpp's native Blackwell kernel does, and back.

    Per block of 16 the E4M3 scale of amax / 6 and its four neighbours are tried, and the one with the smallest squared error is
    used; there is no tensor scale. Source: quantize_mmq_nvfp4 of ggml-cuda (ggml-org/llama.cpp #22196).
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, QK_NVFP4)
    amax = blocks.abs().amax(-1, keepdim=True)
    first = (amax / 6).clamp(max=MAX_E4M3).to(torch.float8_e4m3fn).view(torch.uint8).int()
    best = torch.zeros_like(blocks)
    best_error = torch.full_like(amax, torch.inf)
    for offset in SCALE_OFFSETS:
        code = first + offset
        valid = (code >= 0) & (code <= MAX_CODE)
        scale = code.clamp(0, MAX_CODE).to(torch.uint8).view(torch.float8_e4m3fn).float()
        candidate = to_e2m1(blocks / torch.where(scale > 0, scale, 1.0)) * scale
        error = (candidate - blocks).square().sum(-1, keepdim=True)
        better = valid & (error < best_error)
        best, best_error = (
            torch.where(better, candidate, best),
            torch.where(better, error, best_error),
        )
    return best.reshape(x.shape).to(x.dtype)


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the nearest values of E2M1, ties to the even code, clamped to ±6."""
    a = x.abs()
    # A tie goes to the even code, which is where half-way integers go, too.
    nearest = torch.where(
        a < 2, (a * 2).round() / 2, torch.where(a < 4, a.round(), (a / 2).round() * 2)
    ).clamp_max(6.0)
    return torch.copysign(nearest, x)


def cache_rounding(kind: str) -> CacheRounding:
    """Return f(attention module, keys, values) → both as a cache of this kind holds them, in their own dtype.

    kind: a dtype, "fp8" or "nvfp4". "fp8" divides by the checkpoint's k_scale and v_scale (buffers; 1.0 without them), saturates at
    448 and rounds to E4M3. "nvfp4" rounds blocks of 16 values of a head to E2M1 with an E4M3 scale each, with those two scales as
    tensor scales.
    """
    if kind == "float32":
        return lambda module, key, value: (key, value)
    if kind not in (_FP8, NVFP4):
        dtype = getattr(torch, kind)
        return lambda module, key, value: (
            key.to(dtype).to(key.dtype),
            value.to(dtype).to(value.dtype),
        )

    def rounded(
        module: torch.nn.Module, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return round_one(key, scale_of(module, "k_scale"), kind), round_one(
            value, scale_of(module, "v_scale"), kind
        )

    return rounded


def scale_of(module: torch.nn.Module, name: str) -> torch.Tensor:
    """Return the scale of an attention module or of its projection (compressed-tensors and ModelOpt), or 1.0."""
    scales = [
        getattr(child, name) for child in (module, *module.children()) if hasattr(child, name)
    ]
    return scales[0].float() if scales else torch.ones(())


def round_one(x: torch.Tensor, scale: torch.Tensor, kind: str) -> torch.Tensor:
    scale = scale.to(x.device)
    if kind == _FP8:
        return fake_quant_fp8(x, scale)
    return fake_quant(x.contiguous(), float(scale))


@functools.cache
def has_kernels() -> bool:
    """Return whether this package's CUDA kernels are built and have a GPU to run on."""
    try:
        return gemm.device_count() > 0
    except EnvironmentFault:
        return False


def rounding(dtype: str, in_place: bool = False) -> Round:
    """Return the function that rounds a float tensor to `dtype` and back; values keep their own dtype.

    in_place: in the tensor's own memory, which nothing else reads.
    """
    if dtype == "float32":
        return lambda x: x
    target = getattr(torch, dtype)
    return (lambda x: x.copy_(x.to(target))) if in_place else (lambda x: x.to(target).to(x.dtype))
