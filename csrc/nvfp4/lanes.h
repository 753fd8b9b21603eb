/* The vector types of the SIMD variants, and the operations on them that the compiler does not provide.
 *
 * - f32v, i32v, u32v: the compiler's vector types of LANES lanes, with its operators, for searches with one lane per block
 *   (sweep_lanes.h, kq_lanes.h)
 * - f32x16: 1, 2 or 4 of the processor's registers, or 16 floats without SIMD, for sums in a fixed order (gemv_lanes.h, gptq_lanes.h)
 *
 * A file that includes this one is compiled once per variant, with that variant's flags.
 */
#ifndef AQ_NVFP4_LANES_H
#define AQ_NVFP4_LANES_H

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* For functions with constant arguments, so that their loops have no branch on them. */
#define ALWAYS_INLINE static inline __attribute__((always_inline))

#ifndef AQ_SERIAL /* defined by the serial variant, which has no vectors */
/* ---- a vector of LANES lanes */

#if defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float f32v __attribute__((vector_size(4 * LANES)));
typedef int32_t i32v __attribute__((vector_size(4 * LANES)));
typedef uint32_t u32v __attribute__((vector_size(4 * LANES))); /* wraps around */

ALWAYS_INLINE f32v all_lanes(float f)
{
    return f - (f32v){0}; /* the compiler's form of a broadcast: -0.0 stays -0.0 */
}

ALWAYS_INLINE i32v all_lanes_i(int32_t i)
{
    return i - (i32v){0};
}

/* In each lane of a mask all bits are equal. */
ALWAYS_INLINE f32v pick(i32v mask, f32v yes, f32v no)
{
#if defined(__AVX2__)
    return (f32v)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (f32v)vbslq_f32((uint32x4_t)mask, (float32x4_t)yes, (float32x4_t)no);
#endif
}

ALWAYS_INLINE i32v pick_i(i32v mask, i32v yes, i32v no)
{
#if defined(__AVX2__)
    return (i32v)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
#else
    return (i32v)vbslq_s32((uint32x4_t)mask, (int32x4_t)yes, (int32x4_t)no);
#endif
}

/* a < b ? a : b and so on; b if a is NaN. b must not be NaN. */
ALWAYS_INLINE f32v least_of(f32v a, f32v b)
{
#if defined(__AVX2__)
    return (f32v)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return (f32v)vminnmq_f32((float32x4_t)a, (float32x4_t)b);
#endif
}

ALWAYS_INLINE f32v most_of(f32v a, f32v b)
{
#if defined(__AVX2__)
    return (f32v)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return (f32v)vmaxnmq_f32((float32x4_t)a, (float32x4_t)b);
#endif
}

ALWAYS_INLINE i32v least_of_i(i32v a, i32v b)
{
#if defined(__AVX2__)
    return (i32v)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return (i32v)vminq_s32((int32x4_t)a, (int32x4_t)b);
#endif
}

ALWAYS_INLINE i32v most_of_i(i32v a, i32v b)
{
#if defined(__AVX2__)
    return (i32v)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (i32v)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
#endif
}

ALWAYS_INLINE f32v root(f32v a)
{
#if defined(__AVX2__)
    return (f32v)_mm256_sqrt_ps((__m256)a);
#else
    return (f32v)vsqrtq_f32((float32x4_t)a);
#endif
}

ALWAYS_INLINE f32v to_floats(i32v v)
{
    return __builtin_convertvector(v, f32v);
}

ALWAYS_INLINE bool any_lane(i32v mask)
{
#if defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
    return vmaxvq_u32((uint32x4_t)mask) != 0;
#endif
}

/* a * b + c, rounded once: for error bounds alone, never for a result. */
ALWAYS_INLINE f32v roughly_fused(f32v a, f32v b, f32v c)
{
#if defined(__AVX2__)
    return (f32v)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return (f32v)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#endif
}

#endif

/* ---- sixteen floats: f32_part is the widest register, and PARTS of them are a f32x16 */

#if defined(__AVX512F__)
typedef __m512 f32_part;
#define part_load(p) _mm512_loadu_ps(p)
#define part_store(p, a) _mm512_storeu_ps(p, a)
#define part_all(f) _mm512_set1_ps(f)
#define part_add(a, b) _mm512_add_ps(a, b)
#define part_sub(a, b) _mm512_sub_ps(a, b)
#define part_mul(a, b) _mm512_mul_ps(a, b)
#define part_fused(a, b, c) _mm512_fmadd_ps(a, b, c)
#elif defined(__AVX2__)
typedef __m256 f32_part;
#define part_load(p) _mm256_loadu_ps(p)
#define part_store(p, a) _mm256_storeu_ps(p, a)
#define part_all(f) _mm256_set1_ps(f)
#define part_add(a, b) _mm256_add_ps(a, b)
#define part_sub(a, b) _mm256_sub_ps(a, b)
#define part_mul(a, b) _mm256_mul_ps(a, b)
#define part_fused(a, b, c) _mm256_fmadd_ps(a, b, c)
#elif defined(__aarch64__) && !defined(AQ_SERIAL)
typedef float32x4_t f32_part;
#define part_load(p) vld1q_f32(p)
#define part_store(p, a) vst1q_f32(p, a)
#define part_all(f) vdupq_n_f32(f)
#define part_add(a, b) vaddq_f32(a, b)
#define part_sub(a, b) vsubq_f32(a, b)
#define part_mul(a, b) vmulq_f32(a, b)
#define part_fused(a, b, c) vfmaq_f32(c, a, b)
#else
typedef float f32_part;
#define part_load(p) (*(p))
#define part_store(p, a) (*(p) = (a))
#define part_all(f) (f)
#define part_add(a, b) ((a) + (b))
#define part_sub(a, b) ((a) - (b))
#define part_mul(a, b) ((a) * (b))
#define part_fused(a, b, c) fmaf(a, b, c)
#endif

enum { PART = (int)(sizeof(f32_part) / sizeof(float)), PARTS = 16 / PART };
typedef struct {
    f32_part v[PARTS];
} f32x16;

ALWAYS_INLINE f32x16 f32x16_load(const float *p)
{
    f32x16 r;
    for (int i = 0; i < PARTS; i++)
        r.v[i] = part_load(p + PART * i);
    return r;
}

ALWAYS_INLINE void f32x16_store(float *p, f32x16 a)
{
    for (int i = 0; i < PARTS; i++)
        part_store(p + PART * i, a.v[i]);
}

ALWAYS_INLINE f32x16 f32x16_all(float f)
{
    f32x16 r;
    for (int i = 0; i < PARTS; i++)
        r.v[i] = part_all(f);
    return r;
}

ALWAYS_INLINE f32x16 f32x16_add(f32x16 a, f32x16 b)
{
    for (int i = 0; i < PARTS; i++)
        a.v[i] = part_add(a.v[i], b.v[i]);
    return a;
}

ALWAYS_INLINE f32x16 f32x16_mul(f32x16 a, f32x16 b)
{
    for (int i = 0; i < PARTS; i++)
        a.v[i] = part_mul(a.v[i], b.v[i]);
    return a;
}

/* c - a * b, with the product rounded first. */
ALWAYS_INLINE f32x16 f32x16_less_product(f32x16 c, f32x16 a, f32x16 b)
{
    for (int i = 0; i < PARTS; i++)
        c.v[i] = part_sub(c.v[i], part_mul(a.v[i], b.v[i]));
    return c;
}

/* a * b + c, rounded once in every variant. */
ALWAYS_INLINE f32x16 f32x16_fused(f32x16 a, f32x16 b, f32x16 c)
{
    for (int i = 0; i < PARTS; i++)
        c.v[i] = part_fused(a.v[i], b.v[i], c.v[i]);
    return c;
}

/* The sum of all lanes in one order: lanes i and i + 8, of these i and i + 4, then i and i + 2, then both. */
ALWAYS_INLINE float f32x16_sum(f32x16 a)
{
#if defined(__AVX2__)
#ifdef __AVX512F__
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v[0]), _mm512_extractf32x8_ps(a.v[0], 1));
#else
    const __m256 eight = _mm256_add_ps(a.v[0], a.v[1]);
#endif
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#elif defined(__aarch64__) && !defined(AQ_SERIAL)
    const float32x4_t four = vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
#else
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a.v[i] += a.v[i + half];
    return a.v[0];
#endif
}

#endif
