/* A row of packed weights with AVX-512: a code indexes a register of sixteen floats, including the sign. */
#include "gemv.h"

#include <immintrin.h>

static inline __attribute__((always_inline)) void row_of(const uint8_t *codes, const float *step, const float *x,
                                                         size_t stride, size_t columns, const int tokens, float *y)
{
    const __m512 values = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f,
                                         -4.f, -6.f);
    const __m512i halves = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    __m512 low_sum[GEMV_TOKENS], high_sum[GEMV_TOKENS];
    for (int t = 0; t < tokens; t++)
        low_sum[t] = high_sum[t] = _mm512_setzero_ps();
    for (size_t k = 0; k < columns; k += 32) {
        /* Sixteen bytes: lane i has columns 2i and 2i + 1; lanes 0-7 are one block, 8-15 the next. */
        __m512i code = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + k / 2)));
        __m512 two = _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)(step + k / 16))));
        __m512 s = _mm512_permutexvar_ps(halves, two);
        __m512 low = _mm512_mul_ps(_mm512_permutexvar_ps(code, values), s);
        __m512 high = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(code, 4), values), s);
        for (int t = 0; t < tokens; t++) {
            const float *at = x + (size_t)t * stride + k;
            low_sum[t] = _mm512_fmadd_ps(low, _mm512_loadu_ps(at), low_sum[t]);
            high_sum[t] = _mm512_fmadd_ps(high, _mm512_loadu_ps(at + 16), high_sum[t]);
        }
    }
    for (int t = 0; t < tokens; t++)
        y[t] = _mm512_reduce_add_ps(_mm512_add_ps(low_sum[t], high_sum[t]));
}

void gemv_row_avx512(const uint8_t *codes, const float *step, const float *x, size_t stride, size_t columns, int tokens,
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
