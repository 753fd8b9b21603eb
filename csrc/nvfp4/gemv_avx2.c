/* A row of packed weights with AVX2: three bits of a code index eight magnitudes, the fourth flips the sign. */
#include "gemv.h"

#include <immintrin.h>

static inline __m256 value_of(__m256i code, __m256i sign, __m256 s)
{
    const __m256 magnitudes = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
    __m256 flip = _mm256_and_ps(_mm256_castsi256_ps(sign), _mm256_set1_ps(-0.f));
    return _mm256_mul_ps(_mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), flip), s);
}

static inline __attribute__((always_inline)) void row_of(const uint8_t *codes, const float *step, const float *x,
                                                         size_t stride, size_t columns, const int tokens, float *y)
{
    __m256 low_sum[GEMV_TOKENS], high_sum[GEMV_TOKENS];
    for (int t = 0; t < tokens; t++)
        low_sum[t] = high_sum[t] = _mm256_setzero_ps();
    for (size_t k = 0; k < columns; k += 16) {
        __m256i code = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(codes + k / 2)));
        __m256 s = _mm256_broadcast_ss(step + k / 16);
        __m256 low = value_of(code, _mm256_slli_epi32(code, 28), s);
        __m256 high = value_of(_mm256_srli_epi32(code, 4), _mm256_slli_epi32(code, 24), s);
        const size_t even = k / 32 * 32 + k % 32 / 2;
        for (int t = 0; t < tokens; t++) {
            const float *at = x + (size_t)t * stride + even;
            low_sum[t] = _mm256_fmadd_ps(low, _mm256_loadu_ps(at), low_sum[t]);
            high_sum[t] = _mm256_fmadd_ps(high, _mm256_loadu_ps(at + 16), high_sum[t]);
        }
    }
    for (int t = 0; t < tokens; t++) {
        __m256 sum = _mm256_add_ps(low_sum[t], high_sum[t]);
        __m128 four = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1));
        __m128 pair = _mm_add_ps(four, _mm_movehl_ps(four, four));
        y[t] = _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
    }
}

void gemv_row_avx2(const uint8_t *codes, const float *step, const float *x, size_t stride, size_t columns, int tokens,
                   float *y)
{
    switch (tokens) { /* a constant, so that the sums stay in registers */
    case 1:
        row_of(codes, step, x, stride, columns, 1, y);
        break;
    case 2:
        row_of(codes, step, x, stride, columns, 2, y);
        break;
    case 3:
        row_of(codes, step, x, stride, columns, 3, y);
        break;
    default:
        row_of(codes, step, x, stride, columns, 4, y);
    }
}
