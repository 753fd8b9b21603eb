/* The NVFP4 kernels for aarch64 with NEON: the same methods as codec_x86.h at half the width, with the same bytes as the serial
 * reference. All but the rounding of block scales is vector code. */
#ifndef AQ_NVFP4_CODEC_NEON_H
#define AQ_NVFP4_CODEC_NEON_H

#include "codec.h"
#include "sweep_lanes.h"

#include <arm_neon.h>

static uint32_t amax_bits(const void *x, int kind, size_t count)
{
    size_t i = 0, whole = count / 16 * 16;
    uint32_t largest = 0;
    if (kind == KIND_F32) {
        const uint32_t *p = x;
        uint32x4_t top = vdupq_n_u32(0), mask = vdupq_n_u32(0x7fffffffu);
        for (; i < whole; i += 4)
            top = vmaxq_u32(top, vandq_u32(vld1q_u32(p + i), mask));
        largest = vmaxvq_u32(top);
    } else {
        const uint16_t *p = x;
        uint16x8_t top = vdupq_n_u16(0), mask = vdupq_n_u16(0x7fff);
        for (; i < whole; i += 8)
            top = vmaxq_u16(top, vandq_u16(vld1q_u16(p + i), mask));
        largest = vmaxvq_u16(top);
    }
    uint32_t rest = codec_serial.amax((const char *)x + whole * kind_size(kind), kind, count - whole);
    return rest > largest ? rest : largest;
}

/* Codes of eight elements of a 16-bit kind, as 16-bit lanes. */
static inline uint16x8_t eight_codes_16(const uint16_t *x, const uint32_t *above)
{
    uint16x8_t v = vld1q_u16(x);
    int16x8_t a = vreinterpretq_s16_u16(vandq_u16(v, vdupq_n_u16(0x7fff)));
    uint16x8_t n = vdupq_n_u16(0);
    for (int i = 0; i < 7; i++)
        n = vsubq_u16(n, vcgtq_s16(a, vdupq_n_s16(((const int16_t *)above)[ABOVE_SLOT[i]])));
    uint16x8_t sign = vandq_u16(vshrq_n_u16(v, 12), vcgtq_s16(a, vdupq_n_s16(((const int16_t *)above)[ABOVE_SLOT[7]])));
    return vorrq_u16(n, vandq_u16(sign, vdupq_n_u16(8)));
}

static inline uint16x4_t four_codes_32(const uint32_t *x, const uint32_t *above)
{
    uint32x4_t v = vld1q_u32(x), n = vdupq_n_u32(0);
    int32x4_t a = vreinterpretq_s32_u32(vandq_u32(v, vdupq_n_u32(0x7fffffffu)));
    for (int i = 0; i < 7; i++)
        n = vsubq_u32(n, vcgtq_s32(a, vdupq_n_s32((int32_t)above[ABOVE_SLOT[i]])));
    uint32x4_t sign = vandq_u32(vshrq_n_u32(v, 28), vcgtq_s32(a, vdupq_n_s32((int32_t)above[ABOVE_SLOT[7]])));
    return vmovn_u32(vorrq_u32(n, vandq_u32(sign, vdupq_n_u32(8))));
}

static inline void block_codes(const void *x, int kind, const uint32_t *above, uint8_t *codes)
{
    uint16x8_t low, high;
    if (kind == KIND_F32) {
        const uint32_t *p = x;
        low = vcombine_u16(four_codes_32(p, above), four_codes_32(p + 4, above));
        high = vcombine_u16(four_codes_32(p + 8, above), four_codes_32(p + 12, above));
    } else {
        low = eight_codes_16(x, above);
        high = eight_codes_16((const uint16_t *)x + 8, above);
    }
    uint8x16_t all = vcombine_u8(vmovn_u16(low), vmovn_u16(high));
    uint16x8_t pairs = vreinterpretq_u16_u8(all); /* even column in the low byte, odd in the high byte */
    vst1_u8(codes, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
}

static void scales_of_eight(const struct pack_plan *plan, const char *x, size_t first, const uint32_t *bits,
                         uint8_t *scales)
{
    const size_t group = (size_t)plan->group, bytes = group * kind_size(plan->kind);
    struct eight e;
    for (int b = 0; b < 8; b++) {
        uint16_t half = (uint16_t)bits[b];
        e.top[b] = plan->kind == KIND_F32 ? bits_float(bits[b]) : load_as_float(&half, plan->kind, 0);
        if (plan->choice == CHOICE_AMAX)
            scales[b] = block_code(plan, e.top[b]);
    }
    if (plan->choice == CHOICE_AMAX)
        return;
    for (size_t b = 0; b < 8; b++) {
        for (size_t i = 0; i < group; i++)
            e.a[i][b] = bits_float(float_bits(load_as_float(x + b * bytes, plan->kind, i)) & 0x7fffffffu);
        if (!plan->weight)
            continue;
        const float *weight = plan->weight + (first + b) * group % plan->columns;
        for (size_t i = 0; i < group; i++)
            e.weight[i][b] = weight[i];
    }
    search(plan, &e, 1);
    for (int b = 0; b < 8; b++)
        scales[b] = (uint8_t)e.best[b];
}

static uint32_t pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes,
                     uint8_t *scales)
{
    const size_t whole = blocks / 8 * 8, group = (size_t)plan->group, bytes = group * kind_size(plan->kind);
    const size_t done = whole * group, run = 16 * kind_size(plan->kind);
    uint32_t top = 0;
    for (size_t b = 0; b < whole; b += 8) {
        const char *p = (const char *)x + b * bytes;
        uint32_t bits[8];
        for (size_t i = 0; i < 8; i++) {
            bits[i] = amax_bits(p + i * bytes, plan->kind, group);
            top = bits[i] > top ? bits[i] : top;
        }
        scales_of_eight(plan, p, first + b, bits, scales + b);
        for (size_t i = 0; i < 8; i++)
            for (size_t j = 0; j < group / 16; j++)
                block_codes(p + i * bytes + j * run, plan->kind, plan->above[scales[b + i]], codes + (b + i) * group / 2 + 8 * j);
    }
    uint32_t rest = codec_serial.pack(plan, (const char *)x + done * kind_size(plan->kind), first + whole, blocks - whole,
                                      codes + done / 2, scales + whole);
    return rest > top ? rest : top;
}

/* The 16 nibbles of eight bytes, in order. */
static inline uint8x16_t nibbles(const uint8_t *codes)
{
    uint8x8_t c = vld1_u8(codes);
    uint8x8x2_t each = vzip_u8(vand_u8(c, vdup_n_u8(15)), vshr_n_u8(c, 4));
    return vcombine_u8(each.val[0], each.val[1]);
}

/* 16-bit numbers by index, from two tables of their 16 low and high bytes. */
static inline uint8x16x2_t look_up(const uint8_t *low, const uint8_t *high, uint8x16_t index)
{
    return (uint8x16x2_t){{vqtbl1q_u8(vld1q_u8(low), index), vqtbl1q_u8(vld1q_u8(high), index)}};
}

static void unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks,
                   void *out)
{
    /* The bytes of the element values as bfloat16, which is exact. */
    static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    static const uint8_t high[16] = {0,    0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40,
                                     0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
    const size_t in_group = (size_t)plan->group / 16;
    for (size_t run = 0; run < blocks * in_group; run++) {
        const uint8_t scale = scales[run / in_group];
        const uint8x16_t index = nibbles(codes + 8 * run);
        if (plan->kind != KIND_F32) {
            vst2q_u8((uint8_t *)out + 32 * run, look_up(plan->value[scale], plan->value[scale] + 16, index));
            continue;
        }
        const uint8x16x2_t halves = look_up(low, high, index);
        const uint16x8_t eight[2] = {vreinterpretq_u16_u8(vzip1q_u8(halves.val[0], halves.val[1])),
                                     vreinterpretq_u16_u8(vzip2q_u8(halves.val[0], halves.val[1]))};
        for (int i = 0; i < 4; i++) {
            uint16x4_t four = i & 1 ? vget_high_u16(eight[i / 2]) : vget_low_u16(eight[i / 2]);
            float32x4_t value = vreinterpretq_f32_u32(vshll_n_u16(four, 16));
            vst1q_f32((float *)out + 16 * run + 4 * i, vmulq_n_f32(value, plan->step[scale]));
        }
    }
}

static inline float32x4_t load_four(const char *x, int kind)
{
    if (kind == KIND_F32)
        return vld1q_f32((const float *)(const void *)x);
    uint16x4_t bits = vld1_u16((const uint16_t *)(const void *)x);
    return kind == KIND_F16 ? vcvt_f32_f16(vreinterpret_f16_u16(bits)) : vreinterpretq_f32_u32(vshll_n_u16(bits, 16));
}

static inline void store_four(char *to, float32x4_t v, int kind)
{
    if (kind == KIND_F32) {
        vst1q_f32((float *)(void *)to, v);
    } else if (kind == KIND_F16) {
        vst1_u16((uint16_t *)(void *)to, vreinterpret_u16_f16(vcvt_f16_f32(v)));
    } else { /* never NaN: a step is finite and a value at most 6 */
        uint32x4_t u = vreinterpretq_u32_f32(v), even = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
        vst1_u16((uint16_t *)(void *)to, vshrn_n_u32(vaddq_u32(u, vaddq_u32(even, vdupq_n_u32(0x7fffu))), 16));
    }
}

/* Round to the E2M1 grid, ties to even, by adding a number whose last bit is half a step of the value's binade. */
static inline float32x4_t round_to_grid(float32x4_t a)
{
    const float32x4_t six = vdupq_n_f32(6.f);
    a = vbslq_f32(vcltq_f32(a, six), a, six); /* NaN gives 6 */
    float32x4_t binade = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a), vdupq_n_u32(0x7f800000u)));
    float32x4_t addend = vmulq_n_f32(vmaxq_f32(binade, vdupq_n_f32(1.f)), 0x1.8p22f);
    return vsubq_f32(vaddq_f32(a, addend), addend);
}

static void fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    const size_t four = 4 * kind_size(plan->kind), group = (size_t)plan->group;
    const float six = 6.f * plan->tensor_scale;
    const char *from = x;
    char *to = out;
    for (size_t b = 0; b < blocks; b++) {
        float32x4_t v[MAX_GROUP / 4], top = vdupq_n_f32(0.f);
        for (size_t i = 0; i < group / 4; i++, from += four) {
            v[i] = load_four(from, plan->kind);
            float32x4_t a = vabsq_f32(v[i]);
            top = vbslq_f32(vcgtq_f32(a, top), a, top); /* NaN is skipped */
        }
        float t = vmaxvq_f32(top) / six;
        float step = e4m3_to_float(e4m3_from_clamped(t < 448.f ? t : 448.f)) * plan->tensor_scale;
        float32x4_t steps = vdupq_n_f32(step >= 1e-5f ? step : 1.f);
        for (size_t i = 0; i < group / 4; i++, to += four) {
            float32x4_t q = vmulq_f32(round_to_grid(vdivq_f32(vabsq_f32(v[i]), steps)), steps);
            float32x4_t minus = vsubq_f32(vdupq_n_f32(0.f), q); /* +0.0 for zero */
            store_four(to, vbslq_f32(vcgeq_f32(v[i], vdupq_n_f32(0.f)), q, minus), plan->kind);
        }
    }
}

static const struct codec_kernels codec_kernels = {amax_bits, pack, unpack, fake_quant};

#endif
