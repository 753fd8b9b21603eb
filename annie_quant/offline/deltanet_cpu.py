"""Gated DeltaNet with the roundings of vLLM's CPU kernels, which differ from those of its GPU kernels (deltanet.py).

Source of the order of roundings: vLLM 0.32, csrc/cpu/sgl-kernels/fla.cpp. A prompt (chunk_gated_delta_rule_cpu) is computed with
bfloat16 operands of products and float32 sums and states, as on a GPU. The differences:
  k k^T          multiplies k without beta; beta and the decay follow in float32, then one rounding
  (I + A)^-1     each row is rounded before the next one is computed from it
  q S            q is multiplied by the decay e^G and rounded first; on a GPU the float32 product is multiplied by e^G
  state          k is multiplied by the decay up to the chunk's end and rounded; on a GPU the new values are
  exponentials   of decays are approximate (fast_exp), except that of a whole chunk
A decoded token (fused_sigmoid_gating_delta_rule_update_cpu) is computed in float32, as on a GPU. Queries and keys are normalized
with an epsilon of 1e-5 in both, 1e-6 on a GPU. The convolution's SiLU has an approximate reciprocal (conv.cpp there). Beta's
roundings are the profile's (profiles.py).

The approximate functions, bit for bit:
  fast_exp     csrc/cpu/sgl-kernels/vec.h, `_mm512_fexp_u20_ps`: up to 1.2e-4 off. Decays of DeltaNet's chunks
  exp_u20      PyTorch's Vectorized<float>::exp_u20: up to 20 units in the last place off. The SiLU of DeltaNet's convolution
  reciprocal   the instruction VRCP14PS: up to 2^-14 = 6.1e-5 off. The same SiLU
With exact functions a bfloat16 value in some hundred is another one, or in 10^5 for exp_u20: enough for other answers
(tests/perf/verdict.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from annie_quant.offline.codec import Round

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
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (outputs [B, T, H, Dv], final state [B, H, Dk, Dv] or None); the parameters are those of deltanet.gated_delta_rule."""
    r = to_operand
    kind, (batch, steps, heads, dk), dv = query.dtype, key.shape, value.shape[-1]
    if use_qk_l2norm_in_kernel:
        query, key = (x * (1 / (squared_length(x) + EPSILON).sqrt()) for x in (query, key))
    chunks = functools.partial(in_chunks, size=min(SERVED_CHUNK, steps))
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


def in_chunks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return x [B, T, H, ...] as float32 [B, H, ceil(T / size), size, ...], padded with zeros."""
    x = functional.pad(x.float().transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -x.shape[1] % size))
    return x.reshape(*x.shape[:2], -1, size, *x.shape[3:])


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
            query, key = (
                x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt() for x in (query, key)
            )
        return rule(query, key, value, **more)

    return decode


def silu_on_a_cpu(x: torch.Tensor) -> torch.Tensor:
    """Return x / (1 + e^-x) as the convolution's kernel computes it."""
    return x * reciprocal(1 + exp_u20(-x))


MANTISSA, EXPONENT_BIAS = 23, 127  # of float32
SEGMENTS = 6  # bits of the mantissa that choose a row of RECIPROCALS
USED = 16  # bits of the mantissa that VRCP14PS reads
LOG2_E, LN_2 = 1.4426950216293335, 0.6931471824645996  # as float32
U20_COEFFICIENTS = [
    float(np.float32(c))
    for c in (0.00828929059, 0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1)
]
# VRCP14PS on an AMD EPYC (Zen 4) is linear in each of 64 parts of [1, 2): (value at the begin in units of 2^-18, fall per step of
# the input's last bit that is used, in units of 2^-26). Intel's table is its own. Made by tests/perf/reciprocal_table.py.
RECIPROCALS = (
    (262137, 1009),
    (258102, 977),
    (254194, 949),
    (250400, 921),
    (246715, 893),
    (243143, 869),
    (239667, 843),
    (236294, 821),
    (233010, 797),
    (229820, 777),
    (226712, 755),
    (223690, 735),
    (220748, 717),
    (217883, 699),
    (215089, 681),
    (212364, 663),
    (209711, 647),
    (207121, 631),
    (204598, 617),
    (202131, 601),
    (199725, 587),
    (197375, 573),
    (195082, 561),
    (192837, 547),
    (190646, 535),
    (188504, 523),
    (186413, 513),
    (184362, 501),
    (182359, 491),
    (180397, 479),
    (178478, 469),
    (176599, 459),
    (174762, 451),
    (172959, 441),
    (171196, 433),
    (169464, 423),
    (167770, 415),
    (166109, 407),
    (164480, 399),
    (162883, 391),
    (161320, 385),
    (159781, 377),
    (158273, 369),
    (156795, 363),
    (155345, 357),
    (153917, 349),
    (152518, 343),
    (151144, 337),
    (149795, 331),
    (148469, 325),
    (147166, 319),
    (145890, 315),
    (144630, 309),
    (143393, 303),
    (142180, 299),
    (140983, 293),
    (139810, 289),
    (138655, 285),
    (137517, 279),
    (136403, 275),
    (135305, 271),
    (134223, 267),
    (133157, 263),
    (132107, 259),
)


def fast_exp(x: torch.Tensor) -> torch.Tensor:
    """Return e^x, float32: the bits of x log2(e) as a float32, less a cubic polynomial. e^0 is 0.99995.

    Source: Malossi, Ineichen, Bekas, Curioni, "Fast Exponential Computation on SIMD Architectures", 2015, section 3.
    """
    y = x * 1.44269504
    f = y - y.floor()
    error = (
        (f * -0.079204240219773236 - 0.22433836478672356) * f + 0.30354260500649682
    ) * f + 0.00010703434948458272
    bits = y.sub_(error).mul_(2.0**MANTISSA).add_(EXPONENT_BIAS * 2.0**MANTISSA)
    return (
        torch.where(bits < 2.0**MANTISSA, 0, bits).int().view(torch.float32)
    )  # below the least normal number it is 0


def exp_u20(x: torch.Tensor) -> torch.Tensor:
    """Return e^x, float32, as 2^n times a polynomial of the rest, in fused steps that round to float32.

    Source of the coefficients: PyTorch, aten/src/ATen/cpu/vec/vec512/vec512_float.h.
    """

    def rounded(value: torch.Tensor) -> torch.Tensor:
        return value.float().double()

    x = x.double().clamp(-87.33654, 88.72283)
    n = torch.floor(rounded(x * LOG2_E + 0.5))
    rest = rounded(x - n * LN_2)
    result = torch.full_like(rest, U20_COEFFICIENTS[0])
    for coefficient in U20_COEFFICIENTS[1:]:
        result = rounded(rest * result + coefficient)
    return (result * 2.0**n).float()


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """Return 1 / x, float32, of positive normal x, as VRCP14PS does. Above 2^125 it is 0."""
    begins, falls = _table(x.device)
    bits = x.float().view(torch.int32)
    mantissa, exponent = bits & ((1 << MANTISSA) - 1), bits >> MANTISSA
    segment = mantissa >> (MANTISSA - SEGMENTS)
    low = (mantissa >> (MANTISSA - USED)) & ((1 << (USED - SEGMENTS)) - 1)
    value = ((begins[segment] << 8) - falls[segment] * low) >> 9  # in units of 2^-17, at least 1/2
    exact = mantissa == 0  # a power of two
    result = ((2 * EXPONENT_BIAS - 1 - exponent) << MANTISSA) + (
        (value - (1 << USED)) << (MANTISSA - USED)
    )
    result = torch.where(exact, (2 * EXPONENT_BIAS - exponent) << MANTISSA, result)
    return torch.where(exponent < 2 * EXPONENT_BIAS - 2, result, 0).view(torch.float32)


@functools.cache
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    begins, falls = zip(*RECIPROCALS, strict=True)
    return torch.tensor(begins, dtype=torch.int32, device=device), torch.tensor(
        falls, dtype=torch.int32, device=device
    )
