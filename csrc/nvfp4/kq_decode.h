/* Decoders of ggml's blocks: w = d * scale * q - dmin * min (Q4_K, Q5_K), d * scale * (q - 32) (Q6_K), d * q.
 *
 * Every bit pattern is valid; nothing is read or written outside the block. Each variant compiles this source with its own flags and the
 * compiler vectorizes the loops, which does not change any bit because elements are independent.
 */
#ifndef AQ_NVFP4_KQ_DECODE_H
#define AQ_NVFP4_KQ_DECODE_H

#include "kquant.h"

/* Scale and minimum of all eight sub-blocks, multiplied by d or dmin. */
static void eight_scales(const uint8_t *packed, float d, float dmin, float scale[8], float min[8])
{
    for (int j = 0; j < 4; j++) {
        scale[j] = d * (packed[j] & 63);
        min[j] = dmin * (packed[j + 4] & 63);
        scale[j + 4] = d * ((packed[j + 8] & 15) | packed[j] >> 6 << 4);
        min[j + 4] = dmin * (packed[j + 8] >> 4 | packed[j + 4] >> 6 << 4);
    }
}

static void decode_q4_k(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q4_k *x = raw;
    for (size_t b = 0; b < blocks; b++, x++) {
        float scale[8], min[8];
        eight_scales(x->scales, f16_to_float(x->d), f16_to_float(x->dmin), scale, min);
        for (int j = 0; j < 4; j++, out += 64) {
            const uint8_t *qs = x->qs + 32 * j;
            for (int i = 0; i < 32; i++)
                out[i] = scale[2 * j] * (float)(qs[i] & 15) - min[2 * j];
            for (int i = 0; i < 32; i++)
                out[32 + i] = scale[2 * j + 1] * (float)(qs[i] >> 4) - min[2 * j + 1];
        }
    }
}

static void decode_q5_k(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q5_k *x = raw;
    for (size_t b = 0; b < blocks; b++, x++) {
        float scale[8], min[8];
        eight_scales(x->scales, f16_to_float(x->d), f16_to_float(x->dmin), scale, min);
        for (int j = 0; j < 4; j++, out += 64) {
            const uint8_t *qs = x->qs + 32 * j;
            for (int i = 0; i < 32; i++)
                out[i] = scale[2 * j] * (float)((qs[i] & 15) | (x->qh[i] >> 2 * j & 1) << 4) - min[2 * j];
            for (int i = 0; i < 32; i++)
                out[32 + i] = scale[2 * j + 1] * (float)(qs[i] >> 4 | (x->qh[i] >> (2 * j + 1) & 1) << 4) - min[2 * j + 1];
        }
    }
}

/* First all codes as bytes, then all floats: the compiler vectorizes each of the two loops well. */
static void decode_q6_k(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q6_k *x = raw;
    for (size_t b = 0; b < blocks; b++, x++, out += 256) {
        int8_t q[256];
        float d = f16_to_float(x->d);
        for (int h = 0; h < 2; h++) {
            const uint8_t *ql = x->ql + 64 * h, *qh = x->qh + 32 * h;
            int8_t *to = q + 128 * h;
            for (int i = 0; i < 32; i++) {
                to[i] = (int8_t)(((ql[i] & 15) | (qh[i] & 3) << 4) - 32);
                to[i + 32] = (int8_t)(((ql[i + 32] & 15) | (qh[i] >> 2 & 3) << 4) - 32);
                to[i + 64] = (int8_t)((ql[i] >> 4 | (qh[i] >> 4 & 3) << 4) - 32);
                to[i + 96] = (int8_t)((ql[i + 32] >> 4 | qh[i] >> 6 << 4) - 32);
            }
        }
        for (int j = 0; j < 16; j++) {
            float scale = d * x->scales[j];
#pragma GCC unroll 1 /* unrolled earlier, the loop would not be vectorized */
            for (int i = 0; i < 16; i++)
                out[16 * j + i] = scale * (float)q[16 * j + i];
        }
    }
}

static void decode_q5_0(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q5_0 *x = raw;
    for (size_t b = 0; b < blocks; b++, x++, out += 32) {
        float d = f16_to_float(x->d);
        for (int i = 0; i < 16; i++) {
            int low = x->qs[i] & 15, high = x->qs[i] >> 4;
            low |= (x->qh[i / 8] >> i % 8 & 1) << 4;
            high |= (x->qh[2 + i / 8] >> i % 8 & 1) << 4;
            out[i] = (float)(low - 16) * d;
            out[i + 16] = (float)(high - 16) * d;
        }
    }
}

static void decode_q4_0(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q4_0 *x = raw;
    for (size_t b = 0; b < blocks; b++, x++, out += 32) {
        float d = f16_to_float(x->d);
        for (int i = 0; i < 16; i++) {
            out[i] = (float)((x->qs[i] & 15) - 8) * d;
            out[i + 16] = (float)((x->qs[i] >> 4) - 8) * d;
        }
    }
}

static void decode_q8_0(const void *raw, size_t blocks, float *restrict out)
{
    const struct block_q8_0 *x = raw;
    for (size_t b = 0; b < blocks; b++, x++, out += 32) {
        float d = f16_to_float(x->d);
        for (int i = 0; i < 32; i++)
            out[i] = (float)x->qs[i] * d;
    }
}

/* In the order of KQ_TYPE. */
#define KQ_DECODERS                                                                                                                        \
    {                                                                                                                                      \
        decode_q4_k, decode_q5_k, decode_q6_k, decode_q5_0, decode_q4_0, decode_q8_0                                                       \
    }

#endif
