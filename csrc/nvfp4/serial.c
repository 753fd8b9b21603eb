/* The reference kernels: plain C, one element at a time, with the divisions of the format's definition. */
#include "codec.h"

uint32_t serial_amax(const void *x, int kind, size_t count)
{
    uint32_t top = 0;
    if (kind == KIND_F32) {
        const uint32_t *bits = x;
        for (size_t i = 0; i < count; i++)
            top = (bits[i] & 0x7fffffffu) > top ? bits[i] & 0x7fffffffu : top;
        return top;
    }
    const uint16_t *bits = x;
    uint16_t high = 0;
    for (size_t i = 0; i < count; i++) {
        uint16_t a = bits[i] & 0x7fffu;
        high = a > high ? a : high;
    }
    return high;
}

static float float_of_magnitude(uint32_t bits, int kind)
{
    uint16_t half = (uint16_t)bits;
    return kind == KIND_F32 ? bits_float(bits) : load_as_float(&half, kind, 0);
}

uint32_t serial_pack(const struct pack_plan *plan, const void *x, size_t first, size_t blocks, uint8_t *codes, uint8_t *scales)
{
    const size_t group = (size_t)plan->group, bytes = group * kind_size(plan->kind);
    uint32_t top = 0;
    float v[MAX_GROUP];
    for (size_t b = 0; b < blocks; b++) {
        const void *block = (const char *)x + b * bytes;
        uint32_t bits = serial_amax(block, plan->kind, group);
        top = bits > top ? bits : top;
        for (size_t i = 0; i < group; i++)
            v[i] = load_as_float(block, plan->kind, i);
        const float *weight = plan->weight ? plan->weight + (first + b) * group % plan->columns : NULL;
        scales[b] = plan->choice == CHOICE_AMAX ? block_code(plan, float_of_magnitude(bits, plan->kind)) : best_code(plan, v, weight);
        float step = plan->step[scales[b]];
        for (size_t i = 0; i < group; i += 2) {
            float even = v[i] / step, odd = v[i + 1] / step;
            unsigned low = e2m1_index(even < 0 ? -even : even) | (even < 0) << 3;
            unsigned high = e2m1_index(odd < 0 ? -odd : odd) | (odd < 0) << 3;
            codes[(b * group + i) / 2] = (uint8_t)(high << 4 | low);
        }
    }
    return top;
}

void serial_unpack(const struct unpack_plan *plan, const uint8_t *codes, const uint8_t *scales, size_t blocks, void *out)
{
    const size_t group = (size_t)plan->group;
    for (size_t b = 0; b < blocks; b++) {
        float step = plan->step[scales[b]];
        for (size_t i = 0; i < group; i++) {
            unsigned code = codes[(b * group + i) / 2] >> (i & 1) * 4 & 15;
            store_from_float(out, plan->kind, b * group + i, decoded(code, step));
        }
    }
}

/* ModelOpt's GPU op for activations: no lower clamp on the scale byte, and a step under 1e-5 becomes 1
 * (modelopt/torch/kernels/quantization/gemm/fp4_kernel_hopper.py and common/nvfp4_quant.py). A negative number that rounds to zero
 * becomes +0.0, and NaN becomes -6 steps, as in that op. The GPU divides approximately, so elements within two last bits of a tie may
 * be rounded to the other side there. */
void serial_fake_quant(const struct fake_plan *plan, const void *x, size_t blocks, void *out)
{
    const size_t group = (size_t)plan->group;
    const float six = 6.f * plan->tensor_scale;
    for (size_t b = 0; b < blocks; b++) {
        float amax = 0;
        for (size_t i = 0; i < group; i++) {
            float v = load_as_float(x, plan->kind, b * group + i), a = v < 0 ? -v : v;
            amax = a > amax ? a : amax; /* NaN is skipped, as by fmax */
        }
        float t = amax / six;
        float step = e4m3_to_float(e4m3_from_clamped(t < 448.f ? t : 448.f)) * plan->tensor_scale;
        if (!(step >= 1e-5f))
            step = 1.f;
        for (size_t i = 0; i < group; i++) {
            float v = load_as_float(x, plan->kind, b * group + i);
            float q = E2M1_VALUE[e2m1_index((v < 0 ? -v : v) / step)] * step;
            store_from_float(out, plan->kind, b * group + i, v >= 0 ? q : 0.f - q);
        }
    }
}
