"""Gated DeltaNet without flash-linear-attention, for rows without padding.

The recurrence of offline/deltanet.py in operations that need few launches: chunks of 64 steps, and the triangular systems of a
chunk by inverses of blocks of 2, 4, ... 64. transformers' own form solves them in 63 sequential steps. Products are in TF32 where
the inputs are bfloat16, which is finer than the bfloat16 operands of servers' kernels; inverses, decays and sums are float32.
Source of the rule: Yang et al., Gated Delta Networks (arXiv 2412.06464).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from annie_quant.offline import deltanet
from annie_quant.quantize.backend import has_triton, tensor_cores

CHUNK = 64  # a power of two
CPU_CHUNK = 20  # about this many steps on a CPU; chunks of equal length need little padding


@dataclass(frozen=True)
class DeltaInputs:
    """The inputs of the rule, which begins with a state of zeros.

    query, key: [B, T, H, Dk].
    value: [B, T, H, Dv].
    log_decay, beta: [B, T, H].
    norm: divide queries and keys by their length.
    tf32: multiply in TF32 on a GPU.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor
    norm: bool
    tf32: bool


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return (outputs [B, T, H, Dv], None). The interface is transformers'; g is the log decay."""
    x = DeltaInputs(query, key, value, g, beta, use_qk_l2norm_in_kernel, query.dtype == torch.bfloat16)
    kernels = kernels_for(query, value)
    return kernels.outputs(x) if kernels else in_torch(x), None


def in_torch(x: DeltaInputs) -> torch.Tensor:
    """Return the rule's outputs [B, T, H, Dv] in the query's dtype, by torch operations, which autograd can follow."""
    result = scan(chunk_parts(x), x.tf32)
    return result.flatten(2, 3)[:, :, : x.key.shape[1]].transpose(1, 2).to(x.query.dtype)


def kernels_for(*heads: torch.Tensor) -> Any:
    """Return the module with the kernels, or None without a GPU or Triton, or for heads of other widths."""
    if not (heads[0].is_cuda and has_triton()):
        return None
    from annie_quant.quantize import delta_kernel

    return delta_kernel if delta_kernel.usable(*heads) else None


def chunk_parts(inputs: DeltaInputs) -> tuple[torch.Tensor, ...]:
    """Return what `scan` reads: q, w [B, H, C, CHUNK, Dk], u [..., Dv], within [..., CHUNK], k [..., Dk], decay [B, H, C, 1, 1].

    All are float32.
    """
    batch, steps, heads, dk = inputs.key.shape
    query, key = inputs.query.float(), inputs.key.float()
    if inputs.norm:
        query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6)
        key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    pad = -steps % CHUNK

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, ...] -> [B, H, T / CHUNK, CHUNK, ...]
        x = functional.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, pad))
        return x.reshape(batch, heads, -1, CHUNK, *x.shape[3:])

    q, k, v = chunks(query) * dk**-0.5, chunks(key), chunks(inputs.value)
    log_decay, b = chunks(inputs.log_decay).cumsum(-1), chunks(inputs.beta).unsqueeze(-1)
    between = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).tril().exp()  # above the diagonal: 1, and not used
    inverse = unit_lower_inverse(((k * b) @ k.transpose(-1, -2) * between).tril(-1))
    growth = log_decay.exp().unsqueeze(-1)
    last = log_decay[..., -1:]
    with tensor_cores(inputs.tf32):
        u, w = (inverse @ torch.cat((v * b, k * (growth * b)), -1)).split((v.shape[-1], dk), -1)
        within = (q @ k.transpose(-1, -2) * between).tril()
    return q * growth, w, u, within, k * (last - log_decay).exp().unsqueeze(-1), last.exp().unsqueeze(-1)


def scan(parts: Sequence[torch.Tensor], tf32: bool) -> torch.Tensor:
    """Return the outputs [B, H, C, CHUNK, Dv] of chunk_parts: a state passes from chunk to chunk."""
    q, _, u, *_ = parts
    state = q.new_zeros(*q.shape[:2], q.shape[-1], u.shape[-1])
    out = []
    with tensor_cores(tf32):
        for q_c, w_c, u_c, within_c, k_c, decay_c in zip(*(x.unbind(2) for x in parts), strict=True):
            new = u_c - w_c @ state
            out.append(q_c @ state + within_c @ new)
            state = state * decay_c + k_c.transpose(-1, -2) @ new
    return torch.stack(out, 2)


def unit_lower_inverse(lower: torch.Tensor) -> torch.Tensor:
    """Return (I + A)^-1 for A the strictly lower part of [..., n, n], n a power of two.

    Blocks are inverted in pairs: the inverse of [[P, 0], [R, Q]] is [[P', 0], [-Q' R P', Q']]. As forward substitution does, this
    only adds products of entries of A in their order; a product of powers of A would lose all digits where keys repeat.
    """
    n = lower.shape[-1]
    inverse = torch.ones_like(lower[..., :1]).unsqueeze(-1)  # [..., n, 1, 1], the diagonal's blocks
    size = 1
    while size < n:
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        pairs = lower.unflatten(-2, (-1, 2 * size)).unflatten(-1, (-1, 2 * size))  # [..., n/2s, 2s, n/2s, 2s]
        corner = pairs.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)[..., size:, :size]
        corner = -(second @ corner @ first)
        top = torch.cat((first, torch.zeros_like(first)), -1)
        inverse = torch.cat((top, torch.cat((corner, second), -1)), -2)
        size *= 2
    return inverse.squeeze(-3)


def causal_conv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, **_: object
) -> torch.Tensor:
    """Return the depthwise causal convolution [B, C, T] of x [B, C, T] with weight [C, K], as K shifted sums in float32.

    cuDNN's depthwise convolution of bfloat16 takes far longer.
    """
    if x.is_cuda and has_triton():
        from annie_quant.quantize import delta_kernel

        return delta_kernel.causal_conv(x, weight, bias, activation in ("silu", "swish"))
    width, steps = weight.shape[-1], x.shape[-1]
    padded = functional.pad(x, (width - 1, 0))
    total = torch.zeros_like(x, dtype=torch.float32) if bias is None else bias[:, None].float().expand_as(x)
    for i in range(width):
        total = total + padded[..., i : i + steps].float() * weight[:, i, None].float()
    return (functional.silu(total) if activation in ("silu", "swish") else total).to(x.dtype)


def use_own_delta_rule(model: torch.nn.Module, device: str) -> None:
    """Make DeltaNet layers without flash-linear-attention compute faster: on a CPU as in evaluation, in half the time."""
    for layer in deltanet.delta_layers(model):
        theirs = layer.chunk_gated_delta_rule
        if theirs.__name__ != "torch_chunk_gated_delta_rule":
            continue
        if device.startswith("cuda"):
            layer.chunk_gated_delta_rule = gated_delta_rule
            layer.causal_conv1d_fn = layer.causal_conv1d_fn or causal_conv
        else:
            layer.chunk_gated_delta_rule = on_cpu
            layer.causal_conv1d_fn = conv_on_cpu


def continue_ragged_rows(model: torch.nn.Module, batch: deltanet.RaggedBatch) -> None:
    """Let each row of a batch keep the state after its own last token in DeltaNet layers."""
    for layer in deltanet.delta_layers(model):
        layer.chunk_gated_delta_rule = deltanet.ragged_rule(layer.chunk_gated_delta_rule, batch)
        layer.causal_conv1d_fn = deltanet.ragged_conv(
            layer.causal_conv1d_fn or deltanet.causal_conv, batch, layer.layer_idx
        )


def conv_on_cpu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None, **_: Any
) -> torch.Tensor:
    """Return deltanet.causal_conv as shifted sums, which take a fraction of the time of torch's conv1d."""
    total = x * weight[:, -1:]
    for i in range(1, min(weight.shape[-1], x.shape[-1])):
        total[..., i:].addcmul_(x[..., :-i], weight[:, -1 - i, None])
    total = total if bias is None else total.add_(bias[:, None])
    return functional.silu(total, inplace=True) if activation in ("silu", "swish") else total


def on_cpu(*args: Any, **options: Any) -> Any:
    """Return deltanet.gated_delta_rule in chunks of about CPU_CHUNK steps."""
    steps = args[0].shape[1]
    chunks = math.ceil(steps / CPU_CHUNK)
    return deltanet.gated_delta_rule(*args, **options, chunk=math.ceil(steps / chunks))
