"""The approximate exponentials and the reciprocal of vLLM's CPU kernels, bit for bit.

fast_exp     csrc/cpu/sgl-kernels/vec.h, `_mm512_fexp_u20_ps`: up to 1.2e-4 off. Decays of DeltaNet's chunks
exp_u20      PyTorch's Vectorized<float>::exp_u20: up to 20 units in the last place off. The SiLU of DeltaNet's convolution
reciprocal   the instruction VRCP14PS: up to 2^-14 = 6.1e-5 off. The same SiLU

With exact functions a bfloat16 value in some hundred is another one, or in 10^5 for exp_u20: enough for other answers
(docs/method.md).
"""

from __future__ import annotations

import functools

import numpy as np
import torch

MANTISSA, EXPONENT_BIAS = 23, 127  # of float32
SEGMENTS = 6  # bits of the mantissa that choose a row of RECIPROCALS
USED = 16  # bits of the mantissa that VRCP14PS reads
LOG2_E, LN_2 = 1.4426950216293335, 0.6931471824645996  # as float32
U20_COEFFICIENTS = [
    float(np.float32(c)) for c in (0.00828929059, 0.0418978221, 0.166676521, 0.499991506, 0.999999701, 1)
]
# VRCP14PS on an AMD EPYC (Zen 4) is linear in each of 64 parts of [1, 2): (value at the begin in units of 2^-18, fall per step of
# the input's last bit that is used, in units of 2^-26). Intel's table is its own. Made by tests/perf/reciprocal_table.py.
RECIPROCALS = (
    (262137, 1009), (258102, 977), (254194, 949), (250400, 921), (246715, 893), (243143, 869),
    (239667, 843), (236294, 821), (233010, 797), (229820, 777), (226712, 755), (223690, 735),
    (220748, 717), (217883, 699), (215089, 681), (212364, 663), (209711, 647), (207121, 631),
    (204598, 617), (202131, 601), (199725, 587), (197375, 573), (195082, 561), (192837, 547),
    (190646, 535), (188504, 523), (186413, 513), (184362, 501), (182359, 491), (180397, 479),
    (178478, 469), (176599, 459), (174762, 451), (172959, 441), (171196, 433), (169464, 423),
    (167770, 415), (166109, 407), (164480, 399), (162883, 391), (161320, 385), (159781, 377),
    (158273, 369), (156795, 363), (155345, 357), (153917, 349), (152518, 343), (151144, 337),
    (149795, 331), (148469, 325), (147166, 319), (145890, 315), (144630, 309), (143393, 303),
    (142180, 299), (140983, 293), (139810, 289), (138655, 285), (137517, 279), (136403, 275),
    (135305, 271), (134223, 267), (133157, 263), (132107, 259),
)  # fmt: skip


def fast_exp(x: torch.Tensor) -> torch.Tensor:
    """Return e^x, float32: the bits of x log2(e) as a float32, less a cubic polynomial. e^0 is 0.99995.

    Source: Malossi, Ineichen, Bekas, Curioni, "Fast Exponential Computation on SIMD Architectures", 2015, section 3.
    """
    y = x * 1.44269504
    f = y - y.floor()
    error = ((f * -0.079204240219773236 - 0.22433836478672356) * f + 0.30354260500649682) * f + 0.00010703434948458272
    bits = y.sub_(error).mul_(2.0**MANTISSA).add_(EXPONENT_BIAS * 2.0**MANTISSA)
    return torch.where(bits < 2.0**MANTISSA, 0, bits).int().view(torch.float32)  # below the least normal number it is 0


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
    result = ((2 * EXPONENT_BIAS - 1 - exponent) << MANTISSA) + ((value - (1 << USED)) << (MANTISSA - USED))
    result = torch.where(exact, (2 * EXPONENT_BIAS - exponent) << MANTISSA, result)
    return torch.where(exponent < 2 * EXPONENT_BIAS - 2, result, 0).view(torch.float32)


@functools.cache
def _table(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    begins, falls = zip(*RECIPROCALS, strict=True)
    return torch.tensor(begins, dtype=torch.int32, device=device), torch.tensor(falls, dtype=torch.int32, device=device)
