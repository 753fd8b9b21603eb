/* A row of packed weights times a few rows of x, one source for all variants: the same sums in the same order.
 *
 * Each of 32 columns modulo 32 has its own sum of fused multiply-adds; at the end the sums of an even column and of the odd one after it
 * are added, then the sixteen results (f32x16_sum).
 */
#ifndef AQ_NVFP4_GEMV_LANES_H
#define AQ_NVFP4_GEMV_LANES_H

#include "gemv.h"
#include "lanes.h"

/* float32(scale * tensor_scale), or divided by it, for n scale bytes. Several at a time, through a half whose bits are those of E4M3 and
 * which is 256 times smaller, subnormals included: one after the other they would take as long as the products. */
static void block_steps(const struct gemv_plan *plan, const uint8_t *restrict scales, size_t n, float *restrict to)
{
    const float factor = plan->tensor_scale;
    const bool divides = plan->divides;
    size_t i = 0;
#if defined(__AVX2__)
    const __m128i nan = _mm_set1_epi16(0x7f00), half_nan = _mm_set1_epi16(0x7e00);
    const __m256 all = _mm256_set1_ps(factor);
    for (; i + 8 <= n; i += 8) {
        const __m128i high = _mm_unpacklo_epi8(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i *)(const void *)(scales + i)));
        const __m128i number = _mm_and_si128(_mm_srai_epi16(high, 1), _mm_set1_epi16((short)0xbf80));
        const __m128i is_nan = _mm_cmpeq_epi16(_mm_and_si128(high, nan), nan);
        const __m256 s = _mm256_mul_ps(_mm256_cvtph_ps(_mm_blendv_epi8(number, half_nan, is_nan)), _mm256_set1_ps(256.f));
        _mm256_storeu_ps(to + i, divides ? _mm256_div_ps(s, all) : _mm256_mul_ps(s, all));
    }
#elif defined(__aarch64__) && !defined(AQ_SERIAL)
    const int16x8_t nan = vdupq_n_s16(0x7f00), half_nan = vdupq_n_s16(0x7e00);
    const float32x4_t all = vdupq_n_f32(factor);
    for (; i + 8 <= n; i += 8) {
        const int16x8_t high = vreinterpretq_s16_u16(vshll_n_u8(vld1_u8(scales + i), 8));
        const int16x8_t number = vandq_s16(vshrq_n_s16(high, 1), vdupq_n_s16((int16_t)0xbf80));
        const float16x8_t half = vreinterpretq_f16_s16(vbslq_s16(vceqq_s16(vandq_s16(high, nan), nan), half_nan, number));
        const float32x4_t s[2] = {vmulq_n_f32(vcvt_f32_f16(vget_low_f16(half)), 256.f), vmulq_n_f32(vcvt_high_f32_f16(half), 256.f)};
        for (int part = 0; part < 2; part++)
            vst1q_f32(to + i + 4 * part, divides ? vdivq_f32(s[part], all) : vmulq_f32(s[part], all));
    }
#endif
    for (; i < n; i++)
        to[i] = divides ? e4m3_to_float(scales[i]) / factor : e4m3_to_float(scales[i]) * factor;
}

/* Most rows of x at once: more sums would not fit into the registers. */
#if defined(__AVX512F__)
enum { TOGETHER = 4 };
#else
enum { TOGETHER = 3 };
#endif

/* The values of the low and of the high nibbles of sixteen bytes. */
ALWAYS_INLINE void e2m1_values(const uint8_t *codes, f32x16 *low, f32x16 *high)
{
#if defined(__AVX512F__)
    const __m512 values = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
    const __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)codes));
    low->v[0] = _mm512_permutexvar_ps(code, values); /* uses the four lowest bits */
    high->v[0] = _mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), values);
#elif defined(__AVX2__)
    const __m256 values = _mm256_loadu_ps(E2M1_VALUE), minus = _mm256_set1_ps(-0.f);
    for (int i = 0; i < PARTS; i++) {
        const __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(codes + 8 * i)));
        /* Three bits of a code index eight magnitudes, the fourth flips the sign. */
        const __m256 flip_low = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 28)), minus);
        const __m256 flip_high = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 24)), minus);
        low->v[i] = _mm256_xor_ps(_mm256_permutevar8x32_ps(values, code), flip_low);
        high->v[i] = _mm256_xor_ps(_mm256_permutevar8x32_ps(values, _mm256_srli_epi32(code, 4)), flip_high);
    }
#elif defined(__aarch64__) && !defined(AQ_SERIAL)
    /* The upper 16 bits of the values; the lower ones are zero. */
    static const uint8_t second[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    static const uint8_t first[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const uint8x16_t code = vld1q_u8(codes), nibble[2] = {vandq_u8(code, vdupq_n_u8(15)), vshrq_n_u8(code, 4)};
    for (int n = 0; n < 2; n++) {
        const uint8x16_t a = vqtbl1q_u8(vld1q_u8(second), nibble[n]), b = vqtbl1q_u8(vld1q_u8(first), nibble[n]);
        const uint16x8_t front = vreinterpretq_u16_u8(vzip1q_u8(a, b)), back = vreinterpretq_u16_u8(vzip2q_u8(a, b));
        f32x16 *to = n ? high : low;
        to->v[0] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(front), 16));
        to->v[1] = vreinterpretq_f32_u32(vshll_high_n_u16(front, 16));
        to->v[2] = vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(back), 16));
        to->v[3] = vreinterpretq_f32_u32(vshll_high_n_u16(back, 16));
    }
#else
    for (int i = 0; i < 16; i++) {
        low->v[i] = codes[i] & 8 ? -E2M1_VALUE[codes[i] & 7] : E2M1_VALUE[codes[i] & 7];
        high->v[i] = codes[i] & 0x80 ? -E2M1_VALUE[codes[i] >> 4 & 7] : E2M1_VALUE[codes[i] >> 4 & 7];
    }
#endif
}

/* Lanes 0-7 get the step of the first block, 8-15 that of the second. */
ALWAYS_INLINE f32x16 two_steps(const float *step)
{
    f32x16 r;
#if defined(__AVX512F__)
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    const __m128i two = _mm_loadl_epi64((const __m128i *)(const void *)step);
    r.v[0] = _mm512_permutexvar_ps(halves, _mm512_castps128_ps512(_mm_castsi128_ps(two)));
#else
    for (int i = 0; i < PARTS; i++)
        r.v[i] = part_all(step[PART * i / 8]);
#endif
    return r;
}

ALWAYS_INLINE void some_rows(const uint8_t *codes, const float *step, const float *x, size_t stride, size_t columns, const int tokens,
                             float *y)
{
    f32x16 even[TOGETHER], odd[TOGETHER];
    for (int t = 0; t < tokens; t++)
        even[t] = odd[t] = f32x16_all(0.f);
    for (size_t k = 0; k < columns; k += 32) {
        f32x16 low, high;
        e2m1_values(codes + k / 2, &low, &high);
        const f32x16 s = two_steps(step + k / 16);
        low = f32x16_mul(low, s);
        high = f32x16_mul(high, s);
        for (int t = 0; t < tokens; t++) {
            const float *at = x + (size_t)t * stride + k;
            even[t] = f32x16_fused(low, f32x16_load(at), even[t]);
            odd[t] = f32x16_fused(high, f32x16_load(at + 16), odd[t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        y[t] = f32x16_sum(f32x16_add(even[t], odd[t]));
}

static void row_times_tokens(const uint8_t *codes, const float *step, const float *x, size_t stride, size_t columns, int tokens, float *y)
{
    for (int t = 0, n; t < tokens; t += n) {
        const float *at = x + (size_t)t * stride;
        n = tokens - t <= TOGETHER ? tokens - t : 2; /* four are two and two */
        switch (n) {                                 /* a constant, so that the sums stay in registers */
        case 1:
            some_rows(codes, step, at, stride, columns, 1, y + t);
            break;
        case 2:
            some_rows(codes, step, at, stride, columns, 2, y + t);
            break;
        case 3:
            some_rows(codes, step, at, stride, columns, 3, y + t);
            break;
        default:
            some_rows(codes, step, at, stride, columns, TOGETHER, y + t);
        }
    }
}

#endif
