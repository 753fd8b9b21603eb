/* The searches of kq_search.c with one lane per sub-block: each lane does the same operations in the same order.
 *
 * Written with the compiler's vector types, one source that kq_avx2.c, kq_avx512.c and kq_neon.c compile with their own flags. Branches
 * become selections between both results, so a lane that has finished continues and its results are dropped.
 */
#ifndef AQ_NVFP4_KQ_LANES_H
#define AQ_NVFP4_KQ_LANES_H

#include "kq_decode.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { LANES = 8 };
typedef float kf __attribute__((vector_size(4 * LANES)));
typedef int32_t ki __attribute__((vector_size(4 * LANES)));

static inline kf kf_all(float f)
{
    return (kf){f, f, f, f, f, f, f, f};
}

static inline ki ki_all(int32_t i)
{
    return (ki){i, i, i, i, i, i, i, i};
}

static inline kf choose(ki mask, kf yes, kf no)
{
#if defined(__AVX2__)
    return (kf)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask);
#else
    return (kf)((mask & (ki)yes) | (~mask & (ki)no));
#endif
}

static inline ki choose_i(ki mask, ki yes, ki no)
{
#if defined(__AVX2__)
    return (ki)_mm256_blendv_epi8((__m256i)no, (__m256i)yes, (__m256i)mask);
#else
    return (mask & yes) | (~mask & no);
#endif
}

static inline ki limit(ki v, int low, int high)
{
#if defined(__AVX2__)
    return (ki)_mm256_min_epi32(_mm256_max_epi32((__m256i)v, (__m256i)ki_all(low)), (__m256i)ki_all(high));
#else
    v = choose_i(v < low, ki_all(low), v);
    return choose_i(v > high, ki_all(high), v);
#endif
}

static inline kf to_float(ki v)
{
    return __builtin_convertvector(v, kf);
}

static inline bool none(ki mask)
{
    typedef int64_t wide __attribute__((vector_size(4 * LANES)));
    wide w = (wide)mask;
    return (w[0] | w[1] | w[2] | w[3]) == 0;
}

/* Like nearest_int, bit for bit. */
static inline ki nearest_ints(kf f)
{
    return ((ki)(f + 12582912.f) & 0x7fffff) - 0x400000;
}

/* Transpose the rows of a lane: in[lane * n + i] to out[i][lane]. */
static inline void columns_of(const float *in, int n, kf *out)
{
    for (int i = 0; i < n; i++)
        for (int j = 0; j < LANES; j++)
            out[i][j] = in[j * n + i];
}

static inline void affine_lanes(const float *x_rows, const float *weight_rows, int top, float low, float by, int tries,
                                int weighted, uint8_t *L, struct affine *out)
{
    enum { N = 32 };
    kf x[N], weight[N];
    ki best_codes[N], tried[N];
    columns_of(x_rows, N, x);
    columns_of(weight_rows, N, weight);
    kf min = x[0], max = x[0], sum_w = weight[0], sum_x = sum_w * x[0];
    for (int i = 1; i < N; i++) {
        min = choose(x[i] < min, x[i], min);
        max = choose(x[i] > max, x[i], max);
        sum_w += weight[i];
        sum_x += weight[i] * x[i];
    }
    min = choose(min > 0.f, kf_all(0), min);
    const ki flat = weighted ? max <= min : max == min;
    kf inverse = (float)top / (max - min), scale = 1.f / inverse, least = kf_all(0);
    const kf start = min;
    for (int i = 0; i < N; i++) {
        best_codes[i] = limit(nearest_ints(inverse * (x[i] - min)), 0, top);
        kf diff = scale * to_float(best_codes[i]) + min - x[i];
        least += weight[i] * (diff * diff);
    }
    for (int t = 0; t <= tries; t++) {
        kf sum_l = kf_all(0), sum_l2 = kf_all(0), sum_xl = kf_all(0);
        inverse = (low + by * (float)t + (float)top) / (max - min);
        for (int i = 0; i < N; i++) {
            kf v = inverse * (x[i] - min);
            if (weighted)
                tried[i] = choose_i(v > 0.f, nearest_ints(choose(v < (float)top, v, kf_all((float)top))), ki_all(0));
            else
                tried[i] = limit(nearest_ints(v), 0, top);
            kf l = to_float(tried[i]), wl = weight[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        kf det = sum_w * sum_l2 - sum_l * sum_l;
        kf this_scale = (sum_w * sum_xl - sum_x * sum_l) / det, this_min = (sum_l2 * sum_x - sum_l * sum_xl) / det;
        const ki above = this_min > 0.f;
        this_min = choose(above, kf_all(0), this_min);
        this_scale = choose(above, sum_xl / sum_l2, this_scale);
        kf error = kf_all(0);
        for (int i = 0; i < N; i++) {
            kf diff = this_scale * to_float(tried[i]) + this_min - x[i];
            error += weight[i] * (diff * diff);
        }
        const ki better = (det > 0.f) & (error < least);
        if (none(better))
            continue;
        for (int i = 0; i < N; i++)
            best_codes[i] = choose_i(better, tried[i], best_codes[i]);
        least = choose(better, error, least);
        scale = choose(better, this_scale, scale);
        min = choose(better, this_min, min);
    }
    for (int j = 0; j < LANES; j++) {
        for (int i = 0; i < N; i++)
            L[j * N + i] = flat[j] ? 0 : (uint8_t)best_codes[i][j];
        out[j] = flat[j] ? (struct affine){0.f, -start[j]} : (struct affine){scale[j], -min[j]};
    }
}

/* Eight sub-blocks of 16, codes -32..31. */
static inline void symmetric_lanes(const float *x_rows, const float *weight_rows, uint8_t *L, float *out)
{
    enum { N = 16, TOP = 32 };
    kf x[N], wx[N], weight[N];
    columns_of(x_rows, N, x);
    if (weight_rows)
        columns_of(weight_rows, N, weight);
    kf amax = kf_all(0), extreme = kf_all(0);
    for (int i = 0; i < N; i++) {
        if (!weight_rows)
            weight[i] = x[i] * x[i];
        wx[i] = weight[i] * x[i];
        kf a = choose(x[i] < 0.f, -x[i], x[i]);
        extreme = choose(a > amax, x[i], extreme);
        amax = choose(a > amax, a, amax);
    }
    const ki zero = amax < 1e-15f;
    kf scale = kf_all(0), best = kf_all(0), chosen = kf_all(0);
    for (int t = -10; t <= 9; t++) {
        if (t == 0)
            continue;
        kf inverse = (t == -10 ? -(float)TOP : -(TOP + 0.1f * (float)t)) / extreme;
        kf sum_xl = kf_all(0), sum_l2 = kf_all(0);
        for (int i = 0; i < N; i++) {
            kf l = to_float(limit(nearest_ints(inverse * x[i]), -TOP, TOP - 1));
            sum_xl += wx[i] * l;
            sum_l2 += weight[i] * l * l;
        }
        kf ratio = sum_xl / sum_l2;
        ki better = (sum_l2 > 0.f) & (sum_xl * sum_xl > best * sum_l2);
        if (t == -10) {
            better = ki_all(-1);
            ratio = choose(sum_l2 != 0.f, ratio, kf_all(0));
        }
        scale = choose(better, ratio, scale);
        best = choose(better, ratio * sum_xl, best);
        chosen = choose(better, inverse, chosen);
    }
    for (int i = 0; i < N; i++) {
        ki code = limit(nearest_ints(chosen * x[i]), -TOP, TOP - 1) + TOP;
        for (int j = 0; j < LANES; j++)
            L[j * N + i] = zero[j] ? 0 : (uint8_t)code[j];
    }
    for (int j = 0; j < LANES; j++)
        out[j] = zero[j] ? 0.f : scale[j];
}

#define KQ_SEARCH(variant)                                                                                              \
    static void affine_8(const float *x, const float *weight, int top, float low, float by, int tries, int weighted,    \
                         uint8_t *L, struct affine *out)                                                                \
    {                                                                                                                   \
        if (weighted)                                                                                                   \
            affine_lanes(x, weight, top, low, by, tries, 1, L, out);                                                    \
        else                                                                                                            \
            affine_lanes(x, weight, top, low, by, tries, 0, L, out);                                                    \
    }                                                                                                                   \
    static void symmetric_16(const float *x, const float *weight, uint8_t *L, float *scale)                             \
    {                                                                                                                   \
        for (int j = 0; j < 16; j += LANES)                                                                             \
            symmetric_lanes(x + 16 * j, weight ? weight + 16 * j : NULL, L + 16 * j, scale + j);                        \
    }                                                                                                                   \
    const struct kq_search kq_##variant = {affine_8, symmetric_16, KQ_DECODERS};

#endif
