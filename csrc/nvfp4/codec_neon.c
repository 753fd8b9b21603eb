/* The kernels for aarch64 with NEON: the same ways as codec_x86.h at half the width. Byte for byte the serial reference's.
 *
 * Only what costs most is vector code here: maxima, elements of packs, 16-bit unpacks, searches.
 */
#include "codec.h"
#include "sweep_lanes.h"

#include <arm_neon.h>

static uint32_t amax_bits(const void *x, int kind, size_t count)
{
    size_t i = 0, whole = count / 16 * 16;
    uint32_t found = 0;
    if (kind == KIND_F32) {
        const uint32_t *p = x;
        uint32x4_t top = vdupq_n_u32(0), mask = vdupq_n_u32(0x7fffffffu);
        for (; i < whole; i += 4)
            top = vmaxq_u32(top, vandq_u32(vld1q_u32(p + i), mask));
        found = vmaxvq_u32(top);
    } else {
        const uint16_t *p = x;
        uint16x8_t top = vdupq_n_u16(0), mask = vdupq_n_u16(0x7fff);
        for (; i < whole; i += 8)
            top = vmaxq_u16(top, vandq_u16(vld1q_u16(p + i), mask));
        found = vmaxvq_u16(top);
    }
    uint32_t rest = codec_serial.amax((const char *)x + whole * kind_size(kind), kind, count - whole);
    return rest > found ? rest : found;
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
    uint16x8_t pairs = vreinterpretq_u16_u8(all); /* even column low byte, odd high */
    vst1_u8(codes, vmovn_u16(vorrq_u16(pairs, vshrq_n_u16(pairs, 4))));
}

static void eight_scales(const struct pack_plan *plan, const char *x, size_t first, const uint32_t *bits,
                         uint8_t *scales)
{
    const size_t bytes = 16 * kind_size(plan->kind);
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
        for (size_t i = 0; i < 16; i++)
            e.a[i][b] = bits_float(float_bits(load_as_float(x + b * bytes, plan->kind, i)) & 0x7fffffffu);
        if (!plan->weight)
            continue;
        const float *weight = plan->weight + (first + b) * 16 % plan->columns;
        for (size_t i = 0; i < 16; i++)
            e.weight[i][b] = weight[i];
    }
    search(plan, &e, 1);
    for (int b = 0; b < 8; b++)
        scales[b] = (uint8_t)e.best[b];
}

static uint32_t pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes,
                     uint8_t *scales)
{
    const size_t whole = plan->group == 16 ? blocks / 8 * 8 : 0, bytes = 16 * kind_size(plan->kind);
    const size_t done = whole * (size_t)plan->group;
    uint32_t top = 0;
    for (size_t b = 0; b < whole; b += 8) {
        const char *p = (const char *)x + b * bytes;
        uint32_t bits[8];
        for (size_t i = 0; i < 8; i++) {
            bits[i] = amax_bits(p + i * bytes, plan->kind, 16);
            top = bits[i] > top ? bits[i] : top;
        }
        eight_scales(plan, p, first + b, bits, scales + b);
        for (size_t i = 0; i < 8; i++)
            block_codes(p + i * bytes, plan->kind, plan->above[scales[b + i]], codes + (b + i) * 8);
    }
    uint32_t rest = codec_serial.pack(plan, (const char *)x + done * kind_size(plan->kind), first + whole, blocks - whole,
                                      codes + done / 2, scales + whole);
    return rest > top ? rest : top;
}

static void unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks,
                   void *out)
{
    if (plan->kind == KIND_F32 || plan->group != 16) {
        codec_serial.unpack(plan, codes, scales, blocks, out);
        return;
    }
    for (size_t b = 0; b < blocks; b++) {
        const uint8_t *value = plan->value[scales[b]];
        uint8x8_t c = vld1_u8(codes + 8 * b);
        uint8x8x2_t each = vzip_u8(vand_u8(c, vdup_n_u8(15)), vshr_n_u8(c, 4));
        uint8x16_t index = vcombine_u8(each.val[0], each.val[1]);
        uint8x16x2_t halves = {{vqtbl1q_u8(vld1q_u8(value), index), vqtbl1q_u8(vld1q_u8(value + 16), index)}};
        vst2q_u8((uint8_t *)out + 32 * b, halves);
    }
}

static void fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    codec_serial.fake_quant(plan, x, blocks, out);
}

const struct codec_kernels codec_neon = {"neon", amax_bits, pack, unpack, fake_quant};
