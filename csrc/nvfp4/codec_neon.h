/* The NVFP4 kernels for aarch64 with NEON: the same methods as codec_x86.h at half the width, with the same bytes as the serial
 * reference. All but the rounding of block scales is vector code. */
#ifndef AQ_NVFP4_CODEC_NEON_H
#define AQ_NVFP4_CODEC_NEON_H

#include "codec.h"
#include "sweep_lanes.h"

#include <arm_neon.h>

static uint32_t amax_bits(const void *x, int kind, size_t count)
{
    const size_t whole = count / 64 * 64;
    uint32_t largest;
    if (kind == KIND_F32) {
        const uint32_t *p = x;
        uint32x4_t top[4] = {{0}, {0}, {0}, {0}}, mask = vdupq_n_u32(0x7fffffffu);
        for (size_t i = 0; i < whole; i += 32)
            for (size_t k = 0; k < 8; k++)
                top[k % 4] = vmaxq_u32(top[k % 4], vandq_u32(vld1q_u32(p + i + 4 * k), mask));
        largest = vmaxvq_u32(vmaxq_u32(vmaxq_u32(top[0], top[1]), vmaxq_u32(top[2], top[3])));
    } else {
        const uint16_t *p = x;
        uint16x8_t top[4] = {{0}, {0}, {0}, {0}}, mask = vdupq_n_u16(0x7fff);
        for (size_t i = 0; i < whole; i += 64)
            for (size_t k = 0; k < 8; k++)
                top[k % 4] = vmaxq_u16(top[k % 4], vandq_u16(vld1q_u16(p + i + 8 * k), mask));
        largest = vmaxvq_u16(vmaxq_u16(vmaxq_u16(top[0], top[1]), vmaxq_u16(top[2], top[3])));
    }
    uint32_t rest = serial_amax((const char *)x + whole * kind_size(kind), kind, count - whole);
    return rest > largest ? rest : largest;
}

/* Codes of eight elements of a 16-bit kind, as 16-bit lanes. */
static inline int16x8_t threshold_16(const uint32_t *above, int slot)
{
    int16_t half;
    memcpy(&half, (const uint8_t *)above + (size_t)slot * sizeof half, sizeof half);
    return vdupq_n_s16(half);
}

static inline uint16x8_t eight_codes_16(const uint16_t *x, const uint32_t *above)
{
    uint16x8_t v = vld1q_u16(x);
    int16x8_t a = vreinterpretq_s16_u16(vandq_u16(v, vdupq_n_u16(0x7fff)));
    uint16x8_t n = vdupq_n_u16(0);
    for (int i = 0; i < 7; i++)
        n = vsubq_u16(n, vcgtq_s16(a, threshold_16(above, ABOVE_SLOT[i])));
    uint16x8_t sign = vandq_u16(vshrq_n_u16(v, 12), vcgtq_s16(a, threshold_16(above, ABOVE_SLOT[7])));
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

/* Maxima of |bits| of eight blocks of 16. */
ALWAYS_INLINE void eight_maxima(const char *x, int kind, u32v out[2])
{
    if (kind == KIND_F32) {
        uint32x4_t m[8], mask = vdupq_n_u32(0x7fffffffu);
        for (int b = 0; b < 8; b++) {
            const uint32_t *p = (const uint32_t *)(const void *)(x + 64 * b);
            const uint32x4_t front = vmaxq_u32(vandq_u32(vld1q_u32(p), mask), vandq_u32(vld1q_u32(p + 4), mask));
            m[b] = vmaxq_u32(front, vmaxq_u32(vandq_u32(vld1q_u32(p + 8), mask), vandq_u32(vld1q_u32(p + 12), mask)));
        }
        for (int n = 4; n >= 2; n /= 2)
            for (int b = 0; b < n; b++)
                m[b] = vpmaxq_u32(m[2 * b], m[2 * b + 1]);
        out[0] = (u32v)m[0], out[1] = (u32v)m[1];
        return;
    }
    uint16x8_t m[8], mask = vdupq_n_u16(0x7fff);
    for (int b = 0; b < 8; b++) {
        const uint16_t *p = (const uint16_t *)(const void *)(x + 32 * b);
        m[b] = vmaxq_u16(vandq_u16(vld1q_u16(p), mask), vandq_u16(vld1q_u16(p + 8), mask));
    }
    for (int n = 4; n >= 1; n /= 2)
        for (int b = 0; b < n; b++)
            m[b] = vpmaxq_u16(m[2 * b], m[2 * b + 1]);
    out[0] = (u32v)vmovl_u16(vget_low_u16(m[0]));
    out[1] = (u32v)vmovl_high_u16(m[0]);
}

/* The largest |bits| of each of eight groups of `in_group` runs of 16. */
ALWAYS_INLINE void group_maxima(const char *x, int kind, size_t in_group, u32v out[2])
{
    if (in_group == 1) {
        eight_maxima(x, kind, out);
        return;
    }
    uint32_t runs[8 * MAX_GROUP / 16], top[8] = {0};
    for (size_t i = 0; i < in_group; i++) {
        u32v some[2];
        eight_maxima(x + 8 * i * 16 * kind_size(kind), kind, some);
        memcpy(runs + 8 * i, some, sizeof some);
    }
    for (size_t i = 0; i < 8 * in_group; i++)
        top[i / in_group] = runs[i] > top[i / in_group] ? runs[i] : top[i / in_group];
    memcpy(out, top, 2 * sizeof out[0]);
}

static inline f32v floats_of(u32v bits, int kind)
{
    if (kind == KIND_F32)
        return (f32v)bits;
    if (kind == KIND_BF16)
        return (f32v)(bits << 16);
    return (f32v)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)bits)));
}

/* Magnitudes of eight columns of four rows of bfloat16, `stride` bytes apart, transposed and converted to floats; and the maxima of the
 * rows, so far. */
static inline void transpose_bf16(const char *x, size_t stride, f32v out[8], uint16x8_t largest[4])
{
    uint16x8_t row[4];
    for (size_t b = 0; b < 4; b++) {
        row[b] = vandq_u16(vld1q_u16((const uint16_t *)(const void *)(x + stride * b)), vdupq_n_u16(0x7fff));
        largest[b] = vmaxq_u16(largest[b], row[b]);
    }
    const uint16x8_t even[2] = {vzip1q_u16(row[0], row[2]), vzip2q_u16(row[0], row[2])};
    const uint16x8_t odd[2] = {vzip1q_u16(row[1], row[3]), vzip2q_u16(row[1], row[3])};
    for (int h = 0; h < 2; h++) {
        const uint16x8_t front = vzip1q_u16(even[h], odd[h]), back = vzip2q_u16(even[h], odd[h]); /* two columns each */
        out[4 * h] = (f32v)vshll_n_u16(vget_low_u16(front), 16);
        out[4 * h + 1] = (f32v)vshll_high_n_u16(front, 16);
        out[4 * h + 2] = (f32v)vshll_n_u16(vget_low_u16(back), 16);
        out[4 * h + 3] = (f32v)vshll_high_n_u16(back, 16);
    }
}

/* The columns of eight blocks into the lanes of two batches, and their largest |bits|. */
ALWAYS_INLINE void load_eight(const struct pack_plan *plan, int kind, size_t group, const char *x, size_t first, struct batch e[2],
                              u32v bits[2])
{
    const size_t bytes = group * kind_size(kind);
    uint16x8_t pairs[2];
    for (size_t half = 0; half < 2; half++, x += LANES * bytes) {
        uint16x8_t largest[4] = {{0}, {0}, {0}, {0}};
        for (size_t i = 0; kind == KIND_BF16 && i < group; i += 8)
            transpose_bf16(x + 2 * i, bytes, e[half].a + i, largest);
        pairs[half] = vpmaxq_u16(vpmaxq_u16(largest[0], largest[1]), vpmaxq_u16(largest[2], largest[3]));
        for (size_t b = 0; b < LANES; b++) {
            for (size_t i = 0; kind != KIND_BF16 && i < group; i++)
                e[half].a[i][b] = bits_float(float_bits(load_as_float(x + b * bytes, kind, i)) & 0x7fffffffu);
            if (!plan->weight)
                continue;
            const float *weight = plan->weight + (first + LANES * half + b) * group % plan->columns;
            for (size_t i = 0; i < group; i++)
                e[half].weight[i][b] = weight[i];
        }
    }
    if (kind == KIND_BF16) {
        const uint16x8_t top = vpmaxq_u16(pairs[0], pairs[1]);
        bits[0] = (u32v)vmovl_u16(vget_low_u16(top));
        bits[1] = (u32v)vmovl_high_u16(top);
    } else {
        group_maxima(x - 2 * LANES * bytes, kind, group / 16, bits);
    }
    for (int half = 0; half < 2; half++)
        e[half].top = floats_of(bits[half], kind);
}

/* Eight numbers up to 255. */
static inline void store_bytes(uint8_t *to, i32v low, i32v high)
{
    vst1_u8(to, vreinterpret_u8_s8(vmovn_s16(vcombine_s16(vmovn_s32((int32x4_t)low), vmovn_s32((int32x4_t)high)))));
}

/* The scales of eight blocks, and their largest |bits|. */
ALWAYS_INLINE void eight_block_scales(const struct sweep_plan *s, int kind, size_t group, const char *x, size_t first, u32v bits[2],
                                      uint8_t *scales)
{
    const struct pack_plan *plan = s->pack;
    if (plan->choice == CHOICE_AMAX) {
        group_maxima(x, kind, group / 16, bits);
        store_bytes(scales, scales_by_rule(plan, floats_of(bits[0], kind)), scales_by_rule(plan, floats_of(bits[1], kind)));
        return;
    }
    struct batch e[2];
    load_eight(plan, kind, group, x, first, e, bits);
    search(s, e, 2);
    store_bytes(scales, e[0].best, e[1].best);
}

/* Codes of 16 elements of finite bfloat16, by the table of windows. */
static inline void block_codes_windows(const uint16_t *x, const struct code_windows *w, uint8_t *codes)
{
    const uint16x8_t mask = vdupq_n_u16(0x7fff), one = vdupq_n_u16(1), bottom = vld1q_u16(w->bottom);
    const uint16x8_t front = vld1q_u16(x), back = vld1q_u16(x + 8);
    const uint16x8_t u = vqsubq_u16(vandq_u16(front, mask), bottom), v = vqsubq_u16(vandq_u16(back, mask), bottom);
    const uint8x16_t window = vminq_u8(vqshrn_high_n_u16(vqshrn_n_u16(u, 6), v, 6), vdupq_n_u8(15));
    const uint8x16_t low = vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(u), vreinterpretq_u8_u16(v)), vdupq_n_u8(63));
    const uint8x16_t above = vcgtq_s8(vreinterpretq_s8_u8(low), vqtbl1q_s8(vld1q_s8(w->last_below), window));
    const uint8x16_t code = vsubq_u8(vqtbl1q_u8(vld1q_u8(w->base), window), above);
    /* The high bytes with the signs; less one, so that -0.0 loses its sign. */
    const uint8x16_t high = vuzp2q_u8(vreinterpretq_u8_u16(vqsubq_u16(front, one)), vreinterpretq_u8_u16(vqsubq_u16(back, one)));
    const uint16x8_t pairs = vreinterpretq_u16_u8(vbslq_u8(vdupq_n_u8(8), vshrq_n_u8(high, 4), code));
    vst1_u8(codes, vmovn_u16(vsraq_n_u16(pairs, pairs, 4))); /* the sum has no carry: an element's code has four bits */
}

ALWAYS_INLINE uint32_t pack_blocks(const struct pack_plan *plan, int kind, size_t group, const char *x, size_t first, size_t blocks,
                                   uint8_t *codes, uint8_t *scales)
{
    const size_t run = 16 * kind_size(kind), in_group = group / 16, bytes = in_group * run;
    const struct sweep_plan s = sweep_plan_of(plan);
    u32v top = {0};
    for (size_t b = 0; b < blocks; b += 8) {
        const char *p = x + b * bytes;
        u32v bits[2];
        eight_block_scales(&s, kind, group, p, first + b, bits, scales + b);
        const u32v largest = (u32v)most_of_i((i32v)bits[0], (i32v)bits[1]);
        top = (u32v)most_of_i((i32v)top, (i32v)largest);
        const bool windows = kind == KIND_BF16 && plan->has_windows && !any_lane((i32v)largest >= (int)first_nonfinite(kind));
        for (size_t i = 0; i < 8; i++)
            for (size_t j = 0; j < in_group; j++) {
                const char *from = p + i * bytes + j * run;
                uint8_t *to = codes + (b + i) * group / 2 + 8 * j;
                if (windows)
                    block_codes_windows((const uint16_t *)(const void *)from, plan->windows + scales[b + i], to);
                else
                    block_codes(from, kind, plan->above[scales[b + i]], to);
            }
    }
    return vmaxvq_u32((uint32x4_t)top);
}

static uint32_t pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    const size_t whole = blocks / 8 * 8, group = (size_t)plan->group, done = whole * group;
    uint32_t top;
    if (plan->kind == KIND_BF16 && group == 16) /* the usual case, with constant loop lengths */
        top = pack_blocks(plan, KIND_BF16, 16, x, first, whole, codes, scales);
    else
        top = pack_blocks(plan, plan->kind, group, x, first, whole, codes, scales);
    uint32_t rest =
        serial_pack(plan, (const char *)x + done * kind_size(plan->kind), first + whole, blocks - whole, codes + done / 2, scales + whole);
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

static void unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out)
{
    /* The bytes of the element values as bfloat16, which is exact. */
    static const uint8_t low[16] = {0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0, 0, 0, 0x80, 0xc0, 0, 0x40, 0x80, 0xc0};
    static const uint8_t high[16] = {0, 0x3f, 0x3f, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x80, 0xbf, 0xbf, 0xbf, 0xc0, 0xc0, 0xc0, 0xc0};
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

ALWAYS_INLINE void fake_quant_blocks(const struct fake_plan *plan, int kind, size_t group, const char *from, size_t blocks, char *to)
{
    const size_t four = 4 * kind_size(kind);
    const float six = 6.f * plan->tensor_scale;
    for (size_t b = 0; b < blocks; b++) {
        float32x4_t v[MAX_GROUP / 4], top = vdupq_n_f32(0.f);
        for (size_t i = 0; i < group / 4; i++, from += four) {
            v[i] = load_four(from, kind);
            float32x4_t a = vabsq_f32(v[i]);
            top = vbslq_f32(vcgtq_f32(a, top), a, top); /* NaN is skipped */
        }
        float t = vmaxvq_f32(top) / six;
        float step = e4m3_to_float(e4m3_from_clamped(t < 448.f ? t : 448.f)) * plan->tensor_scale;
        float32x4_t steps = vdupq_n_f32(step >= 1e-5f ? step : 1.f);
        for (size_t i = 0; i < group / 4; i++, to += four) {
            float32x4_t q = vmulq_f32(round_to_grid(vdivq_f32(vabsq_f32(v[i]), steps)), steps);
            float32x4_t minus = vsubq_f32(vdupq_n_f32(0.f), q); /* +0.0 for zero */
            store_four(to, vbslq_f32(vcgeq_f32(v[i], vdupq_n_f32(0.f)), q, minus), kind);
        }
    }
}

static void fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    if (plan->kind == KIND_BF16 && plan->group == 16) /* the usual case, with constant loop lengths */
        fake_quant_blocks(plan, KIND_BF16, 16, x, blocks, out);
    else
        fake_quant_blocks(plan, plan->kind, (size_t)plan->group, x, blocks, out);
}

#endif
