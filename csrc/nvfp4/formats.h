/* The scalar formats: E2M1, E4M3FN, bfloat16, IEEE half. All other files use these functions.
 *
 * E2M1: sign, 2 exponent bits, 1 mantissa bit: 0 .5 1 1.5 2 3 4 6 (OCP Microscaling v1.0, 5.3.3).
 * E4M3FN: bias 7, no infinity, 0x7F is NaN, largest 448 (OCP 8-bit floating point, table 1).
 */
#ifndef AQ_NVFP4_FORMATS_H
#define AQ_NVFP4_FORMATS_H

#include "common/scales.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Sums in another order, and tests for NaN that are left out, would change bytes. GCC and clang define these for -ffast-math and its parts.
 */
#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || defined(__ASSOCIATIVE_MATH__) ||                  \
    defined(__RECIPROCAL_MATH__)
#error "annie_quant's codec is exact to the bit: compile it without -ffast-math, -Ofast, -ffinite-math-only and -funsafe-math-optimizations"
#endif

enum number_kind { KIND_F32 = 0, KIND_F16 = 1, KIND_BF16 = 2 };

static inline size_t kind_size(int kind)
{
    return kind == KIND_F32 ? 4 : 2;
}

static inline uint32_t float_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float bits_float(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline float bf16_to_float(uint16_t h)
{
    return bits_float((uint32_t)h << 16);
}

static inline uint16_t float_to_bf16(float f)
{
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)(u >> 16 | 0x40); /* NaN becomes a quiet NaN */
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}

static inline float f16_to_float(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, rest = h & 0x7fffu;
    if (rest >= 0x7c00u)
        return bits_float(sign | 0x7f800000u | (rest & 0x3ffu) << 13);
    if (rest >= 0x400u)
        return bits_float(sign | ((rest << 13) + (112u << 23)));
    return bits_float(sign | float_bits((float)rest * 0x1p-24f));
}

static inline uint16_t float_to_f16(float f)
{
    uint32_t u = float_bits(f), sign = u >> 16 & 0x8000u, a = u & 0x7fffffffu;
    if (a > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | (a >> 13 & 0x3ffu));
    if (a >= 0x47800000u) /* 65536 and above */
        return (uint16_t)(sign | 0x7c00u);
    if (a < 0x38800000u) /* under 2^-14: the addition rounds to a multiple of 2^-24, ties to even */
        return (uint16_t)(sign | (float_bits(bits_float(a) + 0.5f) - 0x3f000000u));
    return (uint16_t)(sign | (a - (112u << 23) + 0xfffu + (a >> 13 & 1)) >> 13);
}

static inline float load_as_float(const void *x, int kind, size_t i)
{
    switch (kind) {
    case KIND_F32:
        return ((const float *)x)[i];
    case KIND_F16:
        return f16_to_float(((const uint16_t *)x)[i]);
    default:
        return bf16_to_float(((const uint16_t *)x)[i]);
    }
}

static inline void store_from_float(void *x, int kind, size_t i, float v)
{
    switch (kind) {
    case KIND_F32:
        ((float *)x)[i] = v;
        break;
    case KIND_F16:
        ((uint16_t *)x)[i] = float_to_f16(v);
        break;
    default:
        ((uint16_t *)x)[i] = float_to_bf16(v);
    }
}

static inline float e4m3_to_float(uint8_t b)
{
    uint32_t sign = (uint32_t)(b & 0x80u) << 24, rest = b & 0x7fu;
    if (rest == 0x7f)
        return bits_float(sign | 0x7fc00000u);
    if (rest >= 8)
        return bits_float(sign | ((rest << 20) + (120u << 23)));
    return bits_float(sign | float_bits((float)rest * 0x1p-9f));
}

/* Round 0 <= t <= 448 to nearest even; NaN gives NaN. The caller clamps. */
static inline uint8_t e4m3_from_clamped(float t)
{
    uint32_t u = float_bits(t);
    if (u > 0x7f800000u)
        return 0x7f;
    if (u < 0x3c800000u) /* under 2^-6: the addition rounds to a multiple of 2^-9 */
        return (uint8_t)(float_bits(t + 0x1p14f) - 0x46800000u);
    return (uint8_t)((u - (120u << 23) + 0x7ffffu + (u >> 20 & 1)) >> 20);
}

/* Whether no block scale is NaN or has a sign. Simple, so that the compiler vectorizes it; the scales are an eighth of the codes. */
static inline bool scales_valid(const uint8_t *scales, size_t count)
{
    uint8_t largest = 0;
    for (size_t i = 0; i < count; i++)
        largest = scales[i] > largest ? scales[i] : largest;
    return largest < AQ_FIRST_INVALID_SCALE;
}

static const float E2M1_VALUE[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};

/* Midpoints of adjacent values. A tie goes down at even indices and up at odd ones. */
static const float E2M1_MIDPOINT[7] = {.25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.f};

/* Return the index of the magnitude a = |x / step|; NaN gives 7. */
static inline unsigned e2m1_index(float a)
{
    return (unsigned)(!(a <= .25f)) + !(a < .75f) + !(a <= 1.25f) + !(a < 1.75f) + !(a <= 2.5f) + !(a < 3.5f) + !(a <= 5.f);
}

#endif
