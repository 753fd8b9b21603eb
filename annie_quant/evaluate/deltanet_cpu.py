"""Gated DeltaNet with the roundings of vLLM's CPU kernels, which differ from those of its GPU kernels (deltanet.py).

Source of the order of roundings: vLLM 0.32, csrc/cpu/sgl-kernels/fla.cpp. A prompt (chunk_gated_delta_rule_cpu) is computed with
bfloat16 operands of products and float32 sums and states, as on a GPU. The differences:
  k k^T          multiplies k without beta; beta and the decay follow in float32, then one rounding
  (I + A)^-1     each row is rounded before the next one is computed from it
  q S            q is multiplied by the decay e^G and rounded first; on a GPU the float32 product is multiplied by e^G
  state          k is multiplied by the decay up to the chunk's end and rounded; on a GPU the new values are
  exponentials   of decays are approximate (approximate.py), except that of a whole chunk
A decoded token (fused_sigmoid_gating_delta_rule_update_cpu) is computed in float32, as on a GPU. Queries and keys are normalized
with an epsilon of 1e-5 in both, 1e-6 on a GPU. The convolution's SiLU has an approximate reciprocal (conv.cpp there). Beta's
roundings are the profile's (hf/profiles.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from annie_quant.evaluate.approximate import exp_u20, fast_exp, reciprocal
from annie_quant.hf.emulation import Round

SERVED_CHUNK = 64  # steps, of flash-linear-attention and of vLLM's CPU kernel
EPSILON = 1e-5


def gated_delta_rule_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    to_operand: Round,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (outputs [B, T, H, Dv], final state [B, H, Dk, Dv] or None); the parameters are those of deltanet.gated_delta_rule."""
    r = to_operand
    kind, (batch, steps, heads, dk), dv = query.dtype, key.shape, value.shape[-1]
    if use_qk_l2norm_in_kernel:
        query, key = (x * (1 / (squared_length(x) + EPSILON).sqrt()) for x in (query, key))
    size = min(SERVED_CHUNK, steps)
    pad = -steps % size

    def chunks(x: torch.Tensor) -> torch.Tensor:  # [B, T, H, ...] -> [B, H, T / size, size, ...]
        x = functional.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, pad))
        return x.reshape(batch, heads, -1, size, *x.shape[3:])

    q, k, v = r(chunks(query) * dk**-0.5), r(chunks(key)), chunks(value)
    log_decay, b = chunks(g).cumsum(-1).unsqueeze(-1), chunks(beta).unsqueeze(-1)
    k_t = k.transpose(-1, -2)
    between = fast_exp((log_decay - log_decay.transpose(-1, -2)).tril_()).tril_()
    inverse = rounded_inverse(r(((k @ k_t) * b * between).tril_(-1)), r)
    growth = fast_exp(log_decay)
    w, u = r(inverse @ r(k * b * growth)), r(inverse @ r(v * b))
    within = r((q @ k_t) * between)
    grown_q = r(q * growth)
    last = log_decay[..., -1:, :]
    k_to_end = r(k * fast_exp(last - log_decay)).transpose(-1, -2)
    decay = last.exp()
    state = q.new_zeros(batch, heads, dk, dv) if initial_state is None else initial_state.float()
    out = torch.empty_like(v)
    for c in range(v.shape[2]):
        copy = r(state)
        new = r(u[:, :, c] - w[:, :, c] @ copy)
        out[:, :, c] = grown_q[:, :, c] @ copy + within[:, :, c] @ new
        state = state * decay[:, :, c] + k_to_end[:, :, c] @ new
    out = out.reshape(batch, heads, -1, dv)[:, :, :steps].transpose(1, 2).to(kind)
    return out, state if output_final_state else None


def squared_length(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares [..., 1] of bfloat16 values [..., D], float32, summed in the order of the kernel's instructions.

    VDPBF16PS adds the products of a pair to each of 16 sums, the second one first; these are then added in halves. Another order
    is another bfloat16 in some 10^5 of the normalized values, and those decide answers.
    """
    if x.shape[-1] % 32:
        return x.square().sum(-1, keepdim=True)
    squares = x.float().square().unflatten(-1, (-1, 16, 2))
    total = torch.zeros_like(squares[..., 0, :, 0])
    for part in range(squares.shape[-3]):
        total = total + squares[..., part, :, 1] + squares[..., part, :, 0]
    while total.shape[-1] > 1:
        low, high = total.chunk(2, -1)
        total = low + high
    return total


def rounded_inverse(lower: torch.Tensor, to_operand: Round) -> torch.Tensor:
    """Return (I + A)^-1 of strictly lower A [..., n, n] by forward substitution; each row is rounded before it is used."""
    inverse = -lower
    for i in range(1, inverse.shape[-1]):
        row = inverse[..., i, None, :i]
        inverse[..., i, :i] = to_operand((row + row @ inverse[..., :i, :i]).squeeze(-2))
    inverse.diagonal(dim1=-2, dim2=-1).fill_(1)
    return inverse


def normalized_as_on_a_cpu(rule: Callable) -> Callable:
    """Wrap a rule so that its queries and keys are normalized as vLLM's CPU kernel normalizes those of a decoded token."""

    def decode(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **more: Any,
    ) -> Any:
        if use_qk_l2norm_in_kernel:
            query, key = (x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (query, key))
        return rule(query, key, value, **more)

    return decode


def silu_on_a_cpu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + e^-x) as the convolution's kernel computes it."""
    return x * reciprocal(1 + exp_u20(-x))
