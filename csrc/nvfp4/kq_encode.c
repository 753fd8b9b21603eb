/* Encoders from floats to ggml's blocks, around the searches of kq_search.c and its SIMD variants. */
#include "kquant.h"

#include <math.h>

static int at_most(int v, int high)
{
    return v < high ? v : high;
}

static int clip(int v, int low, int high)
{
    return v < low ? low : at_most(v, high);
}

/* 0 for what has no int8: NaN and infinity, which the reciprocal of a denormal step gives. A conversion of these is undefined. */
static int8_t to_int8(float v)
{
    return fabsf(v) < 128.f ? (int8_t)v : 0;
}

/* The six-bit scale and minimum of sub-block j, from the 12 packed bytes. */
static void six_bits(const uint8_t *packed, int j, int *scale, int *min)
{
    if (j < 4) {
        *scale = packed[j] & 63;
        *min = packed[j + 4] & 63;
    } else {
        *scale = (packed[j + 4] & 15) | packed[j - 4] >> 6 << 4;
        *min = packed[j + 4] >> 4 | packed[j] >> 6 << 4;
    }
}

static void pack_six_bits(const uint8_t *scale, const uint8_t *min, uint8_t *packed)
{
    for (int j = 0; j < 4; j++) {
        packed[j] = (uint8_t)(scale[j] | scale[j + 4] >> 4 << 6);
        packed[j + 4] = (uint8_t)(min[j] | min[j + 4] >> 4 << 6);
        packed[j + 8] = (uint8_t)((scale[j + 4] & 15) | (min[j + 4] & 15) << 4);
    }
}

/* Without importance: the largest of eight values gets 63. */
static float spread(const float v[8], uint8_t codes[8])
{
    float max = 0;
    for (int j = 0; j < 8; j++)
        max = v[j] > max ? v[j] : max;
    float inverse = max > 0 ? 63.f / max : 0.f;
    for (int j = 0; j < 8; j++)
        codes[j] = (uint8_t)at_most((uint8_t)nearest_int(inverse * v[j]), 63);
    return max / 63.f;
}

/* With importance: eight values >= 0 to codes 0..63 by weighted least squares, then up to five rounds in which one code at
 * a time is changed. */
static float spread_weighted(const float v[8], const float weight[8], uint8_t codes[8])
{
    enum { TOP = 63 };
    float max = 0;
    for (int j = 0; j < 8; j++)
        max = v[j] > max ? v[j] : max;
    if (max < 1e-15f) {
        memset(codes, 0, 8);
        return 0.f;
    }
    float inverse = TOP / max, step = 1 / inverse, least = 0;
    for (int j = 0; j < 8; j++) {
        float diff = v[j] - step * (uint8_t)nearest_int(inverse * v[j]);
        least += weight[j] * diff * diff;
    }
    for (int t = -4; t <= 4; t++) {
        if (t == 0)
            continue;
        float try = (0.1f * t + TOP) / max, step_of_try = 1 / try, error = 0;
        for (int j = 0; j < 8; j++) {
            float diff = v[j] - step_of_try * at_most(nearest_int(try * v[j]), TOP);
            error += weight[j] * diff * diff;
        }
        if (error < least) {
            least = error;
            inverse = try;
        }
    }
    float sum_xl = 0, sum_l2 = 0;
    for (int j = 0; j < 8; j++) {
        int l = at_most(nearest_int(inverse * v[j]), TOP);
        codes[j] = (uint8_t)l;
        sum_xl += weight[j] * v[j] * l;
        sum_l2 += weight[j] * l * l;
    }
    for (int round = 0; round < 5; round++) {
        int moved = 0;
        for (int j = 0; j < 8; j++) {
            float w = weight[j], xl = sum_xl - w * v[j] * codes[j], l2 = sum_l2 - w * codes[j] * codes[j];
            if (!(xl > 0 && l2 > 0))
                continue;
            int l = at_most(nearest_int(v[j] * l2 / xl), TOP);
            if (l == codes[j])
                continue;
            xl += w * v[j] * l;
            l2 += w * l * l;
            if (xl * xl * sum_l2 > sum_xl * sum_xl * l2) {
                codes[j] = (uint8_t)l;
                sum_xl = xl;
                sum_l2 = l2;
                moved++;
            }
        }
        if (!moved)
            break;
    }
    return sum_l2 > 0 ? sum_xl / sum_l2 : 0.f;
}

/* Q4_K and Q5_K differ only in the number of levels and the position of the fifth bit. */
struct affine_block {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t L[256];
};

static void encode_affine(const struct kq_kernels *kernels, const float *x, const float *weight, int top, struct affine_block *out)
{
    float w[256], sums[8], scale[8], minus_min[8];
    struct affine ranges[8];
    uint8_t scale_code[8], min_code[8];
    if (weight) {
        float square = 0;
        for (int i = 0; i < 256; i++)
            square += x[i] * x[i];
        float sigma2 = 2 * square / 256;
        for (int i = 0; i < 256; i++)
            w[i] = weight[i] * sqrtf(sigma2 + x[i] * x[i]);
        for (int j = 0; j < 8; j++) {
            sums[j] = 0;
            for (int i = 0; i < 32; i++)
                sums[j] += w[32 * j + i];
        }
        kernels->affine_8(x, w, top, -0.9f, 0.05f, 36, 1, out->L, ranges);
    } else {
        for (int j = 0; j < 8; j++) {
            const float *v = x + 32 * j;
            float square = 0;
            for (int i = 0; i < 32; i++)
                square += v[i] * v[i];
            float average = sqrtf(square / 32);
            for (int i = 0; i < 32; i++)
                w[32 * j + i] = average + fabsf(v[i]);
        }
        kernels->affine_8(x, w, top, top == 15 ? -1.f : -0.5f, 0.1f, top == 15 ? 20 : 15, 0, out->L, ranges);
    }
    for (int j = 0; j < 8; j++) {
        scale[j] = ranges[j].scale;
        minus_min[j] = ranges[j].minus_min;
    }
    out->d = float_to_f16(weight ? spread_weighted(scale, sums, scale_code) : spread(scale, scale_code));
    out->dmin = float_to_f16(weight ? spread_weighted(minus_min, sums, min_code) : spread(minus_min, min_code));
    pack_six_bits(scale_code, min_code, out->scales);
    for (int j = 0; j < 8; j++) {
        int sc, m;
        six_bits(out->scales, j, &sc, &m);
        float d = f16_to_float(out->d) * sc, dm = f16_to_float(out->dmin) * m;
        if (d == 0) /* the search's codes are used */
            continue;
        for (int i = 32 * j; i < 32 * j + 32; i++)
            out->L[i] = (uint8_t)clip(nearest_int((x[i] + dm) / d), 0, top);
    }
}

static void encode_q4_k(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)row_square;
    struct block_q4_k *y = out;
    struct affine_block a;
    encode_affine(kernels, x, weight, 15, &a);
    y->d = a.d;
    y->dmin = a.dmin;
    memcpy(y->scales, a.scales, 12);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++)
            y->qs[32 * j + i] = (uint8_t)(a.L[64 * j + i] | a.L[64 * j + 32 + i] << 4);
}

static void encode_q5_k(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)row_square;
    struct block_q5_k *y = out;
    struct affine_block a;
    encode_affine(kernels, x, weight, 31, &a);
    y->d = a.d;
    y->dmin = a.dmin;
    memcpy(y->scales, a.scales, 12);
    memset(y->qh, 0, sizeof y->qh);
    for (int j = 0; j < 4; j++)
        for (int i = 0; i < 32; i++) {
            unsigned low = a.L[64 * j + i], high = a.L[64 * j + 32 + i];
            y->qs[32 * j + i] = (uint8_t)((low & 15) | (high & 15) << 4);
            y->qh[i] |= (uint8_t)((low >> 4 | high >> 4 << 1) << 2 * j);
        }
}

static void encode_q6_k(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)row_square;
    struct block_q6_k *y = out;
    uint8_t L[256];
    float scale[16], top = 0, largest = 0;
    kernels->symmetric_16(x, weight, L, scale);
    for (int j = 0; j < 16; j++)
        if (fabsf(scale[j]) > largest) {
            largest = fabsf(scale[j]);
            top = scale[j];
        }
    if (largest < 1e-15f) {
        memset(y, 0, sizeof *y);
        return;
    }
    float inverse = -128.f / top;
    y->d = float_to_f16(1 / inverse);
    for (int j = 0; j < 16; j++) {
        y->scales[j] = (int8_t)at_most(nearest_int(inverse * scale[j]), 127);
        float d = f16_to_float(y->d) * y->scales[j];
        if (d == 0)
            continue;
        for (int i = 16 * j; i < 16 * j + 16; i++)
            L[i] = (uint8_t)(clip(nearest_int(x[i] / d), -32, 31) + 32);
    }
    for (int h = 0; h < 2; h++)
        for (int i = 0; i < 32; i++) {
            const uint8_t *q = L + 128 * h + i;
            y->ql[64 * h + i] = (uint8_t)((q[0] & 15) | (q[64] & 15) << 4);
            y->ql[64 * h + 32 + i] = (uint8_t)((q[32] & 15) | (q[96] & 15) << 4);
            y->qh[32 * h + i] = (uint8_t)(q[0] >> 4 | q[32] >> 4 << 2 | q[64] >> 4 << 4 | q[96] >> 4 << 6);
        }
}

/* Codes of a block of 32 in which the element of largest magnitude gets -top: the rule of the legacy formats. */
static float legacy(const float *x, int top, const float *weight, float row_square, uint8_t *L)
{
    float w[32];
    if (weight) {
        for (int i = 0; i < 32; i++)
            w[i] = weight[i] * sqrtf(row_square + x[i] * x[i]);
        return search_symmetric(32, top, x, w, L);
    }
    float amax = 0, extreme = 0;
    for (int i = 0; i < 32; i++)
        if (amax < fabsf(x[i])) {
            amax = fabsf(x[i]);
            extreme = x[i];
        }
    float d = extreme / -top, inverse = d != 0 ? 1.f / d : 0.f;
    for (int i = 0; i < 32; i++) {
        L[i] = (uint8_t)at_most(to_int8(x[i] * inverse + (top + .5f)), 2 * top - 1);
    }
    return d;
}

static void encode_q5_0(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)kernels;
    struct block_q5_0 *y = out;
    uint8_t L[32];
    uint32_t high = 0;
    y->d = float_to_f16(legacy(x, 16, weight, row_square, L));
    for (int i = 0; i < 16; i++) {
        y->qs[i] = (uint8_t)((L[i] & 15) | (L[i + 16] & 15) << 4);
        high |= (uint32_t)(L[i] >> 4) << i | (uint32_t)(L[i + 16] >> 4) << (i + 16);
    }
    for (int i = 0; i < 4; i++)
        y->qh[i] = (uint8_t)(high >> 8 * i);
}

static void encode_q4_0(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)kernels;
    struct block_q4_0 *y = out;
    uint8_t L[32];
    y->d = float_to_f16(legacy(x, 8, weight, row_square, L));
    for (int i = 0; i < 16; i++)
        y->qs[i] = (uint8_t)(L[i] | L[i + 16] << 4);
}

static void encode_q8_0(const struct kq_kernels *kernels, const float *x, const float *weight, float row_square, void *out)
{
    (void)kernels, (void)weight, (void)row_square; /* llama.cpp has no importance for Q8_0 */
    struct block_q8_0 *y = out;
    float amax = 0;
    for (int i = 0; i < 32; i++)
        amax = fabsf(x[i]) > amax ? fabsf(x[i]) : amax;
    float d = amax / 127, inverse = d != 0 ? 1.f / d : 0.f;
    y->d = float_to_f16(d);
    for (int i = 0; i < 32; i++)
        y->qs[i] = to_int8(roundf(x[i] * inverse));
}

bool kq_scales_finite(const struct kq_type *type, const uint8_t *block)
{
    bool finite = true;
    for (size_t i = 0; i < type->scales; i++) {
        uint16_t bits;
        memcpy(&bits, block + type->scales_at + i * sizeof bits, sizeof bits);
        finite &= (bits & 0x7c00u) != 0x7c00u;
    }
    return finite;
}

#define ROW(name, block, layout, scales, encode)                                                                                           \
    {                                                                                                                                      \
        name, block, sizeof(struct layout), offsetof(struct layout, d), scales, encode                                                     \
    }
const struct kq_type KQ_TYPE[KQ_TYPES] = {
    ROW("Q4_K", 256, block_q4_k, 2, encode_q4_k), ROW("Q5_K", 256, block_q5_k, 2, encode_q5_k),
    ROW("Q6_K", 256, block_q6_k, 1, encode_q6_k), ROW("Q5_0", 32, block_q5_0, 1, encode_q5_0),
    ROW("Q4_0", 32, block_q4_0, 1, encode_q4_0),  ROW("Q8_0", 32, block_q8_0, 1, encode_q8_0),
};
